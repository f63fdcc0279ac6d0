"""Several ranks try something that may fail on some of them, and agree on what came of it.

A rank that runs out of memory in the middle of a layer never joins the collectives in which the others wait. So ranks
meet in the store that started them, where nobody waits for a device: if all failed, at the same collective, the next
contender can go on; if some did, nothing can be trusted any more, and the run ends with a message.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from carpool.bench.moe.run import free, why_not

# How long a rank waits for the others: one that has failed, and one that has not (they may be compiling).
PATIENCE_FAILED, PATIENCE = datetime.timedelta(seconds=60), datetime.timedelta(seconds=600)


def attempt_together(
    what: Callable[[], object], group: dist.ProcessGroup, device: torch.device, theirs: bool = False
) -> str | None:
    """Call `what` on all ranks; why it cannot be done, or None if it was. Collective.

    Args:
        group: in which `what` communicates; all ranks.
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
    if why:
        free(device)  # only here, where the error no longer holds the tensors of its frames
    if dist.get_world_size() == 1:
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
    said = [store.get(f"bench/{number}/{other}").decode() for other in others]
    places = {text.split(" ", 1)[0] for text in said}
    reasons = {text.split(" ", 1)[1] for text in said}
    if len(places) > 1 or ("" in reasons and len(reasons) > 1):
        failed = [f"rank {other}: {text.split(' ', 1)[1] or 'done'}" for other, text in enumerate(said)]
        raise RuntimeError(f"it failed on some ranks only ({'; '.join(failed)}); ask for less, or leave it out")
    return why
