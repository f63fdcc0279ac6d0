"""The loss of a student that learns from a teacher's probabilities, without all logits of either of them.

    total = (1 - weight) * cross-entropy + weight * temperature^2 * KL(teacher || student)

Both distributions are softmaxes of logits divided by the temperature; its square keeps the gradient's size, which
dividing makes smaller by as much (Hinton et al., arXiv 1503.02531). As `carpool.kernels.cross_entropy` does, pieces of
tokens go through one after the other, and their gradients are computed in the forward.

A teacher may say the probabilities of K words only, which are less than all. What is missing is treated in one of two
ways. An example with the words a b c d, of which the teacher says a = 0.6 and b = 0.3, beside what the student has:

    teacher        a 0.6    b 0.3    (0.1)               student        a 0.5    b 0.3    c 0.15    d 0.05
    rest           a 0.6    b 0.3    rest 0.1            against        a 0.5    b 0.3    rest 0.2
    renormalise    a 0.667  b 0.333                      against        a 0.5    b 0.3

With `rest` all other words are one further word, on both sides. That is a lower bound of the whole divergence, and it
is zero where the student agrees with the teacher on all that is known. A renormalised teacher is surer than it was: its
student learns that all other words are impossible ("Sparse Logit Sampling", arXiv 2503.16870, measures what that does
to calibration), so it is not the default. Words that were drawn at random, with weights that sum to 1, as that paper
proposes, have no rest, and both ways are then the same.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from carpool.kernels.cross_entropy import IGNORED, LOGITS, Layer, linear_loss, piece_size

# Of a piece's size there are six tensors in float32, and not one in bfloat16.
_PIECE = LOGITS // 8


class Words(NamedTuple):
    """What a teacher says of C tokens, at the temperature of the loss.

    Attributes:
        log_p_CK: log-probabilities, -inf: impossible.
        ids_CK: of which words, those of a token distinct; None: of all, in order, and K is V.
        rest: all other words are one word; False: probabilities are renormalised."""

    log_p_CK: torch.Tensor
    ids_CK: torch.Tensor | None = None
    rest: bool = True


def linear_distillation(
    x_TH: torch.Tensor,
    weight_VH: torch.Tensor,
    bias_V: torch.Tensor | None,
    target_T: torch.Tensor,
    tokens_at_once: int | None = None,
    scale: float = 1.0,
    softcap: float | None = None,
    layer: Layer | None = None,
    *,
    teacher: Callable[[slice], Words],
    weight: float,
    temperature: float = 1.0,
) -> torch.Tensor:
    """(3,): sums over tokens of the total as above, of the cross-entropy, and of the divergence with its factor
    temperature^2. The first alone is differentiable.

    Args:
        target_T: as `linear_cross_entropy`, like all that stands before it and up to `layer`. A token that is not
            predicted counts nothing in any of them.
        teacher: of the tokens of a piece.
        weight: of the divergence, from 0 to 1.
    """
    tokens_at_once = tokens_at_once or piece_size(len(x_TH), len(weight_VH), _PIECE)

    def losses(logits_CV: torch.Tensor, piece: slice, gradient: bool) -> torch.Tensor:
        return distillation_(logits_CV, target_T[piece], teacher(piece), weight, temperature, gradient)

    return linear_loss(x_TH, weight_VH, bias_V, losses, 3, tokens_at_once, scale, softcap, layer)


def distillation_(
    logits_CV: torch.Tensor, target_C: torch.Tensor, words: Words, weight: float, temperature: float, gradient: bool
) -> torch.Tensor:
    """(C, 3) losses of each row, as `linear_distillation` has their sums, float32 or float64. With `gradient`, that of
    the sum of the first is then where the logits were."""
    wide = torch.float64 if logits_CV.dtype == torch.float64 else torch.float32
    ignored_C1 = (target_C == IGNORED).unsqueeze(1)
    goal_C1 = target_C.unsqueeze(1).masked_fill(ignored_C1, 0)
    log_CV = torch.log_softmax(logits_CV, 1, dtype=wide)
    ce_C1 = -log_CV.gather(1, goal_C1)
    log_q_CV = log_CV if temperature == 1 else torch.log_softmax(log_CV / temperature, 1)
    kd_C1, slope_CV = divergence(log_q_CV, words)
    kd_C1 *= temperature**2
    loss_C3 = torch.cat([(1 - weight) * ce_C1 + weight * kd_C1, ce_C1, kd_C1], dim=1).masked_fill_(ignored_C1, 0.0)
    if gradient:
        slope_CV *= weight * temperature
        if weight < 1:
            slope_CV.add_(log_CV.exp_(), alpha=1 - weight)
            slope_CV.scatter_add_(1, goal_C1, slope_CV.new_full(goal_C1.shape, weight - 1))
        logits_CV.copy_(slope_CV.masked_fill_(ignored_C1, 0.0))
    return loss_C3


def divergence(log_q_CV: torch.Tensor, words: Words) -> tuple[torch.Tensor, torch.Tensor]:
    """(C, 1) of KL(teacher || student), and (C, V), its gradient with respect to the logits of the student's softmax."""
    log_p_CK, ids_CK = words.log_p_CK.to(log_q_CV.dtype), words.ids_CK
    rest = words.rest and log_p_CK.shape[1] < log_q_CV.shape[1]
    if not rest:
        log_p_CK = torch.log_softmax(log_p_CK, 1)
    p_CK, q_CV = log_p_CK.exp(), log_q_CV.exp()
    if ids_CK is not None:
        ids_CK = ids_CK.to(torch.int64)
    log_q_CK = log_q_CV if ids_CK is None else log_q_CV.gather(1, ids_CK)
    kd_C1 = torch.where(p_CK > 0, p_CK * (log_p_CK - log_q_CK), 0.0).sum(1, keepdim=True)
    if ids_CK is None:
        return kd_C1, q_CV.sub_(p_CK)
    if not rest:
        return kd_C1, q_CV.scatter_add_(1, ids_CK, -p_CK)
    difference_CK = log_q_CK.exp() - p_CK
    slope_CV = q_CV.scatter_(1, ids_CK, 0.0)
    # Sums of the others, and not 1 - those of the K, which would be what rounding makes of a small number.
    tiny = torch.finfo(q_CV.dtype).tiny
    q_C1, p_C1 = slope_CV.sum(1, keepdim=True).clamp_(min=tiny), (1 - p_CK.sum(1, keepdim=True)).clamp_(min=0.0)
    kd_C1 += torch.where(p_C1 > 0, p_C1 * (p_C1.clamp(min=tiny).log() - q_C1.log()), 0.0)
    return kd_C1, slope_CV.mul_(1 - p_C1 / q_C1).scatter_(1, ids_CK, difference_CK)
