"""The objective of a student: cross-entropy, and how far it is from a teacher (`carpool.kernels.distillation`).

    files      a batch brings `teacher_ids` and `teacher_log_probs` (B, L, K), of the word that each position predicts
    online     the teacher's body computes the batch first, without gradients; its hidden states wait for the student's
               output layer, where its logits are made, a piece of tokens at a time like the student's own

The loss that a run reports stays the cross-entropy, and so does that of held-out data, of which no teacher speaks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from carpool.hf.loss_head import Computed, LogitChange, logit_change, output_layer
from carpool.hf.step_graphs import Batch
from carpool.kernels.cross_entropy import change_, linear_cross_entropy
from carpool.kernels.distillation import IDS, LOG_PROBS, Distillation, Words
from carpool.train.config.schema_distillation import DistillationSection
from carpool.train.steps.training_objective import Losses, Objective


class Teacher:
    """A model in evaluation mode, the parameters of whose output layer are whole on each rank.

    Args:
        objective: of the model, which knows how batches are given to it."""

    def __init__(self, objective: Objective) -> None:
        self.objective, self.head = objective, output_layer(objective.model)
        self.change = logit_change(objective.model) or LogitChange()
        if (why := objective.cross_entropy.why_whole) is not None:
            raise ValueError(f"the teacher's logits cannot be made a piece at a time: {why}")

    @torch.no_grad()
    def states(self, batch: Batch) -> torch.Tensor:
        """(T, H): what the output layer gets for this rank's part of a batch. All ranks together."""
        states_TH, _ = self.objective.computed(batch, lambda _: lambda states_TH, *_: states_TH)
        return states_TH

    def words(self, states_TH: torch.Tensor, top_k: int | None, temperature: float) -> Callable[[slice], Words]:
        """Of the tokens of a piece, what the teacher says of them; `top_k`: None: of all words."""

        @torch.no_grad()
        def of_piece(piece: slice) -> Words:
            with torch.autocast(states_TH.device.type, enabled=False):
                logits_CV = F.linear(states_TH[piece].to(self.head.weight.dtype), self.head.weight, self.head.bias)
            change_(logits_CV, *self.change)
            wide = torch.promote_types(logits_CV.dtype, torch.float32)
            log_p_CV = torch.log_softmax(logits_CV.to(wide).div_(temperature), 1)
            return Words(log_p_CV) if top_k is None else Words(*log_p_CV.topk(top_k))

        return of_piece


class DistillingObjective(Objective):
    """As `Objective`, of a model that learns from a teacher.

    Args:
        teacher: computes beside it; None: batches bring what it says.

    Raises:
        ValueError: the output layer cannot compute the loss."""

    def __init__(
        self, model: nn.Module, distillation: DistillationSection, teacher: Teacher | None, **settings: Any
    ) -> None:
        super().__init__(model, **settings)
        self.distillation, self.teacher = distillation, teacher
        if (why := self.cross_entropy.why_whole) is not None:
            raise ValueError(f"[distillation]: the loss of a teacher is computed in pieces, but {why}")
        self.sums += 1

    def forward(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor | None]:
        """In training, the three sums of `Distillation` in the place of one."""
        if not self.model.training:
            return super().forward(batch)
        states_TH = None if self.teacher is None else self.teacher.states(batch)
        return self.computed(batch, partial(self._distilled, states_TH))

    def _distilled(self, states_TH: torch.Tensor | None, batch: Batch) -> Computed:
        """What computes the loss of a batch, of which the teacher has these states; None: its words are in it."""
        settings = self.distillation
        if self.teacher is None or states_TH is None:
            ids_TK, log_p_TK = batch[IDS].flatten(0, 1), batch[LOG_PROBS].flatten(0, 1)
            words: Callable[[slice], Words] = lambda piece: Words(log_p_TK[piece], ids_TK[piece])  # noqa: E731
        else:
            words = self.teacher.words(states_TH, settings.top_k, settings.temperature)
        return partial(linear_cross_entropy, losses=Distillation(words, settings.weight, settings.temperature))

    def _loss(self, batch: Batch, factor: float | torch.Tensor, number: int, sums: torch.Tensor) -> torch.Tensor:
        found_3, aux = self.forward(batch)
        total, own_2 = found_3[0], found_3.detach()[1:]
        sums[0] += own_2[0]
        sums[self.router_sums] += own_2[1]
        loss = total * (factor.to(total.dtype) if isinstance(factor, torch.Tensor) else factor)
        return loss if aux is None else self._with_routers(loss, aux, number, sums)

    def losses(self, means: Sequence[float], tokens: int) -> Losses:
        # `accumulate` has taken it for a mean over ranks, as those of routers are.
        divergence = means[self.router_sums] * self.dp_size * self.ranks_per_copy / tokens
        return replace(super().losses(means, tokens), distillation_loss=divergence)
