"""The adapter of a run: written as peft does, beside the checkpoints, and merged with its model, a folder as that of
the model.

peft merges: each weight becomes weight + scaling * b a, in the weight's dtype. So the merged model's outputs are those
of the two together up to that rounding. The weight is the one that was trained beside (`trained_base`), dequantised
where the run's was quantised, unless the files' own is wanted. peft's own modules merge, beside a model without values:
each has its weight and its adapter while it works, so memory is needed for one layer's experts, however large the model
is. A layer that lies in several files is merged once for each.

What was written is read back before the folder has its name. With peft's modules it is compared with base plus adapter
in three ways, none through the code that merged:

- Each value of an adapted tensor with w + scaling b a, in float32, from the files of the base and of the adapter. A
  tensor without an adapter is the base's, and one that was trained itself (modules_to_save) the adapter's.
- Each product of random tokens with an adapted tensor: x w' with the merged one beside x w + scaling (x a) b, which is
  peft's own forward for linear layers. An expert's gate and up are two products.
- Logits, if the model fits in host memory: Transformers loads what was written, and peft the base and the adapter.
  No formula says how much rounding moves logits, but peft's merge in float32 can be rounded, too: what was written may
  not be much farther away. The median token is compared, since rounding makes some choose another expert.
"""

from __future__ import annotations

import math
import shutil
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from safetensors import safe_open
from torch import nn
from transformers import AutoModelForCausalLM

from carpool.activations.host_memory import SHARE, free_host_memory
from carpool.families import family_of
from carpool.hf.adapters import adapter_tensors, patterns_of_parameters
from carpool.hf.seam.experts_module import expert_function, weight_names
from carpool.hf.seam.find_modules import experts_modules
from carpool.hf.weights import mxfp4_files
from carpool.hf.weights.model_config import read_config
from carpool.hf.weights.original_layout import OriginalLayout, OriginalWeights
from carpool.hf.weights.weight_files import check_whole, stored_weights
from carpool.parallel.ranks import gather, rank, together
from carpool.train.blueprint import meta_model
from carpool.train.checkpoints.checkpoint_files import (
    CheckpointWriteError,
    flush_file,
    flush_folder,
    put_in_place,
    remove_left,
)
from carpool.train.checkpoints.export import Exported, ReadBack, check_target, check_values, unit_roundoff, write_model
from carpool.train.checkpoints.run_source import read_source
from carpool.train.checkpoints.trained_base import Base, load_trained, recorded_base, trained_base
from carpool.train.config.fine_tuning import has_trained_weights
from carpool.train.records.run_folder import ADAPTER

NAME = "default"
# Of products and logits in float32: sums in another order.
_SUMS = 1e-4


class AdapterModules:
    """The modules of an adapter, by the names of the model's tensors that they change.

    Attributes:
        layers: modules of peft that add something to a tensor, and its name there.
        replaced: keys, in the adapter's file, of what stands in for a tensor (modules_to_save) or some of its rows.
        rows: which rows (trainable_token_indices); of other tensors it is all of them.

    Raises:
        ValueError: the folder `adapter` holds none of the model in the folder `base`, or one of a tied tensor."""

    def __init__(self, base: Path, adapter: Path) -> None:
        from peft import PeftConfig
        from peft.tuners.lora import LoraLayer
        from peft.utils import ModulesToSaveWrapper
        from peft.utils.other import TrainableTokensWrapper

        self.base, self.folder, path = base, adapter, adapter / "adapter_model.safetensors"
        check_whole(path)
        self.file: Any = safe_open(path, framework="pt")
        names, adapted, self._keys = adapted_model(base, PeftConfig.from_pretrained(str(adapter)))
        shapes = {id(parameter): tuple(parameter.shape) for parameter in adapted.parameters()}
        ours = {key: shapes[number] for number, key in self._keys.items()}
        theirs = {key: tuple(self.file.get_slice(key).get_shape()) for key in self.file.keys()}  # noqa: SIM118
        if differ := sorted(key for key in ours | theirs if ours.get(key) != theirs.get(key)):
            raise ValueError(
                f"{path} is not an adapter of this model: {differ[0]} is {theirs.get(differ[0], 'not')} there, and "
                f"beside {base} it would be {ours.get(differ[0], 'not')}; say which model it is of (--base)"
            )
        self.layers: dict[str, tuple[Any, str]] = {}
        self.replaced: dict[str, str] = {}
        self.rows: dict[str, list[int]] = {}
        for module in adapted.modules():
            if isinstance(module, LoraLayer):
                own = getattr(module, "parameter_name", "weight")
                self.layers[names[id(module.get_base_layer()._parameters[own])]] = module, own
            elif isinstance(module, ModulesToSaveWrapper):
                trained = dict(module.modules_to_save[NAME].named_parameters())
                for name, parameter in module.original_module.named_parameters():
                    self.replaced[names[id(parameter)]] = self._keys[id(trained[name])]
            elif isinstance(module, TrainableTokensWrapper):
                name, rows = names[id(module.original_module.weight)], module.token_adapter
                self.replaced[name] = self._keys[id(rows.trainable_tokens_delta[NAME])]
                self.rows[name] = rows.token_indices[NAME]
        for pair in (adapted.get_base_model().all_tied_weights_keys or {}).items():
            if {*pair} & (self.layers.keys() | self.replaced.keys()):
                raise ValueError(
                    f"{path} changes one of {' and '.join(pair)}, which are one tensor of {base}: a merged model would "
                    "change both; use base and adapter with peft, unmerged"
                )

    def read(self, name: str, base: Callable[[str], torch.Tensor]) -> torch.Tensor:
        """A tensor that the adapter replaces, or some of whose rows it does; `base` reads the model's."""
        value: torch.Tensor = self.file.get_tensor(self.replaced[name])
        if name not in self.rows:
            return value
        whole = base(name)
        return whole.index_copy(0, torch.tensor(self.rows[name]), value.to(whole.dtype))

    @contextmanager
    def filled(self, name: str, weight: nn.Parameter) -> Iterator[Any]:
        """Inside, the module that changes the tensor of that name has its adapter, in float32, and this weight, which
        it may change, and no bias."""
        module, own = self.layers[name]
        layer = module.get_base_layer()
        inner = [one for path, one in module.named_modules() if not f"{path}.".startswith("base_layer.")]
        before = [(one._parameters, dict(one._parameters)) for one in [*inner, layer]]
        for one in inner:
            for key, parameter in one._parameters.items():
                if parameter is not None:
                    # As peft loads them; in 16 bits it would round what it adds once more.
                    value = self.file.get_tensor(self._keys[id(parameter)]).float()
                    one._parameters[key] = nn.Parameter(value, requires_grad=False)
        layer._parameters[own] = weight
        if isinstance(layer, nn.Linear):
            layer._parameters["bias"] = None
        try:
            yield module
        finally:
            for parameters, empty in before:
                parameters.update(empty)
            module.merged_adapters.clear()
            module._caches.clear()


def adapted_model(base: Path, config: Any) -> tuple[dict[int, str], Any, dict[int, str]]:
    """A model with an adapter of peft's configuration, both without values; names of the model's parameters, and keys
    of the adapter's in peft's file, by their ids."""
    from peft import get_peft_model, get_peft_model_state_dict

    model: Any = meta_model(base)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    with torch.device("meta"), patterns_of_parameters(), warnings.catch_warnings():
        # peft reads an attribute that Transformers calls deprecated.
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing`", FutureWarning)
        adapted = get_peft_model(model, config, NAME, low_cpu_mem_usage=True)
    parameters: dict[str, Any] = dict(adapted.eval().named_parameters())
    kept = get_peft_model_state_dict(adapted, state_dict=parameters, adapter_name=NAME, save_embedding_layers=False)
    return names, adapted, {id(parameter): key for key, parameter in kept.items()}


class MergeCheck(ReadBack):
    """Compares a merged model with its base and the adapter.

    Args:
        base, trained: what the adapter was merged into, and what it was trained beside.
        logits: compare logits, if the model fits in host memory.
        folder, layout: of the merged model."""

    def __init__(
        self,
        modules: AdapterModules,
        base: Base,
        trained: Base,
        logits: bool,
        folder: Path,
        layout: OriginalLayout,
        _: Any,
    ) -> None:
        super().__init__(folder, layout, base.read)
        self._modules, self._base, self._trained = modules, base, trained
        self._logits, self._folder, self._layout = logits, folder, layout
        self._dtypes: dict[str, torch.dtype] = {}
        self._changed = modules.layers.keys() | modules.replaced.keys() | base.quantised | layout.packed

    @torch.no_grad()
    def _compare(self, name: str, written: torch.Tensor, read: torch.Tensor, dtype: torch.dtype) -> tuple[float, str]:
        layers, replaced, packed = self._modules.layers, self._modules.replaced, name in self._layout.packed
        if name in self._changed:
            self._dtypes[name] = dtype
        if name not in layers and packed:
            return mxfp4_files.check_blocks(name, written.transpose(1, 2), read.transpose(1, 2)), name
        if name not in layers:
            read = self._modules.read(name, lambda _: read) if name in replaced else read
            return super()._compare(name, written, read, dtype)
        # Stacked experts become float32 one by one.
        weight, largest = nn.Parameter(read.float() if read.ndim == 2 else read, requires_grad=False), (0.0, "")
        with self._modules.filled(name, weight) as module:
            for part, matrices, linear in _products(name, module, weight, written):
                largest = max(
                    largest, (_compare_product(part, matrices, linear, None if packed else unit_roundoff(dtype)), part)
                )
        return largest

    def finish(self, largest: float, name: str) -> str:
        had, has = (mxfp4_files.unpacked_names(weights.stored) for weights in (self._base, self._written))
        if lost := sorted(had - has - set(self._layout.left_out)):
            raise ValueError(f"it lacks {lost[0]}, which the base has")
        changed = self._changed
        if not changed or changed != self._dtypes.keys():
            raise ValueError(f"of {len(changed)} tensors that the adapter changes it has {len(self._dtypes)}")
        if self._layout.packed:
            mxfp4_files.mark(self._folder)
        how = f" in {self._base.kind}" if self._base.kind else ""
        text = f"read back: {len(changed)} tensors differ from base{how} plus adapter by at most {largest:.1e} ({name})"
        return f"{text}; logits {self._compare_logits()}" if self._logits else text

    @torch.no_grad()
    def _compare_logits(self) -> str:
        needed = 5 * sum(math.prod(stored.shape) for stored in self._written.stored.values())
        if (free := free_host_memory()) is None or needed > SHARE * free:
            return "were not compared: the model in float32 does not fit in host memory"
        from peft import PeftModel

        auto: Any = AutoModelForCausalLM
        options = {"dtype": torch.float32, "local_files_only": True, "trust_remote_code": False}
        vocabulary = read_config(self._modules.base).get_text_config().vocab_size
        ids = torch.randint(vocabulary, (4, 16), generator=torch.Generator().manual_seed(0))
        trained, kind = None, self._trained.kind
        cannot = "were not compared, because this machine cannot compute the base's: "
        if kind is not None:
            model: Any = load_trained(self._modules.base, self._modules.folder, self._trained)
            try:
                trained = model(input_ids=ids, use_cache=False).logits
            except Exception as error:  # whatever a model says that computes on GPUs alone
                return f"{cannot}{error}"
            del model
        model = auto.from_pretrained(self._modules.base, **options)
        for name in self._base.quantised:
            model.get_parameter(name).copy_(self._base.read(name))
        adapted = PeftModel.from_pretrained(model, str(self._modules.folder)).eval()
        try:
            expected = adapted(input_ids=ids, use_cache=False).logits
        except Exception as error:
            return f"{cannot}{error}"
        if trained is not None and self._base.kind is not None:
            # Weights that the run rounded to its dtype are the files' here.
            files = {stored.dtype for stored in self._base.stored.values()}
            rounds = any(torch.promote_types(one, self._trained.dtype) != self._trained.dtype for one in files)
            if not (jump := _distances(expected, trained).median()) <= (2**-5 if rounds else _SUMS):
                raise ValueError(
                    f"the base in {kind} plus the adapter is not what was trained: logits differ by {jump:.1%}"
                )
        model = adapted.merge_and_unload()
        for name, dtype in self._dtypes.items():
            tensor = model.get_parameter_or_buffer(name)
            packed = name in self._layout.packed
            tensor.copy_(mxfp4_files.unpack(*mxfp4_files.pack(tensor)) if packed else tensor.to(dtype))
        by_rounding = _distances(model(input_ids=ids, use_cache=False).logits, expected).median()
        del model, adapted
        model, info = auto.from_pretrained(self._folder, output_loading_info=True, **options)
        if wrong := sorted(str(key) for keys in info.values() for key in keys):
            raise ValueError(f"Transformers does not load it: {wrong[0]}")
        found = model.eval()(input_ids=ids, use_cache=False).logits
        merged = _distances(found, expected).median()
        if not merged <= 4 * by_rounding + _SUMS:
            raise ValueError(
                f"logits of the median random token differ by {merged:.1%}, by rounding only {by_rounding:.1%}"
            )
        text = f"of {ids.numel()} random tokens by {merged:.1e} (median; by rounding alone {by_rounding:.1e})"
        if self._layout.packed or self._base.kind != kind:
            text += f"\nLOSSY: {_jump(found, expected if trained is None else trained)}"
        return text


def _distances(found: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """Of each token's logits, relative to their size."""
    return (found - expected).norm(dim=-1) / expected.norm(dim=-1)


def _jump(merged: torch.Tensor, trained: torch.Tensor) -> str:
    far, (p, q) = _distances(merged, trained), (one.log_softmax(-1) for one in (trained, merged))
    divergence = (p.exp() * (p - q)).sum(-1).mean()
    return (
        f"from what was trained, logits differ by {far.median():.1%} (median token; {far.max():.1%} at most), KL "
        f"{divergence:.2e} nats a token"
    )


class Factors(NamedTuple):
    """What is added to a matrix (O, I), or to one of an expert: b times a. `rows`: which rows of the expert's weight
    (O', I) the matrix has; None: of a layer that has no experts."""

    a_QI: torch.Tensor
    b_OQ: torch.Tensor
    expert: int | None = None
    rows: slice = slice(None)
    kind: str = ""


def factors(name: str, module: Any) -> Iterator[Factors]:
    """What an adapter adds to the tensor of that name in the model, as peft reads its file, scaled: to each expert's
    gate, up and down. `module`: peft's, with values."""
    a, b = module.lora_A[NAME].weight.float(), module.lora_B[NAME].weight.float() * module.scaling[NAME]
    weight = module.get_base_layer()._parameters[getattr(module, "parameter_name", "weight")]
    if weight.ndim == 2:
        yield Factors(a, b)
        return
    experts = module.get_base_layer()
    kinds, half, function = {"": slice(None)}, len(b) // 2, expert_function(experts)
    if name.endswith("gate_up_proj"):
        kinds = {"gate": slice(half), "up": slice(half, None)}
        if function is not None and getattr(function.activation, "interleaved", False):
            kinds = {"gate": slice(0, None, 2), "up": slice(1, None, 2)}
    a_EQI, b_EOQ = a.unflatten(0, (len(weight), -1)), b.unflatten(1, (-1, len(weight))).permute(2, 0, 1)
    for e in range(len(weight)):
        for kind, rows in kinds.items():
            yield Factors(a_EQI[e], b_EOQ[e, rows], e, rows, kind)


def _products(name: str, module: Any, w: torch.Tensor, written: torch.Tensor) -> Iterator[tuple[Any, ...]]:
    """The products with an adapted tensor, as `_compare_product` takes them. `module`: peft's, with values."""
    if w.ndim == 3 and getattr(module.get_base_layer(), "is_transposed", False):
        w, written = w.transpose(1, 2), written.transpose(1, 2)
    for one in factors(name, module):
        if one.expert is None:
            linear = None if hasattr(module, "parameter_name") else module
            yield name, (w, one.a_QI, one.b_OQ, written.float()), linear
            return
        place = one.expert, one.rows
        part = f"{name}, expert {one.expert}{one.kind and f', {one.kind}'}"
        yield part, (w[place].float(), one.a_QI, one.b_OQ, written[place].float()), None


def _compare_product(name: str, matrices: tuple[torch.Tensor, ...], linear: Any, roundoff: float | None) -> float:
    """How far the product of random tokens with what was written is from base plus adapter, relative to the latter.

    `matrices`: the base's, a, b times the scaling, and what was written. `linear`: peft's module, if it is of a linear
    layer. `roundoff`: None: of MXFP4. Raises ValueError if they are farther apart than by rounding, or a value of the
    matrices is."""
    w_OI, a_QI, b_OQ, written_OI = matrices
    x_TI = torch.randn(32, w_OI.shape[1], generator=torch.Generator().manual_seed(0))
    delta_OI = b_OQ @ a_QI
    expected_OI, steps = w_OI + delta_OI, 1
    y_TO = x_TI @ w_OI.T + (x_TI @ a_QI.T) @ b_OQ.T if linear is None else linear(x_TI)
    if linear is not None and (magnitude := linear.lora_magnitude_vector):
        # DoRA: peft rounds the sum, its norm, and the product of the two.
        expected_OI, steps = expected_OI * (magnitude[NAME].weight / expected_OI.norm(dim=1))[:, None], 4
    if roundoff is None:
        mxfp4_files.check_blocks(name, written_OI, expected_OI)
        roundoff = 2**-3
    else:
        # peft rounds what it adds, and then the sum; sums in float32 depend on their order.
        slack = 2 * roundoff * delta_OI.abs().max() + 2**-18 * expected_OI.abs().max()
        check_values(name, written_OI, expected_OI, steps * roundoff, slack.item())
    relative = ((x_TI @ written_OI.T - y_TO).norm() / y_TO.norm().clamp_min(1e-30)).item()
    if not relative <= 2 * steps * roundoff + _SUMS:
        raise ValueError(f"products of random tokens with {name} differ by {relative:.1%}, more than by rounding")
    return relative


def base_folder(adapter: Path, base: Path | None, to_merge: bool = False) -> Path:
    """The folder of an adapter's model. `base`: where it is now; None: where it was when the adapter was trained.

    Raises:
        ValueError: there is no adapter, or no model; or it has other weights now, `to_merge`, and `base` is None."""
    if not (adapter / "adapter_config.json").is_file():
        raise ValueError(f"{adapter} is neither an adapter as peft writes it nor a run that has trained one")
    given, base = base, base or recorded_base(adapter)
    if not (base / "config.json").is_file():
        raise ValueError(f"the model of {adapter} is not in {base} any more: say where it is (--base)")
    if to_merge and given is None and has_trained_weights(adapter, base) is False:
        remedy = f"say where they are (--base), or give --base {base} to merge into the new ones"
        raise ValueError(f"{adapter} was trained with other weights than those in {base} now: {remedy}")
    read_config(base)
    return base


def merge_adapter(
    run: Path,
    target: Path,
    *,
    base: Path | None = None,
    logits: bool = False,
    into: Literal["trained", "original"] = "trained",
    dtype: Literal["mxfp4", "nf4", "int8"] | None = None,
) -> Exported:
    """Writes the model of a run that has trained an adapter, merged with its newest values, as a model folder.

    Args:
        base: where the model is that the adapter was trained beside; None: where it was then.
        logits: compare logits of the whole model, too, if it fits in host memory.
        into: the base that was trained beside, dequantised if the run's was quantised (adapter.base_dtype); or the
            original one, of the files.
        dtype: of the experts in the files; None: as in those of the base, or bfloat16 if these hold them in MXFP4.

    Raises:
        ValueError: the run has no adapter, or its model is not there.
        CheckpointWriteError: what was written is not the model plus the adapter. The folder is not there then.
        OSError: the target is in use, or cannot be written.
    """
    adapter, target = run / ADAPTER, target.absolute()
    if not (adapter / "adapter_config.json").is_file():
        raise ValueError(f"{run} has no adapter to merge: a run with adapter.kind writes one with each checkpoint")
    check_target(target, replace=False)
    base = base_folder(adapter, base, to_merge=True)
    stored, source, model = stored_weights(base), read_source(run), meta_model(base)
    packed = mxfp4_files.packed_names(stored)
    weights = OriginalWeights(model, base, stored, OriginalLayout(model, None, stored, packed=packed))
    # A sum has no place in the blocks of its base.
    files = mxfp4_files.unpacked(source.weights, {name: tuple(model.get_parameter(name).shape) for name in packed})
    layout = OriginalLayout(model, None, files, packed=() if dtype is None else _packable(model, dtype))
    trained = trained_base(weights, model, run)
    merged_into = trained if into == "trained" else Base(weights, model, None, trained.dtype)
    with patterns_of_parameters(), warnings.catch_warnings():
        # peft reads an attribute that Transformers calls deprecated.
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing`", FutureWarning)
        modules = AdapterModules(base, adapter)
        read, check = partial(_merged, modules, merged_into), partial(MergeCheck, modules, merged_into, trained, logits)
        return write_model(target, source, layout, read, base, check)


def _packable(model: Any, dtype: str) -> list[str]:
    """The tensors of a model that Transformers reads in that dtype. Raises ValueError: there are none."""
    if dtype != "mxfp4":
        raise ValueError(
            f"--dtype {dtype}: Transformers reads bitsandbytes' weights of linear layers, and not of stacked experts, "
            "so it could not load the model; leave it out, and quantise where the model is served"
        )
    if not family_of(model).mxfp4:
        raise ValueError(
            f"--dtype mxfp4: Transformers reads experts in MXFP4 of gpt-oss alone, and this is {type(model).__name__}; "
            "leave it out"
        )
    names = [f"{name}.{one}" for name in experts_modules(model) for one in weight_names(model.get_submodule(name))[:2]]
    for name in names:
        mxfp4_files.packed_shape(tuple(model.get_parameter(name).shape))
    return names


@torch.no_grad()
def _merged(modules: AdapterModules, weights: Base, name: str) -> Any:
    """A tensor of the merged model, by its name there."""
    if name in modules.replaced:
        return modules.read(name, weights.read)
    if name not in modules.layers:
        return weights.read(name)
    # Mapped files are not written to.
    weight = nn.Parameter(weights.read(name).clone(), requires_grad=False)
    with modules.filled(name, weight) as module:
        module.merge(adapter_names=[NAME])
        if NAME not in module.merged_adapters:
            raise ValueError(f"peft merged nothing into {name}")
    return weight.data


def save_adapter(model: Any, folder: Path) -> Path:
    """Write the adapter as peft does: `PeftModel.from_pretrained(base, folder)` reads it. Every rank calls it; rank 0
    writes, and the folder appears when it is complete, in place of an earlier one.

    Raises:
        CheckpointWriteError: on all ranks, if rank 0 could not write.
    """
    tensors = adapter_tensors(model)
    temporary = folder.with_name(f".tmp-{folder.name}")
    with together(CheckpointWriteError, f"{folder} was not written: "):
        if rank() == 0:
            try:
                _write_adapter(model, tensors, temporary)
                put_in_place(temporary, folder)
                remove_left(folder)
            finally:
                shutil.rmtree(temporary, ignore_errors=True)
    gather(None)
    return folder


def _write_adapter(model: Any, tensors: dict[str, torch.Tensor], folder: Path) -> None:
    from peft import get_peft_model_state_dict
    from safetensors.torch import save_file

    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    name = model.active_adapters()[0]
    named = get_peft_model_state_dict(model, state_dict=tensors, adapter_name=name)
    whole = {f"base_model.model.{key}": tensor.detach().cpu().contiguous() for key, tensor in named.items()}
    save_file(whole, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    config = model.peft_config[name]
    config.inference_mode = True  # peft's own, for those who load it
    config.save_pretrained(folder)
    config.inference_mode = False
    for file in folder.iterdir():
        flush_file(file)
    flush_folder(folder)
