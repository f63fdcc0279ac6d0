"""`carpool bench generate`: how fast a model reads prompts and writes tokens, over the ranks of a machine.

    carpool         non-expert parameters whole on each rank, experts spread (`carpool.serve`), decode steps in a CUDA
                    graph where that is possible
    carpool-eager   the same without graphs
    transformers    Transformers' own `generate`: over ranks its expert parallelism (`all_to_all`) and FSDP2 for
                    non-expert parameters; on one rank the plain model, with its own experts

All read the same random prompts, and choose greedily, as many tokens as were asked for. Rounds begin with all ranks
together, and contenders take turns. Prefill is the time to the first token of each sequence, decoding the time for the
others; the slowest rank counts.

What weights and caches need is predicted before a model is built (`carpool.serve.serve_memory`). What fits nowhere is
refused. Models that do not fit beside each other are built and measured one after the other, and the table says so.

Files: DIR/generate.json, every round and where it ran.
"""

from __future__ import annotations

import gc
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.distributed import DistributedConfig
from transformers.utils.logging import disable_progress_bar

from carpool.bench.bench_settings import GenerateSettings
from carpool.bench.contest import RankBenchmark
from carpool.bench.model.model_contenders import route
from carpool.bench.result_files import Result, print_table, terminal
from carpool.bench.timing import rounds
from carpool.hf.build_model import build_model
from carpool.hf.generation import ROUND, DecodeGraphs, Generated, Sampling, generate
from carpool.metrics.host import slowest
from carpool.planner.search.plan import USABLE
from carpool.serve.serve_memory import needed_bytes
from carpool.serve.served_model import spread_model
from carpool.train.blueprint import Blueprint, model_config
from carpool.train.launch.machine import rank_memory

WARMUP = 1


@dataclass
class Row:
    """A contender.

    Attributes:
        decoding: "CUDA graph", or "eager" and why.
        prefill_ms, decode_ms: of each round; a decode step is one of all sequences.
        same_tokens: the share of all tokens that are the first contender's."""

    label: str
    decoding: str = ""
    prefill_ms: list[float] = field(default_factory=list)
    decode_ms: list[float] = field(default_factory=list)
    same_tokens: float = 1.0


@dataclass
class Case:
    """The sizes, of a rank and at all, and the rows.

    Attributes:
        groups: contenders that took turns with each other."""

    architecture: str
    parameters: int
    num_ranks: int
    batch: int
    prompt: int
    new_tokens: int
    groups: list[list[str]]
    rows: list[Row]

    def prefill_rate(self, row: Row) -> float:
        """Tokens of all ranks per second, at the median."""
        return 1e3 * self.num_ranks * self.batch * self.prompt / statistics.median(row.prefill_ms)

    def decode_rate(self, row: Row) -> float:
        """The same of decoding."""
        return 1e3 * self.num_ranks * self.batch / statistics.median(row.decode_ms)


def measure(settings: GenerateSettings, device: torch.device, command: str) -> list[Case]:
    """The one case. All ranks together.

    Raises:
        ValueError: a model that does not fit into memory by itself."""
    disable_progress_bar()
    assert settings.batch is not None and settings.prompt is not None and settings.dtype is not None
    keys: dict[str, Any] = {"from": settings.model}
    if settings.layers is not None:
        keys["num_hidden_layers"] = settings.layers
    config = model_config(keys)
    blueprint, ranks = Blueprint.of(config), dist.get_world_size()
    models = groups_that_fit(_needs(settings, config), rank_memory(device.type == "cuda", ranks))
    case = Case(
        blueprint.architecture,
        blueprint.size.total,
        ranks,
        settings.batch,
        settings.prompt,
        settings.new_tokens,
        [[name for name in settings.contenders if _kind(name) in group] for group in models],
        [Row(name) for name in settings.contenders],
    )
    generator = torch.Generator().manual_seed(settings.seed + dist.get_rank())
    prompts = torch.randint(blueprint.vocab_size, (settings.batch, settings.prompt), generator=generator).tolist()
    first: list[list[int]] = []
    for group in case.groups:
        rows = [row for row in case.rows if row.label in group]
        first = _measure_group(rows, settings, config, blueprint, prompts, first, device)
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
    return [case]


def _kind(contender: str) -> str:
    """Its model: eagerly and in a graph, it is the same."""
    return contender.partition("-")[0]


def _needs(settings: GenerateSettings, config: PreTrainedConfig) -> dict[str, int]:
    """Bytes of each model on a rank, with a cache for each of its contenders."""
    assert settings.batch is not None and settings.prompt is not None and settings.dtype is not None
    length, needs = settings.prompt + settings.new_tokens, dict[str, int]()
    for name in settings.contenders:
        # A graph reads a cache of a fixed length.
        cached = -(-length // ROUND) * ROUND if name == "carpool" else length
        tokens, caches = settings.batch * settings.prompt, settings.batch * cached
        needed = needed_bytes(config, getattr(torch, settings.dtype), dist.get_world_size(), tokens, caches)
        kind = _kind(name)
        needs[kind] = needs[kind] + needed["cache"] if kind in needs else sum(needed.values())
    return needs


def groups_that_fit(needs: Mapping[str, int], memory: int) -> list[list[str]]:
    """The models that are in memory together: all of them, or each by itself.

    Args:
        needs: bytes of each model.
        memory: bytes of a rank.

    Raises:
        ValueError: a model that does not fit by itself.
    """
    for kind, size in needs.items():
        if size > memory:
            raise ValueError(
                f"{kind} does not fit: a rank needs about {size / 2**30:.1f} GiB for weights and caches, and has "
                f"{memory / 2**30:.1f} GiB; lower --layers, --batch or --prompt, or raise --ranks"
            )
    return [list(needs)] if sum(needs.values()) <= USABLE * memory else [[kind] for kind in needs]


def _measure_group(
    rows: list[Row],
    settings: GenerateSettings,
    config: PreTrainedConfig,
    blueprint: Blueprint,
    prompts: list[list[int]],
    first: list[list[int]],
    device: torch.device,
) -> list[list[int]]:
    """Measure these contenders in turns. `first`: tokens of the first contender of all; empty: this group has it.
    Returns them. When this returns, nothing of the models is left."""
    assert settings.batch is not None and settings.prompt is not None and settings.dtype is not None
    counts, top_k, tokens = blueprint.expert_counts, blueprint.top_k, settings.batch * settings.prompt
    models: dict[str, PreTrainedModel] = {}
    run: dict[str, Callable[[], Generated]] = {}
    graphs: dict[str, DecodeGraphs | None] = {}
    for row in rows:
        kind = _kind(row.label)
        if kind not in models:
            models[kind] = _build(kind, config, getattr(torch, settings.dtype), tokens)
            route(models[kind], counts, top_k, tokens, settings.routing, dist.get_rank(), dist.get_world_size())
        graphs[row.label] = DecodeGraphs() if row.label == "carpool" else None
        sampling = Sampling(max_new_tokens=settings.new_tokens)
        run[row.label] = _run(models[kind], prompts, sampling, graphs[row.label])
    for number, order in rounds(rows, settings.rounds, WARMUP):
        for row in order:
            made = run[row.label]()
            prefill, decode = slowest([made.prefill_seconds, made.decode_seconds], device)
            if number >= 0:
                row.prefill_ms.append(1e3 * prefill)
                row.decode_ms.append(1e3 * decode / (settings.new_tokens - 1))
            first = first or made.tokens
            row.same_tokens = _share_of_equal(made.tokens, first, device)
    for row in rows:
        own = graphs[row.label]
        row.decoding = "eager" if own is None else "CUDA graph" if own.why_not is None else f"eager: {own.why_not}"
    return first


def _build(kind: str, config: PreTrainedConfig, dtype: torch.dtype, tokens: int) -> PreTrainedModel:
    if kind == "carpool":
        return spread_model(config, dtype, tokens)
    ranks = dist.get_world_size()
    spread = DistributedConfig(fsdp_size=ranks, ep_size=ranks, ep_implementation="all_to_all") if ranks > 1 else None
    return build_model(config, distributed_config=spread, dtype=dtype, seed=0).eval()


def _run(
    model: PreTrainedModel, prompts: list[list[int]], sampling: Sampling, graphs: DecodeGraphs | None
) -> Callable[[], Generated]:
    return lambda: generate(model, prompts, sampling, end=(), graphs=graphs)


def _share_of_equal(tokens: list[list[int]], others: list[list[int]], device: torch.device) -> float:
    """Over all ranks."""
    same = torch.tensor(tokens) == torch.tensor(others)
    counts = torch.tensor([int(same.sum()), same.numel()], dtype=torch.float64, device=device)
    dist.all_reduce(counts)
    return float(counts[0] / counts[1])


def show(result: Result) -> None:
    """The table."""
    console: Console = terminal(140)
    for case in result.cases:
        title = (
            f"{case.architecture}, {case.parameters / 1e9:.2f} B parameters, {case.num_ranks} ranks, each "
            f"{case.batch} prompts of {case.prompt} tokens, {case.new_tokens} new tokens; {result.where}"
        )
        headings = ("", "prefill ms", "tokens/s", "decode step ms", "tokens/s", "same tokens", "decode steps")
        cells = [
            (
                row.label,
                f"{statistics.median(row.prefill_ms):,.1f}",
                f"{case.prefill_rate(row):,.0f}",
                f"{statistics.median(row.decode_ms):,.2f}",
                f"{case.decode_rate(row):,.0f}",
                f"{100 * row.same_tokens:.1f} %",
                row.decoding,
            )
            for row in case.rows
        ]
        print_table(console, title, headings, cells)
        if len(case.groups) > 1:
            told = "; then ".join(", ".join(group) for group in case.groups)
            console.print(f"NOT INTERLEAVED, because the models do not fit into memory together: {told}.")


BENCHMARK = RankBenchmark("generate", GenerateSettings, measure, show)
