"""One optimizer step of all parameters of one device: their coefficients, their table, and one launch for equal dtypes.

Addresses and sizes are worked out once, and again where a parameter got other memory. The addresses of gradients are
compared at each step, and uploaded where they have changed. The step counts lie side by side in one tensor, so that a
few operations on vectors count and correct for all parameters. Nothing waits for the device.

A step is `prepare` and `count`, for all parameters, and then `apply`, of all at once or of some as their gradients
come. What `prepare` puts on the device is all that a step needs to know of the host, so the rest can be captured in a
CUDA graph. The addresses of gradients that a capture makes are known after it (`note_recorded`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch.distributed.tensor import DTensor

from carpool.kernels.device import on_gpu
from carpool.optim import adamw_reference as plain
from carpool.optim.adamw_reference import BLOCK

State = dict[str, torch.Tensor]
# What a row of the kernel's table has addresses of, after the weight.
KINDS = ("exp_avg", "exp_avg_sq", "low_bits", "exp_avg_scale", "exp_avg_sq_scale")


def local(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank holds of it, without a record for autograd."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor.detach()


class Use(NamedTuple):
    """How an update uses gradients.

    Attributes:
        factor: float32 scalar on the device, for the gradients. NaN: nothing changes. None: 1.
        zero: they are zero afterwards.
        squares: float32 scalar on the device, to which the squares of the gradients, times `factor`, are added.
    """

    factor: torch.Tensor | None = None
    zero: bool = False
    squares: torch.Tensor | None = None


class _Table:
    """Parameters of equal dtypes, or parts of them: the arguments of `kernel.launch`.

    Args:
        rows: as `Update._launch_rows` has them.
        weight, grad, moments: dtypes.

    Attributes:
        recorded: as `gradients`, of those that a CUDA graph makes.
        squares: of the gradients of each piece.
    """

    def __init__(
        self,
        rows: Sequence[tuple[list[int], int]],
        weight: torch.dtype,
        grad: torch.dtype,
        moments: torch.dtype,
        device: torch.device,
    ) -> None:
        from carpool.optim.kernel import PIECE

        pieces = []
        for place, (row, first) in enumerate(rows):
            begins = torch.arange(first, row[7], PIECE)
            pieces.append(torch.stack([torch.full_like(begins, place), begins], 1))
        cut = torch.cat(pieces)
        self.numbers = [row[-1] for row, _ in rows]
        self.rows = upload([row for row, _ in rows], torch.int64, device)
        self.pieces = upload(cut, torch.int32, device)
        self.gradients, self.addresses = torch.zeros(len(rows), dtype=torch.int64, device=device), list[int]()
        self.recorded = torch.zeros_like(self.gradients)
        self.squares = torch.zeros(len(cut), device=device)
        self.how: dict[str, Any] = {
            "bfloat16_weight": weight == torch.bfloat16,
            "bfloat16_grad": grad == torch.bfloat16,
            "moments": moments,
        }


class Update:
    """The parameters of one device, and what updates them.

    Args:
        parameters: with their places here they seed stochastic rounding, so the order matters.
        groups: of each parameter, its group's place in `step`'s `settings`.
        states: of each parameter. Their "step" becomes a part of one tensor here.

    Attributes:
        done: an event after the last `apply`; None: it is what the stream of its caller was asked for.
        recording: whether what is captured makes gradients of its own.
    """

    done: Any = None
    recording = False

    def __init__(
        self, parameters: Sequence[torch.Tensor], groups: Sequence[int], states: Sequence[State], device: torch.device
    ) -> None:
        self.parameters, self.states, self.device = list(parameters), list(states), device
        self.steps = torch.stack([state["step"] for state in states])
        for state, step in zip(states, self.steps, strict=True):
            state["step"] = step
        self.coefficients = torch.zeros(len(states), 7, device=self.device)
        self._groups = torch.tensor(groups, device=self.device)
        self._settings: list[tuple[float, ...]] = []
        self._has_grad: list[bool] = []
        self._hyper = torch.zeros(max(groups) + 1, 5, dtype=torch.float64, device=self.device)
        self._counted = torch.zeros(len(states), device=self.device)
        self._recorded: list[tuple[_Table, list[int]]] = []
        # By what is launched at once: its memory and the dtypes of its gradients, and the tables for these.
        self._tables: dict[Any, tuple[Any, list[_Table]]] = {}
        self._codes: torch.Tensor | None = None
        self._one = torch.ones((), device=self.device)

    def step(self, settings: list[tuple[float, ...]], rates: dict[int, torch.Tensor], use: Use) -> None:
        """Update those that have a gradient.

        Args:
            settings: of each group: lr, beta1, beta2, eps, weight decay.
            rates: learning rates that are tensors, by group.
        """
        self.prepare(settings, [p.grad is not None for p in self.parameters])
        self.count(rates, use.factor)
        self.apply(range(len(self.parameters)), use)
        self.join()

    def join(self) -> None:
        """The current stream goes on after all that `apply` has asked for."""

    def apply(self, numbers: Iterable[int], use: Use) -> None:
        """Update those of these parameters that have a gradient, with the steps and coefficients of `count`."""
        numbers = tuple(numbers)
        theirs = {i: local(grad) for i in numbers if (grad := self.parameters[i].grad) is not None}
        grads = {i: placed_gradient(self.parameters[i], grad).contiguous() for i, grad in theirs.items()}
        if on_gpu(self.coefficients):
            self._launch(numbers, grads, use)
        else:
            if use.squares is not None:
                by = 1.0 if use.factor is None else use.factor
                use.squares.add_(sum((grad.float() * by).square().sum() for grad in grads.values()))
            self._plainly(grads, use)
        if use.zero:
            for i, grad in theirs.items():
                if grad is not grads[i]:
                    grad.zero_()
        # The kernel's writes are unknown to PyTorch, whose checks of saved tensors look at versions.
        written = [self.parameters[i] for i in grads]
        torch.autograd.graph.increment_version(written + [local(p) for p in written if isinstance(p, DTensor)])

    def prepare(self, settings: list[tuple[float, ...]], has_grad: list[bool]) -> None:
        """Put on the device what has changed of the settings, and of which parameters have, or will have, a
        gradient."""
        if settings != self._settings:
            # Behind the last group of these parameters there may be others of another optimizer.
            self._hyper.copy_(upload(settings[: len(self._hyper)], torch.float64, self.device))
            self._settings = settings
        if has_grad != self._has_grad:
            self._counted.copy_(upload(has_grad, torch.float32, self.device))
            self._has_grad = has_grad

    def count(self, rates: dict[int, torch.Tensor], factor: torch.Tensor | None) -> None:
        """Steps and coefficients of this step, for those that have, or will have, a gradient."""
        for group, rate in rates.items():
            if group < len(self._hyper):
                self._hyper[group, 0].copy_(rate)
        self.steps += self._counted if factor is None else self._counted * (factor == factor)
        lr, beta1, beta2, eps, decay = self._hyper[self._groups].unbind(1)
        # A parameter that had no gradient yet has 0 here, and is not updated.
        kept1, kept2 = 1 - beta1**self.steps, 1 - beta2**self.steps
        columns = (lr / kept1, kept2.rsqrt(), lr * decay, 1 - beta1, beta2, 1 - beta2, eps)
        self.coefficients.copy_(torch.stack(columns, dim=1))

    def uncount(self, numbers: Sequence[int], factor: torch.Tensor | None) -> None:
        """Take back the step of parameters that had no gradient after all."""
        if numbers:
            one = torch.ones((), device=self.device) if factor is None else (factor == factor).float()
            self.steps[list(numbers)] -= one

    def settle(self) -> None:
        """Before a capture, and before each replay: the current stream goes on after all that was done eagerly."""

    def record(self) -> None:
        """Before a capture, which makes gradients of its own."""
        self.recording = True

    def note_recorded(self) -> None:
        """After a capture: its launches find the gradients that it makes."""
        recorded, self._recorded, self.recording = self._recorded, [], False
        for table, addresses in recorded:
            table.recorded.copy_(upload(addresses, torch.int64, self.device))

    def replayed(self) -> None:
        """After a replay: what follows eagerly comes after it."""

    def _plainly(self, grads: dict[int, torch.Tensor], use: Use) -> None:
        for i, grad in grads.items():
            state = {name: local(value) for name, value in self.states[i].items()}
            self._update_plainly(i, local(self.parameters[i]), grad, state, use)

    def _update_plainly(
        self, i: int, weight: torch.Tensor, grad: torch.Tensor, state: State, use: Use, first: int = 0
    ) -> None:
        """Update the i-th parameter, or a part of it that begins with element `first`."""
        by = 1.0 if use.factor is None else float(use.factor)
        if by == by and grad.numel():
            numbers = plain.Coefficients(*self.coefficients[i].tolist())
            plain.update(weight, grad, state, numbers, by, int(self.steps[i]), i, first)
            if use.zero:
                grad.zero_()

    def _launch(self, numbers: tuple[int, ...], grads: dict[int, torch.Tensor], use: Use) -> None:
        memory = [_memory(self.parameters[i], self.states[i]) for i in numbers]
        self._launch_rows(numbers, numbers, memory, lambda place: (self._row(numbers[place]), 0), grads, use)

    def _launch_rows(
        self,
        key: Any,
        numbers: Sequence[int],
        memory: list[Any],
        row_of: Callable[[int], tuple[list[int], int]],
        grads: dict[int, torch.Tensor],
        use: Use,
    ) -> None:
        """One launch for equal dtypes.

        Args:
            key: of the tables, which are made again where `memory` or the dtypes of gradients have changed.
            numbers: of the parameters.
            row_of: of each: its row of `kernel.launch`'s table, and the first block that is updated; the row's number
                of blocks says where that ends.
        """
        from carpool.optim.kernel import code_tables, launch

        if self._codes is None:
            self._codes = code_tables(self.device)
        dtypes = [self.parameters[i].dtype if (grad := grads.get(i)) is None else grad.dtype for i in numbers]
        known, tables = self._tables.get(key, (None, []))
        if (memory, dtypes) != known:
            alike: dict[tuple[torch.dtype, torch.dtype, torch.dtype], list[tuple[list[int], int]]] = {}
            for place, (i, dtype) in enumerate(zip(numbers, dtypes, strict=True)):
                kind = self.parameters[i].dtype, dtype, self.states[i]["exp_avg"].dtype
                alike.setdefault(kind, []).append(row_of(place))
            tables = [_Table(rows, *kind, self.device) for kind, rows in alike.items()]
            self._tables[key] = (memory, dtypes), tables
        for table in tables:
            addresses = [0 if (grad := grads.get(i)) is None else grad.data_ptr() for i in table.numbers]
            if self.recording:
                self._recorded.append((table, addresses))
            elif addresses != table.addresses:
                table.gradients, table.addresses = upload(addresses, torch.int64, self.device), addresses
            launch(
                table.rows,
                table.recorded if self.recording else table.gradients,
                table.pieces,
                self.coefficients,
                self.steps,
                self._one if use.factor is None else use.factor,
                self._codes,
                table.squares,
                zero_grads=use.zero,
                **table.how,
            )
            if use.squares is not None:
                use.squares.add_(table.squares.sum())

    def _row(self, i: int) -> list[int]:
        parameter, state = local(self.parameters[i]), {k: local(v) for k, v in self.states[i].items()}
        elements = parameter.numel()
        width = parameter.shape[-1] if state["exp_avg"].dtype == torch.uint8 else elements
        per_row = -(-width // BLOCK)
        blocks = per_row * (elements // width) if elements else 0
        addresses = [state[name].data_ptr() if name in state else 0 for name in KINDS]
        return [parameter.data_ptr(), *addresses, width, blocks, per_row, i]


def placed_gradient(parameter: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
    """Of a rank's gradient, the part that belongs to its part of the parameter. PyTorch gives each tensor-parallel rank
    the whole gradient of an embedding of which it has some rows."""
    own = local(parameter)
    if own.shape == grad.shape:
        return grad
    assert isinstance(parameter, DTensor) and isinstance(parameter.grad, DTensor)
    return local(parameter.grad.redistribute(placements=parameter.placements))


def _memory(parameter: torch.Tensor, state: State) -> Any:
    """Changes when a parameter or its state get other memory, as experts do that move to uneven homes. That of DTensors
    stays."""
    if isinstance(parameter, DTensor):
        return local(parameter).data_ptr()
    return parameter.numel(), parameter.data_ptr(), *[value.data_ptr() for value in state.values()]


def upload(values: Any, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Numbers on a device, without waiting for it."""
    if device.type != "cuda":
        return torch.as_tensor(values, dtype=dtype, device=device)
    if torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "the optimizer's step is captured in a CUDA graph, but addresses of gradients or settings have changed "
            "since the step before: take a step before the capture, keep the gradients' memory (zero_grads=True, or "
            "zero_grad(set_to_none=False)), and give the learning rate as a tensor"
        )
    return torch.as_tensor(values, dtype=dtype).pin_memory().to(device, non_blocking=True)
