"""The test pool itself: results in rank order, errors with their traceback, a fresh pool after a failure."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from tests.ranks import Ranks


def _total(x: int) -> float:
    t = torch.tensor(float(dist.get_rank() + x))
    dist.all_reduce(t)
    return t.item()


def _fail_on_rank_one() -> None:
    if dist.get_rank() == 1:
        raise ValueError("only rank 1 says so")
    dist.barrier()


def test_results_errors_and_recovery(ranks: Ranks) -> None:
    assert ranks(_total, 1) == [10.0] * 4
    with pytest.raises(RuntimeError, match="only rank 1 says so"):
        ranks(_fail_on_rank_one)
    assert ranks(_total, 2) == [14.0] * 4
