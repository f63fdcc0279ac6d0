"""Recipes of the kinds "schedule" and "routing": each of their mechanisms changes what four ranks do in a layer.

What is watched: verbs, the shared expert and weight gradients in their order, rows and choices, the balance loss.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import carpool.experts.stages
from carpool.moe import MoE
from carpool.observe.traffic import VERBS as COUNTED
from carpool.recipes import load, names, read
from carpool.recipes.resolve import resolve
from carpool.schedule import Schedule
from carpool.schedule.two_batch import TwoBatch
from carpool.transport import NVLinkOptions
from carpool.transport.base import Pending
from tests.ranks import Ranks, mesh

RANKS_IMPORT = ["carpool.schedule.two_batch"]
# What makes a system that system; a recipe may not lose any of it.
SYSTEMS = {
    "fastmoe": {"transport:alltoall", "experts:grouped", "schedule:none"},
    "gshard": {"top-k:2", "capacity:drop", "capacity:first-choices-first", "second:random", "balance:aux"},
    "switch": {"top-k:1", "capacity:drop", "balance:aux", "router:float32", "init:small"},
    "switch-finetune": {"capacity:drop", "balance:aux", "router:float32"},
    "apx-overlap": {"transport:alltoall", "beside:shared-experts", "delayed:experts"},
    "lina": {"transport:alltoall", "chunks:several", "priority:rides"},
    "lancet": {"schedule:two-batch", "delayed:experts"},
    "fsmoe": {"transport:hierarchical", "chunks:several", "chunks:backward", "priority:rides"},
    "flux-comet-triton": {"transport:nvlink", "kernels:triton", "schedule:tiles", "split:multiprocessors"},
}
VERBS = ("dispatch", "combine", "dispatch_gradients", "combine_gradients")
HIDDEN, EXPERTS, TOKENS = 16, 8, 24
Settings = Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True)
class Seen:
    """Of one rank: what a forward and backward of two micro-batches did.

    Attributes:
        order: verbs, each with "came" once it was waited for; "shared" expert; "weight gradients".
        bytes: sent, by verb.
        chosen: expert_TK of the last forward.
        products: grouped matrix products.
        messages: all-to-alls of PyTorch's.
        options: of `nvlink` under this schedule.
    """

    order: list[str]
    bytes: dict[str, int]
    dropped: int
    chosen: list[list[int]]
    aux_loss: float
    products: int
    messages: int
    options: NVLinkOptions


def run(settings: Settings) -> Seen:
    """A layer as a recipe's settings say, on four ranks."""
    moe, top_k = dict(settings["moe"]), settings.get("model", {}).get("num_experts_per_tok") or 3
    name = moe.get("schedule", "none")
    pieces = {"chunks": [moe.get("chunks", 2), moe.get("backward_chunks")], "tiles": [moe.get("chunks", 4)]}
    schedule = Schedule(name, *pieces.get(name, []))
    router = {key: moe[key] for key in ("capacity_factor", "first_choices_first", "random_second") if key in moe}
    torch.manual_seed(dist.get_rank())
    layer = MoE(
        HIDDEN, 24, EXPERTS, top_k, ep_mesh=mesh((4,), ("ep",)), transport=moe["transport"], schedule=schedule,
        experts=moe.get("experts", "auto"), shared_intermediate_size=8,
        router={**router, "aux_loss_coef": moe.get("router_aux_loss_coef") or 0.0},
    )  # fmt: skip
    order, products, messages = watch(layer), [0], [0]
    x = torch.randn(2, TOKENS, HIDDEN)
    grouped, send = carpool.experts.stages.grouped_mm, dist.all_to_all_single

    def sending(*args: Any, **kwargs: Any) -> Any:
        messages[0] += 1
        return send(*args, **kwargs)

    def counting(*args: Any) -> torch.Tensor:
        products[0] += 1
        return grouped(*args)

    carpool.experts.stages.grouped_mm, dist.all_to_all_single = counting, sending
    try:
        losses: list[Callable[[], torch.Tensor]] = [
            lambda part=part: layer(part).square().sum() + layer.aux_loss for part in x
        ]
        if name == "two-batch":
            TwoBatch(layer).backward(losses)
        else:
            for loss in losses:
                loss().backward()
    finally:
        carpool.experts.stages.grouped_mm, dist.all_to_all_single = grouped, send
    stats, sent = layer.stats(), layer.core.stats.traffic.bytes
    options = NVLinkOptions(max_tokens=TOKENS, **settings.get("nvlink", {}))
    assert layer.routing is not None
    return Seen(
        order, {verb: sum(sent[verb]) for verb in COUNTED}, stats.dropped, layer.routing.expert_TK.tolist(),
        float(layer.aux_loss), products[0], messages[0], options.under(schedule),
    )  # fmt: skip


def watch(layer: MoE) -> list[str]:
    """What the layer does from now on, as `Seen.order`."""
    order: list[str] = []

    def verb(name: str, original: Callable[..., Pending]) -> Callable[..., Pending]:
        def called(*args: Any) -> Pending:
            order.append(name)
            pending = original(*args)

            def finish() -> Any:
                value = pending.wait()
                order.append(f"{name} came")
                return value

            return Pending(finish)

        return called

    for name in VERBS:
        setattr(layer.transport, name, verb(name, getattr(layer.transport, name)))
    assert layer.shared is not None
    layer.shared.register_forward_hook(lambda *_: order.append("shared"))
    backward = layer.experts.backward

    def watched(*args: Any) -> Any:
        dweight_RJ, rest = backward(*args)
        if rest is None:
            return dweight_RJ, rest

        def later() -> Any:
            order.append("weight gradients")
            return rest()

        return dweight_RJ, later

    layer.experts.backward = watched  # type: ignore[method-assign]
    return order


def between(order: list[str], what: str, first: str, last: str) -> bool:
    """Whether each `what` came after a `first` and before the next `last`."""
    places = [i for i, one in enumerate(order) if one == what]
    last_before = [max((i for i in range(p) if order[i] in (first, last)), default=-1) for p in places]
    return bool(places) and all(i >= 0 and order[i] == first for i in last_before)


# Another choice in place of a mechanism, and in what it shows.
OTHER: Mapping[str, tuple[str, str, Any, str]] = {
    "transport:alltoall": ("moe", "transport", "gather", "bytes"),
    "transport:hierarchical": ("moe", "transport", "dedup", "bytes"),
    "transport:1d": ("moe", "transport", "alltoall", "bytes"),
    "transport:2d": ("moe", "transport", "alltoall", "bytes"),
    "transport:2dh": ("moe", "transport", "2d", "bytes"),
    "experts:grouped": ("moe", "experts", "reference", "products"),
    "schedule:none": ("moe", "schedule", "chunks", "order"),
    "schedule:chunks": ("moe", "schedule", "none", "options"),
    "schedule:two-batch": ("moe", "schedule", "none", "order"),
    "schedule:tiles": ("moe", "schedule", "none", "order"),
    "chunks:several": ("moe", "chunks", 1, "messages"),
    "chunks:backward": ("moe", "backward_chunks", 1, "messages"),
    "split:multiprocessors": ("nvlink", "dispatch_ctas", 8, "options"),
    "top-k:1": ("model", "num_experts_per_tok", 3, "bytes"),
    "top-k:2": ("model", "num_experts_per_tok", 1, "bytes"),
    "balance:aux": ("moe", "router_aux_loss_coef", 0.0, "aux_loss"),
    "capacity:drop": ("moe", "capacity_factor", 100.0, "dropped"),
    "capacity:first-choices-first": ("moe", "first_choices_first", False, "chosen"),
    "second:random": ("moe", "random_second", False, "dropped"),
}
# What is always at work is seen in the order.
ALWAYS: Mapping[str, tuple[str, str, str]] = {
    "beside:shared-experts": ("shared", "dispatch", "dispatch came"),
    "delayed:experts": ("weight gradients", "combine_gradients", "combine_gradients came"),
}
# Where a whole model or other devices are needed: the test that shows it.
ELSEWHERE = {
    "priority:rides": "tests/schedule/test_priority.py::test_the_order_of_things",
    "dispatch:fp8": "tests/recipes/test_transport_recipes.py::"
    "test_deepep_sends_rows_in_half_the_bytes_and_sums_as_they_are",
    "router:float32": "tests/hf/test_drops.py::test_logits_in_float32",
    "transport:nvlink": "tests/interpreted/test_nvlink.py::test_rows_arrive_once_per_rank_with_their_slots_and_weights",
    "kernels:triton": "tests/interpreted/test_nvlink.py::test_rows_arrive_once_per_rank_with_their_slots_and_weights",
}
ROOT = Path(__file__).parents[2]
NAMES = sorted({*names("schedule"), *names("routing")})
# Their hops are shown elsewhere too, chunks and batches over these hops here.
OVER_HOPS = ["deepep", "deepspeed-moe", "hetumoe", "schemoe", "tutel-2dh"]
PARTS = [
    (name, mechanism) for name in [*NAMES, *OVER_HOPS] if not read(name).missing for mechanism in read(name).mechanisms
]


def test_the_recipes_are_there_and_of_these_parts() -> None:
    assert set(SYSTEMS) == set(NAMES)
    for name, parts in SYSTEMS.items():
        assert parts <= set(read(name).mechanisms)


@pytest.fixture(scope="module")
def followed() -> dict[str, list[Seen]]:
    """What the ranks did under each recipe as it is."""
    return {}


@pytest.mark.parametrize(
    ("name", "mechanism"),
    [part for part in PARTS if part[1] in {*ALWAYS, *OTHER}],
    ids=lambda part: part,
)
def test_each_mechanism_changes_what_ranks_do(
    name: str, mechanism: str, ranks: Ranks, followed: dict[str, list[Seen]]
) -> None:
    settings = read(name).settings
    if name not in followed:
        followed[name] = ranks(run, runnable(settings))
    if mechanism in ALWAYS:
        assert all(between(seen.order, *ALWAYS[mechanism]) for seen in followed[name])
        return
    section, key, value, what = OTHER[mechanism]
    changed = {**settings, section: {**settings.get(section, {}), key: value}}
    pairs = zip(followed[name], ranks(run, runnable(changed)), strict=True)
    assert any(getattr(with_it, what) != getattr(without, what) for with_it, without in pairs)


def test_each_pass_over_two_hops_has_chunks_of_its_own(ranks: Ranks) -> None:
    settings = read("fsmoe").settings
    few, own, many = (
        ranks(run, {**settings, "moe": {**settings["moe"], "chunks": forward, "backward_chunks": backward}})[0].messages
        for forward, backward in ((2, 2), (2, 4), (4, 4))
    )
    assert few < own < many


def test_each_mechanism_is_shown_somewhere() -> None:
    assert {mechanism for _, mechanism in PARTS} == {*ALWAYS, *OTHER, *ELSEWHERE, "init:small"}
    for test in ELSEWHERE.values():
        path, _, name = test.partition("::")
        tree = ast.parse((ROOT / path).read_text())
        assert name in [node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)], test


def test_initial_weights_are_small() -> None:
    pytest.importorskip("transformers")
    from carpool.hf.building.model import build_model
    from carpool.hf.config.source import make_config

    model = resolve(load("switch")).model
    assert model.model_type is not None
    config = make_config(model.model_type, {**model.config, "vocab_size": 64})
    built = build_model(config, distributed_config=None, dtype=torch.float32, seed=0)
    weight = built.get_parameter("model.layers.0.self_attn.q_proj.weight")
    assert weight.std().item() == pytest.approx(0.02 * 0.1**0.5, rel=0.05)


def runnable(settings: Settings) -> Settings:
    """On a machine without GPUs, in a layer, and without options that nothing is there for."""
    moe = dict(settings["moe"])
    if moe.get("schedule") not in ("chunks", "tiles"):
        moe.pop("chunks", None)
    if settings.get("model", {}).get("num_experts_per_tok") != 2:
        moe.pop("random_second", None)
    if moe.setdefault("transport", "dedup") == "nvlink":
        moe["transport"] = "dedup"
    return {**settings, "moe": moe}


def test_watching_tells_the_orders_apart() -> None:
    assert between(["dispatch", "shared", "dispatch came"], *ALWAYS["beside:shared-experts"])
    assert not between(["dispatch", "dispatch came", "shared"], *ALWAYS["beside:shared-experts"])
    assert not between(["dispatch", "dispatch came"], *ALWAYS["beside:shared-experts"])
