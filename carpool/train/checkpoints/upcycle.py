"""`carpool upcycle` converts a dense checkpoint to an MoE checkpoint.

Each MLP of the dense model becomes E experts and a router, in the MoE family of Transformers that has the same
attention and norms. All other weights are copied. Two methods initialise the experts:

    copy    each expert is the whole MLP (Sparse Upcycling, arXiv 2212.05055). The top-k weights of a token sum to 1, so
            whatever the router chooses, the layer computes the result of the MLP.
    split   the MLP's intermediate dimension is divided into G parts, and expert e is part e % G of copy e // G (arXiv
            2410.07524). All parts of a copy have the same row in the router ("virtual groups"), so the K chosen
            experts are K/G whole copies: each part of a copy has the weight w/G of its copy's w, and `down` is
            multiplied by G.

Both methods give equal logits in exact arithmetic, without noise. In `split` no two copies may have equal scores. In
float32 that does not occur in practice; in bfloat16, 2 to 7 of 1,000 tokens of a layer choose parts of several copies.

Files are read and written one tensor at a time. Transformers then reads the result back, layer by layer in float32, and
its logits on a few random tokens are compared with the dense model's.
"""

from __future__ import annotations

import json
import secrets
import shutil
from collections.abc import Callable, Mapping
from copy import deepcopy
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from safetensors import safe_open
from torch import nn
from transformers import CONFIG_MAPPING, PreTrainedConfig
from transformers.models.auto.modeling_auto import MODEL_MAPPING

from carpool.families import FAMILIES, UpcycleTarget
from carpool.hf.weights.config_keys import keys_read
from carpool.hf.weights.model_config import make_config, read_config
from carpool.hf.weights.original_layout import check_weights
from carpool.hf.weights.weight_files import Entry, split_by_size, stored_weights, write_index, write_tensor_file
from carpool.train.blueprint import meta_model
from carpool.train.checkpoints.checkpoint_files import flush_file, put_in_place, remove_left
from carpool.train.checkpoints.export import check_space, check_target
from carpool.train.checkpoints.run_source import Source, copy_source

MATRICES = ("gate_proj", "up_proj", "down_proj")
# Maximum bytes of a weight file.
_FILE = 5 * 10**9
# The largest |difference| of logits over the largest |logit| that float32 rounding explains.
_ROUNDING = 1e-4
_TOKENS = (2, 32)
# Grouped matrix products need rows of a multiple of 16 bytes, in bfloat16.
_MULTIPLE = 8

_Read = Callable[[str], torch.Tensor]
_Origins = dict[str, tuple[str, int | None]]


# The MoE family for each dense model type, as carpool/families.py declares it. Attention, norms, rotary positions and
# the activation are equal in both.
_PAIRS = ((target.dense, (name, target)) for name in FAMILIES for target in FAMILIES[name].upcycles)
TARGETS = dict(sorted(_PAIRS, key=lambda pair: pair[0]))


class Upcycling(NamedTuple):
    """The settings of a conversion. `parts` is G, or 1 where experts are whole copies.

    `noise`: the standard deviation of the noise added to each expert's matrix, over that of the matrix."""

    experts: int
    top_k: int
    parts: int = 1
    noise: float = 0.0
    seed: int = 0

    @classmethod
    def of(cls, method: str, experts: int, top_k: int, parts: int | None, noise: float, seed: int) -> Upcycling:
        """Returns checked settings. ValueError: the numbers contradict each other."""
        if not 1 <= top_k <= experts:
            raise ValueError(f"--top-k {top_k}: choose 1 to {experts} of --experts {experts}")
        if not 0 <= noise < float("inf"):
            raise ValueError(f"--noise {noise}: give 0 or a small positive number, such as 0.01")
        if method == "copy":
            if parts is not None:
                raise ValueError("--parts needs --method split: experts of --method copy are whole copies")
            return cls(experts, top_k, 1, noise, seed)
        parts = top_k if parts is None else parts
        if parts < 2:
            raise ValueError(f"--method split needs at least 2 parts, but got {parts}; use --method copy")
        for option, number in (("--experts", experts), ("--top-k", top_k)):
            if number % parts:
                raise ValueError(
                    f"{option} {number} is no multiple of {parts} parts (--parts, by default --top-k): tokens choose "
                    "whole copies of the MLP, each of all its parts"
                )
        return cls(experts, top_k, parts, noise, seed)


class Upcycled(NamedTuple):
    """The MoE family, bytes written, the largest |difference| of logits over the dense model's largest |logit|, and
    whether the method promises equal logits."""

    family: str
    bytes: int
    difference: float
    promised: bool


def upcycle(dense: Path, out: Path, how: Upcycling) -> Upcycled:
    """Write the folder of an MoE model: weights, configuration and tokenizer.

    Args:
        dense: a checkpoint folder of a family in `TARGETS`.
        out: a folder that is empty or does not exist.

    Raises:
        ValueError: the dense model or the numbers are unsuitable, or logits differ that must be equal.
        OSError: the folder cannot be written.
    """
    check_target(out, replace=False)
    dense_config = read_config(dense)
    family, target = target_of(dense_config, dense)
    if dense_config.intermediate_size % (how.parts * _MULTIPLE):
        raise ValueError(
            f"the MLP's intermediate_size {dense_config.intermediate_size} cannot be divided into "
            f"{how.parts} equal parts (--parts) of a multiple of {_MULTIPLE}, which grouped matrix products need"
        )
    check_weights(dense, meta_model(dense_config))
    config = moe_config(dense_config, family, target, how)
    stored, origins = stored_weights(dense), _origins(dense_config, target, how)
    entries = _entries(stored, origins, how)
    generator = torch.Generator().manual_seed(how.seed)
    tokens = torch.randint(dense_config.vocab_size, _TOKENS, generator=generator)
    expected = logits_of(dense, tokens)
    if not expected.isfinite().all():
        raise ValueError(f"{dense} computes NaN or infinity from random tokens: copy or download it again")
    files = split_by_size(entries, _FILE)
    size = sum(entry.bytes for entry in entries.values())
    check_space(out, size)
    temporary = out.with_name(f".tmp-{out.name}-{secrets.token_hex(4)}")
    try:
        remove_left(out)
        temporary.mkdir(parents=True)
        values = _values(_reader(dense, stored), origins, dense_config, how, generator)
        for file, file_entries in files.items():
            write_tensor_file(temporary / file, file_entries, ((name, values(name)) for name in file_entries))
            flush_file(temporary / file)
        write_index(temporary, files)
        copy_source(Source(dense, {}), temporary)
        dtype = stored[origins[next(iter(origins))][0]].dtype
        config.architectures, config.dtype = [type(meta_model(config)).__name__], dtype
        config.save_pretrained(temporary)
        check_weights(temporary, meta_model(temporary))
        difference = float((logits_of(temporary, tokens) - expected).abs().max() / expected.abs().max())
        if not difference < float("inf"):
            raise ValueError(f"the MoE computes NaN or infinity: lower --noise {how.noise:g}; the result was deleted")
        # Multiplying `down` by a number that is no power of two rounds it to the stored dtype.
        promised = not how.noise and (dtype == torch.float32 or not how.parts & how.parts - 1)
        if promised and not difference <= _ROUNDING:
            raise ValueError(
                f"the logits of the MoE differ from the dense model's by {difference:.1e} of the largest logit, but "
                f"the method allows rounding alone ({_ROUNDING:.0e}); the result was deleted"
            )
        put_in_place(temporary, out)
    except OSError as error:
        error.filename = error.filename or str(out)  # Python's error of a full disk names no path
        raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return Upcycled(family, size, difference, promised)


def target_of(config: PreTrainedConfig, folder: Path) -> tuple[str, UpcycleTarget]:
    """The MoE family for a dense model. ValueError: there is none."""
    known = ", ".join(f"{name} (to {family})" for name, (family, _) in TARGETS.items())
    if config.model_type not in TARGETS:
        raise ValueError(
            f"{folder} is a model of type {config.model_type!r}, for which Carpool knows no MoE family of Transformers "
            f"with the same attention; these dense models can be upcycled: {known}"
        )
    family, target = TARGETS[config.model_type]
    for key, value in target.required.items():
        if getattr(config, key, value) != value:
            raise ValueError(
                f"{folder} has {key}={json.dumps(getattr(config, key))}, which {family} does not compute; only "
                f"{config.model_type} models with {key}={json.dumps(value)} can be upcycled"
            )
    return family, target


def moe_config(dense: PreTrainedConfig, family: str, target: UpcycleTarget, how: Upcycling) -> PreTrainedConfig:
    """Returns the MoE's configuration, with the dense model's values for all keys that both families read."""
    read = keys_read(CONFIG_MAPPING[family]) | {"pad_token_id", "bos_token_id", "eos_token_id"}
    keys = {key: value for key, value in dense.to_dict().items() if key in read}
    keys |= {"num_experts_per_tok": how.top_k, target.size_key: dense.intermediate_size // how.parts}
    keys["num_local_experts"] = how.experts
    if "norm_topk_prob" in read:
        keys["norm_topk_prob"] = True
    return make_config(family, keys)


def _reader(folder: Path, stored: Mapping[str, Any]) -> _Read:
    @lru_cache(maxsize=len(MATRICES))  # the matrices of an MLP, which all its experts read
    def read(name: str) -> torch.Tensor:
        with safe_open(folder / stored[name].file, framework="pt") as file:
            return file.get_tensor(name)

    return read


def _origins(dense: PreTrainedConfig, target: UpcycleTarget, how: Upcycling) -> _Origins:
    """For each new weight of the MoE, in order: the dense matrix of its values or, for a router, of its dtype; and the
    expert, or None for a router."""
    origins: _Origins = {}
    for i in range(dense.num_hidden_layers):
        block, mlp = f"model.layers.{i}.{target.block}", f"model.layers.{i}.mlp"
        origins[f"{block}.gate.weight"] = f"{mlp}.gate_proj.weight", None
        for expert in range(how.experts):
            for moe_name, dense_name in zip(target.matrices, MATRICES, strict=True):
                origins[f"{block}.experts.{expert}.{moe_name}.weight"] = f"{mlp}.{dense_name}.weight", expert
    return origins


def _entries(stored: Mapping[str, Any], origins: _Origins, how: Upcycling) -> dict[str, Entry]:
    replaced = {origin for origin, _ in origins.values()}
    entries = {name: Entry(weight.dtype, weight.shape) for name, weight in stored.items() if name not in replaced}
    for name, (origin, expert) in origins.items():
        rows, columns = stored[origin].shape
        if expert is None:
            rows = how.experts
        elif "down_proj" in origin:
            columns //= how.parts
        else:
            rows //= how.parts
        entries[name] = Entry(stored[origin].dtype, (rows, columns))
    return entries


def _values(
    read: _Read, origins: _Origins, dense: PreTrainedConfig, how: Upcycling, generator: torch.Generator
) -> _Read:
    """Returns a function that computes a tensor of the MoE. Random numbers depend on the order of its calls."""

    def values(name: str) -> torch.Tensor:
        if name not in origins:
            return read(name)
        origin, expert = origins[name]
        if expert is None:
            copies_EH = torch.randn(how.experts // how.parts, dense.hidden_size, generator=generator)
            return (copies_EH * dense.initializer_range).repeat_interleave(how.parts, dim=0)
        is_down = "down_proj" in origin
        part = read(origin).chunk(how.parts, dim=1 if is_down else 0)[expert % how.parts]
        if how.noise:
            deviation = part.float().std()
            part = part + how.noise * deviation * torch.randn(part.shape, generator=generator)
        return part * how.parts if is_down else part

    return values


@torch.no_grad()
def logits_of(folder: Path, tokens_BS: torch.Tensor) -> torch.Tensor:
    """Returns the logits (B, S, V) of a checkpoint of a family of `TARGETS`, computed in float32.

    Transformers loads each layer as a model of one layer, from the tensors of the files."""
    config, stored = read_config(folder), stored_weights(folder)
    read = _reader(folder, stored)
    hidden_BSH = F.embedding(tokens_BS, read("model.embed_tokens.weight")).float()
    layer_config = deepcopy(config)
    # This function computes the embeddings itself, so the model of one layer has the smallest possible vocabulary.
    layer_config.num_hidden_layers, layer_config.vocab_size, layer_config.pad_token_id = 1, 1, None
    rest = {"embed_tokens.weight": torch.zeros(1, config.hidden_size), "norm.weight": read("model.norm.weight")}
    for i in range(config.num_hidden_layers):
        prefix = f"model.layers.{i}."
        layer = {f"layers.0.{name.removeprefix(prefix)}": read(name) for name in stored if name.startswith(prefix)}
        model, info = MODEL_MAPPING[type(config)].from_pretrained(
            None, config=layer_config, state_dict=layer | rest, dtype=torch.float32, output_loading_info=True
        )
        if wrong := [*info["missing_keys"], *info["mismatched_keys"], *info["unexpected_keys"]]:
            raise ValueError(f"Transformers does not read all weights of layer {i} of {folder}: {wrong[:4]}")
        if i < config.num_hidden_layers - 1:
            model.norm = nn.Identity()
        hidden_BSH = model.eval()(inputs_embeds=hidden_BSH, use_cache=False).last_hidden_state
    head = "model.embed_tokens.weight" if config.tie_word_embeddings else "lm_head.weight"
    return F.linear(hidden_BSH, read(head).float())
