"""Forwards in step, where ranks have unequally many: who has none left makes empty ones until all are done.

Experts are spread over ranks, so each takes part in each forward. But somebody else decides how many forwards the
requests of a rank take (lm-evaluation-harness, `generate` of Transformers). So ranks say before each whether they have
work, and a rank that has finished goes on with two tokens of its own:

    rank 0    work   work   work    done                    4 times all ranks agree, 3 forwards
    rank 1    work   two    two     done
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from transformers import PreTrainedModel


class InStep:
    """The forwards of a model on this rank, from now on until `remove`. All ranks together.

    Args:
        model: with experts over all ranks.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.model, self._empty = model, False
        self._hook = model.register_forward_pre_hook(self._before)

    def finish(self) -> None:
        """This rank has no work left. Returns when none has."""
        ids_BL = torch.zeros(1, 2, dtype=torch.int64, device=self.model.device)
        while self._working(False):
            self._empty = True
            try:
                with torch.no_grad():
                    self.model(input_ids=ids_BL, use_cache=False)
            finally:
                self._empty = False

    def remove(self) -> None:
        """Leave the model as it was."""
        self._hook.remove()

    def _before(self, *_: Any) -> None:
        if not self._empty:
            self._working(True)

    def _working(self, own: bool) -> bool:
        """Whether any rank has work."""
        number = torch.tensor([own], dtype=torch.int32, device=self.model.device)
        dist.all_reduce(number)
        return bool(number.item())
