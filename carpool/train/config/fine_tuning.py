"""What a run is by default, and why: a checkpoint is fine-tuned, any other model is trained as the demo is.

    carpool train model.path=OLMoE-1B-7B data.train=chats.jsonl        what is not said suits fine-tuning
    carpool train model.config=qwen3-30b-a3b                           what is not said is the demo's

The demo trains a tiny model from random weights in two minutes, so its learning rate is large and its sequences are
short. A published model needs neither. Rates: 1e-5 for all parameters, as instruction tuning of models of this size
uses (Tulu 3, arXiv 2411.15124, and the models' own reports have 5e-6 to 2e-5), and ten times that for adapters
("LoRA Without Regret", Thinking Machines, 2025).
"""

from __future__ import annotations

import hashlib
import json
import tomllib
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from carpool.train.config.declarations import DERIVED, Demo
from carpool.train.config.published import download_hint, is_configuration_alone
from carpool.train.config.schema import keys
from carpool.train.config.schema_base import NONE_WORDS
from carpool.train.records.run_folder import ADAPTER, read_record

Key = tuple[str, str]  # (section, key)

FROM_DEMO, FOR_FINE_TUNING, FROM_CHECKPOINT = "from the demo", "default for fine-tuning", "from the checkpoint"
FROM_ADAPTER = "from adapter.path"
# Keys of peft's that change what an adapter computes, and the only value of each with which one is trained on.
_PLAIN = {"bias": "none", "layer_replication": None, "lora_bias": False, "use_qalora": False, "exclude_modules": None}
# Longer sequences than this are asked for.
SEQUENCE_LENGTH = 4096
# Of one micro-batch, where sequences are shorter than that.
MICRO_BATCH_TOKENS = 4096
RATE, ADAPTER_RATE = 1e-5, 1e-4


def defaults(settings: Mapping[str, Any], recorded: bool = False) -> dict[Key, tuple[Any, str]]:
    """Values for keys that the user has not set, by key, each with where it is from.

    Args:
        settings: what the user has set, by section.
        recorded: they are those of a run, which say all of its adapter; what that began with may be gone.

    Returns:
        Nothing for a model from scratch, whose defaults stand in the schema.

    Raises:
        ValueError: a checkpoint without data to train it on, or an adapter that is none or is otherwise than said.
    """
    model, data = _table(settings, "model"), _table(settings, "data")
    path = model.get("path")
    if not isinstance(path, str) or not Path(path, "config.json").is_file() or is_configuration_alone(Path(path)):
        return {}
    if not (data.get("train") or data.get("sources")):
        raise ValueError(
            f"model.path = {path} is a checkpoint, so this run fine-tunes it, but nothing says on which data: set "
            f"data.train to your files, such as\n    carpool train model.path={path} data.train=my-data.jsonl"
        )
    training = _table(settings, "training")
    checkpoint = _read(Path(path))
    found = {key: (demo.fine_tuning, FOR_FINE_TUNING) for key, demo in _demos().items() if demo.fine_tuning != DERIVED}
    if training.get("max_steps") is None:
        found["training", "num_train_epochs"] = 1.0, FOR_FINE_TUNING
    length, why = SEQUENCE_LENGTH, FOR_FINE_TUNING
    longest = checkpoint.get("max_position_embeddings")
    if isinstance(longest, int) and 2 <= longest < length:
        length, why = longest, FROM_CHECKPOINT
    found["data", "sequence_length"] = length, why
    length = data.get("sequence_length", length)
    sequences = max(1, MICRO_BATCH_TOKENS // length) if isinstance(length, int) and length > 0 else 1
    found["training", "per_device_train_batch_size"] = sequences, FOR_FINE_TUNING
    found["training", "per_device_eval_batch_size"] = sequences, FOR_FINE_TUNING
    adapter = _table(settings, "adapter")
    if isinstance(start := adapter.get("path"), str) and not recorded:
        found |= of_adapter(start, adapter)
    adapts = adapter.get("kind") or adapter.get("path")
    found["training", "learning_rate"] = ADAPTER_RATE if adapts else RATE, FOR_FINE_TUNING
    found["training", "output_dir"] = f"runs/{Path(path).resolve().name}", FOR_FINE_TUNING
    # What is in few bits beside bfloat16 need not say the latter.
    stored = "bfloat16" if checkpoint.get("quantization_config") else None
    if (checkpoint.get("dtype") or checkpoint.get("torch_dtype") or stored) == "bfloat16":
        found["model", "dtype"] = "bfloat16", FROM_CHECKPOINT
    return {key: value for key, value in found.items() if key[1] not in _table(settings, key[0])}


def source_of_default(key: Key) -> str:
    """Where the schema's value of a key is from."""
    return FROM_DEMO if key in _demos() else "default"


@lru_cache
def _demos() -> dict[Key, Demo]:
    """The settings whose defaults are the demo's."""
    return {
        (section, key): one
        for section, cls, key in keys()
        for one in cls.model_fields[key].metadata
        if type(one) is Demo
    }


def of_adapter(path: str, given: Mapping[str, Any]) -> dict[Key, tuple[Any, str]]:
    """What the adapter that a run starts from says of itself, by key.

    Args:
        given: settings of the section.

    Raises:
        ValueError: there is none, or it is otherwise than given."""
    try:
        keys = json.loads((adapter_folder(path) / "adapter_config.json").read_text(encoding="utf-8"))
        if keys["peft_type"] != "LORA":
            raise ValueError(
                f"adapter.path: {path} is a {keys['peft_type']} adapter; only those of LoRA can be trained on"
            )
        kind = "dora" if keys.get("use_dora") else "rslora" if keys.get("use_rslora") else "lora"
        modules, weights = keys.get("target_modules") or [], keys.get("target_parameters") or []
        alphas = {name: _whole(alpha) for name, alpha in (keys.get("alpha_pattern") or {}).items()}
        found = {
            "kind": kind, "rank": keys["r"], "alpha": _whole(keys["lora_alpha"]),
            "dropout": keys.get("lora_dropout") or 0.0,
            "targets": sorted([modules] if isinstance(modules, str) else modules) + weights,
            "modules_to_save": keys.get("modules_to_save") or [], "rank_pattern": keys.get("rank_pattern") or {},
            "alpha_pattern": alphas, "layers_to_transform": _list(keys.get("layers_to_transform")),
            "trainable_token_indices": _list(keys.get("trainable_token_indices")),
        }  # fmt: skip
    except (OSError, KeyError, TypeError, json.JSONDecodeError) as error:
        hint = "" if Path(path).exists() else download_hint(path)
        raise ValueError(
            f"adapter.path: {path} holds no adapter as peft writes it (adapter_config.json: {error}); name such a "
            f"folder, or that of a run that has trained one{hint}"
        ) from None
    for name, plain in _PLAIN.items():
        if (value := keys.get(name) or plain) != plain:
            raise ValueError(f"adapter.path: {path} has {name} = {value!r}, which is not trained on")
    if isinstance(indices := found["trainable_token_indices"], dict):
        raise ValueError(
            f"adapter.path: {path} has trainable_token_indices of {', '.join(indices)}; only those of the input "
            "embedding alone, a list, are trained on"
        )
    found |= base_of_run(Path(path))  # beside another base it is another model
    for key, value in found.items():
        same = isinstance(value, list) and sorted(given.get(key, ())) == sorted(value)
        same |= value is None and given.get(key) in NONE_WORDS
        if key in given and given[key] != value and not same:
            other = f", or name {Path(path, 'adapter')} to train it beside another base" if key == "base_dtype" else ""
            raise ValueError(
                f"adapter.{key} = {given[key]!r}, but the adapter in adapter.path has {value!r}: leave it out{other}"
            )
    return {("adapter", key): (value, FROM_ADAPTER) for key, value in found.items()}


def _whole(number: float) -> float:
    """16.0, which some programs write, is 16."""
    return int(number) if number == int(number) else number


def _list(value: Any) -> Any:
    return [value] if isinstance(value, int) else value or []


def other_base(path: str, model: str | None, base_dtype: str | None) -> str | None:
    """That an adapter was trained beside another model, by its weights or else its name, or beside the same in another
    storage; None: it was not, or nothing says so.

    Args:
        model, base_dtype: beside which it is used: its folder, and adapter.base_dtype."""
    try:
        keys = json.loads((adapter_folder(path) / "adapter_config.json").read_text(encoding="utf-8"))
        name = keys["base_model_name_or_path"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    then = base_of_adapter(Path(path)).get("base_dtype", base_dtype)
    if not name or not model:
        return None
    same = has_trained_weights(Path(path), Path(model))
    if then == base_dtype and (same or (same is None and Path(name).name == Path(model).resolve().name)):
        return None
    trained, used = (
        f"{one} in {kind}" if kind else f"{one} as its files have it"
        for one, kind in ((name, then), (model, base_dtype))
    )
    others = ", where the weights are others" if same is False else ""
    return f"{path} was trained beside {trained}, and is used beside {used}{others}"


def has_trained_weights(adapter: Path, model: Path) -> bool | None:
    """Whether a folder has the weights that an adapter, of a run or in its folder, had beside it; None: unknown."""
    adapter = adapter.resolve()
    then = read_record([adapter, adapter.parent] if adapter.name == ADAPTER else [adapter], "base")
    return None if then is None else then == sample_weights(model)


def sample_weights(folder: Path) -> dict[str, str]:
    """`base` of run.json: a hash of a few values of each tensor in a checked folder, whatever files they are in."""
    found = []
    for path in folder.glob("*.safetensors"):
        with path.open("rb") as stream:
            start = 8 + int.from_bytes(stream.read(8), "little")
            for name, one in json.loads(stream.read(start - 8)).items():
                if name != "__metadata__":
                    stream.seek(start + sum(one["data_offsets"]) // 2)
                    values = stream.read(min(256, one["data_offsets"][1] + start - stream.tell()))
                    found.append(f"{name} {one['dtype']} {one['shape']} ".encode() + values)
    return {"samples": hashlib.sha256(b"".join(sorted(found))).hexdigest()}


def base_of_adapter(path: Path) -> dict[str, Any]:
    """As `base_of_run`, of a run or of the folder of its adapter."""
    inside = path.resolve().name == ADAPTER
    return base_of_run(path) or (base_of_run(path.resolve().parent) if inside else {})


def base_of_run(folder: Path, keys: Sequence[str] = ("base_dtype",)) -> dict[str, Any]:
    """Keys of [adapter] of a run, by its folder. No base_dtype: frozen weights are as in the files. Empty: no run."""
    try:
        table = tomllib.loads((folder / "config.toml").read_text(encoding="utf-8"))["adapter"]
        return {key: None if table[key] in NONE_WORDS else table[key] for key in keys}
    except (OSError, KeyError, TypeError, tomllib.TOMLDecodeError):
        return {}


def adapter_folder(path: str) -> Path:
    """The adapter's own folder, of one that may be a run's."""
    run = Path(path, ADAPTER)
    return run if run.is_dir() else Path(path)


def _table(settings: Mapping[str, Any], section: str) -> Mapping[str, Any]:
    table = settings.get(section)
    return table if isinstance(table, Mapping) else {}


def _read(folder: Path) -> dict[str, Any]:
    """A checkpoint's configuration, and over it that of its language model. What is damaged is refused later."""
    try:
        keys = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    if not isinstance(keys, dict):
        return {}
    text = keys.get("text_config")
    return {**keys, **{k: v for k, v in text.items() if v is not None}} if isinstance(text, dict) else keys
