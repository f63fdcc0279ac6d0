"""A contender tries something that may fail, on some ranks or on all, and ranks agree on what came of it.

A rank that runs out of memory in the middle of a layer never joins the collectives in which the others wait. So ranks
meet in the store that started them, where nobody waits for a device: if all failed, at the same collective, the next
contender can go on; if some did, nothing can be trusted any more, and the run ends with a message.
"""

from __future__ import annotations

import datetime
import gc
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

OUT_OF_MEMORY = "out of memory"
# How long a rank waits for the others: one that has failed, and one that has not (they may be compiling).
PATIENCE_FAILED, PATIENCE = datetime.timedelta(seconds=60), datetime.timedelta(seconds=600)


def attempt_together(
    what: Callable[[], object], group: dist.ProcessGroup | None, device: torch.device, theirs: bool = False
) -> str | None:
    """Call `what` on all ranks; why it cannot be done, or None if it was. Collective.

    Args:
        group: in which `what` communicates; all ranks. None: this process alone.
        theirs: see `why_not`.

    Raises:
        RuntimeError: it failed on some ranks only.
        Exception: whatever else `what` raised.
    """
    why = None
    try:
        what()
    except Exception as error:
        why = why_not(error, theirs)
        if why is None:
            raise
    if why:  # only here, where the error no longer holds the tensors of its frames
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
    if group is None or dist.get_world_size() == 1:
        return why
    rank, others = dist.get_rank(), range(dist.get_world_size())
    store = distributed_c10d._get_default_store()
    number = store.add(f"bench/attempts/{rank}", 1)
    done = group._get_sequence_number_for_group() if why else 0  # type: ignore[attr-defined]
    store.set(f"bench/{number}/{rank}", f"{done} {why or ''}")
    try:
        store.wait([f"bench/{number}/{other}" for other in others], PATIENCE_FAILED if why else PATIENCE)
    except RuntimeError:
        raise RuntimeError(
            f"rank {rank}: {why or 'done'}, and other ranks did not come back; ask for less, or leave it out"
        ) from None
    said = [store.get(f"bench/{number}/{other}").decode().split(" ", 1) for other in others]
    places, reasons = ({text[part] for text in said} for part in (0, 1))
    if len(places) > 1 or ("" in reasons and len(reasons) > 1):
        failed = [f"rank {other}: {reason or 'done'}" for other, (_, reason) in enumerate(said)]
        raise RuntimeError(f"it failed on some ranks only ({'; '.join(failed)}); ask for less, or leave it out")
    return why


def why_not(error: Exception, theirs: bool) -> str | None:
    """One line for the table if a contender could not run, or None if the error is something else: a bug.

    `theirs`: it is transformers', where PyTorch says that a size is not to its liking; Carpool's say so themselves."""
    text = str(error)
    full = any(part in text.lower() for part in (OUT_OF_MEMORY, "can't allocate memory", "not enough memory"))
    if isinstance(error, torch.OutOfMemoryError) or (isinstance(error, MemoryError | RuntimeError) and full):
        return OUT_OF_MEMORY
    kinds = (ValueError, NotImplementedError, ImportError, *((RuntimeError,) if theirs else ()))
    if isinstance(error, kinds) and not isinstance(error, torch.AcceleratorError):
        return (text.strip() or type(error).__name__).splitlines()[0]
    return None
