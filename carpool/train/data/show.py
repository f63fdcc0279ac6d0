"""`carpool train --show-examples`: what a run would learn, token by token, before it does.

Tokens have two shades in turns, so that one sees where each ends. Those that the loss is of are green, and stand
between » and «, which are there without colours too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

from rich.console import Console
from rich.text import Text

from carpool.train.config.schema import Config
from carpool.train.data.corpus import corpus_of
from carpool.train.data.mixture import train_sequences
from carpool.train.data.sequences import IGNORED
from carpool.train.data.tokenizer import tokenizer_of

_LEARNED = ("black on green", "black on bright_green")
_GIVEN = ("default on grey23", "default on grey35")


def show(config: Config, count: int, console: Console) -> None:
    """Print the first examples of `data.train`, as many as asked, as they are trained on; of a stream, sequences; of a
    mixture, what a run begins with.

    Raises:
        ValueError: as `carpool.train.data.corpus.prepare`.
    """
    data = config.data
    if data.streaming:  # the begin of it
        data = data.model_copy(update={"streaming": False, "max_bytes": 1 << 20, "eval": None, "eval_fraction": 0.0})
    tokenizer = tokenizer_of(config)
    corpora = corpus_of(config.model_copy(update={"data": data}), tokenizer)
    # One example in a sequence, in the order of the files.
    streams = all(corpus.train_marks is None for corpus in corpora.sources)
    sequences = train_sequences(corpora, data if streams else data.model_copy(update={"packing": "off"}))
    decode = partial(tokenizer.decode, special=True)
    order = sequences.order(config.training.seed, 0) if sequences.names else range(len(sequences))
    for number, place in enumerate(order[:count]):
        ids, labels, _ = sequences[int(place)]
        # Nothing predicts the first token, although a stream has a label there.
        learned = [False, *(labels[1:] != IGNORED).tolist()]
        title = f"example {number + 1}: {len(ids)} tokens, {sum(learned)} learned"
        console.print(title, style="bold", highlight=False)
        console.print(_colored(ids.tolist(), learned, decode))
    console.print(train_sequences(corpora, data).describe(), style="bold", highlight=False)


def _colored(ids: list[int], learned: list[bool], decode: Callable[[Sequence[int]], str]) -> Text:
    text, before = Text(), False
    for number, (piece, mark) in enumerate(_pieces(ids, learned, decode)):
        if mark != before:
            text.append("»" if mark else "«", style="bold")
        text.append(piece, style=(_LEARNED if mark else _GIVEN)[number % 2])
        before = mark
    if before:
        text.append("«", style="bold")
    return text


def _pieces(ids: list[int], learned: list[bool], decode: Callable[[Sequence[int]], str]) -> Iterator[tuple[str, bool]]:
    """The text of each token; of a character that takes several, of all of them."""
    held: list[int] = []
    for token, mark in zip(ids, learned, strict=True):
        held.append(token)
        text = decode(held)
        # U+FFFD stands for a character that is not whole; none takes more than a few tokens.
        if text.endswith("\ufffd") and len(held) < 8:
            continue
        yield text, mark
        held = []
    if held:
        yield decode(held), learned[-1]
