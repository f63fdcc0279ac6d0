"""Recipes of the kinds "schedule" and "routing": each of their mechanisms changes what four ranks do in a layer.

What is watched: verbs and weight gradients in their order, rows and choices, messages, the balance loss.
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

import carpool.experts.gemm.grouped
from carpool.metrics.counters import VERBS as COUNTED
from carpool.moe import MoE
from carpool.recipes import names, read
from carpool.ride.schedule import Schedule
from carpool.ride.two_batch import TwoBatch
from carpool.transport import find_transport
from carpool.transport.base import Pending, Transport
from carpool_systems.mechanisms import WITHOUT_SETTING, load
from carpool_systems.resolve import resolve
from tests.ranks import Ranks, mesh

RANKS_IMPORT = ["carpool.ride.two_batch"]
# What makes a system that system; a recipe may not lose any of it.
SYSTEMS = {
    "fastmoe": {"transport:alltoall", "experts:grouped", "schedule:none"},
    "gshard": {"top-k:2", "capacity:drop", "capacity:first-choices-first", "second:random", "balance:aux"},
    "switch": {"top-k:1", "capacity:drop", "balance:aux", "router:float32", "init:small"},
    "switch-finetune": {"capacity:drop", "balance:aux", "router:float32"},
    "apx-overlap": {"transport:alltoall", "beside:shared-experts"},
    "lina": {"transport:alltoall", "chunks:several", "priority:rides"},
    "lancet": {"transport:alltoall", "schedule:two-batch"},
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
        order: verbs, each with "came" once it was waited for; "weight gradients".
        bytes: sent, by verb.
        chosen: expert_TK of the last forward.
        products: grouped matrix products.
        messages: all-to-alls of PyTorch's.
    """

    order: list[str]
    bytes: dict[str, int]
    dropped: int
    chosen: list[list[int]]
    aux_loss: float
    products: int
    messages: int


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
        experts=moe.get("experts", "auto"),
        router={**router, "aux_loss_coef": moe.get("router_aux_loss_coef") or 0.0},
    )  # fmt: skip
    order, products, messages = watch(layer), [0], [0]
    x = torch.randn(2, TOKENS, HIDDEN)
    grouped, send = carpool.experts.gemm.grouped.grouped_mm, dist.all_to_all_single

    def sending(*args: Any, **kwargs: Any) -> Any:
        messages[0] += 1
        return send(*args, **kwargs)

    def counting(*args: Any) -> torch.Tensor:
        products[0] += 1
        return grouped(*args)

    carpool.experts.gemm.grouped.grouped_mm, dist.all_to_all_single = counting, sending
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
        carpool.experts.gemm.grouped.grouped_mm, dist.all_to_all_single = grouped, send
    stats, sent = layer.stats(), layer.core.stats.traffic.bytes
    assert layer.routing is not None
    return Seen(
        order, {verb: sum(sent[verb]) for verb in COUNTED}, stats.dropped, layer.routing.expert_TK.tolist(),
        float(layer.aux_loss), products[0], messages[0],
    )  # fmt: skip


def watch_verbs(transport: Transport, order: list[str]) -> None:
    """Write down what a transport does from now on, as `Seen.order`."""

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
        setattr(transport, name, verb(name, getattr(transport, name)))


def watch(layer: MoE) -> list[str]:
    """What the layer does from now on, as `Seen.order`."""
    order: list[str] = []
    watch_verbs(layer.transport, order)
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
    "schedule:chunks": ("moe", "schedule", "none", "messages"),
    "schedule:two-batch": ("moe", "schedule", "none", "order"),
    "schedule:tiles": ("moe", "schedule", "none", "order"),
    "chunks:several": ("moe", "chunks", 1, "messages"),
    "chunks:backward": ("moe", "backward_chunks", 1, "messages"),
    "top-k:1": ("model", "num_experts_per_tok", 3, "bytes"),
    "top-k:2": ("model", "num_experts_per_tok", 1, "bytes"),
    "balance:aux": ("moe", "router_aux_loss_coef", 0.0, "aux_loss"),
    "capacity:drop": ("moe", "capacity_factor", 100.0, "dropped"),
    "capacity:first-choices-first": ("moe", "first_choices_first", False, "chosen"),
    "second:random": ("moe", "random_second", False, "dropped"),
}
# Where a whole model or other devices are needed: the test that shows it.
ELSEWHERE = {
    "beside:shared-experts": "tests/recipes/test_schedule_recipes.py::"
    "test_apx_overlap_is_fastmoe_but_for_shared_experts",
    "split:multiprocessors": "tests/interpreted/test_nvlink.py::test_a_verb_takes_as_many_blocks_as_its_option_says",
    "priority:rides": "tests/schedule/test_priority.py::test_the_order_of_things",
    "dispatch:fp8": "tests/recipes/test_transport_recipes.py::"
    "test_deepep_sends_rows_in_half_the_bytes_and_sums_as_they_are",
    "router:float32": "tests/hf/test_limit.py::test_logits_in_float32",
    "transport:nvlink": "tests/interpreted/test_nvlink.py::test_rows_arrive_once_per_rank_with_their_slots_and_weights",
    "kernels:triton": "tests/interpreted/test_nvlink.py::test_rows_arrive_once_per_rank_with_their_slots_and_weights",
}
# What no setting chooses, and the test that shows it in what ranks do, or in generation.
BY_THEMSELVES = {
    "delayed:experts": "tests/recipes/test_schedule_recipes.py::"
    "test_a_weight_gradient_is_computed_while_row_gradients_travel",
    "kept:collectives": "tests/hf/test_sequence_parallel.py::test_deepspeed_ted",
    "prefetch:activation-matrix": "tests/recipes/test_memory_recipes.py::test_what_generation_alone_has",
    "cache:experts": "tests/recipes/test_memory_recipes.py::test_what_generation_alone_has",
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
    [part for part in PARTS if part[1] in OTHER],
    ids=lambda part: part,
)
def test_each_mechanism_changes_what_ranks_do(
    name: str, mechanism: str, ranks: Ranks, followed: dict[str, list[Seen]]
) -> None:
    settings = read(name).settings
    if name not in followed:
        followed[name] = ranks(run, runnable(settings))
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
    assert {mechanism for _, mechanism in PARTS} == {*OTHER, *ELSEWHERE, "init:small"}
    assert set(BY_THEMSELVES) == set(WITHOUT_SETTING)
    for test in (*ELSEWHERE.values(), *BY_THEMSELVES.values()):
        path, _, name = test.partition("::")
        tree = ast.parse((ROOT / path).read_text())
        assert name in [node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)], test


@pytest.mark.parametrize("name", ["apx-overlap", "lancet", "fastmoe", "lina"])
def test_a_weight_gradient_is_computed_while_row_gradients_travel(
    name: str, ranks: Ranks, followed: dict[str, list[Seen]]
) -> None:
    """In every recipe's run, so that it tells none from another."""
    if name not in followed:
        followed[name] = ranks(run, runnable(read(name).settings))
    for seen in followed[name]:
        assert between(seen.order, "weight gradients", "combine_gradients", "combine_gradients came")


def order_in_a_model(folder: str, path: str, recipe: str) -> tuple[list[str], list[torch.Tensor]]:
    """Verbs of a layer of a model of Transformers, and the shared experts where it has any; its gradients."""
    import carpool.hf
    from tests.hf.test_behaviours import _model, _save
    from tests.hf.test_shared import _answer

    _save(folder, path, num_hidden_layers=1)
    moe = resolve(load(recipe)).moe
    model = _model(folder, path, f"carpool-{moe.transport}")
    carpool.hf.set_schedule(model, moe.asked_schedule())
    ((name, own),) = carpool.hf.rides(model).items()
    order: list[str] = []
    own.transport = find_transport(moe.transport)(own.group, own.layout.slots_per_rank)
    watch_verbs(own.transport, order)
    block = model.get_submodule(name.rpartition(".")[0])
    if isinstance(module := getattr(block, "shared_experts", None), torch.nn.Module):
        first = next(child for child in module.modules() if isinstance(child, torch.nn.Linear))
        first.register_forward_hook(lambda *_: order.append("shared"))
    _, gradients = _answer(model)
    return order, [gradient for gradient in gradients.values() if gradient is not None]


@pytest.mark.parametrize(("folder", "shared"), [("deepseek_v3", True), ("qwen3_moe", False)])
def test_apx_overlap_is_fastmoe_but_for_shared_experts(
    folder: str, shared: bool, two_ranks: Ranks, tmp_path: Path
) -> None:
    pytest.importorskip("transformers")
    pairs = [two_ranks(order_in_a_model, folder, str(tmp_path), name) for name in ("apx-overlap", "fastmoe")]
    for (ours, gradients), (plain, others) in zip(*pairs, strict=True):
        assert between(ours, "shared", "dispatch", "dispatch came") == shared
        assert not between(plain, "shared", "dispatch", "dispatch came") and ("shared" in plain) == shared
        assert (ours == plain) != shared
        assert shared or all(map(torch.equal, gradients, others))


def test_initial_weights_are_small() -> None:
    pytest.importorskip("transformers")
    from carpool.hf.build_model import build_model
    from carpool.hf.weights.model_config import make_config

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
    assert between(["dispatch", "shared", "dispatch came"], "shared", "dispatch", "dispatch came")
    assert not between(["dispatch", "dispatch came", "shared"], "shared", "dispatch", "dispatch came")
    assert not between(["dispatch", "dispatch came"], "shared", "dispatch", "dispatch came")
