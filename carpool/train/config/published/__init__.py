"""Configurations of models as they were published: a `config.json`, or one that ships with Carpool under a short name.

    model.config = "qwen3-30b-a3b"                                     by name: one of the JSON files in this folder
    model.config = "downloads/config.json"                             a file, or the folder that holds it
    model.config = {from = "qwen3-30b-a3b", num_hidden_layers = 4}     with some keys changed

The files here have the sizes that their authors published, without the keys that say nothing to transformers.
`deepseek-v3-cut` is the exception: the shapes of DeepSeek-V3 in 4 layers of 64 experts, for measurements on one host.

A model that is cut to its first layers keeps what its other layers are: lists with one entry a layer are cut too.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from carpool.plugins.nearest import nearest

# The key under which a table of keys names what it changes.
FROM = "from"
_FOLDER = Path(__file__).parent
# How the names of files end that hold weights or list them.
_WEIGHTS = (
    ".safetensors", ".index.json", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".h5", ".msgpack", "adapter_config.json",
)  # fmt: skip


def published_models() -> list[str]:
    """The short names that ship with Carpool."""
    return sorted(path.stem for path in _FOLDER.glob("*.json"))


def read_keys(source: str | Mapping[str, Any]) -> dict[str, Any]:
    """All keys of a model's configuration, `model_type` among them if it is known.

    Args:
        source: a short name, the path of a `config.json` or of its folder, or keys; keys may say under `from` which
            of the former they change.

    Raises:
        ValueError: there is no such name or file, or the file is no JSON object.
    """
    if isinstance(source, str):
        return _read_file(_find(source))
    keys = dict(source)
    base = keys.pop(FROM, None)
    if base is None:
        return keys
    if not isinstance(base, str):
        raise ValueError(f"model.config.{FROM} = {base!r}: expected a name or a file, as text")
    return _changed(read_keys(base), keys)


def download_hint(name: str, kind: str = "") -> str:
    """Advice on a path where nothing is: of an address, or of what may be a name of the Hugging Face Hub; else an empty
    text.

    `kind`: further options of `hf download`, from a space on."""
    if "://" in name:
        return "; that is an address: download it first, and name the file or folder"
    if (
        name.count("/") != 1
        or name.startswith(("/", ".", "~"))
        or name.endswith("/")
        or Path(name).suffix[1:].isalpha()
    ):
        return ""
    return f"; if that is a name of the Hugging Face Hub, download it first: hf download {name}{kind} --local-dir DIR"


def check_checkpoint(name: str, folder: str) -> None:
    """Raise ValueError unless the folder has a model. `name`: of the setting or argument that names it."""
    if not (Path(folder) / "config.json").is_file():
        model = Path(folder) / "model"
        hint = f"; the model of that run is {model}" if model.is_dir() else ""
        hint = hint or ("" if Path(folder).exists() else download_hint(folder))
        raise ValueError(f"{name}: {folder} is no checkpoint folder (it has no config.json){hint}")


def is_configuration_alone(folder: Path) -> bool:
    """True for a folder with a `config.json` and without any weights: a model to be trained from scratch."""
    return (folder / "config.json").is_file() and not any(path.name.endswith(_WEIGHTS) for path in folder.iterdir())


def _find(source: str) -> Path:
    if source in published_models():
        return _FOLDER / f"{source}.json"
    path = Path(source)
    if path.is_dir():
        path /= "config.json"
    if not path.is_file():
        close = nearest(source, published_models())
        hint = f"did you mean {close}?" if close else f"the names are {', '.join(published_models())}"
        raise ValueError(
            f"model.config = {source!r} is neither a config.json, nor a folder with one, nor the name of a published "
            f"model; {hint}"
        )
    return path


def _read_file(path: Path) -> dict[str, Any]:
    try:
        keys = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not valid JSON ({error}); copy or download it again if it was cut off") from None
    if not isinstance(keys, dict):
        raise ValueError(f"{path} holds no JSON object with a model's configuration")
    return keys


def _changed(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """`base` with the values of `over`, table by table."""
    layers, fewer = base.get("num_hidden_layers"), over.get("num_hidden_layers")
    result = dict(base)
    if isinstance(layers, int) and isinstance(fewer, int) and fewer < layers:
        result = {key: _of_first_layers(key, value, layers, fewer) for key, value in base.items()}
    for key, value in over.items():
        old = result.get(key)
        result[key] = _changed(old, value) if isinstance(value, Mapping) and isinstance(old, Mapping) else value
    return result


def _of_first_layers(key: str, value: Any, layers: int, fewer: int) -> Any:
    if isinstance(value, list) and len(value) == layers:
        return value[:fewer]
    if key == "linear_attn_config" and isinstance(value, dict):
        # Kimi-Linear lists the layers of each kind by number, from 1 on.
        lists = {kind: numbers for kind, numbers in value.items() if isinstance(numbers, list)}
        return value | {kind: [number for number in numbers if number <= fewer] for kind, numbers in lists.items()}
    return value
