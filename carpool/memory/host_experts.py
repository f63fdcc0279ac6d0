"""Experts whose parameters are in host memory, and on the device only while their layer needs them.

Experts are almost all of a model (Qwen3-30B-A3B: 29 of 30.5 billion parameters), and one layer computes at a time. So
two layers' experts on the device are enough: those that compute, and those that are under way. (In a backward there is
a third, on its way out.)

    forward     computes     layer 0 | layer 1 | layer 2 | layer 3
                in           1       | 2       | 3       |
    backward    computes     layer 3 | layer 2 | layer 1 | layer 0
                in           2       | 1       | 0       |
                out                  | 3       | 2       | 1, 0      what the update has made of them

Copies run on streams of their own. Each parameter is updated while it is on the device: as soon as its gradient is
there (`carpool.parallel.consumed`), with optimizer state that may come from host memory in the same way. So gradients
never leave the device, and a step moves each parameter in twice and out once. ZeRO-Infinity (arXiv 2104.07857) and
ES-MoE (ICML 2024) send gradients out and update on the CPU.

The memory of a parameter on the device is given back and taken again under the same tensor, as FSDP2 does it. So
whoever holds the parameter, or saved it for a backward, finds its values there when it is the layer's turn. The last
layer of a forward stays for its backward, and the first layer of a backward for the next forward.

A forward without a backward need not bring in experts that nobody chose. In generation a token chooses 8 of 128, say.
With `chosen_only` a layer brings in those that its router has chosen, and while it computes, those of the next layer
that are likely by what was chosen so far (`carpool.memory.next_experts`). A wrong guess costs time alone. Where tokens
choose most of a layer's experts, as in a prompt, the layer comes whole.

On a CPU the same code copies at once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from carpool.memory.host import host_zeros
from carpool.memory.next_experts import NextExperts

_ATTRIBUTE = "_carpool_host_experts"


class _Weight:
    """One parameter, which moves to `device` if it is not there.

    Attributes:
        device: its memory on the device; without any while the parameter is away.
        host: its values, if they are not newer on the device.
        shard: the DTensor of the same memory, if the model is sharded.
    """

    def __init__(self, whole: nn.Parameter, shard: nn.Parameter | None, device: torch.device) -> None:
        self.whole, self.shard = whole, shard
        values: torch.Tensor = whole.detach()
        self.host = host_zeros(values.shape, values.dtype, device).copy_(values)
        if values.device != device:
            values = torch.empty_like(values, device=device)
        elif values.untyped_storage().nbytes() != values.nbytes or not values.untyped_storage().resizable():
            values = values.clone()  # it was a part of a file that is mapped, say
        self.device = whole.data = values
        if isinstance(shard, DTensor):
            shard._local_tensor = values
        self.size = self.device.untyped_storage().nbytes()

    @property
    def key(self) -> int:
        return storage_key(self.whole)


class _Layer:
    """The experts of one layer.

    Attributes:
        here: whether they are on the device, or on their way to it.
        ready: when they have come; None: the device has waited for that.
        gone: when their newest values are in host memory.
        rows: experts that are here; None: all of them.
    """

    def __init__(self, weights: Sequence[_Weight]) -> None:
        self.weights = list(weights)
        self.here = True
        self.rows: set[int] | None = None
        self.ready: Any = None
        self.gone: Any = None


class HostExperts:
    """Moves the experts of a model between host memory and the device. Constructed once the optimizer has them.

    Args:
        model: it is found again by `host_experts(model)`.
        modules: the experts modules, in the order of the forward, with the parameters that each of them has.
        shards: of parameters that are sharded: the DTensor by `storage_key`.
        device: where they are computed with; None: where they are.
        chosen_only: forwards without a backward bring in what is chosen. The modules are called with rows, choices and
            weights, and choices are numbers of their own experts.

    Attributes:
        bytes_in, bytes_out: that have travelled so far.
        predictor: with `chosen_only`, of the experts of the next layer.
        consuming: whether a backward's gradients are used for updates, so that parameters stay until `updated`.

    Raises:
        ValueError: parameters share memory with others.
    """

    def __init__(
        self,
        model: nn.Module,
        modules: Sequence[nn.Module],
        shards: dict[int, nn.Parameter] | None = None,
        device: torch.device | None = None,
        chosen_only: bool = False,
    ) -> None:
        self.bytes_in = self.bytes_out = 0
        self.consuming = False
        shards = shards or {}
        device = device or next(modules[0].parameters()).device
        streams: list[Any] = [torch.cuda.Stream(device) if device.type == "cuda" else None for _ in range(2)]
        self._into, self._out = streams
        self.predictor = NextExperts() if chosen_only else None
        self._layers: list[_Layer] = []
        self._of: dict[int, int] = {}
        parameters = [p for module in modules for p in module.parameters()]
        if len({p.data_ptr() for p in parameters if p.numel()}) < len([p for p in parameters if p.numel()]):
            raise ValueError(
                "experts of two layers share memory, so they cannot come from host memory layer by layer "
                "(memory.experts)"
            )
        for number, module in enumerate(modules):
            layer = _Layer([_Weight(p, shards.get(storage_key(p)), device) for p in module.parameters()])
            self._layers.append(layer)
            self._of |= {weight.key: number for weight in layer.weights}
            self._leave(number)
            module.register_forward_pre_hook(partial(self._before_forward, number))
            module.register_forward_hook(partial(self._after_forward, number))
        object.__setattr__(model, _ATTRIBUTE, self)

    # -- the turn of a layer ---------------------------------------------------------------------------------------

    def _before_forward(self, number: int, _module: nn.Module, args: tuple[Any, ...]) -> None:
        if self.predictor is not None and not torch.is_grad_enabled():
            self._enter_chosen(number, args[1])
        else:
            # Activation checkpointing runs forwards in the backward.
            self._enter(number, -1 if _in_backward() else 1)

    def _after_forward(self, number: int, _module: nn.Module, _args: Any, y_TH: torch.Tensor) -> None:
        if y_TH.requires_grad:
            y_TH.register_hook(partial(self._before_backward, number))
        if not _in_backward() and not (y_TH.requires_grad and number + 1 == len(self._layers)):
            self._leave(number)

    def _before_backward(self, number: int, _: torch.Tensor) -> None:
        self._enter(number, -1)

    @torch.no_grad()
    def _enter(self, number: int, direction: int) -> None:
        """It is a layer's turn: it is here, and the next one is on its way. Those that were before it leave."""
        following = number + direction
        self._leave_others(number, following)
        self._fetch(number)
        self._wait_for(number)
        if 0 <= following < len(self._layers):
            self._fetch(following)

    @torch.no_grad()
    def _enter_chosen(self, number: int, expert_TK: torch.Tensor) -> None:
        """As `_enter`, of the experts that are chosen. The host waits for the router."""
        assert self.predictor is not None
        experts = self._layers[number].weights[0].whole.shape[0]
        chosen = [expert for expert in expert_TK.unique().tolist() if 0 <= expert < experts]
        self.predictor.saw(number, chosen)
        self._leave_others(number, number + 1)
        self._fetch(number, None if 2 * len(chosen) > experts else chosen)
        self._wait_for(number)
        if number + 1 < len(self._layers) and (likely := self.predictor.likely(number, chosen)):
            self._fetch(number + 1, likely)

    def _leave_others(self, number: int, following: int) -> None:
        for other, layer in enumerate(self._layers):
            if layer.here and other not in (number, following) and not self._waits(layer):
                self._leave(other)

    def _wait_for(self, number: int) -> None:
        layer = self._layers[number]
        if layer.ready is not None:
            torch.cuda.current_stream().wait_event(layer.ready)
            layer.ready = None

    def _waits(self, layer: _Layer) -> bool:
        """Whether a gradient has come that is still to be used."""
        return self.consuming and any(
            p.grad is not None for weight in layer.weights for p in (weight.whole, weight.shard) if p is not None
        )

    def _fetch(self, number: int, rows: Iterable[int] | None = None) -> None:
        """Begin to bring in of a layer what is not here. `rows`: these experts; None: all."""
        layer = self._layers[number]
        if not layer.here:
            layer.here, layer.rows = True, set()
            for weight in layer.weights:
                weight.device.untyped_storage().resize_(weight.size)
        if layer.rows is None:
            return
        missing = None if rows is None else sorted(set(rows) - layer.rows)
        layer.rows = None if missing is None else layer.rows.union(missing)
        if missing == []:
            return
        # The memory was somebody's until what has been asked for so far is done.
        with self._beside(self._into, layer.gone):
            for weight in layer.weights:
                with torch.autograd._unsafe_preserve_version_counter(weight.device):
                    if missing is None:
                        weight.device.copy_(weight.host, non_blocking=True)
                    for row in missing or ():
                        weight.device[row].copy_(weight.host[row], non_blocking=True)
                self.bytes_in += weight.size if missing is None else len(missing) * weight.host[0].nbytes
            layer.ready = self._now()

    def _leave(self, number: int) -> None:
        """Give a layer's memory on the device back."""
        layer = self._layers[number]
        if layer.ready is not None:
            torch.cuda.current_stream().wait_event(layer.ready)
        for weight in layer.weights:
            if self._out is not None:
                # Nobody gets it before it has gone out.
                weight.device.record_stream(self._out)
            weight.device.untyped_storage().resize_(0)
        layer.here, layer.ready = False, None

    @torch.no_grad()
    def updated(self, parameters: Iterable[torch.Tensor]) -> None:
        """Parameters, some of which may be ours, have been updated on the device: their values go out."""
        for parameter in parameters:
            number = self._of.get(storage_key(parameter))
            if number is None:
                continue
            layer = self._layers[number]
            assert layer.here
            weight = next(one for one in layer.weights if one.key == storage_key(parameter))
            with self._beside(self._out, None):
                weight.host.copy_(weight.device, non_blocking=True)
                layer.gone = self._now()
            self.bytes_out += weight.size

    # -- streams: nothing on a CPU ---------------------------------------------------------------------------------

    def _now(self) -> Any:
        return None if self._into is None else torch.cuda.current_stream().record_event()

    def _beside(self, stream: Any, after: Any) -> AbstractContextManager[Any]:
        """Inside, a stream does what is asked for, after what the current one has been asked for and `after`."""
        if stream is None:
            return nullcontext()
        stream.wait_stream(torch.cuda.current_stream())
        if after is not None:
            stream.wait_event(after)
        return torch.cuda.stream(stream)

    # -- values for checkpoints ------------------------------------------------------------------------------------

    @contextmanager
    def shown(self) -> Iterator[None]:
        """Inside, parameters are their values in host memory, which may be changed. Nothing computes with them."""
        if self._out is not None:
            torch.cuda.synchronize()
        weights = [weight for layer in self._layers for weight in layer.weights if weight.host.numel()]
        if weights and weights[0].whole.data_ptr() == weights[0].host.data_ptr():  # inside of another
            yield
            return
        for number, layer in enumerate(self._layers):
            if layer.here:
                self._leave(number)
        self._point(weights, host=True)
        try:
            yield
        finally:
            self._point(weights, host=False)

    @staticmethod
    def _point(weights: Sequence[_Weight], host: bool) -> None:
        for weight in weights:
            values = weight.host if host else weight.device
            weight.whole.data = values
            if isinstance(weight.shard, DTensor):
                weight.shard._local_tensor = values


def host_experts(model: nn.Module) -> HostExperts | None:
    """What keeps a model's experts in host memory; None: nothing does."""
    found: HostExperts | None = getattr(model, _ATTRIBUTE, None)
    return found


def storage_key(tensor: torch.Tensor) -> int:
    """The same for tensors in the same memory, also while it has none."""
    own = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
    return int(own.untyped_storage()._cdata)


def _in_backward() -> bool:
    return bool(torch._C._current_graph_task_id() != -1)
