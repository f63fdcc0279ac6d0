"""Decode steps as CUDA graphs: one launch for a whole forward of one token per sequence.

    graphs = DecodeGraphs()
    with graphs.steps(model, ids_BL, max_new_tokens) as cache:      # {} or {"past_key_values": a static cache}
        model.generate(ids_BL, ..., **cache)

Transformers asks the model for what it shall call in each decode step with a static cache (`get_compiled_call`), and
gives it tensors whose sizes never change. Here that is a graph. For each pair of a batch size and a cache length:

    prefill       eager
    token 2       eager, which warms up
    token 3       captured, which runs nothing, then replayed
    token 4 ...   tensors are copied to where the graph reads them, and it is replayed

So each step runs one forward on each rank, whoever captures, and ranks may have other sizes. A cache length is rounded
up, and cache and graph are used again by later prompts of the same sizes; they go when other sizes come.

A model that cannot be captured decodes eagerly with the usual cache, and `why_not` says why: a transport that asks the
host, experts that run the model's own forward, layers whose cache is more than keys and values of all tokens, or
whatever PyTorch says during the capture.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import StaticCache
from transformers.cache_utils import StaticLayer

from carpool.experts.host_experts import host_experts
from carpool.hf.seam.rides import rides, why_experts_wait
from carpool.kernels.capture import capturing

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
        if not getattr(own.transport, "graphable", False):
            name = own.requested if own.transport is None else own.transport.name
            return f"the transport {name} asks the host how many rows travel"
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
            fixed = _clones(given)
            self._inputs = _tensors(fixed)
            captured = self.graphs.capture(lambda: self.model(**fixed))
            if captured is None:
                return self.model(**given)
            self._replay, self._output = captured
        for mine, value in zip(self._inputs, _tensors(given), strict=True):
            mine.copy_(value)
        self._replay()
        return self._output


def _clones(given: dict[str, Any]) -> dict[str, Any]:
    """The same with tensors of their own. Masks are a dictionary where layers differ in what they see."""
    return {
        name: _clones(value) if type(value) is dict else value.clone() if isinstance(value, torch.Tensor) else value
        for name, value in given.items()
    }


def _tensors(given: dict[str, Any]) -> list[torch.Tensor]:
    """All tensors of it, in order."""
    found: list[torch.Tensor] = []
    for value in given.values():
        if type(value) is dict:
            found += _tensors(value)
        elif isinstance(value, torch.Tensor):
            found.append(value)
    return found


def _capture(forward: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
    graph = torch.cuda.CUDAGraph()
    with capturing(graph):
        output = forward()
    return graph.replay, output
