"""A linear router with top-k selection, its balance losses, and biases that balance without a loss.

Lossy, off by default: `DropOptions` drop choices beyond an expert's capacity, or second choices at random (counted in
`dropped`), and `num_groups`/`topk_groups` restrict a token to the experts of a few groups, wherever they live.
`carpool.routing.limit` restricts it to few ranks or nodes of a layout.

`route` computes choices, weights and balance losses from logits, in plain PyTorch. On CUDA `carpool.routing.kernel`
does the same in one pass, forward and backward. Both choose alike: of equal scores the lower expert id wins.

What balances uses the statistics of the whole batch:

  - auxiliary loss (Switch Transformer, section 2.2; GShard): E * sum_e f_e * P_e, where f_e is the share of choices
    that went to expert e and P_e the mean probability; 1.0 when balanced.
  - z-loss (ST-MoE, section 2.2): mean of logsumexp(logits)^2, which keeps the router's logits small.
  - biases, without a loss (DeepSeek-V3, section 2.1.2): `update_biases`.

The auxiliary loss is a product of two means, and so it is not linear in the batch: the mean of the ranks' losses is not
the loss of the batch. So both means are summed over all ranks first.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from carpool.kernels.device import on_gpu
from carpool.metrics.counters import add_once
from carpool.routing.routing import DropOptions, Routed, Routing, Rule, sum_over

# (score_TE to select by, share_TE of the weight, K) -> expert_TK, best first.
Choose = Callable[[torch.Tensor, torch.Tensor, int], torch.Tensor]


class Router(nn.Module):
    """A linear router with top-k selection.

    Args:
        hidden_size, num_experts, num_experts_per_tok: H, E, K.
        score: "softmax" over the experts (Mixtral, OLMoE), or "sigmoid" of each (DeepSeek-V3).
        normalize: divide the K weights by their sum.
        scaling_factor: multiply the weights (DeepSeek-V3 uses 2.5).
        num_groups, topk_groups: choose the `topk_groups` best of `num_groups` equal groups of experts first, by the
            sum of each group's two best scores (DeepSeek-V3, section 2.1.2: node-limited routing). 0: off.
        aux_loss_coef, z_loss_coef: weights of the two losses in `aux_loss`. 0: off.
        bias_update_rate: step of the bias in `update_bias`. 0: off, no bias.
        capacity_factor, first_choices_first, random_second: what is dropped, see `DropOptions`. By default nothing is.
        groups: process groups over which statistics are summed, one after another; together they must cover all
            ranks that hold tokens of the batch (the expert-parallel group and that of its copies).

    Attributes:
        aux_loss: scalar, differentiable, of the last forward. Its mean over the ranks is the loss of the whole
            batch, so it composes with a loss that is averaged over ranks (DDP, FSDP).
        dropped: scalar int64 tensor: choices dropped since the last `reset_counts`.
    """

    load_E: torch.Tensor
    bias_E: torch.Tensor | None
    dropped: torch.Tensor

    def __init__(
        self,
        hidden_size: int,
        num_experts: int,
        num_experts_per_tok: int,
        *,
        score: Literal["softmax", "sigmoid"] = "softmax",
        normalize: bool = True,
        scaling_factor: float = 1.0,
        num_groups: int = 0,
        topk_groups: int = 0,
        aux_loss_coef: float = 0.0,
        z_loss_coef: float = 0.0,
        bias_update_rate: float = 0.0,
        capacity_factor: float | None = None,
        first_choices_first: bool = False,
        random_second: bool = False,
        groups: Sequence[dist.ProcessGroup] = (),
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if not 1 <= num_experts_per_tok <= num_experts:
            raise ValueError(f"num_experts_per_tok={num_experts_per_tok} must be between 1 and {num_experts} experts")
        if score not in ("softmax", "sigmoid"):
            raise ValueError(f"score={score!r} is not known; use 'softmax' or 'sigmoid'")
        for name, value in (("aux_loss_coef", aux_loss_coef), ("z_loss_coef", z_loss_coef)):
            if not 0 <= value < math.inf:
                raise ValueError(f"{name}={value} must be 0 (no such loss) or more, and finite")
        if num_groups or topk_groups:
            _check_groups(num_experts, num_experts_per_tok, num_groups, topk_groups)
        drops = DropOptions(capacity_factor, first_choices_first, random_second)
        drops.check(num_experts_per_tok)
        self.drops = drops if drops.active else None
        self.num_experts, self.top_k = num_experts, num_experts_per_tok
        self.score, self.normalize, self.scaling_factor = score, normalize, scaling_factor
        self.num_groups, self.topk_groups = num_groups, topk_groups
        self.aux_loss_coef, self.z_loss_coef = aux_loss_coef, z_loss_coef
        self.bias_update_rate = bias_update_rate
        self.groups = tuple(groups)
        self.weight = nn.Parameter(torch.empty(num_experts, hidden_size, device=device, dtype=dtype))
        # Selection is sensitive to rounding, so the bias stays float32 whatever the weights are.
        self.register_buffer(
            "bias_E", torch.zeros(num_experts, device=device, dtype=torch.float32) if bias_update_rate else None
        )
        self.register_buffer("load_E", torch.zeros(num_experts, device=device, dtype=torch.int64), persistent=False)
        self.register_buffer("dropped", torch.zeros((), device=device, dtype=torch.int64), persistent=False)
        self.aux_loss = torch.zeros((), device=device)

    def forward(
        self, x_TH: torch.Tensor, expert_TK: torch.Tensor | None = None, choose: Choose | None = None
    ) -> Routing:
        """Route tokens; with `expert_TK`, keep those choices and compute only their weights (replay). `choose` chooses
        in place of the top-k (carpool/routing/limit.py)."""
        logits_TE = router_logits(x_TH, self.weight)
        rule = Rule(
            self.top_k, self.score, self.normalize, self.scaling_factor, self.num_groups, self.topk_groups,
            self.aux_loss_coef, self.z_loss_coef,
        )  # fmt: skip
        if choose is not None and expert_TK is None:
            with torch.no_grad():
                prob_TE = scores(logits_TE, rule)
                plain = self.bias_E is None and rule.num_groups <= 1
                score_TE = prob_TE if plain else selection(logits_TE, prob_TE, self.bias_E, rule)
                expert_TK = choose(score_TE, prob_TE, self.top_k).int()
        expert_TK, weight_TK, self.aux_loss, count_E = route(logits_TE, self.bias_E, expert_TK, rule, self.groups)
        if self.training:
            # Activation checkpointing runs this forward twice; the tokens came once. Evaluation must not train.
            add_once(self.load_E, count_E)
        routing = Routing(expert_TK, weight_TK)
        if self.drops is not None:
            routing, dropped = self.drops.drop(routing, self.num_experts, self.training)
            add_once(self.dropped, dropped)
        return routing

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Router:
        """`module.to(...)`: the bias follows to the device and keeps its dtype and digits."""
        bias_E = self.bias_E
        super()._apply(fn, recurse)
        if bias_E is not None and self.bias_E is not None and self.bias_E.dtype != bias_E.dtype:
            self.bias_E = bias_E.to(self.bias_E.device)
        return self

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw the weight, and set the bias and all counters to zero: as constructed, also after `to_empty`."""
        draw_weight(self.weight)
        if self.bias_E is not None:
            self.bias_E.zero_()
        self.reset_counts()
        self.aux_loss = torch.zeros((), device=self.weight.device)

    def __deepcopy__(self, memo: dict[int, Any]) -> Router:
        """A copy that shares the process groups, which cannot be copied."""
        twin = self.__class__.__new__(self.__class__)
        memo[id(self)] = twin
        memo.update({id(group): group for group in self.groups})
        # It may have a graph, which cannot be copied either.
        kept = self.__dict__ | {"aux_loss": self.aux_loss.detach()}
        twin.__dict__.update({name: copy.deepcopy(value, memo) for name, value in kept.items()})
        return twin

    @torch.no_grad()
    def update_bias(self) -> None:
        """Move the bias towards balance and forget the load. Call on every rank, once per optimizer step.

        The load of all ranks and of all micro-batches since the last call decides, each token counted once and those
        of an evaluation (`eval()`) not at all.
        """
        if self.bias_E is None:
            raise ValueError("this router has no bias: construct it with bias_update_rate > 0")
        update_biases([self.bias_E], [self.load_E], self.bias_update_rate, self.groups)

    def reset_counts(self) -> None:
        """Forget load and drops counted so far."""
        self.load_E.zero_()
        self.dropped.zero_()


def _check_groups(num_experts: int, top_k: int, num_groups: int, topk_groups: int) -> None:
    if num_groups < 1:
        raise ValueError(f"topk_groups={topk_groups} chooses among groups, but num_groups={num_groups}")
    if num_experts % num_groups:
        raise ValueError(f"num_groups={num_groups} must divide num_experts={num_experts}")
    if not 1 <= topk_groups <= num_groups:
        raise ValueError(f"topk_groups={topk_groups} must be between 1 and num_groups={num_groups}")
    if topk_groups * (num_experts // num_groups) < top_k:
        raise ValueError(
            f"{topk_groups} groups of {num_experts // num_groups} experts hold fewer than {top_k} experts per token; "
            "raise topk_groups"
        )


@torch.no_grad()
def draw_weight(weight: torch.Tensor) -> None:
    """Fill in place from the default generator: normal with the standard deviation of a linear layer's usual start;
    zeros for a bias (fewer than two dimensions)."""
    if weight.dim() < 2:
        weight.zero_()
    else:
        weight.normal_(std=1 / math.sqrt(weight.shape[-1]))


def router_logits(x_TH: torch.Tensor, weight_EH: torch.Tensor) -> torch.Tensor:
    """(T, E) float32 logits (float64 for such tokens or weights), also under autocast: a bf16 softmax over hundreds of
    experts changes which are chosen.

    Tokens and weights of bfloat16 are multiplied on tensor cores on CUDA, others as float32; both add in float32."""
    with torch.autocast(x_TH.device.type, enabled=False):
        if x_TH.dtype == weight_EH.dtype == torch.bfloat16 and on_gpu(x_TH):
            from carpool.routing.logits import logits

            return logits(x_TH, weight_EH)
        wide = torch.float64 if torch.float64 in (x_TH.dtype, weight_EH.dtype) else torch.float32
        return F.linear(x_TH.to(wide), weight_EH.to(wide))


def route(
    logits_TE: torch.Tensor,
    bias_E: torch.Tensor | None,
    expert_TK: torch.Tensor | None,
    rule: Rule,
    groups: Sequence[dist.ProcessGroup] = (),
) -> Routed:
    """From logits to choices, weights and the balance loss: on CUDA by kernels, elsewhere (and for float64) by plain
    PyTorch, which defines what they compute.

    Args:
        bias_E: added to the scores for the selection, or None.
        expert_TK: keep these choices and weigh them (replay), or None: choose.
        groups: over which the statistics of the balance loss are summed.
    """
    if logits_TE.dtype == torch.float32 and on_gpu(logits_TE):
        from carpool.routing import kernel as routing_kernel

        return routing_kernel.route(logits_TE, bias_E, expert_TK, rule, groups)
    prob_TE = scores(logits_TE, rule)
    if expert_TK is None:
        with torch.no_grad():
            expert_TK = best(selection(logits_TE, prob_TE, bias_E, rule), rule.top_k).int()
    index_TK = expert_TK.clamp(min=0).long()
    weight_TK = prob_TE.gather(1, index_TK).masked_fill(expert_TK < 0, 0.0)
    if rule.normalize:
        weight_TK = weight_TK / weight_TK.sum(-1, keepdim=True).clamp(min=1e-20)
    weight_TK = weight_TK * rule.scaling_factor
    count_E = torch.zeros(logits_TE.shape[1], dtype=torch.int64, device=logits_TE.device)
    count_E.scatter_add_(0, index_TK.reshape(-1), (expert_TK >= 0).long().reshape(-1))
    return Routed(expert_TK, weight_TK, aux_loss(logits_TE, prob_TE, count_E, rule, groups), count_E)


def scores(logits_TE: torch.Tensor, rule: Rule) -> torch.Tensor:
    return logits_TE.softmax(-1) if rule.score == "softmax" else logits_TE.sigmoid()


def selection(logits_TE: torch.Tensor, prob_TE: torch.Tensor, bias_E: torch.Tensor | None, rule: Rule) -> torch.Tensor:
    """(T, E): what experts are selected by, the best K, best first. Of equal ones the lower id wins, and NaN is above
    all.

    Scores rise with logits, so where nothing is added to or among them logits are compared: they have fewer ties, and
    do not depend on how a device computes `exp`."""
    choice_TE = prob_TE if bias_E is not None or rule.num_groups > 1 else logits_TE
    if bias_E is not None:
        choice_TE = choice_TE + bias_E
    if rule.num_groups > 1:
        choice_TGe = choice_TE.unflatten(1, (rule.num_groups, -1))
        group_TG = choice_TGe.topk(min(2, choice_TGe.shape[-1]), dim=-1).values.sum(-1)
        best_TG = best(group_TG, rule.topk_groups)
        open_TG = torch.zeros_like(group_TG, dtype=torch.bool).scatter_(1, best_TG, True)
        choice_TE = choice_TGe.masked_fill(~open_TG.unsqueeze(-1), -math.inf).flatten(1)
    return choice_TE


def best(value_TN: torch.Tensor, count: int) -> torch.Tensor:
    """As `topk(count).indices`, which leaves open which of equal ones it takes."""
    return value_TN.sort(dim=-1, descending=True, stable=True).indices[:, :count]


def aux_loss(
    logits_TE: torch.Tensor,
    prob_TE: torch.Tensor,
    count_E: torch.Tensor,
    rule: Rule,
    groups: Sequence[dist.ProcessGroup],
) -> torch.Tensor:
    """Both losses of the batch, weighted by the rule's coefficients: a scalar, the same on every rank. Its gradient is
    this rank's part times the number of ranks, so that the mean over ranks is the gradient of the batch's loss.

    Args:
        logits_TE, prob_TE: of this rank's tokens; scores that are no shares (sigmoid) are made such.
        count_E: (E,) int64, choices of each expert by these tokens.
        groups: over which the statistics are summed, one after another."""
    if not (rule.aux_loss_coef or rule.z_loss_coef):
        return logits_TE.new_zeros(())
    num_experts = logits_TE.shape[1]
    prob_TE = prob_TE / prob_TE.sum(-1, keepdim=True)  # a no-op for softmax; makes sigmoid scores shares
    prob_E = prob_TE.sum(0)
    z = logits_TE.logsumexp(-1).square().sum()
    tokens = logits_TE.new_full((1,), float(logits_TE.shape[0]))
    total = torch.cat([count_E.to(z.dtype), prob_E.detach(), z.detach().view(1), tokens])
    ranks = sum_over(total, groups)
    count_all_E, prob_all_E, z_all, tokens_all = total.split([num_experts, num_experts, 1, 1])
    share_E = count_all_E / count_all_E.sum().clamp(min=1.0)
    # The loss is linear in P once f is global. So each rank differentiates its own part, scaled by the number
    # of ranks because the caller averages over them, and no gradient has to travel.
    scale = ranks / tokens_all.squeeze(0).clamp(min=1.0)
    own = rule.aux_loss_coef * num_experts * (share_E * prob_E).sum() * scale + rule.z_loss_coef * z * scale
    value = (
        rule.aux_loss_coef * num_experts * (share_E * prob_all_E).sum() + rule.z_loss_coef * z_all.squeeze(0)
    ) / tokens_all.squeeze(0).clamp(min=1.0)
    return own + (value - own).detach()


@torch.no_grad()
def count_choices(load_E: torch.Tensor, expert_TK: torch.Tensor) -> None:
    """Add to (E,) int64 loads how often (T, K) choices, -1: none, name each expert; once under checkpointing."""
    count_E = torch.zeros_like(load_E)
    count_E.scatter_add_(0, expert_TK.clamp(min=0).reshape(-1).long(), (expert_TK >= 0).reshape(-1).long())
    add_once(load_E, count_E)


@torch.no_grad()
def update_biases(
    biases: Sequence[torch.Tensor],
    loads: Sequence[torch.Tensor],
    rate: float,
    groups: Sequence[dist.ProcessGroup | None],
) -> None:
    """Move the biases of several layers towards balance, in place, and set their loads to zero. Collective.

    Args:
        biases: an (E,) tensor for each layer, equal on all ranks; it stays so, bit for bit.
        loads: an (E,) int64 tensor for each layer, choices of each expert by this rank's tokens.
        rate: the step.
        groups: over which loads are summed, one after another; together they cover all ranks that hold tokens of the
            batch. None as a group: the whole world. All layers share one reduction for each."""
    if not biases:
        return
    total = torch.cat(list(loads))
    sum_over(total, groups)
    for bias_E, load_E, all_E in zip(biases, loads, total.split([len(load_E) for load_E in loads]), strict=True):
        bias_E += rate * torch.sign(all_E.double().mean() - all_E.double()).to(bias_E.dtype)
        load_E.zero_()
