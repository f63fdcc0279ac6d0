"""Tasks of lm-evaluation-harness, through its class for models of Transformers (`HFLM`).

Experts are spread over ranks, and so are a task's examples: each rank has every n-th of them, and takes part in the
forwards of the others (`carpool.serve.in_step`). The harness gathers what all have found on rank 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any

import torch
import torch.distributed as dist
from transformers import PreTrainedModel

from carpool.serve.in_step import InStep
from carpool.serve.text import Text


def check_installed() -> None:
    """Raise ValueError if lm-evaluation-harness is not installed."""
    if find_spec("lm_eval") is None:
        raise ValueError("--tasks needs lm-evaluation-harness: pip install lm_eval")


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
