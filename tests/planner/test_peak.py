"""The memory that a plan counts, against the trainer's own estimate."""

from __future__ import annotations

from typing import Any

import pytest

from carpool.parallel.degrees import Degrees
from carpool.planner.candidate import KEEP, Candidate, toml_text
from carpool.planner.model_shape import ModelShape
from carpool.planner.peak import memory_of
from carpool.train.config import load_config
from carpool.train.config.published import read_keys
from carpool.train.run.estimate import MemoryEstimate
from carpool.train.run.model import meta_model, model_config

QWEN = "qwen3-30b-a3b"


@pytest.mark.parametrize(
    ("name", "candidate"),
    [
        (QWEN, Candidate(Degrees(1, 2, 1, 2), 4096, 2, moments="bfloat16")),
        (QWEN, Candidate(Degrees(1, 4, 1, 4), 4096, 2, dense="fsdp")),
        (QWEN, Candidate(Degrees(1, 8, 1, 4), 4096, 2, 3, "dedup", dense="fsdp", compiled=False,
                         policies={"dense": "recompute"})),
        (QWEN, Candidate(Degrees(1, 8, 1, 8), 4096, 1, 4, policies={"rows": "resend", "hidden": "recompute"})),
        ("deepseek-v3", Candidate(Degrees(1, 8, 1, 8), 4096, 1, dense="fsdp", compiled=False,
                                  policies={"dense": "recompute", "sums": "recompute"})),
        ("glm-4.5-air", Candidate(Degrees(1, 8, 1, 8), 4096, 2, policies={"hidden": "offload"})),
        ("mixtral-8x7b", Candidate(Degrees(1, 8, 1, 8), 4096, 2, transport="dedup", optimizer_state="host")),
    ],
)  # fmt: skip
def test_peaks_agree_with_the_trainers_estimate(name: str, candidate: Candidate, tmp_path: Any) -> None:
    keys = {"from": name, "num_hidden_layers": 5}
    candidate = Candidate(**{**vars(candidate), "policies": {**KEEP, **candidate.policies}})
    settings = candidate.settings()
    (tmp_path / "plan.toml").write_text(toml_text(settings))
    config = load_config(tmp_path / "plan.toml", ["data.tokenizer=bytes", f"model.config={name}"])
    estimate = MemoryEstimate(config, candidate.degrees, meta_model(model_config(keys)), True)
    theirs = estimate(candidate.transport, candidate.dense)
    peak = memory_of(ModelShape.read(read_keys(keys)), candidate)
    assert peak.total == pytest.approx(theirs["total"], rel=0.03)
    assert peak.host == pytest.approx(estimate.host_bytes(candidate.transport), rel=0.03)


def test_the_timeline_rises_and_falls() -> None:
    shape = ModelShape.read(read_keys(QWEN))
    candidate = Candidate(Degrees(1, 8, 1, 8), 4096, 1, 2)
    peak = memory_of(shape, candidate, every_layer=True)
    sizes = dict(peak.timeline)
    assert max(sizes.values()) == pytest.approx(peak.tensors) and peak.at in sizes
    assert sizes["forward of layer 3"] < sizes["forward of layer 30"] < sizes["loss"]
    assert memory_of(shape, candidate).parts == peak.parts


def test_early_stages_of_a_pipeline_keep_more_micro_batches() -> None:
    shape = ModelShape.read(read_keys(QWEN))
    one, four = (
        memory_of(shape, Candidate(Degrees(1, 8 // pp, 1, 2, pp=pp), 4096, 1, 8)).parts["activations"] for pp in (1, 4)
    )
    # A quarter of the layers, four micro-batches of them.
    assert four == pytest.approx(one, rel=0.25)
