"""Whether a merged model is its base plus the adapter: three comparisons, none through the code that merged.

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
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM

from carpool.hf.seam.experts_module import expert_function
from carpool.hf.weights.original_layout import OriginalLayout, OriginalWeights, without_progress
from carpool.memory.host import SHARE, free_host_memory
from carpool.train.checkpoints.adapter_modules import NAME, AdapterModules
from carpool.train.checkpoints.read_back import ReadBack, check_values, unit_roundoff

_TOKENS = 32
# Of products and logits in float32: sums in another order.
_SUMS = 1e-4


class MergeCheck(ReadBack):
    """Compares a merged model with its base and the adapter.

    Args:
        modules: of the adapter.
        base: weights of the base.
        logits: compare logits, if the model fits in host memory.
        folder, layout: of the merged model.
    """

    def __init__(
        self, modules: AdapterModules, base: OriginalWeights, logits: bool, folder: Path, layout: OriginalLayout, _: Any
    ) -> None:
        super().__init__(folder, layout, base.read)
        self._modules, self._base, self._logits, self._folder, self._layout = modules, base, logits, folder, layout
        self._dtypes: dict[str, torch.dtype] = {}

    @torch.no_grad()
    def _compare(self, name: str, written: torch.Tensor, read: torch.Tensor, dtype: torch.dtype) -> tuple[float, str]:
        layers, replaced = self._modules.layers, self._modules.replaced
        if name in layers or name in replaced:
            self._dtypes[name] = dtype
        if name not in layers:
            read = self._modules.read(replaced[name]) if name in replaced else read
            return super()._compare(name, written, read, dtype)
        weight, largest = nn.Parameter(read.float(), requires_grad=False), (0.0, "")
        with self._modules.filled(name, weight) as module:
            for part, *matrices in _products(name, module, weight, written):
                largest = max(largest, (_compare_product(part, *matrices, unit_roundoff(dtype)), part))
        return largest

    def finish(self, largest: float, name: str) -> str:
        if lost := sorted(self._base.stored.keys() - self._written.stored.keys() - set(self._layout.left_out)):
            raise ValueError(f"it lacks {lost[0]}, which the base has")
        changed = self._modules.layers.keys() | self._modules.replaced.keys()
        if not changed or changed != self._dtypes.keys():
            raise ValueError(f"of {len(changed)} tensors that the adapter changes it has {len(self._dtypes)}")
        text = f"read back: {len(changed)} tensors differ from base plus adapter by at most {largest:.1e} ({name})"
        return f"{text}; logits {self._compare_logits()}" if self._logits else text

    @torch.no_grad()
    def _compare_logits(self) -> str:
        needed = 5 * sum(math.prod(stored.shape) for stored in self._written.stored.values())
        if (free := free_host_memory()) is None or needed > SHARE * free:
            return "were not compared: the model in float32 does not fit in host memory"
        from peft import PeftModel

        auto: Any = AutoModelForCausalLM
        options = {"dtype": torch.float32, "local_files_only": True, "trust_remote_code": False}
        with without_progress():
            model = auto.from_pretrained(self._modules.base, **options)
            adapted = PeftModel.from_pretrained(model, str(self._modules.folder)).eval()
            vocabulary = model.config.get_text_config().vocab_size
            ids = torch.randint(vocabulary, (4, 16), generator=torch.Generator().manual_seed(0))
            try:
                trained = adapted(input_ids=ids, use_cache=False).logits
            except Exception as error:  # whatever a model says that computes on GPUs alone
                return f"were not compared, because this machine cannot compute the base's: {error}"
            model = adapted.merge_and_unload()
            for name, dtype in self._dtypes.items():
                tensor = model.get_parameter_or_buffer(name)
                tensor.copy_(tensor.to(dtype))
            rounded = _median(model(input_ids=ids, use_cache=False).logits, trained)
            del model, adapted
            model, info = auto.from_pretrained(self._folder, output_loading_info=True, **options)
            if wrong := sorted(str(key) for keys in info.values() for key in keys):
                raise ValueError(f"Transformers does not load it: {wrong[0]}")
            merged = _median(model.eval()(input_ids=ids, use_cache=False).logits, trained)
        if not merged <= 4 * rounded + _SUMS:
            raise ValueError(
                f"logits of the median random token differ by {merged:.1%}, by rounding only {rounded:.1%}"
            )
        return f"of {ids.numel()} random tokens by {merged:.1e} (median; by rounding alone {rounded:.1e})"


def _products(name: str, module: Any, w: torch.Tensor, written: torch.Tensor) -> Iterator[tuple[Any, ...]]:
    """The products with an adapted tensor, as `_compare_product` takes them. `module`: peft's, with values."""
    a, b = module.lora_A[NAME].weight.float(), module.lora_B[NAME].weight.float() * module.scaling[NAME]
    if w.ndim == 2:
        yield name, w, a, b, written, None if hasattr(module, "parameter_name") else module
        return
    experts = module.get_base_layer()
    if getattr(experts, "is_transposed", False):
        w, written = w.transpose(1, 2), written.transpose(1, 2)
    kinds, half, function = {"": slice(None)}, w.shape[1] // 2, expert_function(experts)
    if name.endswith("gate_up_proj"):
        kinds = {", gate": slice(half), ", up": slice(half, None)}
        if function is not None and function.activation.interleaved:
            kinds = {", gate": slice(0, None, 2), ", up": slice(1, None, 2)}
    a_EQI, b_EOQ = a.unflatten(0, (len(w), -1)), b.unflatten(1, (-1, len(w))).permute(2, 0, 1)
    for e in range(len(w)):
        for kind, rows in kinds.items():
            yield f"{name}, expert {e}{kind}", w[e, rows], a_EQI[e], b_EOQ[e, rows], written[e, rows], None


def _compare_product(
    name: str,
    w_OI: torch.Tensor,
    a_QI: torch.Tensor,
    b_OQ: torch.Tensor,
    written_OI: torch.Tensor,
    linear: Any,
    roundoff: float,
) -> float:
    """How far the product of random tokens with what was written is from base plus adapter, relative to the latter.

    Args:
        w_OI, a_QI, b_OQ: the base's matrix, and the adapter's; b times the scaling.
        linear: peft's module, if it is of a linear layer.

    Raises:
        ValueError: farther than by rounding, or a value of the matrix is."""
    x_TI = torch.randn(_TOKENS, w_OI.shape[1], generator=torch.Generator().manual_seed(0))
    delta_OI = b_OQ @ a_QI
    expected_OI, steps = w_OI + delta_OI, 1
    y_TO = x_TI @ w_OI.T + (x_TI @ a_QI.T) @ b_OQ.T if linear is None else linear(x_TI)
    if linear is not None and (magnitude := linear.lora_magnitude_vector):
        # DoRA: peft rounds the sum, its norm, and the product of the two.
        expected_OI, steps = expected_OI * (magnitude[NAME].weight / expected_OI.norm(dim=1))[:, None], 4
    # peft rounds what it adds, and then the sum; sums in float32 depend on their order.
    slack = 2 * roundoff * delta_OI.abs().max() + 2**-18 * expected_OI.abs().max()
    check_values(name, written_OI, expected_OI, steps * roundoff, slack.item())
    relative = ((x_TI @ written_OI.T - y_TO).norm() / y_TO.norm().clamp_min(1e-30)).item()
    if not relative <= 2 * steps * roundoff + _SUMS:
        raise ValueError(f"products of random tokens with {name} differ by {relative:.1%}, more than by rounding")
    return relative


def _median(logits: torch.Tensor, trained: torch.Tensor) -> float:
    """The median token's difference, relative to what was trained."""
    return float(((logits - trained).norm(dim=-1) / trained.norm(dim=-1)).median())
