"""`carpool eval`: how well a model predicts a text, or does tasks.

Perplexity, by sliding windows of L tokens that move by S, over each document by itself:

    L = 4, S = 2, tokens a b c d e f:    a[b c d]          predicts b c d
                                         c d[e f]          predicts e f, each seeing at least L - S tokens

Each token but the first of a document is predicted once; where the tokenizer begins texts with a token of its own, that
is the first. Windows are dealt to the ranks, and all ranks make equally many forwards.

Tasks are those of lm-evaluation-harness (`eval_tasks.py`). Perplexity is not: the harness's windows share one token of
context, so that a long document's tokens would see less than L - S others.
"""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from transformers import PreTrainedModel
from transformers.utils.logging import disable_progress_bar

from carpool.hf.loss_head import HeadLoss, next_tokens
from carpool.kernels.cross_entropy import IGNORED
from carpool.serve.generate_answers import context_of
from carpool.serve.prompts import Text
from carpool.serve.served_model import find_source, open_model
from carpool.train.config.schema import Config
from carpool.train.data.rows import parse_json

# Of a window, where the model sees more.
MOST_WINDOW = 2048


@dataclass(frozen=True)
class Perplexity:
    """How well a text is predicted.

    Attributes:
        documents, tokens, bytes: of the text; tokens that are predicted, and bytes of these.
        window, stride: tokens of a window, and by how many the next one begins later.
        loss: the mean negative log-likelihood of a token, in nats.
        perplexity: exp of it.
        bits_per_byte: the same per byte of UTF-8, in bits, which compares models with other tokenizers.
        seconds: without loading."""

    documents: int
    tokens: int
    bytes: int
    window: int
    stride: int
    loss: float
    perplexity: float
    bits_per_byte: float
    seconds: float

    def __str__(self) -> str:
        return (
            f"perplexity {self.perplexity:.4f} per token, {2**self.bits_per_byte:.4f} per byte "
            f"(loss {self.loss:.4f}, {self.bits_per_byte:.4f} bits per byte)\n"
            f"{self.tokens:,} tokens, {self.bytes:,} bytes, {self.documents:,} documents; windows of {self.window} "
            f"tokens, each {self.stride} further; {self.tokens / self.seconds:,.0f} tokens/s"
        )


class Window(NamedTuple):
    """Tokens that a forward sees, of which those from `first` on are predicted."""

    tokens: list[int]
    first: int


def windows(tokens: Sequence[int], length: int, stride: int) -> Iterator[Window]:
    """The windows of a document, as the module says.

    Example: list("abcdef"), 4, 2: (abcd, 1), (cdef, 2)."""
    done, start = 1, 0
    while done < len(tokens):
        end = min(start + length, len(tokens))
        yield Window(list(tokens[start:end]), done - start)
        done, start = end, start + stride


def read_documents(files: Sequence[Path], field: str) -> list[str]:
    """The texts of files: of .jsonl one per line, in that field; of any other file its whole text.

    Raises:
        ValueError: no such file, a line without a text (with its number), a file that is not UTF-8, or no text."""
    found: list[str] = []
    for file in files:
        if not file.is_file():
            raise ValueError(f"--data: there is no file {file}")
        try:
            content = file.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(f"--data: {file} is no text in UTF-8: {error}") from None
        found += _lines(file, content, field) if file.suffix == ".jsonl" else [content]
    if not any(found):
        raise ValueError(f"--data: there is no text in {', '.join(map(str, files))}")
    return [text for text in found if text]


def _lines(file: Path, content: str, field: str) -> Iterator[str]:
    for number, line in enumerate(content.split("\n"), 1):
        if not line.strip():
            continue
        value = parse_json(line, f"--data: line {number} of {file}")
        if not isinstance(value, dict) or not isinstance(value.get(field), str):
            raise ValueError(f"--data: line {number} of {file} has no text in the field {field!r}; see --text-field")
        yield value[field]


def run_rank(
    config: Config,
    model: str,
    files: list[str],
    field: str,
    tasks: list[str],
    limit: int | None,
    window: int | None,
    stride: int | None,
    batch_size: int,
    dtype: str | None,
    as_json: bool,
    adapters: Sequence[str] = (),
) -> None:
    """One rank's part of the command.

    Raises:
        ValueError: a model, text or task that cannot be used."""
    disable_progress_bar()
    source = find_source(Path(model), adapters)
    context = context_of(source)
    usual = min(context or MOST_WINDOW, MOST_WINDOW) if source.run is None else source.run.data.sequence_length
    length = usual if window is None else window
    if context is not None and length > context:
        raise ValueError(f"--window {length} is more than the {context} tokens that the model sees")
    step = max(length // 2, 1) if stride is None else stride
    if not 0 < step < length:
        raise ValueError(f"--stride {step} must be at least 1 and less than the window of {length} tokens")
    documents = read_documents([Path(file) for file in files], field) if files else []
    loaded = open_model(source, dtype=dtype, max_tokens=batch_size * (length if not tasks else context or length))
    results: dict[str, Any] = {}
    if documents:
        found = perplexity(loaded, source.text, documents, length=length, stride=step, batch_size=batch_size)
        results["perplexity"] = asdict(found)
    if tasks:
        from carpool.serve.eval_tasks import run_tasks

        results["tasks"] = run_tasks(loaded, source.text, tasks, batch_size=batch_size, limit=limit, context=context)
    if dist.is_initialized() and dist.get_rank() > 0:
        return
    if as_json:
        print(json.dumps(results))
        return
    if documents:
        print(found)
    for task, measures in results.get("tasks", {}).items():
        print(f"{task}: " + ", ".join(f"{name} {value:.4f}" for name, value in measures.items()))
    sys.stdout.flush()


@torch.no_grad()
def perplexity(
    model: PreTrainedModel, text: Text, documents: Sequence[str], *, length: int, stride: int, batch_size: int
) -> Perplexity:
    """How well the model predicts these texts. All ranks together, with the same texts.

    Args:
        batch_size: windows of a rank in a forward.

    Raises:
        ValueError: no document has two tokens."""
    several = dist.is_initialized() and dist.get_world_size() > 1
    ranks, rank = (dist.get_world_size(), dist.get_rank()) if several else (1, 0)
    encoded = [text.encode(one) for one in documents]
    # What no window predicts does not count.
    unseen = sum(text.bytes_of(one[0]) for one in encoded)
    size = sum(len(one.encode()) for one in documents) - unseen
    cut = [one for tokens in encoded for one in windows(tokens, length, stride)]
    if not cut:
        raise ValueError("no document has two tokens, so there is nothing to predict")
    loss, device = HeadLoss(model), model.device
    sums = torch.zeros(2, dtype=torch.float64, device=device)
    started = time.perf_counter()
    together = ranks * batch_size
    for start in range(0, len(cut), together):
        mine = cut[start : start + together][rank::ranks]
        ids_BL, labels_BL = _batch(mine or [Window(cut[0].tokens[:2], 2)])
        total, _ = loss(ids_BL.to(device), next_tokens(labels_BL).to(device), use_cache=False)
        sums[0] += total
        sums[1] += int((labels_BL[:, 1:] != IGNORED).sum())
    if several:
        dist.all_reduce(sums)
    total, tokens = sums.tolist()
    seconds = time.perf_counter() - started
    mean, bits = total / tokens, total / size / math.log(2)
    if not mean < 700:  # whose exponential is the largest float64; a guess among all words is at ln(words), about 12
        raise ArithmeticError(
            f"the loss is {mean:g}, so the model computes nonsense: copy or download its weights again"
        )
    return Perplexity(len(documents), int(tokens), size, length, stride, mean, math.exp(mean), bits, seconds)


def _batch(rows: Sequence[Window]) -> tuple[torch.Tensor, torch.Tensor]:
    """(B, L) tokens, padded on the right, where causal attention leaves them alone; and what is predicted."""
    longest = max(len(row.tokens) for row in rows)
    ids_BL = torch.zeros(len(rows), longest, dtype=torch.int64)
    labels_BL = torch.full_like(ids_BL, IGNORED)
    for number, (tokens, first) in enumerate(rows):
        ids_BL[number, : len(tokens)] = torch.tensor(tokens)
        labels_BL[number, first : len(tokens)] = torch.tensor(tokens[first:])
    return ids_BL, labels_BL
