"""What an optimizer says of itself, so that nobody else knows any by name.

`training.optimizer` names a class of the registry `carpool.optim.OPTIMIZERS`. Whoever depends on the optimizer asks
this class: the trainer how gradients are clipped, the memory estimate and the planner what it keeps and moves, the
configuration which settings it takes, checkpoints what is zero at the start. So a new optimizer is one file:

    @carpool.optim.register
    class Momentum(OptimizerBase, torch.optim.Optimizer):
        name = "momentum"
        options = {"beta": float}                       # of training.optimizer_options

        def __init__(self, params, lr, beta=0.9):
            super().__init__(params, {"lr": lr, "beta": beta, "weight_decay": 0.0})

        @classmethod
        def state_bytes(cls, dtype, moments):
            return {"momentum": 4}                      # a tensor in float32 for each parameter

        def step(self): ...                             # PyTorch's contract: update what has a gradient

Parameters are DTensors where they are sharded. An update that looks at one element at a time works on the local part.
One that needs whole matrices says `updates_shards = False`, or gathers them in its `step`, as Muon does; `groups` is
told which parameters are matrices.

This module does not import PyTorch when it runs, because the planner and the configuration ask these classes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any, ClassVar, Literal

if TYPE_CHECKING:
    import torch
    from torch.optim import Optimizer as _Optimizer
else:
    _Optimizer = object

STORED: Mapping[str, int] = {"float32": 4, "bfloat16": 2, "float16": 2}  # bytes of a parameter
NEWTON_SCHULZ_STEPS = 5
AVERAGE_BYTES = 4  # of each element of an average of weights (`carpool.optim.ema`)


@dataclass(frozen=True, kw_only=True)
class OptimizerSettings:
    """What the configuration says of an optimizer: the settings of [training] by their meaning.

    Attributes:
        learning_rate: the peak.
        betas, epsilon: of Adam and its kin.
        moments: how moments are kept, one of the class's `moments`.
        place: where its state is, one of the class's `places`.
        folder: of the files of its state, if it is on disk.
        options: training.optimizer_options.
    """

    learning_rate: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    epsilon: float = 1e-8
    moments: str = "float32"
    place: str = "none"
    folder: Path | None = None
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Matrices:
    """Of which matrices a parameter consists.

    Attributes:
        stacked: it has three dimensions, of which the first counts experts.
        halves: the dimension of an expert's (1 or 2) along which gate and up, two matrices, are beside each other; 0:
            it is one matrix.
        interleaved: rows or columns of gate and up alternate.
        cut: the dimension of which slices of an expert (expert tensor parallelism) have a part each; 0: there are none.
        slices: of each expert.
        order: of each row of a parameter with slices: expert * slices + slice.
    """

    stacked: bool = False
    halves: int = 0
    interleaved: bool = False
    cut: int = 0
    slices: int = 1
    order: tuple[int, ...] = ()


class OptimizerBase(_Optimizer):
    """The facts of an optimizer, and how it is made. Its instances are PyTorch optimizers.

    Attributes:
        name: of `training.optimizer`.
        implementation: "module:Class" of what is made, a class derived from this one; "": this class itself. So that
            facts can be asked without PyTorch.
        options: names and types of what `training.optimizer_options` may give it.
        moments: values of `training.optimizer_state_dtype` that it has.
        places: values of `training.optimizer_offload` that it has.
        clips_in_step: `step` takes a `factor` for the gradients, so that clipping needs no pass of its own.
        in_backward: it has what `carpool.optim.in_backward` calls (`begin`, `update`, `finish`, ...), as `AdamW` has.
        captured_places: of `places`, those with which an update in the backward can be in a CUDA graph.
        starts_at_zero: its state is zeros before the first gradient.
        updates_shards: it updates a shard of a parameter without the others.
        whole_matrices: ranks put their shards of a matrix together for its update.
        zero_if_absent: state that is zero where a checkpoint of another optimizer lacks it.
        refusals: why it does not have a setting, half a sentence by "section.key".
    """

    name: ClassVar[str]
    implementation: ClassVar[str] = ""
    options: ClassVar[Mapping[str, Any]] = {}
    moments: ClassVar[tuple[str, ...]] = ("float32",)
    places: ClassVar[tuple[str, ...]] = ("none",)
    clips_in_step: ClassVar[bool] = False
    in_backward: ClassVar[bool] = False
    captured_places: ClassVar[tuple[str, ...]] = ()
    starts_at_zero: ClassVar[bool] = True
    updates_shards: ClassVar[bool] = True
    whole_matrices: ClassVar[bool] = False
    zero_if_absent: ClassVar[frozenset[str]] = frozenset()
    refusals: ClassVar[Mapping[str, str]] = {}

    # -- before there is a model ------------------------------------------------------------------------------------

    @classmethod
    def state_bytes(cls, dtype: str, moments: str) -> Mapping[str, float]:
        """Bytes of each state of a parameter, for each of its elements, by the name that it has in checkpoints.

        Args:
            dtype: of the parameter.
            moments: one of the class's.
        """
        raise NotImplementedError

    @classmethod
    def matrix_state_bytes(cls, dtype: str, moments: str) -> Mapping[str, float]:
        """The same of a matrix, which is any in a layer: no embedding, no output layer."""
        return cls.state_bytes(dtype, moments)

    @classmethod
    def update_flops(cls, rows: int, columns: int) -> float:
        """Floating-point operations of the update of a matrix, beyond a few for each element."""
        return 0.0

    @classmethod
    def check_options(cls, options: Mapping[str, Any]) -> None:
        """Raise ValueError for values of `training.optimizer_options` that it cannot have. Types are checked."""

    @classmethod
    def update_bytes(cls, dtype: str, moments: str) -> float:
        """Bytes of device memory that norm, clipping and update read and write for each element: parameter and state
        both ways, the gradient for the update, for the norm, and, unless `clips_in_step`, both ways for clipping."""
        gradients = 2 if cls.clips_in_step else 4
        return (2 + gradients) * STORED[dtype] + 2 * sum(cls.matrix_state_bytes(dtype, moments).values())

    # -- making one -------------------------------------------------------------------------------------------------

    @classmethod
    def groups(
        cls,
        named_parameters: Iterable[tuple[str, torch.Tensor]],
        weight_decay: float,
        matrices: Mapping[str, Matrices] | None = None,
    ) -> list[dict[str, Any]]:
        """Parameter groups: weight decay on matrices only, not on norms, biases and other vectors.

        Args:
            matrices: by name, the parameters that are matrices of layers: not embeddings, output layers, routers,
                norms, biases and adapters.

        Parameters on different meshes (experts on efsdp x ep, others on fsdp) go into different groups, because a fused
        update of PyTorch's over DTensors of two meshes is refused."""
        found: dict[tuple[bool, Any], list[torch.Tensor]] = {}
        for name, parameter in named_parameters:
            # The shared bias of all experts has two dimensions but is still a bias.
            decays = parameter.dim() >= 2 and not name.endswith("bias")
            found.setdefault((decays, getattr(parameter, "device_mesh", None)), []).append(parameter)
        return [
            {"params": some, "weight_decay": weight_decay if decays else 0.0} for (decays, _), some in found.items()
        ]

    @classmethod
    def arguments(cls, settings: OptimizerSettings) -> dict[str, Any]:
        """What it is constructed with, beside the groups."""
        return {"lr": settings.learning_rate, **settings.options}

    @classmethod
    def make(cls, groups: list[dict[str, Any]], settings: OptimizerSettings) -> OptimizerBase:
        """An optimizer of these groups."""
        implementation: Any = resolve_name(cls.implementation) if cls.implementation else cls
        made: OptimizerBase = implementation(groups, **cls.arguments(settings))
        return made

    # -- in a run ---------------------------------------------------------------------------------------------------

    def gradient_norm(
        self, parameters: Iterable[torch.Tensor], max_norm: float, ranks: int | None = None
    ) -> torch.Tensor:
        """The norm of the gradient over all ranks (`carpool.optim.clip`). Gradients are clipped here, unless the step
        does that."""
        from carpool.optim.clip import clip_grad_norm, grad_norm

        return grad_norm(parameters, ranks) if self.clips_in_step else clip_grad_norm(parameters, max_norm, ranks)

    def clipped_step(self, norm: torch.Tensor, max_norm: float) -> None:
        """Update with gradients clipped to `max_norm`. `norm`: what `gradient_norm` returned for them."""
        from carpool.optim.clip import clip_factor

        if self.clips_in_step:
            self.step(factor=clip_factor(norm, max_norm))  # type: ignore[call-overload]
        else:
            self.step()

    def describe(self) -> tuple[dict[str, Any], list[str]]:
        """What run.json says of it, and how it is lossy."""
        dtypes = {str(p.dtype).removeprefix("torch.") for group in self.param_groups for p in group["params"]}
        bf16 = "bfloat16" in dtypes
        lossy = ["bfloat16 parameters and their moments are updated in bfloat16, without masters"] if bf16 else []
        moments = "bfloat16" if bf16 else "float32"
        return {"name": self.name, "masters": False, "moments": moments, "state": "device"}, lossy


class TorchFacts(OptimizerBase):
    """`torch.optim.AdamW`, fused: moments in the dtype of the parameter, no masters of those in bfloat16."""

    name = "torch"
    implementation = "carpool.optim.adamw:TorchAdamW"

    @classmethod
    def state_bytes(cls, dtype: str, moments: str) -> Mapping[str, float]:
        return {"exp_avg": STORED[dtype], "exp_avg_sq": STORED[dtype]}

    @classmethod
    def arguments(cls, settings: OptimizerSettings) -> dict[str, Any]:
        return {"lr": settings.learning_rate, "betas": settings.betas, "eps": settings.epsilon, "fused": True}


class AdamWFacts(OptimizerBase):
    """AdamW in one pass (`carpool.optim.adamw`): float32 masters of bfloat16 parameters, moments in fewer bits, state
    in host memory or on disk, updates in the backward."""

    name = "one-pass"
    implementation = "carpool.optim.adamw:AdamW"
    moments: ClassVar[tuple[str, ...]] = ("float32", "bfloat16", "int8")
    places: ClassVar[tuple[str, ...]] = ("none", "host", "disk")
    clips_in_step = True
    in_backward = True
    captured_places: ClassVar[tuple[str, ...]] = ("none", "host")
    # Where a checkpoint has no low bits, the masters are the weights.
    zero_if_absent = frozenset({"low_bits"})

    @classmethod
    def state_bytes(cls, dtype: str, moments: str) -> Mapping[str, float]:
        size = {"float32": 4, "bfloat16": 2, "int8": 1}[moments]
        found: dict[str, float] = {"exp_avg": size, "exp_avg_sq": size}
        if dtype == "bfloat16":
            found["low_bits"] = 2
        if moments == "int8":  # a float32 scale for each block of 256
            found |= {"exp_avg_scale": 4 / 256, "exp_avg_sq_scale": 4 / 256}
        return found

    @classmethod
    def update_bytes(cls, dtype: str, moments: str) -> float:
        # Low bits count three times, which fits the measured updates but those of 8-bit moments.
        again = 0 if moments == "int8" else cls.state_bytes(dtype, moments).get("low_bits", 0)
        return super().update_bytes(dtype, moments) + again

    @classmethod
    def arguments(cls, settings: OptimizerSettings) -> dict[str, Any]:
        adam = {"lr": settings.learning_rate, "betas": settings.betas, "eps": settings.epsilon}
        offload = settings.place != "none"
        return adam | {"moments": settings.moments, "offload": offload, "folder": settings.folder}


class MuonFacts(AdamWFacts):
    """Muon (`carpool.optim.muon`) for the matrices of layers, and the one-pass AdamW for all else."""

    name = "muon"
    implementation = "carpool.optim.muon:Muon"
    options: ClassVar[Mapping[str, Any]] = {
        "momentum": float, "nesterov": bool, "ns_steps": int, "ns_dtype": Literal["bfloat16", "float32"],
    }  # fmt: skip
    moments = ("float32", "bfloat16")
    places = ("none",)
    whole_matrices = True
    in_backward = False
    captured_places = ()
    refusals: ClassVar[Mapping[str, str]] = {
        "training.optimizer_offload": "Muon multiplies whole matrices with themselves, and its momentum is read at once"
        " for all of them, not tile by tile from elsewhere",
        "training.optimizer_in_backward": "Muon orthogonalises matrices whose shards ranks send each other, many at a "
        "time and all ranks in one order, after the backward",
        "adapter.kind": "Muon orthogonalises the update of a matrix, and adapters train factors of one",
    }

    @classmethod
    def matrix_state_bytes(cls, dtype: str, moments: str) -> Mapping[str, float]:
        found: dict[str, float] = {"momentum_buffer": STORED[moments]}
        return found | ({"low_bits": 2} if dtype == "bfloat16" else {})

    @classmethod
    def update_flops(cls, rows: int, columns: int) -> float:
        n, m = sorted((rows, columns))
        return NEWTON_SCHULZ_STEPS * (4 * n * n * m + 2 * n**3)

    @classmethod
    def update_bytes(cls, dtype: str, moments: str) -> float:
        # The update itself is written, orthogonalised and read, in bfloat16.
        return super().update_bytes(dtype, moments) + 2 * STORED["bfloat16"]

    @classmethod
    def check_options(cls, options: Mapping[str, Any]) -> None:
        if not 0 <= options.get("momentum", 0.95) < 1:
            raise ValueError(f"optimizer_options.momentum = {options['momentum']}: it is from 0 to below 1")
        if options.get("ns_steps", NEWTON_SCHULZ_STEPS) < 1:
            raise ValueError(f"optimizer_options.ns_steps = {options['ns_steps']}: there is at least one")

    @classmethod
    def groups(
        cls,
        named_parameters: Iterable[tuple[str, torch.Tensor]],
        weight_decay: float,
        matrices: Mapping[str, Matrices] | None = None,
    ) -> list[dict[str, Any]]:
        """A group of all matrices, if there are any, and AdamW's groups of all else."""
        known, named = matrices or {}, list(named_parameters)
        own = [(name, parameter) for name, parameter in named if name in known]
        others = [(name, parameter) for name, parameter in named if name not in known]
        if not own:
            return super().groups(others, weight_decay)
        group = {
            "params": [parameter for _, parameter in own],
            "names": [name for name, _ in own],
            "matrices": [known[name] for name, _ in own],
            "weight_decay": weight_decay,
        }
        return [group, *super().groups(others, weight_decay)]

    @classmethod
    def arguments(cls, settings: OptimizerSettings) -> dict[str, Any]:
        adam = {"lr": settings.learning_rate, "betas": settings.betas, "eps": settings.epsilon}
        return adam | {"moments": settings.moments, **settings.options}
