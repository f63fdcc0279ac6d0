"""Text from a model of Transformers whose experts are spread over ranks: `model.generate`, on all ranks together.

Attention is data-parallel: each rank continues prompts of its own and has their keys and values. Experts are on all
ranks, so every forward is a collective, and every rank takes part until the last sequence anywhere has ended:

    rank 0   prompts of 5 and 9 tokens      one prefill, then a token of each sequence per forward
    rank 1   a prompt of 3 tokens           the same forwards; with fewer sequences left, they are still called
    rank 2   nothing                        continues one padding token, which nobody reads

Transformers' own loop does that (`synced_gpus`). Two things are ours: a step on a GPU may be a CUDA graph, and a token
is drawn by a number that depends on the seed, the prompt's number and the step alone, so a text is the same on any
number of ranks.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_leaves, tree_map_only
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    StaticCache,
    StoppingCriteria,
    StoppingCriteriaList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)
from transformers.cache_utils import StaticLayer

from carpool.experts.host_experts import host_experts
from carpool.hf.seam.expert_rides import rides, why_experts_wait
from carpool.kernels.capture import capturing
from carpool.planner.candidate import PLANS_OF


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen. ValueError for a value that cannot be.

    Attributes:
        max_new_tokens: of each sequence; the same on all ranks.
        temperature: 0 is greedy: always the likeliest token.
        top_k: only the k likeliest; None: all.
        top_p: only the likeliest whose probabilities sum up to this; None: all.
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
    """What `generate` made on this rank: the new tokens of each of its prompts, up to the first that ends a text; how
    many tokens were read and made, without padding; seconds until the first new token of each sequence, and for the
    others."""

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
        prompts: tokens; none of them empty, or ValueError.
        sampling: the same on all ranks.
        end: tokens that end a text.
        pad: any token of the vocabulary.
        numbers: of the prompts among those of all ranks, for the draws. None: their places here.
        vocabulary: tokens from here on are never chosen, as of a padded vocabulary. None: all may be.
        streamer: of Transformers, for one prompt.
        graphs: decode steps are CUDA graphs; None: they are not.
        stop: called after each token; True ends all texts of this rank.
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
    tokens = [next((row[:place] for place, token in enumerate(row) if token in end), row) for row in rows]
    return Generated(
        tokens,
        sum(map(len, prompts)),
        # The token that ended a text was made, too.
        sum(min(len(one) + 1, len(row)) for one, row in zip(tokens, rows, strict=True)),
        clock.first - started,
        finished - clock.first,
    )


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


# ---------------------------------------------------------------------------------------------------------------------
# Decode steps as CUDA graphs: one launch for a whole forward of one token per sequence.
#
#     graphs = DecodeGraphs()
#     with graphs.steps(model, ids_BL, max_new_tokens) as cache:      # {} or {"past_key_values": a static cache}
#         model.generate(ids_BL, ..., **cache)
#
# Transformers asks the model what it shall call in each decode step with a static cache (`get_compiled_call`), with
# tensors of fixed sizes. For each pair of a batch size and a cache length (rounded up), the first decode step is eager,
# the second is captured, and all are replayed from then on. So each step runs one forward on each rank, whoever
# captures. Cache and graph serve later prompts of the same sizes. A model that cannot be captured decodes eagerly, and
# `why_not` says why.

log = logging.getLogger("carpool")

# Cache lengths are multiples of it.
ROUND = 256


class DecodeGraphs:
    """The caches and graphs of one model.

    Args:
        capture: captures what a function does and returns (how to do it again, what it returned).

    Attributes:
        why_not: why steps are no graphs; None while they are, or before the first."""

    def __init__(self, capture: Callable[[Callable[[], Any]], tuple[Callable[[], None], Any]] | None = None) -> None:
        self._capture = capture or _capture
        self._steps: dict[tuple[int, int], _Step] = {}
        self.why_not: str | None = None

    @contextmanager
    def steps(self, model: Any, ids_BL: torch.Tensor, max_new_tokens: int) -> Iterator[dict[str, Any]]:
        """Inside, decode steps of `model.generate` on prompts of this shape are a graph. Yields arguments for it."""
        self.why_not = self.why_not or why_not(model)
        if self.why_not is not None:
            yield {}
            return
        length = -(-(ids_BL.shape[1] + max_new_tokens) // ROUND) * ROUND
        key = len(ids_BL), length
        if key not in self._steps:
            # Memory is reckoned for one cache, and old sizes hardly come back: a chat grows, rounds get shorter.
            self._steps.clear()
            cache = StaticCache(config=model.config.get_text_config(decoder=True), max_cache_len=length)
            self._steps[key] = _Step(self, model, cache)
        step = self._steps[key]
        step.cache.reset()
        model.get_compiled_call = lambda _: step
        try:
            yield {"past_key_values": step.cache}
        finally:
            del model.get_compiled_call

    def capture(self, forward: Callable[[], Any]) -> tuple[Callable[[], None], Any] | None:
        """As the function that was given; None, and the reason is kept, if it fails."""
        try:
            return self._capture(forward)
        except RuntimeError as error:
            self.why_not = f"the step cannot be captured: {str(error).splitlines()[0]}"
            log.warning("decode steps run eagerly: %s", self.why_not)
            return None


def why_not(model: Any) -> str | None:
    """Why decode steps of this model cannot be captured, as far as can be told before; None: nothing speaks against it.
    Its transports have been made."""
    if model.device.type != "cuda":
        return "there is no GPU"
    if host_experts(model) is not None:
        return "experts come from host memory"
    for own in rides(model).values():
        if own.compute is None:
            return f"{own.name} runs its own forward"
        name = own.requested if own.transport is None else own.transport.name
        if not getattr(own.transport, "graphable", False):
            return f"the transport {name} asks the host how many rows travel"
        if own.reads_plans:
            return PLANS_OF.format(name)
        if reason := why_experts_wait(own):
            return reason
    return why_no_static_cache(model)


def why_no_static_cache(model: Any) -> str | None:
    """Why a static cache of this model cannot be in a graph; None if it can."""
    config = model.config.get_text_config(decoder=True)
    layers = StaticCache(config=config, max_cache_len=ROUND).layers
    if other := next((layer for layer in layers if type(layer) is not StaticLayer), None):
        return f"the host counts what a {type(other).__name__} of its cache holds"
    return None


class _Step:
    """What `generate` calls in place of the model, for one batch size and one cache length."""

    def __init__(self, graphs: DecodeGraphs, model: Any, cache: StaticCache) -> None:
        self.graphs, self.model, self.cache = graphs, model, cache
        self._warm = False
        self._replay: Callable[[], None] | None = None
        self._inputs: list[torch.Tensor] = []
        self._output: Any = None

    def __call__(self, **given: Any) -> Any:
        if self.graphs.why_not is not None or not self._warm:
            self._warm = True
            return self.model(**given)
        if self._replay is None:
            fixed = tree_map_only(torch.Tensor, torch.Tensor.clone, given)
            self._inputs = _tensors(fixed)
            captured = self.graphs.capture(lambda: self.model(**fixed))
            if captured is None:
                return self.model(**given)
            self._replay, self._output = captured
        for mine, value in zip(self._inputs, _tensors(given), strict=True):
            mine.copy_(value)
        self._replay()
        return self._output


def _tensors(given: dict[str, Any]) -> list[torch.Tensor]:
    """All tensors of it, in order. Masks are a dictionary where layers differ in what they see."""
    return [value for value in tree_leaves(given) if isinstance(value, torch.Tensor)]


def _capture(forward: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
    graph = torch.cuda.CUDAGraph()
    with capturing(graph):
        output = forward()
    return graph.replay, output
