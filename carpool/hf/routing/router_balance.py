"""The balance loss of transformers' models, on the statistics of the whole batch.

Models such as OLMoE, Mixtral and Qwen-MoE add `router_aux_loss_coef` times a load-balancing loss (Switch Transformer,
section 2.2): E * sum_e f_e * P_e, with f_e the choices of expert e per token and P_e its mean probability, over the
tokens of all layers together; K when balanced. Their own code takes f and P from the tokens of one rank. A product of
two means is not linear in the batch, so the mean of the ranks' losses is not the loss of the batch: with few tokens per
rank it punishes every rank for not being balanced by itself. Here f is summed over all ranks.

All layers together can be balanced while none is: expert 3 hot in one layer, cold in another. But ranks wait for each
other in each layer. `per_layer` takes the mean of every layer's own loss, as in the papers.

A step may have several micro-batches. With `StepCounts`, f is of all of them so far (Qwen, arXiv 2501.11873): a loss of
few tokens keeps experts from specialising, and a micro-batch of one rank is often one document.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Replicate
from transformers import PreTrainedModel
from transformers.utils.output_capturing import OutputRecorder

from carpool.families import family_of, family_of_class
from carpool.hf.seam.expert_rides import ExpertRides, required_rides
from carpool.hf.seam.find_modules import list_number
from carpool.parallel.replicated import sharded_parameters
from carpool.routing.router import update_biases


def balance_loss(
    router_logits: Sequence[torch.Tensor],
    top_k: int,
    group: dist.ProcessGroup | None = None,
    *,
    per_layer: bool = False,
    padding_T: torch.Tensor | None = None,
) -> torch.Tensor:
    """The load-balancing loss over all layers and all ranks of `group`.

    Args:
        router_logits: one (T, E) tensor for each MoE layer, as models return with `output_router_logits=True`.
        top_k: K of the router.
        group: all ranks that hold tokens of the batch; None: the whole world, if there is one.
        per_layer: the mean of the layers' losses; else the loss of all layers' tokens together, as in transformers.
        padding_T: true where there is no token but padding, which counts nothing. None: there is none.

    Returns:
        Scalar float32, the same value on every rank. Its gradient is this rank's share times the number of ranks, so
        that averaging gradients over ranks (FSDP, DDP) gives the gradient of the batch's loss.
    """
    return loss_of_statistics(router_statistics(router_logits, top_k, padding_T), group, per_layer=per_layer)


def router_statistics(
    router_logits: Sequence[torch.Tensor], top_k: int, padding_T: torch.Tensor | None = None
) -> torch.Tensor:
    """What the loss needs of this rank's tokens: (layers, 2E + 1) float32, a row for each of `router_logits`.

    In a row are the choices of each expert, the sum of its probabilities, which is differentiable, and the number of
    tokens. The stages of a pipeline add their layers' rows, and the last one computes the loss of all layers.
    """
    rows = []
    counts_T1 = None if padding_T is None else (~padding_T).float().unsqueeze(1)
    for logits_TE in router_logits:
        prob_TE = logits_TE.float().softmax(-1)
        chosen_TK = prob_TE.detach().topk(top_k, dim=-1).indices
        if counts_T1 is None:
            one_TK = torch.ones_like(chosen_TK, dtype=torch.float32)
            # Not `new_tensor`, which waits for the device.
            tokens = prob_TE.new_full((1,), float(logits_TE.shape[0]))
        else:
            prob_TE, one_TK, tokens = prob_TE * counts_T1, counts_T1.expand_as(chosen_TK), counts_T1.sum().view(1)
        count_E = prob_TE.new_zeros(prob_TE.shape[1]).scatter_add(0, chosen_TK.reshape(-1), one_TK.reshape(-1))
        rows.append(torch.cat([count_E, prob_TE.sum(0), tokens]))
    return torch.stack(rows)


class StepCounts:
    """What routers have chosen so far in a step, over all ranks. It may be in a CUDA graph: its memory stays."""

    def __init__(self) -> None:
        self._sum_GS: torch.Tensor | None = None

    def begin(self) -> None:
        """A step begins."""
        if self._sum_GS is not None:
            self._sum_GS.zero_()

    def add(self, total_GS: torch.Tensor) -> torch.Tensor:
        """Statistics of the step so far, with those of one more micro-batch."""
        if self._sum_GS is None:
            self._sum_GS = torch.zeros_like(total_GS)
        return self._sum_GS.add_(total_GS)


def loss_of_statistics(
    own_GS: torch.Tensor,
    group: dist.ProcessGroup | None = None,
    *,
    per_layer: bool = False,
    counts: StepCounts | None = None,
) -> torch.Tensor:
    """`balance_loss`, of what `router_statistics` has returned for all layers. `counts`: choices are those of the step
    so far; None: of this micro-batch."""
    # G: what is balanced by itself, each layer or all of them.
    if not per_layer:
        own_GS = own_GS.sum(0, keepdim=True)
    num_experts = own_GS.shape[1] // 2
    prob_GE, total_GS = own_GS[:, num_experts : 2 * num_experts], own_GS.detach().clone()
    ranks = 1
    if dist.is_initialized():
        dist.all_reduce(total_GS, group=group)
        ranks = dist.get_world_size(group)
    count_GE, prob_all_GE, tokens_G1 = total_GS.split([num_experts, num_experts, 1], dim=1)
    tokens_G1 = tokens_G1.clamp(min=1.0)
    f_GE = count_GE / tokens_G1
    if counts is not None:
        count_GE, _, chosen_of_G1 = counts.add(total_GS).split([num_experts, num_experts, 1], dim=1)
        f_GE = count_GE / chosen_of_G1.clamp(min=1.0)
    # Linear in P once f is global: each rank differentiates its own part and no gradient has to travel.
    own = num_experts * (f_GE * prob_GE / tokens_G1).sum(1).mean() * ranks
    value = num_experts * (f_GE * prob_all_GE / tokens_G1).sum(1).mean()
    return own + (value - own).detach()


# ---------------------------------------------------------------------------------------------------------------------
# Balancing without a loss, for routers that have a bias per expert (carpool/routing/router.py).
#
#     balance = BiasBalance(model, 0.001)         # on all ranks, before the first step
#     ...                                         # forward, backward, optimizer.step()
#     balance.step()                              # on all ranks, once per optimizer step
#
# DeepSeek-V3 and its relatives add such a bias to the scores before they choose experts, but transformers never moves
# it. Here each layer counts the load of its training tokens, and `step` moves the bias against the load of the whole
# batch: of all ranks and micro-batches, each token once. The bias is a buffer of the model (of some a frozen
# parameter), so checkpoints have it; it is equal on all ranks.


def find_biases(model: nn.Module, experts: Mapping[str, int] | None = None) -> dict[str, tuple[nn.Module, str]]:
    """For each MoE layer that has a bias, by the name of its experts module: the module that holds it, and its name
    there. The holder is the block around the experts, or something in it (the router).

    Args:
        experts: E of each experts module, by name. None: the model has Carpool's layers, which know it."""
    found: dict[str, tuple[nn.Module, str]] = {}
    if experts is None:
        experts = {layer: own.num_experts for layer, own in required_rides(model).items()}
    for layer, number in experts.items():
        block = model.get_submodule(layer.rpartition(".")[0])
        for holder in block.modules():
            for name in family_of(model).selection_bias:
                bias = getattr(holder, name, None)
                if isinstance(bias, torch.Tensor) and bias.numel() == number and not bias.requires_grad:
                    found.setdefault(layer, (holder, name))
    return found


def check_biases(model: nn.Module, found: Collection[str]) -> None:
    """Raise ValueError if no router of a model has a bias. `found`: what `find_biases` found."""
    if not found:
        names = " or ".join(family_of(model).selection_bias)
        raise ValueError(
            f"{type(model).__name__} has no bias per expert that its routers choose by ({names}), so "
            "there is nothing to move; balance it by a loss instead"
        )


class BiasBalance:
    """Moves the biases of the routers of a model with Carpool's layers. All ranks construct and call it together.

    Args:
        rate: the step, 0.001 in DeepSeek-V3.
        group: the ranks that have the same layers, of a stage of a pipeline; None: all.

    Raises:
        ValueError: no router of the model has a bias, or a rate that is not positive."""

    def __init__(self, model: nn.Module, rate: float, group: dist.ProcessGroup | None = None) -> None:
        if rate <= 0:
            raise ValueError(f"the rate {rate:g} must be positive: it is what a bias moves by in a step")
        self.model, self.rate, self.group, layers = model, rate, group, required_rides(model)
        self.holders = find_biases(model)
        check_biases(model, self.holders)
        self.layers: dict[str, ExpertRides] = {name: layers[name] for name in self.holders}
        for name, (holder, attribute) in self.holders.items():
            bias = getattr(holder, attribute)
            if attribute in holder._buffers and bias.dtype in (torch.bfloat16, torch.float16):
                # A step would be lost in the rounding of anything larger than a few steps.
                bias = holder._buffers[attribute] = bias.float()
            self.layers[name].set_balance(True, bias.device)

    def step(self) -> None:
        """Move all biases against the load since the last step, and forget it. Collective."""
        loads = self._loads()
        moves = [torch.zeros(load.shape, device=load.device) for load in loads]
        update_biases(moves, loads, self.rate, (self.group,) if dist.is_initialized() else ())
        parameters = any(attribute in holder._parameters for holder, attribute in self.holders.values())
        with torch.no_grad(), sharded_parameters(self.model, write=True) if parameters else nullcontext():
            for (holder, attribute), move_E in zip(self.holders.values(), moves, strict=True):
                bias = getattr(holder, attribute)
                _add(bias, move_E.view(bias.shape))

    def forget(self) -> None:
        """Forget the load since the last step: its forwards are void."""
        for load_E in self._loads():
            load_E.zero_()

    def _loads(self) -> list[torch.Tensor]:
        return [own.load_E for own in self.layers.values() if own.load_E is not None]

    def spread(self) -> float:
        """Largest bias minus smallest, in the layer where that is most: how far they have moved. Waits for the device;
        collective for biases that FSDP shards."""
        widths = []
        for holder, attribute in self.holders.values():
            bias = getattr(holder, attribute).detach()
            whole = bias.full_tensor() if isinstance(bias, DTensor) else bias
            widths.append(whole.max() - whole.min())
        return float(torch.stack(widths).max())


def _add(bias: torch.Tensor, move: torch.Tensor) -> None:
    """`bias += move`, where every rank has all of `move` and maybe a shard of `bias`."""
    if isinstance(bias, DTensor):
        mesh = bias.device_mesh
        whole = DTensor.from_local(move, mesh, [Replicate()] * mesh.ndim, run_check=False)
        bias.to_local().add_(whole.redistribute(placements=bias.placements).to_local())
    else:
        bias.add_(move)


# ---------------------------------------------------------------------------------------------------------------------
# The router logits of a forward, for the balance loss, without asking the model for them.
#
#     collector = RouterLogits(model)
#     with collector.collect() as logits:         a list, filled in the order of the layers
#         model(input_ids=...)
#     balance_loss(logits, top_k)
#
# With `output_router_logits=True`, models also compute a balance loss of this rank's tokens that nobody wants, and
# their hooks cut the graphs of compiled layers. Here a hook on each router appends its logits, and a compiled layer
# returns them beside its output (`with_logits`), so that its graph stays whole. What checkpointing computes again
# appends nothing.

# Of this thread: two halves of a micro-batch are in the model at the same time (`carpool.ride.two_batch`).
_COLLECTED: ContextVar[list[torch.Tensor] | None] = ContextVar("router_logits", default=None)


class RouterLogits:
    """Collects the router logits of a transformers model. ValueError: transformers does not say where these are.
    `none`: there may be none, in a stage of a pipeline."""

    def __init__(self, model: nn.Module, none: bool = False) -> None:
        found = find_routers(model)
        if not found and not none:
            raise ValueError(f"transformers does not say which modules of {type(model).__name__} make router logits")
        self.model, self.count = model, len(found)
        for name, (router, index) in found.items():
            if not any(isinstance(hook, _Record) for hook in router._forward_hooks.values()):
                number = list_number(name)
                layer = model.get_submodule(".".join(name.split(".")[: number + 1])) if number is not None else model
                router.register_forward_hook(_Record(index, traced_logits(layer)))

    @contextmanager
    def collect(self, expected: int | None = None) -> Iterator[list[torch.Tensor]]:
        """Inside, one forward of the model fills the list with a (T, E) tensor for each router; `expected`: of a part
        of the model, with so many."""
        found: list[torch.Tensor] = []
        token = _COLLECTED.set(found)
        try:
            yield found
        finally:
            _COLLECTED.reset(token)
        number = self.count if expected is None else expected
        if len(found) != number:
            raise RuntimeError(
                f"{type(self.model).__name__} has {number} routers, but a forward made {len(found)} router logits"
            )


class TracedLogits:
    """Where the routers of a layer that is being compiled put their logits. None: not inside of `with_logits`."""

    logits: list[torch.Tensor] | None = None


def traced_logits(layer: nn.Module) -> TracedLogits:
    """The one of a layer."""
    found = vars(layer).get("_carpool_traced_logits")
    if found is None:
        found = TracedLogits()
        # Past nn.Module, to whom it is nothing.
        object.__setattr__(layer, "_carpool_traced_logits", found)
    return found


def with_logits(
    own: Callable[..., Any], layer: nn.Module, traced: TracedLogits, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, list[torch.Tensor]]:
    """What `own(layer, ...)` returns, and the logits that its routers made while it was traced. For `torch.compile`: of
    all that it is given only the kind counts, so layers share their graphs."""
    logits: list[torch.Tensor] = []
    traced.logits = logits
    try:
        out = own(layer, *args, **kwargs)
    finally:
        # A checkpoint ends a layer that it computes again by an exception. What stayed here would keep the step's
        # graph of autograd, and no later step could be captured.
        traced.logits = None
    return out, logits


@torch._disable_dynamo
def add_collected(logits: list[torch.Tensor]) -> None:
    """Add to the list of `RouterLogits.collect`, if there is one."""
    found = _COLLECTED.get()
    if found is not None:
        found.extend(logits)


class _Record:
    """The hook on a router."""

    def __init__(self, index: int, traced: TracedLogits) -> None:
        self.index, self.traced = index, traced

    def __call__(self, module: nn.Module, args: tuple[Any, ...], out: Any) -> None:
        logits = out[self.index] if isinstance(out, tuple) else out
        if torch.compiler.is_compiling() and self.traced.logits is not None:
            self.traced.logits.append(logits)
        else:
            add_collected([logits])


def find_routers(model: nn.Module) -> dict[str, tuple[nn.Module, int]]:
    """The modules that make the router logits which a model of transformers returns, by name, in the order of its
    layers, each with the place of the logits in its output."""
    found: dict[str, tuple[nn.Module, int]] = {}
    for prefix, part in model.named_modules():
        # A model within a model speaks for itself.
        recorder = (getattr(part, "_can_record_outputs", None) or {}).get("router_logits")
        if not isinstance(part, PreTrainedModel) or not isinstance(recorder, OutputRecorder):
            continue
        for name, module in part.named_modules(prefix=prefix):
            within = recorder.layer_name is None or f".{recorder.layer_name.strip('.')}." in f".{name}."
            if recorder.target_class is not None and isinstance(module, recorder.target_class) and within:
                found[name] = module, recorder.index
    return found


def router_scores(model: PreTrainedModel) -> str:
    """Which function makes scores of the logits of a model's routers: softmax, sigmoid or another one."""
    families = [family_of_class(type(router)) for router, _ in find_routers(model).values()]
    keys = [one.scores_key for one in families if one.scores_key]
    if keys:
        return str(getattr(model.config.get_text_config(), keys[0]))
    return "sigmoid" if any(one.sigmoid_router for one in families) else "softmax"
