"""AdamW whose step is one pass over memory: one kernel for all parameters of equal dtypes on GPUs, plain PyTorch on
CPUs.

    optimizer = AdamW(model.parameters(), lr=3e-4, weight_decay=0.1)
    loss.backward()
    norm = grad_norm(model.parameters())
    optimizer.step(factor=clip_factor(norm, 1.0), zero_grads=True)

The same pass clips, updates and, if asked, zeroes the gradients. It is exact AdamW for float32 parameters. Those in
bfloat16 have float32 masters, of which the optimizer keeps the other 16 bits. Moments may be kept in fewer
bits, which is lossy (`adamw_reference`). Bytes for each parameter, with its gradient:

    parameters    moments      weight  gradient  low bits  moments   in all
    float32       float32      4       4                   8         16
    float32       int8         4       4                   2.03      10.03
    bfloat16      float32      2       2         2         8         14
    bfloat16      bfloat16     2       2         2         4         10
    bfloat16      int8         2       2         2         2.03      8.03

With `offload=True` low bits and moments are in host memory, and go through the device in tiles (`offloaded_state`): the
same kernel, the same bits.

Where nothing waits for the norm of all gradients, each may be used and freed as soon as it is there:

    optimizer.begin(factor)          steps are counted, of all parameters that require a gradient
    optimizer.update([parameter])    in the backward, where its gradient is
    optimizer.finish(factor)         what had no gradient has taken no step

`begin` and `update` can be captured in a CUDA graph with the backward (`record`), if a step has been taken before. Each
replay is between `prepare` and `replayed`.

State of a parameter: `step`, `exp_avg` and `exp_avg_sq`, as those of `torch.optim.AdamW`; `low_bits` (int16) beside
bfloat16; `exp_avg_scale` and `exp_avg_sq_scale` beside 8-bit codes. It exists from the start. All but `step` has one
row for each row of the parameter, and is a DTensor where the parameter is one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

from carpool.optim.adamw_reference import DTYPES, ZERO_CODE, can_be_blocks, dequantise, quantise, scale_shape
from carpool.optim.base import AdamWFacts, TorchFacts
from carpool.optim.offloaded_state import Slab, StreamedUpdate
from carpool.optim.update import State, Update, Use, local

Moments = Literal["float32", "bfloat16", "int8"]
_SIGNED = {"exp_avg": True, "exp_avg_sq": False}


class TorchAdamW(TorchFacts, torch.optim.AdamW):
    """PyTorch's own."""


class AdamW(AdamWFacts, torch.optim.Optimizer):
    """AdamW over plain tensors and DTensors alike: each rank updates what it holds.

    Args:
        params: contiguous float32 or bfloat16 tensors, or groups of them.
        lr: a number, or a float32 scalar tensor, which a captured CUDA graph reads at each replay.
        moments: how both moments are kept. Other than float32 is lossy.
        offload: low bits and moments are in host memory.
        folder: with `offload`, they are in files there instead. None: in memory.

    Raises:
        ValueError: a parameter of another dtype, or not contiguous.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | torch.Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        moments: Moments = "float32",
        offload: bool = False,
        folder: Path | None = None,
    ) -> None:
        if moments not in DTYPES:
            raise ValueError(f"moments={moments!r} is not known; it is one of {', '.join(DTYPES)}")
        self.moment_dtype, self.offload, self.folder = moments, offload, folder
        self._updates: list[Update] = []
        self._slabs: dict[torch.Tensor, tuple[Slab, int]] = {}
        self._early: set[torch.Tensor] = set()
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        for parameter in self.param_groups[-1]["params"]:
            if parameter.dtype not in (torch.float32, torch.bfloat16) or not local(parameter).is_contiguous():
                raise ValueError(
                    f"a parameter of shape {tuple(parameter.shape)} is {parameter.dtype} with strides "
                    f"{parameter.stride()}; this optimizer updates contiguous float32 and bfloat16 parameters, "
                    "torch.optim.AdamW all others"
                )
        self._updates = []
        if self.offload:
            self._new_slabs(self.param_groups[-1]["params"])
        for parameter in self.param_groups[-1]["params"]:
            self.state[parameter] = self._new_state(parameter)

    def _new_slabs(self, parameters: list[torch.Tensor]) -> None:
        alike: dict[tuple[torch.dtype, torch.dtype, torch.device], list[torch.Tensor]] = {}
        for parameter in parameters:
            key = parameter.dtype, self._moments_dtype(parameter), parameter.device
            alike.setdefault(key, []).append(parameter)
        for (dtype, moments, device), found in alike.items():
            slab = Slab([local(p).shape for p in found], dtype == torch.bfloat16, moments, device, self.folder)
            self._slabs |= {parameter: (slab, i) for i, parameter in enumerate(found)}

    def _moments_dtype(self, parameter: torch.Tensor) -> torch.dtype:
        # What cannot be in blocks is small, so that it stays exact.
        blocks = self.moment_dtype != "int8" or can_be_blocks(parameter.shape, _last_dim_shards(parameter))
        return DTYPES[self.moment_dtype] if blocks else torch.float32

    def _new_state(self, parameter: torch.Tensor) -> State:
        part, dtype = local(parameter), self._moments_dtype(parameter)
        if self.offload:
            slab, place = self._slabs[parameter]
            found = slab.state(place)
        else:
            found = {name: torch.zeros_like(part, dtype=dtype) for name in _SIGNED}
            if parameter.dtype == torch.bfloat16:
                found["low_bits"] = torch.zeros_like(part, dtype=torch.int16)
            if dtype == torch.uint8:
                found |= {
                    f"{name}_scale": part.new_zeros(scale_shape(part.shape), dtype=torch.float32) for name in _SIGNED
                }
        if dtype == torch.uint8:
            for name, signed in _SIGNED.items():
                found[name].fill_(ZERO_CODE[signed])
        return {
            "step": torch.zeros((), device=parameter.device),
            **{name: placed(value, name, parameter) for name, value in found.items()},
        }

    @torch.no_grad()
    def step(  # type: ignore[override]
        self,
        closure: Callable[[], Any] | None = None,
        *,
        factor: torch.Tensor | None = None,
        zero_grads: bool = False,
    ) -> Any:
        """Update the parameters that have a gradient.

        Args:
            closure: computes the loss again, as PyTorch's optimizers take it.
            factor: scalar float32 tensor on the parameters' device, by which gradients are multiplied (`clip_factor`).
                Nothing waits for it. If it is NaN, nothing is updated and no step is counted.
            zero_grads: gradients are zero afterwards, in the memory that they have.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._update_all(factor, zero_grads)
        return loss

    def _update_all(self, factor: torch.Tensor | None, zero_grads: bool) -> None:
        settings, rates = self._settings()
        for update in self._updates:
            update.step(settings, rates, Use(_on(update, factor), zero_grads))

    def _settings(self) -> tuple[list[tuple[float, ...]], dict[int, torch.Tensor]]:
        """Numbers of each group, and the learning rates that are tensors, by group."""
        if not self._updates:
            self._updates = self._new_updates()
        settings, rates = [], {}
        for i, group in enumerate(self.param_groups):
            lr = group["lr"]
            if isinstance(lr, torch.Tensor):
                rates[i], lr = lr, 0.0
            settings.append((lr, *group["betas"], group["eps"], group["weight_decay"]))
        return settings, rates

    def _new_updates(self) -> list[Update]:
        devices: dict[torch.device, list[tuple[torch.Tensor, int, State]]] = {}
        for i, group in enumerate(self.param_groups):
            for parameter in group["params"]:
                if "exp_avg" in (state := self.state[parameter]):  # else a class derived from this one updates it
                    devices.setdefault(parameter.device, []).append((parameter, i, state))
        made: list[Update] = []
        for device, found in devices.items():
            parameters, groups, states = map(list, zip(*found, strict=True))
            if self.offload:
                slabs = [self._slabs[parameter] for parameter in parameters]
                made.append(StreamedUpdate(parameters, groups, states, slabs, device, self.folder is not None))
            else:
                made.append(Update(parameters, groups, states, device))
        return made

    # -- a step in parts -------------------------------------------------------------------------------------------

    @torch.no_grad()
    def prepare(self) -> None:
        """Before a capture of `begin`, and before each replay: what has changed on the host goes to the device."""
        self._prepare()
        for update in self._updates:
            update.settle()

    def _prepare(self) -> None:
        settings, _ = self._settings()
        for update in self._updates:
            update.prepare(settings, [p.requires_grad for p in update.parameters])

    @torch.no_grad()
    def begin(self, factor: torch.Tensor | None = None) -> None:
        """Begin a step whose gradients come one after the other. All parameters that require one count as updated."""
        self._prepare()
        _, rates = self._settings()
        self._early = set()
        for update in self._updates:
            update.count(rates, _on(update, factor))

    @contextmanager
    def record(self) -> Iterator[None]:
        """Around a capture of `begin` and `update` with a backward, which makes gradients of its own. Call
        `prepare` before.

        Raises:
            ValueError: the optimizer's state is on disk."""
        if self.folder is not None:
            raise ValueError("what reads the optimizer's state from files cannot be captured in a CUDA graph")
        for update in self._updates:
            update.record()
        try:
            yield
        finally:
            for update in self._updates:
                update.note_recorded()

    def replayed(self, parameters: Iterable[torch.Tensor]) -> None:
        """A captured `begin` was replayed, with an `update` of each of these parameters."""
        self._early = set(parameters)
        for update in self._updates:
            update.replayed()

    def join(self) -> None:
        """The current stream goes on after all updates. At the end of a capture, inside."""
        for update in self._updates:
            update.join()

    @torch.no_grad()
    def update(
        self,
        parameters: Iterable[torch.Tensor],
        factor: torch.Tensor | None = None,
        squares: torch.Tensor | None = None,
    ) -> list[Any]:
        """Update parameters whose gradient is there: each once between `begin` and `finish`.

        Args:
            squares: float32 scalar on the parameters' device, to which the squares of what this rank holds of the
                gradients, times `factor`, are added. It is right when the update is done.

        Returns:
            Events until which these parameters and their gradients are in use, on streams of the optimizer's; none
            where the current stream does it all.
        """
        wanted = set(parameters)
        assert not wanted & self._early, "a parameter is updated twice in a step"
        self._early |= wanted
        done: list[Any] = []
        for update in self._updates:
            numbers = [i for i, parameter in enumerate(update.parameters) if parameter in wanted]
            if numbers:
                update.apply(numbers, Use(_on(update, factor), squares=squares))
                if update.done is not None:
                    done.append(update.done)
        return done

    @torch.no_grad()
    def finish(self, factor: torch.Tensor | None = None) -> None:
        """End such a step. `factor`: as in `begin`."""
        self.join()
        for update in self._updates:
            late = [i for i, p in enumerate(update.parameters) if p.requires_grad and p not in self._early]
            update.uncount(late, _on(update, factor))

    # -- its state -------------------------------------------------------------------------------------------------

    def describe(self) -> tuple[dict[str, Any], list[str]]:
        bf16 = any(p.dtype == torch.bfloat16 for group in self.param_groups for p in group["params"])
        moments = self.moment_dtype
        lossy = [f"the optimizer's moments are kept in {moments}"] if moments != "float32" else []
        state = "device" if not self.offload else "host" if self.folder is None else "disk"
        return {"name": self.name, "masters": bf16, "moments": moments, "state": state}, lossy

    def synchronize(self) -> None:
        """Wait until the state in host memory is that of the last step."""
        for update in self._updates:
            if isinstance(update, StreamedUpdate):
                update.synchronize()

    @property
    def disk_bytes(self) -> tuple[int, int]:
        """What was read from files so far, and what was written."""
        found = [update.staging for update in self._updates if isinstance(update, StreamedUpdate) and update.staging]
        return sum(staging.bytes_read for staging in found), sum(staging.bytes_written for staging in found)

    @property
    def streamed_bytes(self) -> tuple[int, int]:
        """What has come from host memory so far, and what has gone there."""
        found = [update for update in self._updates if isinstance(update, StreamedUpdate)]
        return sum(update.bytes_in for update in found), sum(update.bytes_out for update in found)

    def __getstate__(self) -> dict[str, Any]:
        if self.offload:
            raise TypeError("an optimizer's offloaded state cannot be copied: load state_dict() into another one")
        # `step` is there if a scheduler counts the steps of this one.
        return {name: value for name, value in vars(self).items() if name != "step"} | {"_updates": []}

    def state_dict(self) -> dict[str, Any]:
        """As of PyTorch's optimizers: its own memory."""
        self.synchronize()
        return super().state_dict()

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Copy a state into the memory of this one. That of `torch.optim.AdamW` will do: masters are then the weights;
        so will moments of other dtypes, which are converted.

        Raises:
            ValueError: other groups, other shapes, or 16 low bits for a parameter that has none.
        """
        self.synchronize()
        theirs = state_dict["param_groups"]
        if [len(group["params"]) for group in theirs] != [len(group["params"]) for group in self.param_groups]:
            raise ValueError("the state is of an optimizer with other groups of parameters")
        for group, other in zip(self.param_groups, theirs, strict=True):
            for name in other.keys() - {"params", "param_names"}:  # also what schedulers have added
                if isinstance(group.get(name), torch.Tensor):  # a captured graph reads this memory
                    group[name].copy_(torch.as_tensor(other[name]))
                else:
                    group[name] = other[name]
            for parameter, key in zip(group["params"], other["params"], strict=True):
                self._copy_state(parameter, state_dict["state"].get(key, {}))

    def _copy_state(self, parameter: torch.Tensor, theirs: dict[str, Any]) -> None:
        _copy_state(self.state[parameter], theirs, parameter)


def _copy_state(ours: State, theirs: dict[str, Any], parameter: torch.Tensor) -> None:
    shape = tuple(parameter.shape)
    known = {"step", *_SIGNED, "low_bits", *(f"{name}_scale" for name in _SIGNED)}
    if more := sorted(theirs.keys() - known) + (["low_bits"] if theirs.keys() - ours.keys() == {"low_bits"} else []):
        raise ValueError(
            f"a state has {', '.join(more)} of a {parameter.dtype} parameter of shape {shape}: not AdamW's"
        )
    ours["step"].copy_(torch.as_tensor(theirs.get("step", 0.0)))
    if "low_bits" in ours:
        copy(ours["low_bits"], theirs.get("low_bits"), shape)
    for name, signed in _SIGNED.items():
        value, scale = theirs.get(name), theirs.get(f"{name}_scale")
        if ours[name].dtype == torch.uint8 and (value is None or scale is None):
            values = torch.zeros(local(ours[name]).shape) if value is None else local(value)
            codes, made = quantise(values.to(ours[name].device), signed)
            local(ours[name]).copy_(codes)
            local(ours[f"{name}_scale"]).copy_(made)
        elif ours[name].dtype != torch.uint8 and scale is not None:
            assert value is not None
            local(ours[name]).copy_(dequantise(local(value), local(scale), signed))
        else:
            copy(ours[name], value, shape)
            if scale is not None:
                copy(ours[f"{name}_scale"], scale, shape)


def copy(target: torch.Tensor, value: torch.Tensor | None, shape: tuple[int, ...]) -> None:
    """Copy what a rank holds of a state; None: it is zero."""
    if value is None:
        local(target).zero_()
    elif local(value).shape != local(target).shape:
        raise ValueError(f"a state of shape {tuple(value.shape)} does not fit a parameter of shape {shape}")
    else:
        local(target).copy_(local(value))


def _on(update: Update, factor: torch.Tensor | None) -> torch.Tensor | None:
    return factor if factor is None else factor.to(update.device, torch.float32)


def placed(value: torch.Tensor, name: str, parameter: torch.Tensor) -> torch.Tensor:
    """This rank's part of a state, sharded as the parameter is. It may be in other memory than the parameter."""
    if not isinstance(parameter, DTensor):
        return value
    shape = torch.Size(scale_shape(parameter.shape)) if name.endswith("_scale") else parameter.shape
    strides = torch.empty(shape, device="meta").stride()
    spec = DTensorSpec(parameter.device_mesh, parameter.placements, tensor_meta=TensorMeta(shape, strides, value.dtype))
    return DTensor(value, spec, requires_grad=False)


def _last_dim_shards(parameter: torch.Tensor) -> int:
    """In how many pieces the last dimension is divided among ranks."""
    shards = 1
    if isinstance(parameter, DTensor):
        for size, placement in zip(parameter.device_mesh.shape, parameter.placements, strict=True):
            if getattr(placement, "dim", None) == parameter.dim() - 1:
                shards *= size
    return shards
