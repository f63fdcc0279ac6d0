"""Text from a model of Transformers whose experts are spread over ranks: `model.generate`, on all ranks together.

Attention is data-parallel: each rank continues prompts of its own and keeps their keys and values. Experts are on all
ranks, so every forward is a collective, and every rank takes part until the last sequence anywhere has ended:

    rank 0   prompts of 5 and 9 tokens      one prefill, then a token of each sequence per forward
    rank 1   a prompt of 3 tokens           the same forwards; with fewer sequences left, they are still called
    rank 2   nothing                        continues one padding token, which nobody reads

Transformers' own loop does that (`synced_gpus`), with its caches, its logits processors and its ends. Two things are
ours. What a step calls on a GPU may be a CUDA graph (`carpool.hf.generation.decode_graph`). And a token is drawn by a
number that depends on the seed, the prompt's number and the step alone, so a text is the same on any number of ranks.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    StoppingCriteria,
    StoppingCriteriaList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from carpool.experts.host_experts import host_experts
from carpool.hf.generation.decode_graph import DecodeGraphs


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen.

    Attributes:
        max_new_tokens: of each sequence; the same on all ranks.
        temperature: 0 is greedy: always the likeliest token.
        top_k: only the k likeliest; None: all.
        top_p: only the likeliest whose probabilities sum up to this; None: all.
        seed: of the draws.

    Raises:
        ValueError: a value that cannot be.
    """

    max_new_tokens: int = 200
    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens is {self.max_new_tokens}, but at least one token must be made")
        if self.temperature < 0:
            raise ValueError(f"temperature is {self.temperature:g}; give 0 (always the likeliest token) or more")
        if self.top_k is not None and self.top_k < 1:
            raise ValueError(f"top_k is {self.top_k}; give 1 or more, or leave it out")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise ValueError(f"top_p is {self.top_p:g}; give more than 0 and at most 1, or leave it out")


@dataclass(frozen=True)
class Generated:
    """What `generate` made on this rank.

    Attributes:
        tokens: the new tokens of each of its prompts, up to the first that ends a text, without that one.
        prompt_tokens, new_tokens: how many tokens were read and made, padding left out.
        prefill_seconds: until the first new token of each sequence was there.
        decode_seconds: for the others.
    """

    tokens: list[list[int]]
    prompt_tokens: int
    new_tokens: int
    prefill_seconds: float
    decode_seconds: float


@torch.no_grad()
def generate(
    model: Any,
    prompts: Sequence[Sequence[int]],
    sampling: Sampling,
    *,
    end: Sequence[int],
    pad: int = 0,
    numbers: Sequence[int] | None = None,
    vocabulary: int | None = None,
    streamer: Any = None,
    graphs: DecodeGraphs | None = None,
    stop: Callable[[], bool] | None = None,
) -> Generated:
    """Continue this rank's prompts. All ranks together, each with prompts of its own, or with none.

    Args:
        model: a causal language model of Transformers.
        prompts: tokens; none of them empty.
        sampling: the same on all ranks.
        end: tokens that end a text.
        pad: any token of the vocabulary.
        numbers: of the prompts among those of all ranks, for the draws. None: their places here.
        vocabulary: tokens from here on are never chosen: a vocabulary padded to a round size has places that mean
            nothing. None: all may be.
        streamer: of Transformers, for one prompt.
        graphs: decode steps are CUDA graphs; None: they are not.
        stop: asked after each token; True ends all texts of this rank.

    Raises:
        ValueError: an empty prompt.
    """
    if not all(prompts):
        raise ValueError("a prompt has no tokens: give some text, or the token that begins one")
    device = model.device
    own = list(prompts) or [[pad]]
    length = max(map(len, own))
    ids_BL = torch.tensor([[pad] * (length - len(one)) + list(one) for one in own], device=device)
    mask_BL = torch.tensor([[0] * (length - len(one)) + [1] * len(one) for one in own], device=device)
    processors = _processors(sampling, numbers or range(len(own)), length, vocabulary, device)
    if (away := host_experts(model)) is not None:
        away.begin()
    clock = _Clock(stop if prompts else lambda: True)
    several = dist.is_initialized() and dist.get_world_size() > 1
    training = model.training
    model.eval()
    # Before the first forward, so that all ranks begin to count together.
    if several:
        dist.barrier()
    started = time.perf_counter()
    plain: AbstractContextManager[dict[str, Any]] = nullcontext({})
    with plain if graphs is None else graphs.steps(model, ids_BL, sampling.max_new_tokens) as cache:
        out_BL = model.generate(
            ids_BL,
            attention_mask=mask_BL,
            # Drawn by the processors; None, so that the checkpoint's own do not count again.
            do_sample=False,
            temperature=None,
            top_k=None,
            top_p=None,
            num_beams=1,
            max_new_tokens=sampling.max_new_tokens,
            eos_token_id=list(end) or None,
            pad_token_id=pad,
            use_cache=True,
            logits_processor=processors,
            stopping_criteria=StoppingCriteriaList([clock]),
            synced_gpus=several,
            streamer=streamer,
            **cache,
        )
    finished = time.perf_counter()
    model.train(training)
    rows = out_BL[: len(prompts), length:].tolist()
    tokens = [_until_end(row, end) for row in rows]
    return Generated(
        tokens,
        sum(map(len, prompts)),
        # The token that ended a text was made, too.
        sum(min(len(one) + 1, len(row)) for one, row in zip(tokens, rows, strict=True)),
        clock.first - started,
        finished - clock.first,
    )


def _until_end(row: list[int], end: Sequence[int]) -> list[int]:
    return next((row[:place] for place, token in enumerate(row) if token in end), row)


def _processors(
    sampling: Sampling, numbers: Sequence[int], length: int, vocabulary: int | None, device: torch.device
) -> LogitsProcessorList:
    """What Transformers applies to logits, in its order; the last one draws."""
    made = LogitsProcessorList()
    if vocabulary is not None:
        made.append(_Without(vocabulary))
    if sampling.temperature > 0:
        made.append(TemperatureLogitsWarper(sampling.temperature))
        if sampling.top_k is not None:
            made.append(TopKLogitsWarper(sampling.top_k))
        if sampling.top_p is not None and sampling.top_p < 1:
            made.append(TopPLogitsWarper(sampling.top_p))
        made.append(_Draw(sampling, numbers, length, device))
    return made


class _Without(LogitsProcessor):
    """Tokens from `vocabulary` on are never chosen."""

    def __init__(self, vocabulary: int) -> None:
        self.vocabulary = vocabulary

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        scores[:, self.vocabulary :] = -torch.inf
        return scores


class _Draw(LogitsProcessor):
    """Leaves one token of each sequence, drawn by a number in [0, 1): the first whose cumulative probability is above.

    Sequence n has the numbers of a generator seeded by (seed, n), one for each step."""

    def __init__(self, sampling: Sampling, numbers: Sequence[int], length: int, device: torch.device) -> None:
        self.length = length
        draws = []
        for number in numbers:
            generator = torch.Generator().manual_seed((sampling.seed * 1_000_003 + number) % 2**63)
            draws.append(torch.rand(sampling.max_new_tokens, generator=generator, dtype=torch.float64))
        self.draw_BN = torch.stack(draws).to(device)

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        total_BV = scores.softmax(-1).double().cumsum(-1)
        draw_B1 = self.draw_BN[:, input_ids.shape[1] - self.length, None] * total_BV[:, -1:]
        token_B1 = torch.searchsorted(total_BV, draw_B1, right=True).clamp_(max=scores.shape[1] - 1)
        return torch.full_like(scores, -torch.inf).scatter_(1, token_B1, 0.0)


class _Clock(StoppingCriteria):
    """Notes when the first token was there. `stop`: asked after each token; True: all sequences are done."""

    def __init__(self, stop: Callable[[], bool] | None) -> None:
        self.stop, self.first = stop, 0.0

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        if not self.first:
            if input_ids.is_cuda:
                torch.cuda.synchronize()
            self.first = time.perf_counter()
        done = self.stop is not None and self.stop()
        return torch.full((len(input_ids),), done, device=input_ids.device)
