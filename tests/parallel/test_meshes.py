"""Groups and meshes of a run: who is in them, on 4 ranks, and what follows from the degrees of parallelism."""

from __future__ import annotations

import inspect
from datetime import timedelta
from typing import Annotated, Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from carpool.layout.topology import Topology
from carpool.parallel import meshes
from carpool.parallel.degrees import EXPERT_AXES, NON_EXPERT_AXES, Degrees
from carpool.parallel.meshes import Meshes
from carpool.train.config.declarations import Declared, Excludes, declared
from carpool.train.config.schema import config_type
from carpool.train.config.schema_base import Section
from carpool.transport import set_topology
from carpool.transport.nodes import hops_of, timeout_of
from tests.ranks import Ranks

EVERY = [
    Degrees(fsdp=4, ep=4),
    Degrees(pp=2, fsdp=2, ep=2),
    Degrees(dp_replicate=2, cp=2, ep=2),
    Degrees(fsdp=2, tp=2, ep=2, etp=2),
    Degrees(pp=2, cp=2, etp=2),
]


def _members(degrees: Degrees) -> None:
    meshes, rank = Meshes(degrees, "cpu"), dist.get_rank()
    for axis in (*NON_EXPERT_AXES, *EXPERT_AXES):
        group = meshes.group(axis)
        expected = degrees.ranks_along(rank, axis)
        assert (group is None) == (len(expected) == 1)
        if group is not None:
            assert tuple(dist.get_process_group_ranks(group)) == expected
            total = torch.tensor(10**rank)
            dist.all_reduce(total, group=group)
            assert total == sum(10**one for one in expected)
        assert meshes.group(axis) is group
    shards = meshes.group("fsdp", "cp")
    assert shards is None or dist.get_process_group_ranks(shards) == list(degrees.ranks_along(rank, "fsdp", "cp"))

    stage = meshes.stage
    folded = {"fsdp": ("fsdp", "cp"), "ep": ("ep", "etp")}
    for name, axes in {"dp_replicate": (), "tp": (), "efsdp": (), **folded}.items():
        one = stage.get_mesh(name)
        ranks = degrees.ranks_along(rank, *(axes or (name,)))
        assert tuple(one.mesh.tolist()) == ranks and one.size() == len(ranks)
        assert one.get_local_rank() == ranks.index(rank)
        assert dist.get_process_group_ranks(one.get_group()) == list(ranks)
    assert stage.get_mesh(("pp", "fsdp", "tp")).shape == (1, degrees.fsdp * degrees.cp, degrees.tp)
    assert stage.non_experts.mesh.numel() == stage.experts.mesh.numel() == degrees.stage_size


@pytest.mark.parametrize("degrees", EVERY, ids=str)
def test_ranks_of_groups_and_meshes(degrees: Degrees, ranks: Ranks) -> None:
    ranks(_members, degrees)


def _limits() -> set[timedelta | None]:
    seconds = timedelta(seconds=17)
    group = dist.new_group(range(dist.get_world_size()), seconds)
    set_topology(group, Topology.even(dist.get_world_size(), 2))
    hops = hops_of(group)
    assert hops.rail is not None and hops.node is not None
    # Tests before this one may have let models share groups (tests/hf/meshes.py).
    new = mock.patch("carpool.parallel.meshes.make_group", inspect.unwrap(meshes.make_group))
    with mock.patch("carpool.parallel.meshes.timeout_of", lambda world: seconds), new:
        made = [Meshes(Degrees(fsdp=2, tp=2, ep=2), "cpu").group(axis) for axis in ("fsdp", "ep")]
    return {timeout_of(one) for one in (hops.rail, hops.node, *made) if one is not None}


def test_a_collective_of_any_group_may_take_as_long_as_one_of_all_ranks(ranks: Ranks) -> None:
    assert ranks(_limits) == [{timedelta(seconds=17)}] * 4


def check_supported(sizes: dict[str, int], settings: dict[str, Any], all_: Declared | None = None) -> None:
    (all_ or declared(config_type())).check(
        {**settings, **{f"parallelism.{axis}_size": size for axis, size in sizes.items()}}
    )


def test_a_refusal_names_the_axes_and_what_works() -> None:
    check_supported({"fsdp": 4, "tp": 2, "ep": 4}, {"parallelism.data_parallel": "fsdp"})
    with pytest.raises(ValueError) as error:
        check_supported({"fsdp": 4, "tp": 2}, {"parallelism.data_parallel": "zero1"})
    assert str(error.value) == (
        "parallelism.tp_size = 2 with parallelism.data_parallel = 'zero1': whole non-expert parameters are on each "
        "rank, and "
        "tensor parallelism divides them. The nearest combination that works: parallelism.data_parallel = 'fsdp'"
    )
    with pytest.raises(
        ValueError, match=r"tp_size = 2 with parallelism.ep_size = 1 with parallelism.etp_size = 1: .*ep_size = 2$"
    ):
        check_supported({"fsdp": 4, "tp": 2, "ep": 1}, {})


@pytest.mark.parametrize(
    ("sizes", "settings", "said"),
    [
        ({"tp": 2}, {"hidden_projection.size": 8}, "of a part of the tokens"),
        ({"etp": 2}, {"hidden_projection.size": 8}, "the model's own size"),
        ({}, {"hidden_projection.size": 8, "adapter.kind": "lora"}, "models from scratch"),
        ({"tp": 2}, {"adapter.kind": "lora"}, "layers beside them"),
    ],
)
def test_what_projected_hidden_states_do_not_go_with(
    sizes: dict[str, int], settings: dict[str, object], said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        check_supported(sizes, settings)
    key = next(iter(settings))
    check_supported(sizes, {**settings, key: None})


def test_two_batches_go_with_the_pairs_of_a_pipeline() -> None:
    both = {"moe.schedule": "two-batch", "parallelism.pp_schedule": "DualPipeV"}
    check_supported({"pp": 2, "etp": 2}, both)
    check_supported({"pp": 2}, both | {"parallelism.pp_schedule": "Interleaved1F1B"})
    said = r"pairs of Interleaved1F1B or DualPipeV. .* works: parallelism.pp_schedule = 'DualPipeV'$"
    with pytest.raises(ValueError, match=said):
        check_supported({"pp": 2}, both | {"parallelism.pp_schedule": "ZBVZeroBubble"})
    with pytest.raises(ValueError, match=r"works: moe.schedule = .none.$"):
        check_supported({"pp": 2}, both | {"moe.schedule": "tiles"})


def test_a_refusal_is_written_as_a_configuration_is() -> None:
    with pytest.raises(
        ValueError, match=r"optimizer_in_backward = true: .* works: training.optimizer_in_backward = false$"
    ):
        check_supported({"pp": 2}, {"training.optimizer_in_backward": True})


def test_a_refusal_folds_ranks_of_refused_axes_until_it_works() -> None:
    class Sizes(Section):
        cp_size: Annotated[int, Excludes("parallelism.pp_size", "no")] = 1
        pp_size: int = 1
        tp_size: int = 1
        fsdp_size: int | None = None
        ep_size: int | None = None
        etp_size: Annotated[int, Excludes(lambda settings: True, "not either")] = 1

    class Toy(Section):
        parallelism: Sizes = Sizes()

    rules = Declared(Toy)
    with pytest.raises(
        ValueError,
        match=r"pp_size = 4 with parallelism.cp_size = 2: no. .*: parallelism.pp_size = 1, "
        r"parallelism.fsdp_size = 12, parallelism.etp_size = 1, parallelism.ep_size = 2$",
    ):
        check_supported({"fsdp": 3, "cp": 2, "pp": 4, "etp": 2, "ep": 1}, {}, rules)
    with pytest.raises(ValueError, match=r"works: parallelism.pp_size = 1$"):
        check_supported({"cp": 2, "pp": 4}, {}, rules)


@pytest.mark.parametrize(
    ("settings", "said", "change"),
    [
        ({"adapter.kind": "lora"}, "cut into slices have no adapters", "adapter.kind = 'none'"),
        ({"moe.limit_ranks": 2}, "a token visits every slice", "moe.limit_ranks = 'none'"),
        ({"training.optimizer_state_dtype": "int8"}, "blocks of int8", "training.optimizer_state_dtype = 'bfloat16'"),
        (
            {"memory.experts": "host", "training.optimizer_in_backward": True, "training.max_grad_norm": 0.0},
            "one by one",
            "memory.experts = 'device'",
        ),
        ({"placement.every": 5, "placement.policy": "migrate"}, "move whole experts", "placement.every = 'none'"),
    ],
)
def test_what_slices_of_experts_cannot_do_is_refused(settings: dict[str, object], said: str, change: str) -> None:
    check_supported({"ep": 4}, settings)
    with pytest.raises(ValueError, match=f"parallelism.etp_size = 2 with .*{said}.*works: .*{change}") as refused:
        check_supported({"ep": 2, "etp": 2}, settings)
    assert "None" not in str(refused.value), "what is not set is no part of the combination"


ALL = Degrees(pp=2, dp_replicate=2, fsdp=2, cp=2, tp=2, ep=4, etp=2)


def test_sizes_of_an_example() -> None:
    degrees = Degrees(dp_replicate=2, fsdp=4, tp=2, ep=4)
    assert (degrees.world_size, degrees.efsdp, degrees.dp) == (16, 2, 8)
    assert degrees.non_expert_shards == degrees.expert_shards == 8
    assert [degrees.dp_rank(rank) for rank in (0, 1, 2, 15)] == [0, 0, 1, 7]
    assert degrees.tokens_per_rank(99) == 50
    assert degrees.record() == {
        "world_size": 16, "pp_size": 1, "dp_replicate_size": 2, "fsdp_size": 4, "cp_size": 1, "tp_size": 2,
        "efsdp_size": 2, "ep_size": 4, "etp_size": 1,
    }  # fmt: skip
    assert str(degrees) == "fsdp 4 x tp 2, experts ep 4 x efsdp 2, replicas 2"


@pytest.mark.parametrize("axes", [NON_EXPERT_AXES, EXPERT_AXES])
def test_coordinates_count_ranks_the_last_axis_fastest(axes: tuple[str, ...]) -> None:
    for rank in range(ALL.world_size):
        number = 0
        for axis in axes:
            number = number * ALL.size(axis) + ALL.coordinate(rank, axis)
            along = ALL.ranks_along(rank, axis)
            assert along[ALL.coordinate(rank, axis)] == rank and len(along) == ALL.size(axis)
            assert all(ALL.ranks_along(other, axis) == along for other in along)
        assert number == rank


def test_ranks_that_share_tokens_or_sequences() -> None:
    assert (ALL.world_size, ALL.stage_size, ALL.efsdp, ALL.dp, ALL.dp_cp, ALL.tokens_per_rank(9)) == (
        32,
        16,
        1,
        4,
        8,
        3,
    )
    assert ALL.ranks_along(21, "pp") == (5, 21) and ALL.ranks_along(21, "tp") == (20, 21)
    assert ALL.ranks_along(21, "cp") == (21, 23) and ALL.ranks_along(21, "ep") == (17, 19, 21, 23)
    assert len({ALL.dp_rank(rank) for rank in ALL.ranks_along(21, "cp")}) == 1
    assert str(ALL).endswith("replicas 2, cp 2, etp 2, pp 2")


def test_a_group_along_several_axes_is_in_order() -> None:
    degrees = Degrees(pp=2, fsdp=2, cp=2, tp=2, ep=2, etp=2)
    assert degrees.ranks_along(13, "fsdp", "cp") == (9, 11, 13, 15)
    assert degrees.ranks_along(13, "tp", "fsdp") == (8, 9, 12, 13)
    assert degrees.ranks_along(13, "ep", "etp") == (12, 13, 14, 15)
    assert degrees.ranks_along(13) == (13,)
