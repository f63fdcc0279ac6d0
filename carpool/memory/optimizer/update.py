"""One optimizer step of all parameters of one device: their coefficients, their table, and one launch for equal dtypes.

Addresses and sizes are worked out once, and again where a parameter got other memory. The addresses of gradients are
compared at each step, and uploaded where they have changed. The step counts lie side by side in one tensor, so that a
few operations on vectors count and correct for all parameters. Nothing waits for the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from carpool.kernels.device import on_gpu
from carpool.memory.optimizer import plain
from carpool.memory.optimizer.moments import BLOCK, dynamic_map, midpoints

State = dict[str, torch.Tensor]


def local(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank holds of it, without a record for autograd."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor.detach()


@dataclass
class _Table:
    """Parameters of equal dtypes: see `kernel.launch`."""

    numbers: list[int]
    rows: torch.Tensor
    pieces: torch.Tensor
    gradients: torch.Tensor
    how: dict[str, Any]
    addresses: list[int] = field(default_factory=list)


class Update:
    """The parameters of one device, and what updates them.

    Args:
        parameters: with their places here they seed stochastic rounding, so the order matters.
        groups: of each parameter, its group's place in `step`'s `settings`.
        states: of each parameter. Their "step" becomes a part of one tensor here.
    """

    def __init__(self, parameters: Sequence[torch.Tensor], groups: Sequence[int], states: Sequence[State]) -> None:
        self.parameters, self.states = list(parameters), list(states)
        self.device = parameters[0].device
        self.steps = torch.stack([state["step"] for state in states])
        for state, step in zip(states, self.steps, strict=True):
            state["step"] = step
        self.coefficients = torch.zeros(len(states), 7, device=self.device)
        self._groups = torch.tensor(groups, device=self.device)
        self._settings: list[tuple[float, ...]] = []
        self._has_grad: list[bool] = []
        self._tables: list[_Table] = []
        self._memory: list[Any] = []
        self._grad_dtypes: list[torch.dtype] = []
        self._maps: torch.Tensor | None = None
        self._one = torch.ones((), device=self.device)

    def step(
        self,
        settings: list[tuple[float, ...]],
        rates: dict[int, torch.Tensor],
        factor: torch.Tensor | None,
        zero_grads: bool,
    ) -> None:
        """Update those that have a gradient.

        Args:
            settings: of each group: lr, beta1, beta2, eps, weight decay.
            rates: learning rates that are tensors, by group.
            factor: float32 scalar on this device, for the gradients. NaN: nothing changes.
        """
        theirs = [None if p.grad is None else local(p.grad) for p in self.parameters]
        grads = [None if grad is None else grad.contiguous() for grad in theirs]
        self._count(settings, rates, [grad is not None for grad in grads], factor)
        if on_gpu(self.coefficients):
            self._launch(grads, factor, zero_grads)
        else:
            self._plainly(grads, factor, zero_grads)
        if zero_grads:
            for grad, ours in zip(theirs, grads, strict=True):
                if grad is not None and grad is not ours:
                    grad.zero_()
        # The kernel's writes are unknown to PyTorch, whose checks of saved tensors look at versions.
        written = [p for p, grad in zip(self.parameters, grads, strict=True) if grad is not None]
        torch.autograd.graph.increment_version(written + [local(p) for p in written if isinstance(p, DTensor)])

    def _count(
        self,
        settings: list[tuple[float, ...]],
        rates: dict[int, torch.Tensor],
        has_grad: list[bool],
        factor: torch.Tensor | None,
    ) -> None:
        """Steps and coefficients of this step."""
        if settings != self._settings:
            self._hyper = upload(settings, torch.float64, self.device)
            self._settings = settings
        for group, rate in rates.items():
            self._hyper[group, 0].copy_(rate)
        if has_grad != self._has_grad:
            self._counted = upload(has_grad, torch.float32, self.device)
            self._has_grad = has_grad
        self.steps += self._counted if factor is None else self._counted * (factor == factor)
        lr, beta1, beta2, eps, decay = self._hyper[self._groups].unbind(1)
        # A parameter that had no gradient yet has 0 here, and is not updated.
        kept1, kept2 = 1 - beta1**self.steps, 1 - beta2**self.steps
        columns = (lr / kept1, kept2.rsqrt(), lr * decay, 1 - beta1, beta2, 1 - beta2, eps)
        self.coefficients.copy_(torch.stack(columns, dim=1))

    def _plainly(self, grads: list[torch.Tensor | None], factor: torch.Tensor | None, zero_grads: bool) -> None:
        by = 1.0 if factor is None else float(factor)
        if by != by:
            return
        steps, coefficients = self.steps.tolist(), self.coefficients.tolist()
        for i, grad in enumerate(grads):
            if grad is None or grad.numel() == 0:
                continue
            state = {name: local(value) for name, value in self.states[i].items()}
            numbers = plain.Coefficients(*coefficients[i])
            plain.update(local(self.parameters[i]), grad, state, numbers, by, int(steps[i]), i)
            if zero_grads:
                grad.zero_()

    def _launch(self, grads: list[torch.Tensor | None], factor: torch.Tensor | None, zero_grads: bool) -> None:
        from carpool.memory.optimizer.kernel import launch

        memory = [_memory(p, state) for p, state in zip(self.parameters, self.states, strict=True)]
        dtypes = [p.dtype if grad is None else grad.dtype for p, grad in zip(self.parameters, grads, strict=True)]
        if memory != self._memory or dtypes != self._grad_dtypes:
            self._tables = self._make_tables(dtypes)
            self._memory, self._grad_dtypes = memory, dtypes
        if self._maps is None:
            maps = [
                dynamic_map(True),
                dynamic_map(False),
                midpoints(True),
                torch.zeros(1),
                midpoints(False),
                torch.zeros(1),
            ]
            self._maps = torch.cat(maps).to(self.device)
        for table in self._tables:
            addresses = [0 if (grad := grads[i]) is None else grad.data_ptr() for i in table.numbers]
            if addresses != table.addresses:
                table.gradients, table.addresses = upload(addresses, torch.int64, self.device), addresses
            launch(
                table.rows,
                table.gradients,
                table.pieces,
                self.coefficients,
                self.steps,
                self._one if factor is None else factor,
                self._maps,
                zero_grads=zero_grads,
                **table.how,
            )

    def _make_tables(self, grad_dtypes: list[torch.dtype]) -> list[_Table]:
        alike: dict[tuple[torch.dtype, torch.dtype, torch.dtype], list[int]] = {}
        for i, (parameter, dtype) in enumerate(zip(self.parameters, grad_dtypes, strict=True)):
            alike.setdefault((parameter.dtype, dtype, self.states[i]["exp_avg"].dtype), []).append(i)
        return [self._table(*dtypes, numbers) for dtypes, numbers in alike.items()]

    def _table(self, weight: torch.dtype, grad: torch.dtype, moments: torch.dtype, numbers: list[int]) -> _Table:
        from carpool.memory.optimizer.kernel import PIECE

        rows, pieces = [], []
        for place, i in enumerate(numbers):
            parameter, state = local(self.parameters[i]), {k: local(v) for k, v in self.states[i].items()}
            elements = parameter.numel()
            width = parameter.shape[-1] if moments == torch.uint8 else elements
            per_row = -(-width // BLOCK)
            blocks = per_row * (elements // width) if elements else 0
            addresses = [parameter.data_ptr()]
            for name in ("exp_avg", "exp_avg_sq", "low_bits", "exp_avg_scale", "exp_avg_sq_scale"):
                addresses.append(state[name].data_ptr() if name in state else 0)
            rows.append([*addresses, width, blocks, per_row, i])
            pieces.append(torch.stack([torch.full((-(-blocks // PIECE),), place), torch.arange(0, blocks, PIECE)], 1))
        how = {
            "bfloat16_weight": weight == torch.bfloat16,
            "bfloat16_grad": grad == torch.bfloat16,
            "moments": moments,
        }
        return _Table(
            numbers,
            upload(rows, torch.int64, self.device),
            torch.cat(pieces).int().to(self.device),
            torch.zeros(len(rows), dtype=torch.int64, device=self.device),
            how,
        )


def _memory(parameter: torch.Tensor, state: State) -> Any:
    """Changes when a parameter or its state get other memory, as experts do that move to uneven homes. That of DTensors
    stays."""
    if isinstance(parameter, DTensor):
        return local(parameter).data_ptr()
    return parameter.numel(), parameter.data_ptr(), *[value.data_ptr() for value in state.values()]


def upload(values: Any, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Numbers on a device, without waiting for it."""
    if device.type != "cuda":
        return torch.tensor(values, dtype=dtype, device=device)
    if torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "the optimizer's step is captured in a CUDA graph, but addresses of gradients or settings have changed "
            "since the step before: take a step before the capture, keep the gradients' memory (zero_grads=True, or "
            "zero_grad(set_to_none=False)), and give the learning rate as a tensor"
        )
    return torch.tensor(values, dtype=dtype, pin_memory=True).to(device, non_blocking=True)
