"""Forwards in step, where ranks have unequally many: who has none left makes empty ones until all are done.

Experts are spread over ranks, so each takes part in each forward. But somebody else decides how many forwards the
requests of a rank take (lm-evaluation-harness, `generate` of Transformers). So ranks say before each whether they have
work, and a rank that has finished goes on with two tokens of its own:

    rank 0    work   work   work    done                    4 times all ranks agree, 3 forwards
    rank 1    work   two    two     done

A rank that fails between two forwards says that instead, and the others fail with it. One that fails inside of a
forward cannot say anything: the others are inside, too, and wait for its rows until the launcher ends them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from enum import IntEnum
from typing import Any

import torch
import torch.distributed as dist
from transformers import PreTrainedModel


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
