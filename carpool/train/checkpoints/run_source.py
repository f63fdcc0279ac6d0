"""What an export needs of the folder that a run began from, kept in the run: `RUN/source/`.

    source.json                 the names of the folder's weights, each with its file, dtype and shape
    config.json, generation_config.json, tokenizer files, chat template, license: as they are there

The folder itself may be gone when the run is exported: Slurm jobs copy a checkpoint to a node's own disk. A run from
scratch keeps its tokenizer here, and names no weights.
"""

from __future__ import annotations

import errno
import json
import shutil
from pathlib import Path
from typing import NamedTuple

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

from carpool.hf.weights.weight_files import Stored, stored_weights
from carpool.train.data.tokenizer import BytesTokenizer
from carpool.train.records.run_folder import replace_text

SOURCE, _RECORD = "source", "source.json"
# Of the text model's tokenizer, of the processors of others, and what must travel with weights. Never code.
_TOKENIZER = (
    "tokenizer*.json", "tokenizer*.model", "*.tiktoken", "vocab.*", "merges.txt", "special_tokens_map.json",
    "added_tokens.json", "chat_template.*", "additional_chat_templates/*.jinja",
)  # fmt: skip
_MODEL = (
    "config.json", "generation_config.json", "preprocessor_config.json", "processor_config.json",
    "video_preprocessor_config.json", "LICENSE*", "NOTICE*",
)  # fmt: skip


class Source(NamedTuple):
    """`folder`: RUN/source. `weights`: those of the folder that the run began from; none of a run from scratch."""

    folder: Path
    weights: dict[str, Stored]


def keep_source(
    run: Path, model: Path | None, tokenizer: str | None, chat_template: str | None = None, end: int | None = None
) -> None:
    """Writes RUN/source.

    Args:
        model: the folder with the weights that it began from; None: it began from scratch.
        tokenizer: the path of its tokenizer's folder or `tokenizer.json`, or "bytes".
        chat_template: a Jinja file that stands in for the tokenizer's own template.
        end: a token that ends texts, too, besides those that the folder of the model names.

    Raises:
        OSError: it cannot be written.
    """
    folder = run / SOURCE
    folder.mkdir(parents=True, exist_ok=True)
    if model is not None:
        _copy(model, folder, _MODEL)
        if end is not None:
            _add_end(folder, end)
    if tokenizer == "bytes":
        _bytes_tokenizer().save_pretrained(folder)
    elif tokenizer is not None:
        place = Path(tokenizer)
        _copy(place if place.is_dir() else place.parent, folder, _TOKENIZER)
        if place.is_file() and place.name != "tokenizer.json":
            shutil.copyfile(place, folder / "tokenizer.json")
    if chat_template is not None:
        shutil.copyfile(Path(chat_template).expanduser(), folder / "chat_template.jinja")
    if model is not None and not any(model.glob("*.safetensors")):
        raise FileNotFoundError(errno.ENOENT, "the checkpoint that the run began from is gone", str(model))
    weights = stored_weights(model) if model is not None else {}
    record = {name: (one.file, str(one.dtype).removeprefix("torch."), one.shape) for name, one in weights.items()}
    replace_text(folder / _RECORD, json.dumps({"weights": record}) + "\n")


def read_source(run: Path) -> Source:
    """What `keep_source` wrote.

    Raises:
        ValueError: it is not there, or damaged.
    """
    path = run / SOURCE / _RECORD
    try:
        record = json.loads(path.read_text(encoding="utf-8"))["weights"].items()
        weights = {name: Stored(file, getattr(torch, dtype), tuple(shape)) for name, (file, dtype, shape) in record}
        return Source(path.parent, weights)
    except FileNotFoundError:
        raise ValueError(f"{run} is not a run directory that can be exported: it has no {SOURCE}/{_RECORD}") from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} is damaged ({error!r}); copy the run's folder again") from error


def copy_source(source: Source, folder: Path) -> None:
    """Copies what is kept of the source, but for its record, into an export."""
    _copy(source.folder, folder, (*_MODEL, *_TOKENIZER))


def _copy(source: Path, target: Path, patterns: tuple[str, ...]) -> None:
    for pattern in patterns:
        for path in source.glob(pattern):
            to = target / path.relative_to(source)
            to.parent.mkdir(exist_ok=True)
            shutil.copyfile(path, to)


def _add_end(folder: Path, end: int) -> None:
    """Generation, by whoever reads the folder, then stops there."""
    path = folder / "generation_config.json"
    settings = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    known = settings.get("eos_token_id")
    if known is None:
        known = json.loads((folder / "config.json").read_text(encoding="utf-8")).get("eos_token_id")
    ends = known if isinstance(known, list) else [] if known is None else [known]
    if end not in ends:
        replace_text(path, json.dumps({**settings, "eos_token_id": [*ends, end]}, indent=2) + "\n")


def _bytes_tokenizer() -> PreTrainedTokenizerFast:
    """`carpool.train.data.tokenizer.BytesTokenizer`, as Transformers has tokenizers: token b is byte b."""
    tokenizer = Tokenizer(models.BPE(vocab={text: byte for byte, text in bytes_to_unicode().items()}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = {"eos_token": BytesTokenizer.eos_token, "bos_token": BytesTokenizer.bos_token}
    tokenizer.add_special_tokens([AddedToken(text) for text in special.values()])
    assert [tokenizer.token_to_id(text) for text in special.values()] == [BytesTokenizer.eos_id, BytesTokenizer.bos_id]
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)
