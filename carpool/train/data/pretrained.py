"""The tokenizer of transformers in a checkpoint's folder, with its chat template."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from carpool.train.config.schema import DataSection

# One of these is in every folder that holds a tokenizer. Transformers makes an empty one where there is none.
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model", "tekken.json")


def check_has_tokenizer(folder: Path) -> None:
    """Raise ValueError if there is no tokenizer in the folder of a checkpoint."""
    if not any((folder / name).is_file() for name in TOKENIZER_FILES):
        raise ValueError(
            f"{folder} has no tokenizer (none of {', '.join(TOKENIZER_FILES)}): copy those of the model that it was "
            "made from into it"
        )


def load_pretrained(data: DataSection, model_path: str | None) -> Any:
    """The tokenizer of transformers that `[data]` and `[model]` name.

    Raises:
        ValueError: there is none.
    """
    folder = data.tokenizer or model_path
    if folder is None or not Path(folder).is_dir():
        named = f"data.tokenizer = {folder!r} is none" if folder else "none is named"
        raise ValueError(
            "conversations and prompts need a folder with a tokenizer of transformers, and "
            f"{named}: set model.path to a checkpoint's folder, or data.tokenizer to a folder with a tokenizer's files"
        )
    return read_pretrained(Path(folder))


def read_pretrained(folder: Path) -> Any:
    """The tokenizer of transformers in the folder of a checkpoint. ValueError: there is none."""
    from transformers import AutoTokenizer

    check_has_tokenizer(folder)
    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # whatever a damaged or missing file makes it raise
        raise ValueError(f"{folder} has no tokenizer that transformers can read: {error}") from None


def fingerprint_of(pretrained: Any) -> str:
    """Equal for two tokenizers of transformers only if they turn every text into the same tokens."""
    backend = getattr(pretrained, "backend_tokenizer", None)
    content = backend.to_str() if backend is not None else json.dumps(sorted(pretrained.get_vocab().items()))
    settings = json.dumps(pretrained.special_tokens_map, sort_keys=True, default=str)
    return hashlib.sha256((content + settings).encode("utf-8", errors="replace")).hexdigest()
