"""Ranks with unequally many forwards."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist

from carpool.serve.eval_tasks import InStep
from carpool.serve.served_model import find_source, open_model
from tests.hf.meshes import reuse_meshes
from tests.ranks import Ranks
from tests.serve.checkpoints import save

RANKS_IMPORT = ("carpool.serve.served_model",)
TEXTS = [[[1, 2, 3, 4, 5], [6, 7, 8], [9, 10]], []]


def _logits(folder: str) -> list[torch.Tensor]:
    """Of this rank's texts, and of a second time, when the other rank has them."""
    reuse_meshes()
    model = open_model(find_source(Path(folder)), max_tokens=64)
    steps, found = InStep(model), []
    for turn in range(2):
        with torch.no_grad(), steps.work():
            for text in TEXTS[(dist.get_rank() + turn) % 2]:
                found.append(model(input_ids=torch.tensor([text]), use_cache=False).logits)
    steps.remove()
    return found


def test_a_rank_without_work_takes_part_in_the_forwards_of_others(two_ranks: Ranks, tmp_path: Path) -> None:
    model = save(tmp_path, "qwen3_moe")
    with torch.no_grad():
        alone = [model(input_ids=torch.tensor([text]), use_cache=False).logits for text in TEXTS[0]]
    for found in two_ranks(_logits, str(tmp_path)):
        assert len(found) == len(alone)
        for ours, theirs in zip(found, alone, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


def _failures(folder: str) -> list[str]:
    """What each rank sees if one fails after its first forward, the others being at work or done."""
    reuse_meshes()
    model = open_model(find_source(Path(folder)), max_tokens=64)
    steps, found = InStep(model), []
    for forwards in (3, 0):
        try:
            with torch.no_grad(), steps.work():
                for number in range(2 if dist.get_rank() else forwards):
                    model(input_ids=torch.tensor([[1, 2, 3]]), use_cache=False)
                    if dist.get_rank():
                        raise KeyError(number)
        except (KeyError, RuntimeError) as error:
            found.append(f"{type(error).__name__}: {error}")
    steps.remove()
    return found


def test_if_a_rank_fails_between_forwards_the_others_do_not_wait(two_ranks: Ranks, tmp_path: Path) -> None:
    save(tmp_path, "qwen3_moe")
    other, failed = two_ranks(_failures, str(tmp_path))
    assert failed == ["KeyError: 0"] * 2
    assert other == ["RuntimeError: another rank has failed between two forwards: its error says why"] * 2
