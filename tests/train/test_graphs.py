"""Which steps are captured as CUDA graphs. What a capture computes needs GPUs: tests/gpu/test_graphs_gpu.py."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd import profiler

from carpool.activations import Arena
from carpool.activations.arrivals import HiddenStates
from carpool.activations.offload import Offloader
from carpool.hf import step_graphs as graphs
from carpool.hf.seam import expert_rides
from carpool.hf.step_graphs import StepGraphs
from carpool.optim import AdamW
from carpool.optim import in_backward as consumed
from carpool.optim.in_backward import ConsumedGradients
from carpool.parallel.degrees import Degrees
from carpool.parallel.schedules import PAIRED
from carpool.planner import candidate as planned
from carpool.planner.candidate import Candidate, Spare
from carpool.planner.decisions.chosen import Decisions
from carpool.planner.decisions.configured import candidate_of
from carpool.planner.machine.hardware import HARDWARE
from carpool.planner.model.shape import ModelShape
from carpool.train.config import load_config
from carpool.train.config.published import read_keys
from carpool.train.config.schema import Config
from carpool.train.plan.compile_and_capture import why_no_graphs
from carpool.train.run.run_records import Records, record_graphs
from carpool.transport import TRANSPORTS
from tests.gpu.runs import COMPILED_STAGES
from tests.replayed import Again
from tools import captured_table


class OnGpu(nn.Module):
    """As far as `why_no_graphs` looks."""

    def __init__(
        self, attention: str = "sdpa", device: str = "cuda", dropout: float = 0.0, takes: bool = False
    ) -> None:
        super().__init__()
        self.attention_dropout, self._supports_attention_backend = dropout, takes
        text = SimpleNamespace(_attn_implementation=attention)
        self.config: Any = SimpleNamespace(get_text_config=lambda: text)
        self.device = torch.device(device)

    def parameters(self, recurse: bool = True) -> Any:
        return iter([SimpleNamespace(device=self.device)])


def layer(
    graphable: bool = True,
    own: bool = False,
    name: str = "grouped",
    dtype: torch.dtype = torch.bfloat16,
    reads_plans: bool = False,
) -> Any:
    weights = torch.empty(1, 8, 8, dtype=dtype)
    return SimpleNamespace(
        transport=SimpleNamespace(name="some", graphable=graphable),
        compute=None if own else SimpleNamespace(name=name, counts_on_host=name == "reference"),
        reads_plans=reads_plans,
        experts=SimpleNamespace(has_gate=False, has_bias=False, up_proj=weights, down_proj=weights),
    )


STAGES = ["parallelism.pp_size=2", "training.gradient_accumulation_steps=2"]
CONSUMED = ["training.optimizer_in_backward=true", "training.max_grad_norm=0", "training.optimizer=one-pass"]


@pytest.mark.parametrize(
    ("model", "one", "overrides", "schedule", "why"),
    [
        (OnGpu(), layer(), [], "none", None),
        (OnGpu(), layer(), [], "chunks", None),
        (OnGpu(device="cpu"), layer(), [], "none", "there is no GPU"),
        (OnGpu(), layer(graphable=False), [], "none", "transport some waits for the host"),
        (OnGpu(), layer(own=True), [], "none", "own forward"),
        (OnGpu(), layer(name="reference"), [], "none", "how many rows"),
        (OnGpu(), layer(dtype=torch.float32), [], "none", "8 x 8 in float32"),
        (OnGpu(), layer(), [], "two-batch", None),
        (OnGpu(dropout=0.1), layer(), [], "two-batch", None),
        (OnGpu(), layer(), ["memory.layer_activations=offload"], "two-batch", "of two batches"),
        (
            OnGpu(),
            layer(),
            ["parallelism.pp_size=2", "parallelism.pp_schedule=DualPipeV", "training.gradient_accumulation_steps=4"],
            "two-batch",
            None,
        ),
        (OnGpu(), layer(), ["moe.spare_slots=2"], "none", None),
        (OnGpu(), layer(reads_plans=True), ["moe.spare_slots=2"], "none", "some the host reads which experts go"),
        # Of 16,384 tokens each forward of the only rank records 512.
        (OnGpu(), layer(), ["placement.every=32"], "none", "the host names the tokens"),
        (OnGpu(), layer(), ["placement.every=33"], "none", None),
        (OnGpu(), layer(), ["placement.every=1", "placement.policy=pick"], "none", None),
        (OnGpu(), layer(), ["data.packing=off"], "none", "data.pad_to=sequence_length makes all alike"),
        (OnGpu(), layer(), ["data.packing=off", "data.pad_to=sequence_length"], "none", None),
        (OnGpu("flash_attention_2"), layer(), [], "none", "lengths of documents"),
        (OnGpu("flash_attention_2", takes=True), layer(), [], "none", None),
        (OnGpu(), layer(), ["memory.layer_activations=recompute"], "none", None),
        (OnGpu(dropout=0.1), layer(), [], "none", None),
        (OnGpu(dropout=0.1), layer(), ["memory.layer_activations=recompute"], "two-batch", None),
        (OnGpu(dropout=0.1), layer(), [*STAGES, "memory.layer_activations=recompute"], "none", "drop-out"),
        (OnGpu(), layer(), [*CONSUMED, "memory.experts=host"], "none", "host memory"),
        (OnGpu(), layer(), ["training.cuda_graphs=off"], "none", "training.cuda_graphs = 'off'"),
        (OnGpu(), layer(), STAGES, "none", None),
        (OnGpu(), layer(), [*STAGES, "memory.expert_activations=offload"], "none", "in another"),
        (OnGpu(), layer(), ["memory.layer_activations=offload"], "none", None),
        (OnGpu(), layer(), CONSUMED, "none", None),
        (OnGpu(), layer(), [*CONSUMED, "training.optimizer_offload=host"], "none", None),
        (OnGpu(), layer(), [*CONSUMED, "training.optimizer_offload=disk"], "none", "a state that comes from disk"),
        (OnGpu(), layer(), ["training.optimizer_offload=disk"], "none", None),
    ],
)
def test_why_steps_are_not_captured(model: Any, one: Any, overrides: list[str], schedule: str, why: str | None) -> None:
    config = load_config(None, overrides)
    found = why_no_graphs(config, candidate(config, schedule), model, [one])
    assert found is None if why is None else why in (found or "")
    assert found is None or captured_table.cause(found), "docs/reference/captured.md has the cause of each reason"
    # What settings and plans know, plans and estimates say alike.
    by_ranks = ("own forward", "how many rows", "8 x 8", "lengths of documents", "drop-out", "GPU", "some")
    if why is None or not any(part in why for part in by_ranks):
        assert candidate(config, schedule).why_eager == found


def candidate(config: Config, schedule: str = "none") -> Candidate:
    """Of a run on one rank of each stage, whose experts stay there."""
    degrees = Degrees(1, 1, 1, 1, pp=config.parallelism.pp_size)
    found, _ = candidate_of(
        config.model_dump(), degrees, ModelShape.read(read_keys("qwen3-30b-a3b")), HARDWARE["H200"], 8
    )
    return replace(found, schedule=schedule)


def test_fsdp_is_not_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs.fsdp, "states", lambda model: [object()])
    model: Any = OnGpu()
    config = load_config(None, [])
    reason = why_no_graphs(config, candidate(config), model, [layer()])
    assert reason is not None and "FSDP" in reason
    assert Candidate(Degrees(1, 8, 1, 8), 4096, 1, data_parallel="fsdp").why_eager == reason


def test_plans_know_which_transports_wait() -> None:
    """Two hops do not where GPUs of a node reach each other; only over nvlink replicas are not read on the host."""
    for name, way in TRANSPORTS.items():
        one = Candidate(Degrees(1, 8, 1, 8), 4096, 1, transport=name)
        assert one.waits != way.graphable
        assert replace(one, peers=False).waits == (not way.graphable or way.writes_to_peers)
        with_slots = replace(one, spare=Spare(2)).why_eager
        assert one.waits or (with_slots is None) == (name == "nvlink"), with_slots


def test_a_capture_that_fails_leaves_no_gradients_to_wait_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """An event that was recorded in a capture must not be waited for after it."""
    model = nn.Linear(2, 2)
    gradients = ConsumedGradients(model, AdamW(model.parameters()))
    steps = StepGraphs(model, [], lambda *_: None, lambda _: None, consumed=gradients)
    waited: list[Any] = []
    monkeypatch.setattr(consumed, "wait_for", lambda *events: waited.extend(events))

    def record(*_: Any) -> None:
        gradients.begin(torch.tensor(True))
        gradients._waiting.append(model.weight)
        gradients._events.append("event")
        gradients._held.append((["held"], [torch.ones(2)], 2))
        raise RuntimeError("operation not permitted")

    monkeypatch.setattr(steps, "_record", record)
    assert not steps._capture([], None)
    # Somebody else's backward, then a step.
    model(torch.ones(1, 2)).sum().backward()
    assert model.weight.grad is not None
    model.zero_grad()
    gradients.begin(torch.tensor(True))
    model(torch.ones(1, 2)).sum().backward()
    assert gradients.finish() == pytest.approx(6**0.5)
    assert not waited


@pytest.mark.parametrize("replays", [False, True])
def test_steps_that_a_profiler_watches(replays: bool) -> None:
    model, computed = nn.Linear(2, 2), []

    def compute(batches: Any, factor: torch.Tensor, number: int, sums: torch.Tensor, *_: Any) -> None:
        computed.append(profiler._is_profiler_enabled)
        sums[0] += (model(batches[0]["x"]).sum() * factor).detach()

    steps = StepGraphs(model, [], compute, lambda _: None, recorder=Again)
    steps.replays_watched = replays
    batch = {"x": torch.ones(1, 2)}
    found = [steps.run([batch], 1.0) for _ in range(graphs.EAGER_STEPS + 2)]
    assert [one is None for one in found] == [True, True, False, False]
    # When it was recorded, and in two replays.
    assert computed == [False] * 3
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        seen = steps.run([batch], 1.0)
    assert (seen is not None) == replays and computed[3:] == [True] * replays
    # What was forgotten is captured anew.
    assert (steps.run([batch], 1.0) is not None) == replays


def test_a_capture_that_fails_lets_go_of_what_layers_keep(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hidden states in an arena, and what was offloaded: the eager steps after it find both as if there had been no
    capture."""
    told: list[str | None] = []
    arena, offloader = Arena(1 << 12, torch.device("cpu")), Offloader()
    steps = StepGraphs(nn.Linear(2, 2), [], lambda *_: None, told.append)
    for module in (graphs, expert_rides):
        monkeypatch.setattr(
            module, "buffers_of_rides", lambda _: [SimpleNamespace(arenas=[arena], abandon=lambda: None)]
        )
    monkeypatch.setattr(graphs, "offloaders", lambda _: [offloader])

    def backward(*_: Any) -> None:
        rows = arena.reserve(8, torch.float32, torch.tensor([3]))
        offloader.staging(None)
        away = offloader.put([HiddenStates(torch.ones(4), 0)])
        # As an event of a capture, for which nobody may wait.
        offloader._lanes[0].here[0] = offloader._lanes[0].here[0][0], Unreached()
        assert rows.start is not None and away
        raise RuntimeError("operation not permitted\nmore")

    monkeypatch.setattr(steps, "_record", backward)
    assert not steps._capture([], None) and told == ["RuntimeError: operation not permitted"]
    assert not arena._stack and not offloader._parcels
    for _ in range(3):
        offloader.staging(None)
        away = offloader.put([HiddenStates(torch.ones(4), 0)])
    assert offloader.get(away)[0].data.sum() == 4


class Unreached:
    """An event that nobody waits for."""

    def __getattr__(self, name: str) -> Any:
        raise AssertionError("an event of a capture is waited for")


def test_run_json_says_whether_steps_are_graphs(tmp_path: Path) -> None:
    said: list[str] = []
    run: Any = SimpleNamespace(
        plan=SimpleNamespace(decisions=Decisions()),
        built=SimpleNamespace(no_graphs=None),
        records=Records(tmp_path, True, None, SimpleNamespace(say=said.append), {"seed": 1}),  # type: ignore[arg-type]
    )
    for why_not in (None, "RuntimeError: no"):
        record_graphs(run, why_not)
        found = json.loads((tmp_path / "run.json").read_text())["decisions"]["cuda_graphs"]
        assert (found["used"], found["why"]) == (why_not is None, why_not or "captured")
    assert said == ["steps are not captured as CUDA graphs: RuntimeError: no"]


def test_the_table_of_what_is_captured() -> None:
    assert captured_table.DOCS.read_text(encoding="utf-8") == captured_table.page(), (
        "run python -m tools.captured_table"
    )
    # All reasons that have names are there; others are those of the test above.
    named = [text for name, text in vars(planned).items() if name.isupper() and " " in str(text) and type(text) is str]
    assert len(named) > 6 and all(
        map(captured_table.cause, (one for one in named if one != planned.NOT_COMPILED_AGAIN))
    )
    assert captured_table.answer("pp 2, ep 4, DualPipeV, pairs", "recompute") == ("yes", None)
    # Schedules that GPU tests capture.
    assert {name.split()[0] for name in COMPILED_STAGES} >= {"1F1B", "ZBVZeroBubble", *PAIRED}
