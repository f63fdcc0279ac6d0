"""`carpool chat`: a conversation, answered token by token.

Rank 0 reads and writes. The others wait for each turn's tokens, and take part in its forwards. Each turn begins with
the whole conversation, as the checkpoint's own chat template writes it.

Ctrl-C ends an answer, which stays as far as it came; before the first word of a line it ends the conversation. With
several ranks, whose launcher hears it too, it ends everything.
"""

from __future__ import annotations

import signal
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist
from transformers import TextStreamer
from transformers.utils.logging import disable_progress_bar

from carpool.hf.generation import DecodeGraphs, Generated, generate
from carpool.serve.generate_answers import Speed, context_of, sampling_of
from carpool.serve.prompts import Text, check_length
from carpool.serve.served_model import find_source, open_model, use_adapter
from carpool.train.config.schema import Config

HELP = "/reset forgets the conversation, /adapter NAME takes another adapter, or none, /exit ends it"
# What a turn may have where the model's context is longer.
MOST_TOKENS = 32768
# Of an answer, if nobody says.
MOST_NEW_TOKENS = 1024
# Ranks wait that long for somebody to type.
PATIENCE = timedelta(days=7)


class Conversation:
    """What was said so far.

    Args:
        system: the system prompt; None: none.
        context: the most tokens of a turn with its answer.

    Attributes:
        adapter, adapters: the one that answers, None: the model alone; and all of them, by name."""

    adapter: str | None = None
    adapters: tuple[str, ...] = ()

    def __init__(self, text: Text, system: str | None, max_new_tokens: int, context: int) -> None:
        self.text, self.max_new_tokens, self.context = text, max_new_tokens, context
        self._first = [] if system is None else [{"role": "system", "content": system}]
        self.reset()

    def reset(self) -> None:
        """Forget all but the system prompt."""
        self.messages = list(self._first)

    def take(self, name: str) -> None:
        """Another adapter answers from now on; "none": the model alone. Says which does."""
        if name and name not in (*self.adapters, "none"):
            print(f"there is no adapter {name}", file=sys.stderr)
        elif name:
            self.adapter = None if name == "none" else name
        print(f"adapter: {self.adapter or 'none'}; there are {', '.join(self.adapters) or 'none'}", file=sys.stderr)

    def ask(self, words: str) -> list[int]:
        """The tokens of the conversation with one more message of the user's. It stays as it was until `add`.

        Raises:
            ValueError: no chat template, or the conversation has become too long."""
        tokens = self.text.chat([*self.messages, {"role": "user", "content": words}])
        check_length("the conversation", len(tokens), self.max_new_tokens, self.context)
        return tokens

    def add(self, words: str, answer: str) -> None:
        """What was asked, and the answer."""
        self.messages += [{"role": "user", "content": words}, {"role": "assistant", "content": answer}]


def run_rank(
    config: Config,
    model: str,
    system: str | None,
    options: dict[str, Any],
    dtype: str | None,
    adapters: Sequence[str] = (),
) -> None:
    """One rank's part of the command.

    Raises:
        ValueError: a model that cannot be used, or has no chat template."""
    disable_progress_bar()
    source = find_source(Path(model), adapters)
    most = min(context_of(source) or MOST_TOKENS, MOST_TOKENS)
    if options["max_new_tokens"] is None:
        options = options | {"max_new_tokens": max(1, min(MOST_NEW_TOKENS, most // 2))}
    sampling = sampling_of(source, options)
    talk = Conversation(source.text, system, sampling.max_new_tokens, most)
    talk.ask("")  # an error now, and not after the weights
    loaded = open_model(source, dtype=dtype, max_tokens=most, cached_tokens=most)
    # Of each adapter.
    graphs: dict[str | None, DecodeGraphs] = defaultdict(DecodeGraphs)
    text, talk.adapters, talk.adapter = source.text, tuple(source.adapters), next(iter(source.adapters), None)

    def reply(tokens: list[list[int]], adapter: str | None, **kwargs: Any) -> Generated:
        if source.adapters:
            use_adapter(loaded, source, adapter)
        kwargs |= {"end": text.end, "vocabulary": text.vocabulary, "graphs": graphs[adapter]}
        return generate(loaded, tokens, sampling, **kwargs)

    several = dist.is_initialized() and dist.get_world_size() > 1
    group = dist.new_group(backend="gloo", timeout=PATIENCE) if several else None
    if several and dist.get_rank() > 0:
        while (turn := _from_rank_0(None, group)) is not None:
            reply([], *turn)
        return
    speed = Speed()
    streamer: Any = TextStreamer(source.text.tokenizer, skip_prompt=True, skip_special_tokens=True)
    try:
        for words, tokens in _turns(talk):
            _from_rank_0((talk.adapter,), group)
            with _until_interrupted(alone=not several) as stop:
                made = reply([tokens], talk.adapter, streamer=streamer, stop=stop)
            talk.add(words, source.text.decode(made.tokens[0]))
            speed += Speed.of_ranks([made])
    finally:
        _from_rank_0(None, group)
    print(speed, file=sys.stderr, flush=True)


def _from_rank_0(turn: tuple[str | None] | None, group: dist.ProcessGroup | None) -> tuple[str | None] | None:
    """What rank 0 has: the adapter of a turn, or None at the end. Collective."""
    told = [turn]
    if group is not None:
        dist.broadcast_object_list(told, src=0, group=group)
    return told[0]


@contextmanager
def _until_interrupted(alone: bool) -> Iterator[Callable[[], bool] | None]:
    """Inside, Ctrl-C raises nothing; what this yields then returns True. Not unless this process is `alone`."""
    if not alone:
        yield None
        return
    heard = [False]

    def hear(*_: Any) -> None:
        heard[0] = True

    before = signal.signal(signal.SIGINT, hear)
    try:
        yield lambda: heard[0]
    finally:
        signal.signal(signal.SIGINT, before)


def _turns(talk: Conversation) -> Iterator[tuple[str, list[int]]]:
    """What the user says, and the conversation with it as tokens, until the end of the input or /exit."""
    for line in _lines():
        words = line.strip()
        if words == "/exit":
            return
        if words == "/reset":
            talk.reset()
        elif words.split()[:1] == ["/adapter"]:
            talk.take(words.removeprefix("/adapter").strip())
        elif words.startswith("/"):
            print(f"there is no {words.split()[0]}; {HELP}", file=sys.stderr)
        elif words:
            try:
                tokens = talk.ask(words)
            except ValueError as error:
                print(f"{error}; or start anew with /reset", file=sys.stderr)
                continue
            yield words, tokens


def _lines() -> Iterator[str]:
    """Lines of the input. A terminal gets a prompt, and the keys of readline."""
    if not sys.stdin.isatty():
        yield from sys.stdin
        return
    import readline  # noqa: F401

    print(HELP, file=sys.stderr)
    while True:
        try:
            yield input("> ")
        except (EOFError, KeyboardInterrupt):
            print(file=sys.stderr)
            return
