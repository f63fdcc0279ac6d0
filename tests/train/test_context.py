"""Runs of ranks that share sequences are those of ranks with whole ones. Their steps, and every gradient:
tests/meshes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from carpool.train.config import load_config
from carpool.train.plan.dry_run import dry_run
from tests.ranks import Ranks
from tests.train.test_loop import losses, records, start


def test_a_run_is_that_of_ranks_with_whole_sequences(two_ranks: Ranks, text: list[str], tmp_path: Path) -> None:
    """Also in what it evaluates, counts, records and samples."""
    common = [*text, "training.max_steps=2", "training.save_steps=none", "training.eval_steps=1"]
    common += ['training.sample_prompt="def "', "training.sample_tokens=4"]
    shared = ["parallelism.cp_size=2", "training.per_device_train_batch_size=4"]
    assert start(two_ranks, tmp_path / "whole", common) == [""] * 2
    assert start(two_ranks, tmp_path / "parts", [*common, *shared]) == [""] * 2
    for step, (loss, norm) in losses(tmp_path / "whole").items():
        assert losses(tmp_path / "parts")[step] == pytest.approx((loss, norm), rel=1e-5)
    for kind in ("train", "eval", "sample"):
        whole, parts = (records(tmp_path / name, kind) for name in ("whole", "parts"))
        assert whole.keys() == parts.keys() and whole
        for step, line in whole.items():
            assert parts[step].get("text") == line.get("text")
            for key in {"loss", "aux_loss", "tokens", "tokens_seen"} & line.keys():
                assert parts[step][key] == pytest.approx(line[key], rel=1e-5), key
    info = json.loads((tmp_path / "parts" / "run.json").read_text())["parallelism"]
    assert (info["cp_size"], info["fsdp_size"], info["ep_size"], info["cp_attention"]) == (2, 1, 2, "ulysses")


@pytest.mark.slow
def test_a_run_goes_on_with_other_ranks_that_share_sequences(two_ranks: Ranks, text: list[str], tmp_path: Path) -> None:
    common = [*text, "training.max_steps=3", "training.save_steps=1", "training.eval_steps=none"]
    shared = ["parallelism.cp_size=2", "training.per_device_train_batch_size=4"]
    assert start(two_ranks, tmp_path / "whole", common) == [""] * 2
    last = "training.resume_from_checkpoint=last"
    for step, own in ((1, []), (2, [*shared, last]), (3, [last])):
        stop = f"training.stop_at_step={step}"
        assert start(two_ranks, tmp_path / "turns", [*common, *own, stop]) == [""] * 2
    turns = losses(tmp_path / "turns")
    for step, expected in losses(tmp_path / "whole").items():
        assert turns[step] == pytest.approx(expected, rel=1e-5)


def test_a_dry_run_divides_tokens(text: list[str], tmp_path: Path) -> None:
    (tmp_path / "long.txt").write_text("def f(x): return x\n" * 60_000)
    settings = ["model.model_type=olmoe", "model.config.num_hidden_layers=2", *text, f"data.train={tmp_path}/long.txt"]
    settings += ["parallelism.num_ranks=8", "data.sequence_length=4096"]
    shared = dry_run(load_config(None, [*settings, "parallelism.cp_size=4"]), gpu="h100")
    whole = dry_run(load_config(None, settings), gpu="h100")
    assert "each rank has 1/4 of every sequence, attention by ulysses" in shared
    assert "fsdp 2 x tp 1, experts ep 8 x efsdp 1, replicas 1, cp 4" in shared
    kept, four_times = (_mib(one, "activations") for one in (shared, whole))
    assert four_times / 4.2 < kept < four_times / 3.8
    with pytest.raises(ValueError, match=r"4096 or 4100 can"):
        dry_run(load_config(None, [*settings, "parallelism.cp_size=4", "data.sequence_length=4098"]), gpu="h100")


def _mib(said: str, name: str) -> float:
    line = next(line for line in said.splitlines() if line.startswith(f"#   {name}"))
    return float(line.split()[-2].replace(",", ""))
