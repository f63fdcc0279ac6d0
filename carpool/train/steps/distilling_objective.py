"""The objective of a student: cross-entropy plus a divergence from a teacher (`carpool.kernels.distillation`).

    files      a batch holds `teacher_ids` and `teacher_log_probs` (B, L, K) of the token that each position predicts
    online     the teacher's decoder layers compute the batch first, without gradients; the teacher's logits are then
               computed from its hidden states, a chunk of tokens at a time, together with the student's

The loss that a run reports remains the cross-entropy. Evaluation computes the cross-entropy alone, without a teacher.
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
from carpool.kernels.distillation import IDS, LOG_PROBS, Distillation, LogProbs
from carpool.train.config.schema_distillation import DistillationSection
from carpool.train.steps.training_objective import Losses, Objective


class Teacher:
    """A model in evaluation mode. Each rank holds the whole parameters of its output layer.

    Args:
        objective: the objective of the teacher's model, which runs its forward on a batch."""

    def __init__(self, objective: Objective) -> None:
        self.objective, self.head = objective, output_layer(objective.model)
        self.change = logit_change(objective.model) or LogitChange()
        if (why := objective.cross_entropy.why_whole) is not None:
            raise ValueError(f"the teacher's logits cannot be computed in chunks of tokens: {why}")

    @torch.no_grad()
    def hidden_states(self, batch: Batch) -> torch.Tensor:
        """Returns the inputs (T, H) of the output layer for this rank's part of a batch. Collective."""
        hidden_TH, _ = self.objective.computed(batch, lambda _: lambda hidden_TH, *_: hidden_TH)
        return hidden_TH

    def log_probs(self, hidden_TH: torch.Tensor, top_k: int | None, temperature: float) -> Callable[[slice], LogProbs]:
        """Returns a function that computes a chunk of tokens. `top_k` None means the whole vocabulary."""

        @torch.no_grad()
        def log_probs_of(chunk: slice) -> LogProbs:
            with torch.autocast(hidden_TH.device.type, enabled=False):
                logits_CV = F.linear(hidden_TH[chunk].to(self.head.weight.dtype), self.head.weight, self.head.bias)
            change_(logits_CV, *self.change)
            wide = torch.promote_types(logits_CV.dtype, torch.float32)
            log_p_CV = torch.log_softmax(logits_CV.to(wide).div_(temperature), 1)
            return LogProbs(log_p_CV) if top_k is None else LogProbs(*log_p_CV.topk(top_k))

        return log_probs_of


class DistillingObjective(Objective):
    """The `Objective` of a model that learns from a teacher.

    Args:
        teacher: computes log-probabilities online. None means that batches hold them.

    Raises:
        ValueError: the output layer cannot compute the loss in chunks."""

    def __init__(
        self, model: nn.Module, distillation: DistillationSection, teacher: Teacher | None, **settings: Any
    ) -> None:
        super().__init__(model, **settings)
        self.distillation, self.teacher = distillation, teacher
        if (why := self.cross_entropy.why_whole) is not None:
            raise ValueError(f"[distillation]: the loss is computed in chunks of tokens, but {why}")
        self.sums += 1

    def forward(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Returns the three sums of `Distillation` in training, and the cross-entropy otherwise."""
        if not self.model.training:
            return super().forward(batch)
        hidden_TH = None if self.teacher is None else self.teacher.hidden_states(batch)
        return self.computed(batch, partial(self._loss_function, hidden_TH))

    def _loss_function(self, hidden_TH: torch.Tensor | None, batch: Batch) -> Computed:
        """Returns the function that computes the loss of a batch. `hidden_TH`: the teacher's hidden states, or None
        where the batch holds the teacher's log-probabilities."""
        settings = self.distillation
        if self.teacher is None or hidden_TH is None:
            ids_TK, log_p_TK = batch[IDS].flatten(0, 1), batch[LOG_PROBS].flatten(0, 1)
            chunks: Callable[[slice], LogProbs] = lambda chunk: LogProbs(log_p_TK[chunk], ids_TK[chunk])  # noqa: E731
        else:
            chunks = self.teacher.log_probs(hidden_TH, settings.top_k, settings.temperature)
        return partial(linear_cross_entropy, losses=Distillation(chunks, settings.weight, settings.temperature))

    def _loss(self, batch: Batch, factor: float | torch.Tensor, number: int, sums: torch.Tensor) -> torch.Tensor:
        loss_3, aux = self.forward(batch)
        total, (cross_entropy, divergence) = loss_3[0], loss_3.detach()[1:]
        sums[0] += cross_entropy
        sums[self.router_sums] += divergence
        loss = total * (factor.to(total.dtype) if isinstance(factor, torch.Tensor) else factor)
        return loss if aux is None else self._with_routers(loss, aux, number, sums)

    def losses(self, means: Sequence[float], tokens: int) -> Losses:
        # `accumulate` averages this sum over ranks, as it does for the routers' losses; the factors undo that.
        divergence = means[self.router_sums] * self.dp_size * self.ranks_per_copy / tokens
        return replace(super().losses(means, tokens), distillation_loss=divergence)
