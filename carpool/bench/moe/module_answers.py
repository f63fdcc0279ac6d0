"""What the right answer is, and whether a contender's is right: output and every gradient, before anything is timed.

The definition is computed in float32, one expert after the other, so that it needs little memory however large the
layer is. Over several ranks each computes what its experts make of all tokens, and the sums are taken over the ranks.
Experts are transformers' own formulas here: the module's gate or activation.

    error       root mean square of (answer - right) over that of the right one; the largest of the output, each
                gradient, and each expert's part of it; as a share of what is allowed
    allowed     2 units of the dtype's rounding (bf16: 1.6 %), for each contender rounds several times in between; FP8
                experts are lossy, 15 %. Each row may be off by 8 times that (FP8: 5), compared with its own size or
                the tensor's, whichever is larger: one wrong row among thousands would not show in the whole. An
                expert's bias is one row: its gradient is a sum over all that came, which some take in bf16

An expert that nobody chose must have a gradient of zero.
"""

from __future__ import annotations

import gc
import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from transformers import CONFIG_MAPPING

from carpool.activations import Arena
from carpool.bench.options import LayerShape
from carpool.families import family
from carpool.hf.seam.experts_module import weight_names
from carpool.routing import Routing

ROW, ROW_FP8, FP8 = 8.0, 5.0, 0.15


@dataclass(frozen=True)
class Case:
    """What every contender is given on this rank.

    Attributes:
        module: transformers' experts module with this rank's experts.
        x_TH, weight_TK: inputs, in the dtype of the weights; leaves that want a gradient.
        routings: of all ranks, with global expert ids.
        dy_TH: the gradient of the output.
    """

    module: Any
    x_TH: torch.Tensor
    routings: Sequence[Routing]
    weight_TK: torch.Tensor
    dy_TH: torch.Tensor
    group: dist.ProcessGroup | None = None
    rank: int = 0

    @cached_property
    def index_TK(self) -> torch.Tensor:
        """(T, K) int64: the experts that this rank's tokens chose."""
        return self.routings[self.rank].expert_TK.long().to(self.x_TH.device)

    @property
    def names(self) -> list[str]:
        """Of the module's parameters: up, down, and biases if there are any."""
        return [name for name in weight_names(self.module) if name is not None]

    @property
    def leaves(self) -> list[torch.Tensor]:
        """x_TH, weight_TK, and the module's parameters: what gradients are taken of."""
        return [self.x_TH, self.weight_TK, *(getattr(self.module, name) for name in self.names)]


def check(label: str, y_TH: torch.Tensor, gradients: Sequence[torch.Tensor], case: Case, fp8: bool = False) -> float:
    """Compare output and gradients (of `case.leaves`) with what is right. Collective over the case's group.

    Returns:
        The largest error of all ranks, as a share of what is allowed.

    Raises:
        RuntimeError: it is more than 1, or not a number. On every rank.
    """
    dx_TH, dweight_TK, *dmodule = gradients
    first, experts = case.rank * case.module.num_experts, case.module.num_experts
    x_NH, index_NK, weight_NK, dy_NH = (
        _gather(t.detach(), case.group) for t in (case.x_TH, case.index_TK, case.weight_TK, case.dy_TH)
    )
    right_y, right_dx = (torch.zeros_like(x_NH, dtype=torch.float32) for _ in range(2))
    right_dweight = torch.zeros_like(weight_NK, dtype=torch.float32)
    ratios = []
    tolerance = FP8 if fp8 else 2 * torch.finfo(dy_NH.dtype).eps + 1e-5
    row = ROW_FP8 if fp8 else ROW
    for expert in range(experts):
        token_p, column_p = (index_NK == first + expert).nonzero(as_tuple=True)
        leaves = [x_NH[token_p], weight_NK[token_p, column_p], *(getattr(case.module, n)[expert] for n in case.names)]
        leaves = [leaf.detach().float().requires_grad_() for leaf in leaves]
        with torch.enable_grad():
            y_pH = _expert(case, leaves)
        dx_pH, dweight_p, *right = torch.autograd.grad(y_pH, leaves, dy_NH[token_p].float(), materialize_grads=True)
        right_y.index_add_(0, token_p, y_pH.detach())
        right_dx.index_add_(0, token_p, dx_pH)
        right_dweight[token_p, column_p] = dweight_p
        ratios += [_ratio(got[expert], want, tolerance, row) for got, want in zip(dmodule, right, strict=True)]
    for got, want in ((y_TH, right_y), (dx_TH, right_dx), (dweight_TK, right_dweight)):
        ratios.append(_ratio(got, _scatter(want, case), tolerance, row))
    # What is not a number is wrong.
    worst = torch.stack(ratios).nan_to_num(nan=torch.inf).max()
    if case.group is not None:
        dist.all_reduce(worst, op=dist.ReduceOp.MAX, group=case.group)
    if not float(worst) <= 1:
        raise RuntimeError(
            f"{label} gives a wrong answer: its largest error is {float(worst):.3g} times what is allowed, so it is "
            "not timed"
        )
    return float(worst)


def _expert(case: Case, leaves: list[torch.Tensor]) -> torch.Tensor:
    """(p, H): what one expert makes of its rows, times their weights. `leaves`: rows, weights, up, down, biases."""
    x_pH, weight_p, up, down, *biases = leaves
    if case.module.is_transposed:
        up, down = up.t(), down.t()
    up_bias, down_bias = biases or (None, None)
    h_pF = F.linear(x_pH, up, up_bias)
    a_pF = case.module._apply_gate(h_pF) if case.module.has_gate else case.module.act_fn(h_pF)
    return F.linear(a_pF, down, down_bias) * weight_p.unsqueeze(1)


def _ratio(got: torch.Tensor, want: torch.Tensor, tolerance: float, row: float) -> torch.Tensor:
    """The error as a share of what is allowed: of the whole, or of the worst row if that is more."""
    want = want.reshape(-1, want.shape[-1])
    error = got.detach().reshape(want.shape).float() - want
    size, size_R = want.square().mean().sqrt(), want.square().mean(1).sqrt()
    ratio = (error.square().mean(1).sqrt() / torch.maximum(size_R, size)).max() / (row * tolerance)
    if want.shape[0] > 1:
        ratio = torch.maximum(ratio, error.square().mean().sqrt() / size / tolerance)
    exact = (error == 0).all()  # an expert that nobody chose: 0 / 0
    return torch.where(exact, torch.zeros_like(ratio), ratio)


def _gather(rows: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    """The rows of all ranks, which have equally many, in rank order."""
    if group is None:
        return rows
    parts = [torch.empty_like(rows) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, rows.contiguous(), group=group)
    return torch.cat(parts)


def _scatter(partial_N: torch.Tensor, case: Case) -> torch.Tensor:
    """The sum over ranks, of which this rank's tokens are taken."""
    if case.group is None:
        return partial_N
    dist.all_reduce(partial_N, group=case.group)
    tokens = case.x_TH.shape[0]
    return partial_N[case.rank * tokens :][:tokens]


IMPLEMENTATIONS = ("grouped_mm", "eager")


def make_module(shape: LayerShape, experts: int, device: torch.device, dtype: torch.dtype, seed: int) -> Any:
    """transformers' own experts module: its parameters are what all contenders compute on.

    A module of the model's class, of the sizes in question, with `experts` experts, is made without the model around
    it, and with random weights that keep the size of what they multiply. Its forward looks up
    `config._experts_implementation` at every call (`use`).
    """
    modeling = importlib.import_module(f"transformers.models.{shape.family}.modeling_{shape.family}")
    (module_class,) = (thing for name, thing in vars(modeling).items() if name.endswith("Experts"))
    config = CONFIG_MAPPING[shape.family](**family(shape.family).layer_keys)
    inner = "moe_intermediate_size" if hasattr(config, "moe_intermediate_size") else "intermediate_size"
    config.update({"hidden_size": shape.hidden, inner: shape.inner, family(shape.family).experts_key(config): experts})
    with torch.device("meta"):
        module: nn.Module = module_class(config)
    module = module.to(dtype).to_empty(device=device)
    generator = torch.Generator(device).manual_seed(seed)
    with torch.no_grad():
        for name, weight in module.named_parameters():
            fan_in = shape.inner if name.startswith("down") else shape.hidden
            weight.normal_(std=0.5 if weight.dim() < 3 else fan_in**-0.5, generator=generator)
    return module


def use(module: Any, implementation: str) -> None:
    """Compute by `implementation` (one of `IMPLEMENTATIONS`) from now on."""
    module.config._experts_implementation = implementation


def measure(
    forward: Callable[[], torch.Tensor],
    leaves: Sequence[torch.Tensor],
    dy_TH: torch.Tensor,
    arena: Arena | None = None,
) -> tuple[int, int | None]:
    """(bytes kept between forward and backward, most bytes at one time); without input, weights, and dy, which are
    there before. What is kept is without the output too, which belongs to whoever called.

    On CUDA the allocator is asked, so whatever is kept counts, by whatever means; what lies in an arena, which is there
    before, is added. On CPU the tensors are counted that autograd saved, and the peak is not known (None).
    """
    if dy_TH.device.type != "cuda":
        return _count_saved(forward, leaves), None
    device = dy_TH.device
    gc.collect()
    if arena is not None:
        arena.reset_peak()
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    y_TH = forward()
    saved = torch.cuda.memory_allocated(device) - before - y_TH.untyped_storage().nbytes()
    gradients = torch.autograd.grad(y_TH, leaves, dy_TH)
    peak = torch.cuda.max_memory_allocated(device) - before
    del gradients
    in_arena = int(arena.needed.item()) if arena is not None else 0
    return saved + in_arena, peak + in_arena


def _count_saved(forward: Callable[[], torch.Tensor], leaves: Sequence[torch.Tensor]) -> int:
    kept: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage  # held, so that its address stays its own
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        y_TH = forward()
    outside = {tensor.untyped_storage().data_ptr() for tensor in (*leaves, y_TH)}
    return sum(storage.nbytes() for address, storage in kept.items() if address not in outside)
