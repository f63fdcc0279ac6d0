"""What follows from the degrees of parallelism."""

from __future__ import annotations

from carpool.parallel.degrees import Degrees


def test_sizes_of_an_example() -> None:
    degrees = Degrees(dp_replicate=2, fsdp=4, tp=2, ep=4)
    assert (degrees.world_size, degrees.efsdp, degrees.dp) == (16, 2, 8)
    assert degrees.dense_shards == degrees.expert_shards == 8
    assert [degrees.dp_rank(rank) for rank in (0, 1, 2, 15)] == [0, 0, 1, 7]
    assert degrees.tokens_per_rank(99) == 50
    assert degrees.record() == {
        "world_size": 16, "dp_replicate_size": 2, "fsdp_size": 4, "tp_size": 2, "ep_size": 4, "efsdp_size": 2,
    }  # fmt: skip
    assert str(degrees) == "fsdp 4 x tp 2, experts ep 4 x efsdp 2, copies 2"
