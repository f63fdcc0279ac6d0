"""What follows from the degrees of parallelism."""

from __future__ import annotations

import pytest

from carpool.parallel.degrees import EXPERT_AXES, NON_EXPERT_AXES, Degrees

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
