"""`carpool generate`: the continuations of prompts, in batches, over ranks."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import GenerationConfig, PreTrainedModel
from transformers.utils.logging import disable_progress_bar

from carpool.experts.host_experts import host_experts
from carpool.hf.generation import DecodeGraphs, Generated, Sampling
from carpool.hf.generation import generate as continue_prompts
from carpool.parallel.ranks import gather, rank, world
from carpool.serve.prompts import Prompt, Text, check_length, deal, encode
from carpool.serve.serve_memory import ExpertTier, what_came
from carpool.serve.served_model import Source, find_source, open_model, use_adapter
from carpool.train.config.schema import Config

# If nobody says.
MOST_NEW_TOKENS = 200


@dataclass(frozen=True)
class Speed:
    """Of all ranks: tokens of theirs, in the seconds of the slowest."""

    prompt_tokens: int = 0
    prefill_seconds: float = 0.0
    decoded_tokens: int = 0
    decode_seconds: float = 0.0

    def __add__(self, other: Speed) -> Speed:
        return Speed(
            self.prompt_tokens + other.prompt_tokens,
            self.prefill_seconds + other.prefill_seconds,
            self.decoded_tokens + other.decoded_tokens,
            self.decode_seconds + other.decode_seconds,
        )

    @classmethod
    def of_ranks(cls, made: Sequence[Generated]) -> Speed:
        """Of one batch. The first token of each sequence is of the prefill."""
        return cls(
            sum(one.prompt_tokens for one in made),
            max(one.prefill_seconds for one in made),
            sum(one.new_tokens - len(one.tokens) for one in made),
            max(one.decode_seconds for one in made),
        )

    def __str__(self) -> str:
        def part(name: str, tokens: int, seconds: float) -> str:
            return f"{name} {tokens:,} tokens in {seconds:.2f} s: {tokens / max(seconds, 1e-9):,.0f} tokens/s"

        text = part("prefill", self.prompt_tokens, self.prefill_seconds)
        if self.decoded_tokens:
            text += "; " + part("decode", self.decoded_tokens, self.decode_seconds)
        return text


def run_rank(
    config: Config,
    model: str,
    prompts: list[Prompt],
    options: dict[str, Any],
    batch_size: int,
    dtype: str | None,
    out: str | None,
    as_json: bool,
    experts: dict[str, Any] | None = None,
    adapters: Sequence[str] = (),
) -> None:
    """One rank's part of the command.

    Args:
        options: of `Sampling`; what is None is taken from the checkpoint.
        out: a file for JSON lines, written by rank 0. None: the terminal.
        as_json: JSON lines there, too; otherwise texts alone.
        experts: of `ExpertTier`, where they are; None: on the device.
        adapters: as of `find_source`; a prompt's "adapter" names one of them, or is null.

    Raises:
        ValueError: a model or prompts that cannot be used.
    """
    disable_progress_bar()
    source = find_source(Path(model), adapters)
    text, main = source.text, rank() == 0
    tokens, sampling = ready(source, prompts, options)
    first = next(iter(source.adapters), None)
    wanted = [prompt.get("adapter", first) for prompt in prompts]
    for name in filter(None, wanted):
        source.number_of(name)
    batch_size = min(batch_size, -(-len(prompts) // world()))
    longest = max(map(len, tokens))
    loaded = open_model(
        source,
        dtype=dtype,
        max_tokens=batch_size * longest,
        cached_tokens=batch_size * (longest + sampling.max_new_tokens),
        experts=ExpertTier(**(experts or {})),
    )
    answers, speed = [[0]] * len(prompts), Speed()
    for adapter in dict.fromkeys(wanted):
        if wanted != [first] * len(wanted):
            use_adapter(loaded, source, adapter)
        graphs, mine = DecodeGraphs(), [number for number, one in enumerate(wanted) if one == adapter]
        asked = [tokens[number] for number in mine]
        news, took = answer(loaded, text, asked, sampling, batch_size=batch_size, graphs=graphs)
        speed += took
        for number, new in zip(mine, news, strict=True):
            answers[number] = new
    if not main:
        return
    texts = [text.decode(one) for one in answers]
    lines = [
        json.dumps({**prompt, "text": made, "prompt_tokens": len(read), "new_tokens": len(new)}, ensure_ascii=False)
        for prompt, made, read, new in zip(prompts, texts, tokens, answers, strict=True)
    ]
    if out is not None:
        try:
            Path(out).write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
        except OSError:
            print("\n".join(lines))  # what was made is not lost with a disk that is full
            raise
    elif as_json:
        print("\n".join(lines))
    else:
        for prompt, made in zip(prompts, texts, strict=True):
            print(prompt.get("prompt", "") + made)
    decoding = "decode steps are CUDA graphs" if graphs.why_not is None else f"decode steps are eager: {graphs.why_not}"
    print(f"{speed} ({decoding})", file=sys.stderr, flush=True)
    if (away := host_experts(loaded)) is not None:
        print(what_came(away), file=sys.stderr, flush=True)


def ready(source: Source, prompts: list[Prompt], options: dict[str, Any]) -> tuple[list[list[int]], Sampling]:
    """The tokens of each prompt, and how they are continued. `options`: as `run_rank`.

    Raises:
        ValueError: prompts without a template, or longer than the model's context."""
    context, tokens = context_of(source), encode(prompts, source.text)
    if options["max_new_tokens"] is None:
        left = MOST_NEW_TOKENS if context is None else context - max(map(len, tokens))
        options = options | {"max_new_tokens": max(1, min(MOST_NEW_TOKENS, left))}
    sampling = sampling_of(source, options)
    for number, one in enumerate(tokens, 1):
        what = f"prompt {number}" if len(tokens) > 1 else "the prompt"
        check_length(what, len(one), sampling.max_new_tokens, context)
    return tokens, sampling


def answer(
    model: PreTrainedModel,
    text: Text,
    prompts: Sequence[Sequence[int]],
    sampling: Sampling,
    *,
    batch_size: int,
    graphs: DecodeGraphs | None = None,
) -> tuple[list[list[int]], Speed]:
    """The new tokens of all prompts, on all ranks, and how fast they were made. All ranks together.

    Args:
        prompts: the same on all ranks.
        batch_size: of a rank, at most.
    """
    answers: list[list[int]] = [[] for _ in prompts]
    speed = Speed()
    for one in deal([len(prompt) for prompt in prompts], world(), batch_size):
        mine = one.of_rank[rank()]
        made = continue_prompts(
            model,
            [prompts[number] for number in mine],
            sampling,
            end=text.end,
            pad=text.end[0] if text.end else 0,
            numbers=mine or [0],
            vocabulary=text.vocabulary,
            graphs=graphs,
        )
        of_ranks = gather(made)
        speed += Speed.of_ranks(of_ranks)
        for numbers, theirs in zip(one.of_rank, of_ranks, strict=True):
            for number, new in zip(numbers, theirs.tokens, strict=True):
                answers[number] = new
    return answers, speed


def sampling_of(source: Source, options: dict[str, Any]) -> Sampling:
    """`Sampling` from what was asked for, and, where nothing was, from the checkpoint's generation_config.json: its
    temperature, top_k and top_p if it samples; otherwise temperature 0.8.

    Raises:
        ValueError: as `Sampling`."""
    defaults: dict[str, Any] = {"temperature": 0.8}
    folder = source.build if isinstance(source.build, Path) else source.path
    if (folder / "generation_config.json").is_file():
        own = GenerationConfig.from_pretrained(folder, local_files_only=True)
        if own.do_sample:
            defaults = {"temperature": own.temperature or 1.0, "top_k": own.top_k or None, "top_p": own.top_p}
    return Sampling(**(defaults | {name: value for name, value in options.items() if value is not None}))


def context_of(source: Source) -> int | None:
    """The most tokens that the model sees; None: it does not say."""
    context = getattr(source.config, "max_position_embeddings", None)
    return context if isinstance(context, int) and context > 0 else None
