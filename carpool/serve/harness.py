"""Tasks of lm-evaluation-harness, through its class for models of Transformers (`HFLM`).

All ranks compute the same requests together: experts are spread over them, and the work is not. Rank 0's results count;
the others' are the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any

from transformers import PreTrainedModel

from carpool.serve.text import Text


def check_installed() -> None:
    """Raise ValueError if lm-evaluation-harness is not installed."""
    if find_spec("lm_eval") is None:
        raise ValueError("--tasks needs lm-evaluation-harness: pip install lm_eval")


def run_tasks(
    model: PreTrainedModel, text: Text, tasks: Sequence[str], *, batch_size: int, limit: int | None, context: int | None
) -> dict[str, dict[str, float]]:
    """The measures of each task. All ranks together.

    Args:
        limit: examples of each task; None: all.
        context: the most tokens that the model sees.

    Raises:
        ValueError: lm-evaluation-harness is not installed, or a task that it does not have."""
    check_installed()
    import lm_eval
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    manager = TaskManager()
    if unknown := [task for task in tasks if task not in manager.all_tasks]:
        raise ValueError(f"--tasks: lm-evaluation-harness has no task {unknown[0]!r}; `lm_eval ls tasks` lists them")
    wrapped = HFLM(pretrained=model, tokenizer=text.tokenizer, batch_size=batch_size, max_length=context)
    found: Any = lm_eval.simple_evaluate(model=wrapped, tasks=list(tasks), limit=limit, task_manager=manager)
    return {
        task: {name.removesuffix(",none"): value for name, value in measures.items() if isinstance(value, float)}
        for task, measures in found["results"].items()
    }
