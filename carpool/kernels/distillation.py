"""The loss of a student that learns from a teacher's probabilities, without all logits of either of them.

    total = (1 - weight) * cross-entropy + weight * temperature^2 * KL(teacher || student)

Both distributions are softmaxes of logits divided by the temperature; its square keeps the gradient's size, which
dividing makes smaller by as much (Hinton et al., arXiv 1503.02531). As in `carpool.kernels.cross_entropy`, pieces of
tokens go through one after the other, and their gradients are computed in the forward.

A teacher may speak of K words only. All others are one further word then, on both sides:

    teacher    a 0.6    b 0.3    others 0.1            student    a 0.5    b 0.3    others 0.15 + 0.05

That is a lower bound of the whole divergence, and zero where the student agrees on all that is known
(docs/reference/distillation.md says what scaling the K probabilities to sum to 1 would do).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from carpool.kernels.cross_entropy import IGNORED, LOGITS, TokenLosses

# Of a piece's size there are six tensors in float32, and not one in bfloat16.
PIECE = LOGITS // 8
# In a batch: (B, L, K) of what a teacher says of the word after each token.
IDS, LOG_PROBS = "teacher_ids", "teacher_log_probs"


class Words(NamedTuple):
    """What a teacher says of C tokens, at the temperature of the loss: log-probabilities, -inf: impossible; and of
    which words, those of a token distinct. None: of all, in order, and K is V."""

    log_p_CK: torch.Tensor
    ids_CK: torch.Tensor | None = None


class Distillation(TokenLosses):
    """For `linear_cross_entropy`, whose result is then (3,): sums over the predicted tokens of the total, the
    cross-entropy, and temperature^2 * the divergence.

    Args:
        teacher: what it says of the tokens of a piece.
        weight: of the divergence, from 0 to 1.
    """

    columns, logits_at_once = 3, PIECE

    def __init__(self, teacher: Callable[[slice], Words], weight: float, temperature: float = 1.0) -> None:
        self.teacher, self.weight, self.temperature = teacher, weight, temperature

    def __call__(self, logits_CV: torch.Tensor, target_C: torch.Tensor, piece: slice, gradient: bool) -> torch.Tensor:
        return distillation_(logits_CV, target_C, self.teacher(piece), self.weight, self.temperature, gradient)


def distillation_(
    logits_CV: torch.Tensor, target_C: torch.Tensor, words: Words, weight: float, temperature: float, gradient: bool
) -> torch.Tensor:
    """(C, 3) losses of each row, float32 or float64. With `gradient`, that of the sum of the first is then where the
    logits were."""
    wide = torch.float64 if logits_CV.dtype == torch.float64 else torch.float32
    ignored_C1 = (target_C == IGNORED).unsqueeze(1)
    goal_C1 = target_C.unsqueeze(1).masked_fill(ignored_C1, 0)
    log_CV = torch.log_softmax(logits_CV, 1, dtype=wide)
    ce_C1 = -log_CV.gather(1, goal_C1)
    kd_C1, slope_CV = divergence(log_CV if temperature == 1 else torch.log_softmax(log_CV / temperature, 1), words)
    kd_C1 *= temperature**2
    loss_C3 = torch.cat([(1 - weight) * ce_C1 + weight * kd_C1, ce_C1, kd_C1], dim=1)
    if gradient:
        slope_CV.mul_(weight * temperature).add_(log_CV.exp_(), alpha=1 - weight)
        slope_CV.scatter_add_(1, goal_C1, slope_CV.new_full(goal_C1.shape, weight - 1))
        logits_CV.copy_(slope_CV.masked_fill_(ignored_C1, 0.0))
    return loss_C3.masked_fill_(ignored_C1, 0.0)


def divergence(log_q_CV: torch.Tensor, words: Words) -> tuple[torch.Tensor, torch.Tensor]:
    """(C, 1) of KL(teacher || student), and (C, V), its gradient by what the student's softmax was of."""
    log_p_CK, q_CV = words.log_p_CK.to(log_q_CV.dtype), log_q_CV.exp()
    p_CK = log_p_CK.exp()
    ids_CK = None if words.ids_CK is None else words.ids_CK.to(torch.int64)
    log_q_CK = log_q_CV if ids_CK is None else log_q_CV.gather(1, ids_CK)
    kd_C1 = torch.where(p_CK > 0, p_CK * (log_p_CK - log_q_CK), 0.0).sum(1, keepdim=True)
    if ids_CK is None:
        return kd_C1, q_CV.sub_(p_CK)
    slope_CK = log_q_CK.exp() - p_CK
    slope_CV = q_CV.scatter_(1, ids_CK, 0.0)
    if ids_CK.shape[1] < q_CV.shape[1]:
        # The student's others are added up: 1 - the K would be what rounding makes of a small number.
        tiny = torch.finfo(q_CV.dtype).tiny
        q_C1, p_C1 = slope_CV.sum(1, keepdim=True).clamp_(min=tiny), (1 - p_CK.sum(1, keepdim=True)).clamp_(min=tiny)
        kd_C1 += p_C1 * (p_C1.log() - q_C1.log())
        slope_CV *= 1 - p_C1 / q_C1
    return kd_C1, slope_CV.scatter_(1, ids_CK, slope_CK)
