"""Muon: steps along the orthogonal factor of the momentum of each matrix; AdamW for all that is no matrix of a layer.

    m <- m + (1 - momentum) (g - m)              what `momentum_buffer` keeps, sharded as the parameter is
    u <- g + momentum (m - g)                    Nesterov; or m itself
    o <- U V^T, of u = U S V^T                   approximately, by Newton–Schulz steps in bfloat16
    w <- w - lr * weight_decay * w - lr * 0.2 sqrt(max(rows, columns)) * o

Newton–Schulz (`orthogonalise`) takes five steps of K. Jordan's quintic, after which singular values are between 0.7 and
1.2. The factor 0.2 sqrt(max(rows, columns)) gives updates the root mean square of AdamW's, so that both have one
learning rate and one weight decay (Moonlight, arXiv 2502.16982, section 2.2). `torch.optim.Muon` with
adjust_lr_fn="match_rms_adamw" computes the same of one two-dimensional parameter, without masters.

A matrix is what one vector is multiplied with. A stack of experts is one matrix for each expert, and a fused
gate_up_proj of an expert is two: gate and up are orthogonalised each by itself. Other fused projections, such as qkv,
are one matrix, as the model has them. Matrices of one shape are multiplied as a batch, up to `BATCH` elements at once:
the experts of a rank, and projections of several layers.

Ranks that have shards of a matrix, or replicas, send them to one of them (`carpool.optim.whole_matrices`). What a rank
has alone and whole, as its experts under expert parallelism, it orthogonalises by itself. Nothing waits for the host,
and shapes are the same in every step.

Bytes for each element of a matrix, with its gradient: 4 + 4 + 4 of a parameter in float32, where AdamW has 16 in all;
2 + 2 + 2 (low bits) + 4 in bfloat16, where it has 14.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from carpool.kernels.device import on_gpu
from carpool.optim.adamw import AdamW, copy, placed
from carpool.optim.adamw_reference import DTYPES, join, split
from carpool.optim.base import NEWTON_SCHULZ_STEPS, Matrices, MuonFacts
from carpool.optim.update import State, local, placed_gradient, upload
from carpool.optim.whole_matrices import Exchange, Shape, parts_of

# Of the polynomial a x + b x^3 + c x^5 (K. Jordan, "Muon: An optimizer for hidden layers in neural networks", 2024).
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
EPSILON = 1e-7
# Elements that are orthogonalised at once: 256 MiB in bfloat16. There are two of these, a copy where gate and up are
# taken apart, and two of the shorter side's products at a time.
BATCH = 2**27


def orthogonalise(x_BNM: torch.Tensor, steps: int = NEWTON_SCHULZ_STEPS) -> torch.Tensor:
    """The orthogonal factor of each matrix of a batch, approximately, in the dtype of the batch. A matrix of zeros
    stays one. Overwrites the batch."""
    a, b, c = COEFFICIENTS
    norm = torch.linalg.vector_norm(x_BNM, dim=(1, 2), keepdim=True, dtype=torch.float32)
    x = x_BNM.div_(norm.clamp_(min=EPSILON).to(x_BNM.dtype))
    tall, other = x.shape[1] > x.shape[2], torch.empty_like(x)
    for _ in range(steps):
        gram = x.mT @ x if tall else x @ x.mT  # of the shorter side
        polynomial = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        torch.baddbmm(x, *((x, polynomial) if tall else (polynomial, x)), beta=a, out=other)
        x, other = other, x
    return x


def take_gradient(
    gradient: torch.Tensor, momentum: torch.Tensor, update: torch.Tensor, numbers: torch.Tensor, nesterov: bool
) -> None:
    """Put a gradient into the momentum, and what is to be orthogonalised into `update`. Contiguous, of one shape.

    Args:
        numbers: (4,) float32: a factor for the gradient, momentum, learning rate, and this times weight decay. With a
            factor that is NaN the momentum stays, and is the update.
    """
    factor, beta, *_ = numbers
    m = g = momentum.float()
    if factor == factor:
        g = gradient.float() * factor
        m = m + (g - m) * (1 - beta)
        momentum.copy_(m)
    update.copy_(g + (m - g) * beta if nesterov else m)


def change(
    weight: torch.Tensor, low_bits: torch.Tensor | None, update: torch.Tensor, numbers: torch.Tensor, scale: float
) -> None:
    """Decay a weight and take a step of `scale` times the learning rate along an update. Contiguous, of one shape.

    Args:
        low_bits: of the float32 master of a weight in bfloat16.
        numbers: as of `take_gradient`. With a factor that is NaN the weight stays.
    """
    factor, _, rate, decay = numbers
    if factor != factor:
        return
    w = weight if low_bits is None else join(weight, low_bits)
    w.sub_(w * decay)
    w.sub_(update.float() * (rate * scale))
    if low_bits is not None:
        for target, value in zip((weight, low_bits), split(w), strict=True):
            target.copy_(value)


class _Matrix(NamedTuple):
    """A parameter of Muon's: its name, of which matrices it consists, and the number of its group."""

    name: str
    of: Matrices
    group: int


class _Rows(NamedTuple):
    """Whole matrices of a parameter, by their places in what this rank has."""

    parameter: torch.Tensor
    first: int
    stop: int


class Muon(MuonFacts, AdamW):
    """Muon for the groups that `Muon.groups` makes of matrices, AdamW for the others. Every rank takes each step.

    Args:
        params: groups. One with "matrices" (a list of `Matrices`) and "names" beside "params" is Muon's.
        lr, weight_decay: of both. betas, eps: of AdamW.
        ns_steps: Newton–Schulz steps.
        ns_dtype: "bfloat16", or "float32" to compare runs on different ranks.
        moments: how the momentum, and AdamW's moments, are kept. bfloat16 is lossy.

    Raises:
        ValueError: no group has matrices, or an option that is out of range.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | torch.Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_steps: int = NEWTON_SCHULZ_STEPS,
        ns_dtype: Literal["bfloat16", "float32"] = "bfloat16",
        moments: Literal["float32", "bfloat16"] = "float32",
    ) -> None:
        self.check_options({"momentum": momentum, "ns_steps": ns_steps})
        self.momentum, self.nesterov, self.ns_steps, self.ns_dtype = momentum, nesterov, ns_steps, DTYPES[ns_dtype]
        self._matrices: dict[torch.Tensor, _Matrix] = {}
        self._exchange: Exchange | None = None
        self._hyper: tuple[list[tuple[float, float, float]], torch.Tensor] | None = None
        super().__init__(params, lr, betas, eps, weight_decay, moments=moments)
        if not self._matrices:
            raise ValueError("no parameter that is trained is a matrix of a layer: take AdamW")

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        group = dict(param_group)
        names, matrices = group.pop("names", ()), group.pop("matrices", ())
        for parameter, name, of in zip(group["params"] if matrices else (), names, matrices, strict=True):
            self._matrices[parameter] = _Matrix(name, of, len(self.param_groups))
        super().add_param_group(group)

    def _new_state(self, parameter: torch.Tensor) -> State:
        if parameter not in self._matrices:
            return super()._new_state(parameter)
        own = local(parameter)
        found = {"momentum_buffer": torch.zeros_like(own, dtype=DTYPES[self.moment_dtype])}
        if parameter.dtype == torch.bfloat16:
            found["low_bits"] = torch.zeros_like(own, dtype=torch.int16)
        return {name: placed(value, name, parameter) for name, value in found.items()}

    def _copy_state(self, parameter: torch.Tensor, theirs: dict[str, Any]) -> None:
        if parameter not in self._matrices:
            return super()._copy_state(parameter, theirs)
        ours, shape = self.state[parameter], tuple(parameter.shape)
        if more := sorted(theirs.keys() - ours.keys()):
            raise ValueError(
                f"a state has {', '.join(more)} of a {parameter.dtype} matrix of shape {shape}: not Muon's"
            )
        for name, value in ours.items():
            copy(value, theirs.get(name), shape)

    # -- a step ----------------------------------------------------------------------------------------------------

    def _update_all(self, factor: torch.Tensor | None, zero_grads: bool) -> None:
        super()._update_all(factor, zero_grads)
        if self._exchange is None:
            self._exchange = self._new_exchange()
        step = _Step(self, self._numbers(factor))
        self._exchange.run(step.take, step.orthogonal, step.change, meanwhile=lambda: self._alone(step))
        if zero_grads:
            for parameter in step.gradients:
                assert parameter.grad is not None
                local(parameter.grad).zero_()
        written = list(step.gradients)
        torch.autograd.graph.increment_version(written + [local(p) for p in written if isinstance(p, DTensor)])

    def _new_exchange(self) -> Exchange:
        """Which ranks have which matrices. All ranks together, if any parameter is sharded or replicated."""
        parts = {
            matrix.name: part
            for parameter, matrix in self._matrices.items()
            if isinstance(parameter, DTensor) and (part := parts_of(parameter, matrix.of)) is not None
        }
        shared = any(isinstance(p, DTensor) and p.device_mesh.size() > 1 for p in self._matrices)
        device = next(iter(self._matrices)).device
        return Exchange(parts, self.ns_dtype, device, dist.get_world_size() if shared else 1)

    def _numbers(self, factor: torch.Tensor | None) -> torch.Tensor:
        """(groups, 4) float32, of each group `take_gradient`'s numbers."""
        device = next(iter(self._matrices)).device
        rates = [group["lr"] for group in self.param_groups]
        values = [
            (self.momentum, 0.0 if isinstance(rate, torch.Tensor) else rate, group["weight_decay"])
            for rate, group in zip(rates, self.param_groups, strict=True)
        ]
        if self._hyper is None or self._hyper[0] != values:
            self._hyper = values, upload(values, torch.float32, device)
        numbers = torch.ones(len(values), 4, device=device)
        numbers[:, 1:] = self._hyper[1]
        for number, rate in enumerate(rates):
            if isinstance(rate, torch.Tensor):
                numbers[number, 2].copy_(rate)
        numbers[:, 3] *= numbers[:, 2]
        if factor is not None:
            numbers[:, 0] = factor.to(device, torch.float32)
        return numbers

    def _alone(self, step: _Step) -> None:
        """Update the matrices that this rank has whole and alone, in batches of one shape."""
        assert self._exchange is not None
        batches: dict[Shape, list[_Rows]] = {}
        for parameter, matrix in self._matrices.items():
            if matrix.name in self._exchange.shared or parameter not in step.gradients or not local(parameter).numel():
                continue
            stack = _stack(local(parameter), matrix.of)
            shape = Shape(stack.shape[1], stack.shape[2], matrix.of.halves, matrix.of.interleaved)
            batches.setdefault(shape, []).append(_Rows(parameter, 0, stack.shape[0]))
        for shape, rows in batches.items():
            for batch in _cut(rows, max(1, BATCH // (shape.rows * shape.columns))):
                count = sum(one.stop - one.first for one in batch)
                x = torch.empty(count, shape.rows, shape.columns, dtype=self.ns_dtype, device=batch[0].parameter.device)
                slots = x.split([one.stop - one.first for one in batch])
                for one, slot in zip(batch, slots, strict=True):
                    step.take(self._matrices[one.parameter].name, one.first, one.stop, slot)
                found = step.orthogonal(shape, x).split([len(slot) for slot in slots])
                for one, update in zip(batch, found, strict=True):
                    step.change(self._matrices[one.parameter].name, one.first, one.stop, update, shape)


class _Step:
    """What is done with some matrices of a parameter in a step, by the parameter's name and their places on this rank.

    Attributes:
        gradients: what this rank has of each gradient, by parameter.
    """

    def __init__(self, optimizer: Muon, numbers: torch.Tensor) -> None:
        self.optimizer, self.numbers = optimizer, numbers
        self.parameters = {matrix.name: parameter for parameter, matrix in optimizer._matrices.items()}
        self.gradients = {
            parameter: placed_gradient(parameter, local(parameter.grad)).contiguous()
            for parameter in self.parameters.values()
            if parameter.grad is not None
        }

    def take(self, name: str, first: int, stop: int, update: torch.Tensor) -> None:
        """Put the gradient into the momentum, and what is to be orthogonalised into `update`. A parameter without a
        gradient, of which other ranks may have one, gives its momentum."""
        parameter = self.parameters[name]
        matrix, state = self.optimizer._matrices[parameter], self.optimizer.state[parameter]
        momentum = _stack(local(state["momentum_buffer"]), matrix.of)[first:stop]
        numbers, gradient = self.numbers[matrix.group], self.gradients.get(parameter)
        if gradient is None:
            gradient, numbers = momentum, numbers.clone()
            numbers[0] = math.nan
        else:
            gradient = _stack(gradient, matrix.of)[first:stop]
        if on_gpu(update):
            from carpool.optim import muon_kernel

            muon_kernel.take_gradient(gradient, momentum, update, numbers, self.optimizer.nesterov)
        else:
            take_gradient(gradient, momentum, update, numbers, self.optimizer.nesterov)

    def orthogonal(self, shape: Shape, x: torch.Tensor) -> torch.Tensor:
        """The same of whole matrices, gate and up each by itself, in the shape that they had. Overwrites them."""
        if not shape.halves:
            return orthogonalise(x, self.optimizer.ns_steps)
        # The place of the halves is before, or of alternating rows behind, the place in each.
        size = shape[shape.halves - 1]
        sizes, at = ((size // 2, 2), shape.halves + 1) if shape.interleaved else ((2, size // 2), shape.halves)
        apart = x.unflatten(shape.halves, sizes).movedim(at, 1)
        found = orthogonalise(apart.flatten(0, 1).contiguous(), self.optimizer.ns_steps)
        return found.unflatten(0, (len(x), 2)).movedim(1, at).flatten(shape.halves, shape.halves + 1).contiguous()

    def change(self, name: str, first: int, stop: int, update: torch.Tensor, shape: Shape) -> None:
        """Change the parameter. `shape`: of the whole."""
        parameter = self.parameters[name]
        if parameter not in self.gradients:
            return
        matrix, low = self.optimizer._matrices[parameter], self.optimizer.state[parameter].get("low_bits")
        weight = _stack(local(parameter), matrix.of)[first:stop]
        lows = None if low is None else _stack(local(low), matrix.of)[first:stop]
        numbers, scale = self.numbers[matrix.group], 0.2 * math.sqrt(max(shape.matrix))
        if on_gpu(weight):
            from carpool.optim import muon_kernel

            muon_kernel.change(weight, lows, update, numbers, scale)
        else:
            change(weight, lows, update, numbers, scale)


def _stack(tensor: torch.Tensor, of: Matrices) -> torch.Tensor:
    """(matrices, rows, columns), the same memory."""
    return tensor if of.stacked else tensor.unsqueeze(0)


def _cut(rows: list[_Rows], most: int) -> Iterator[list[_Rows]]:
    """Batches of at most so many matrices (gate and up of an expert count as one)."""
    batch: list[_Rows] = []
    left = most
    for parameter, first, stop in rows:
        while first < stop:
            end = min(stop, first + left)
            batch.append(_Rows(parameter, first, end))
            left, first = left - (end - first), end
            if not left:
                yield batch
                batch, left = [], most
    if batch:
        yield batch
