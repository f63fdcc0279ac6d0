"""The loss of a student that learns from a teacher's probabilities. Neither model's logits exist as a whole.

    total = (1 - weight) * cross-entropy + weight * temperature^2 * KL(teacher || student)

Both distributions are softmaxes of logits divided by the temperature T. The division scales the gradient by 1 / T^2,
and the factor T^2 undoes that (Hinton et al., arXiv 1503.02531). As in `carpool.kernels.cross_entropy`, chunks of
tokens are computed one after the other, and their gradients are computed in the forward.

A teacher may give the probabilities of K tokens of the vocabulary. The loss merges all others into one, on both sides:

    teacher    a 0.6    b 0.3    others 0.1            student    a 0.5    b 0.3    others 0.15 + 0.05

The result is a lower bound of the divergence over the whole vocabulary. It is zero where the student agrees with the
K + 1 probabilities (docs/reference/distillation.md says what scaling the K probabilities to sum to 1 would do).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from carpool.kernels.cross_entropy import IGNORED, LOGITS, TokenLosses

# Logits of a chunk of tokens. The loss holds six float32 tensors of that size; the cross-entropy holds one in bfloat16.
CHUNK_LOGITS = LOGITS // 8
# Keys of a batch: (B, L, K) ids and log-probabilities of the tokens that may follow each token.
IDS, LOG_PROBS = "teacher_ids", "teacher_log_probs"


class LogProbs(NamedTuple):
    """A teacher's log-probabilities for C positions, at the temperature of the loss; -inf marks an impossible token.
    `ids_CK` holds the vocabulary ids, which are distinct in each row. None means all ids in order, with K = V."""

    log_p_CK: torch.Tensor
    ids_CK: torch.Tensor | None = None


class Distillation(TokenLosses):
    """The losses to give to `linear_cross_entropy`. Its result is then (3,): sums over the predicted tokens of the
    total, the cross-entropy, and temperature^2 * the divergence.

    Args:
        teacher: returns the log-probabilities of a chunk of tokens.
        weight: the weight of the divergence, from 0 to 1.
    """

    columns, logits_at_once = 3, CHUNK_LOGITS

    def __init__(self, teacher: Callable[[slice], LogProbs], weight: float, temperature: float = 1.0) -> None:
        self.teacher, self.weight, self.temperature = teacher, weight, temperature

    def __call__(self, logits_CV: torch.Tensor, target_C: torch.Tensor, chunk: slice, gradient: bool) -> torch.Tensor:
        return distillation_(logits_CV, target_C, self.teacher(chunk), self.weight, self.temperature, gradient)


def distillation_(
    logits_CV: torch.Tensor, target_C: torch.Tensor, top_k: LogProbs, weight: float, temperature: float, gradient: bool
) -> torch.Tensor:
    """Returns the (C, 3) losses of each token, float32 or float64. With `gradient`, overwrites the logits by the
    gradient of the sum of the first column."""
    wide = torch.float64 if logits_CV.dtype == torch.float64 else torch.float32
    ignored_C1 = (target_C == IGNORED).unsqueeze(1)
    goal_C1 = target_C.unsqueeze(1).masked_fill(ignored_C1, 0)
    log_CV = torch.log_softmax(logits_CV, 1, dtype=wide)
    ce_C1 = -log_CV.gather(1, goal_C1)
    kd_C1, slope_CV = divergence(log_CV if temperature == 1 else torch.log_softmax(log_CV / temperature, 1), top_k)
    kd_C1 *= temperature**2
    loss_C3 = torch.cat([(1 - weight) * ce_C1 + weight * kd_C1, ce_C1, kd_C1], dim=1)
    if gradient:
        slope_CV.mul_(weight * temperature).add_(log_CV.exp_(), alpha=1 - weight)
        slope_CV.scatter_add_(1, goal_C1, slope_CV.new_full(goal_C1.shape, weight - 1))
        logits_CV.copy_(slope_CV.masked_fill_(ignored_C1, 0.0))
    return loss_C3.masked_fill_(ignored_C1, 0.0)


def divergence(log_q_CV: torch.Tensor, top_k: LogProbs) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns KL(teacher || student) (C, 1), and its gradient with respect to the student's scaled logits (C, V)."""
    log_p_CK, q_CV = top_k.log_p_CK.to(log_q_CV.dtype), log_q_CV.exp()
    p_CK = log_p_CK.exp()
    ids_CK = None if top_k.ids_CK is None else top_k.ids_CK.to(torch.int64)
    log_q_CK = log_q_CV if ids_CK is None else log_q_CV.gather(1, ids_CK)
    kd_C1 = torch.where(p_CK > 0, p_CK * (log_p_CK - log_q_CK), 0.0).sum(1, keepdim=True)
    if ids_CK is None:
        return kd_C1, q_CV.sub_(p_CK)
    slope_CK = log_q_CK.exp() - p_CK
    slope_CV = q_CV.scatter_(1, ids_CK, 0.0)
    if ids_CK.shape[1] < q_CV.shape[1]:
        # The probabilities of the student's other tokens are added up, because 1 - sum of K loses their digits.
        tiny = torch.finfo(q_CV.dtype).tiny
        q_C1, p_C1 = slope_CV.sum(1, keepdim=True).clamp_(min=tiny), (1 - p_CK.sum(1, keepdim=True)).clamp_(min=tiny)
        kd_C1 += p_C1 * (p_C1.log() - q_C1.log())
        slope_CV *= 1 - p_C1 / q_C1
    return kd_C1, slope_CV.scatter_(1, ids_CK, slope_CK)
