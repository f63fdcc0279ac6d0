"""Tasks of lm-evaluation-harness, through its class for models of Transformers (`HFLM`).

The harness (`pip install 'carpool[eval]'`) has the tasks, their prompts, measures and averages; nothing of these is
here. What is here is what it does not do: experts are spread over ranks, so each rank takes part in each forward, while
the harness decides by itself how many forwards the examples of a rank take (each rank has every n-th of them). So ranks
say before each whether they have work, and a rank that has finished goes on with two tokens of its own (`InStep`):

    rank 0    work   work   work    done                    4 times all ranks agree, 3 forwards
    rank 1    work   two    two     done

A rank that fails between two forwards says that instead, and the others fail with it. One that fails inside of a
forward cannot say anything: the others are inside, too, and wait for its tokens until the launcher ends them. The
harness gathers what all have found on rank 0.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from enum import IntEnum
from importlib.util import find_spec
from typing import Any

import torch
import torch.distributed as dist
from transformers import PreTrainedModel

from carpool.serve.prompts import Text


def check_installed() -> None:
    """Raise ValueError if lm-evaluation-harness is not installed."""
    if find_spec("lm_eval") is None:
        raise ValueError("--tasks needs lm-evaluation-harness: pip install 'carpool[eval]', or lm_eval")


def run_tasks(
    model: PreTrainedModel, text: Text, tasks: Sequence[str], *, batch_size: int, limit: int | None, context: int | None
) -> dict[str, dict[str, float]]:
    """The measures of each task; on ranks but the first, nothing. All ranks together.

    Args:
        limit: examples of each task; None: all.
        context: the most tokens that the model sees.

    Raises:
        ValueError: lm-evaluation-harness is not installed, a task that it does not have, or fewer examples than
            ranks."""
    check_installed()
    import lm_eval
    from lm_eval.tasks import TaskManager

    ranks = dist.get_world_size() if dist.is_initialized() else 1
    if limit is not None and limit < ranks:
        raise ValueError(f"--limit {limit} leaves some of {ranks} ranks without an example: raise it, or use --ranks 1")
    manager = TaskManager()
    if unknown := [task for task in tasks if task not in manager.all_tasks]:
        raise ValueError(f"--tasks: lm-evaluation-harness has no task {unknown[0]!r}; `lm_eval ls tasks` lists them")
    settings = {"pretrained": model, "tokenizer": text.tokenizer, "batch_size": batch_size, "max_length": context}
    wrapped = _over_ranks(settings, ranks)
    found: Any = lm_eval.simple_evaluate(model=wrapped, tasks=list(tasks), limit=limit, task_manager=manager)
    return {
        task: {name.removesuffix(",none"): value for name, value in measures.items() if isinstance(value, float)}
        for task, measures in (found["results"] if found else {}).items()
    }


def _over_ranks(settings: dict[str, Any], ranks: int) -> Any:
    """The harness's model; of several ranks one that tells it so, and keeps them in step."""
    from lm_eval.models.huggingface import HFLM

    if ranks == 1:
        return HFLM(**settings)

    class OverRanks(HFLM):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__(**settings)
            self._rank, self._world_size = dist.get_rank(), ranks
            self._steps = InStep(settings["pretrained"])

        def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
            found = [torch.empty_like(tensor) for _ in range(ranks)]
            dist.all_gather(found, tensor)
            return torch.stack(found)

        def barrier(self) -> None:
            dist.barrier()

        def loglikelihood(self, *args: Any, **kwargs: Any) -> Any:
            return self._in_step(super().loglikelihood, *args, **kwargs)

        def loglikelihood_rolling(self, *args: Any, **kwargs: Any) -> Any:
            return self._in_step(super().loglikelihood_rolling, *args, **kwargs)

        def generate_until(self, *args: Any, **kwargs: Any) -> Any:
            return self._in_step(super().generate_until, *args, **kwargs)

        def _in_step(self, answer: Any, *args: Any, **kwargs: Any) -> Any:
            with self._steps.work():
                return answer(*args, **kwargs)

    return OverRanks()


class _State(IntEnum):
    """Of a rank. That of the highest number is the ranks' together."""

    DONE = 0
    WORKING = 1
    FAILED = 2


class InStep:
    """The forwards of a model on this rank, from now on until `remove`. All ranks together.

    Args:
        model: with experts over all ranks.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.model, self._empty, self._inside = model, False, False
        self._hooks = [model.register_forward_pre_hook(self._before), model.register_forward_hook(self._after)]

    @contextmanager
    def work(self) -> Iterator[None]:
        """Around all work of this rank. The end waits until no rank has any left.

        Raises:
            RuntimeError: another rank has failed between two forwards."""
        self._inside = False
        try:
            yield
            self._finish()
        except BaseException:
            if not self._inside:
                self._agree(_State.FAILED)
            raise

    def _finish(self) -> None:
        ids_BL = torch.zeros(1, 2, dtype=torch.int64, device=self.model.device)
        while self._together(_State.DONE) == _State.WORKING:
            self._empty = True
            try:
                with torch.no_grad():
                    self.model(input_ids=ids_BL, use_cache=False)
            finally:
                self._empty = False

    def remove(self) -> None:
        """Leave the model as it was."""
        for hook in self._hooks:
            hook.remove()

    def _before(self, *_: Any) -> None:
        if not self._empty:
            self._together(_State.WORKING)
        self._inside = True

    def _after(self, *_: Any) -> None:
        self._inside = False

    def _together(self, own: _State) -> _State:
        """What all ranks are."""
        # Whoever learns that another rank has failed does not say that it has.
        self._inside = True
        if (found := self._agree(own)) == _State.FAILED:
            raise RuntimeError("another rank has failed between two forwards: its error says why")
        self._inside = False
        return found

    def _agree(self, own: _State) -> _State:
        number = torch.tensor([own], dtype=torch.int32, device=self.model.device)
        dist.all_reduce(number, op=dist.ReduceOp.MAX)
        return _State(int(number.item()))
