"""The transport of a run: asked for, by the rule, or as the run has recorded it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from carpool.layout.topology import Topology
from carpool.parallel.degrees import Degrees
from carpool.planner.machine.hardware import find_hardware
from carpool.train.config.schema import Config
from carpool.train.launch.machine import Machine
from carpool.train.plan.start_checks import decisions_of
from carpool.train.plan.transport_choice import TRANSPORT_KIND, choose_on_ranks, expected_transport


def way(wanted: str, unfit: str | None = "there is no CUDA device", folder: Path | None = None) -> Any:
    layer: Any = SimpleNamespace(compute=object(), group=None, num_ranks=4)
    reasons = {} if unfit is None else {"nvlink": unfit}
    config = Config()
    config = config.model_copy(update={"moe": config.moe.model_copy(update={"transport": wanted})})
    with mock.patch("carpool.train.plan.transport_choice.unfit_transports", lambda *args, **kwargs: reasons):
        plan: Any = SimpleNamespace(
            config=config,
            degrees=Degrees(fsdp=4, ep=4),
            machine=Machine(Topology.even(4), find_hardware("cpu"), 0, cuda=False, device=torch.device("cpu")),
            blueprint=SimpleNamespace(top_k=8, row_size=64),
            dtype=torch.float32,
            decisions=decisions_of([] if folder is None else [folder]),
        )
        return choose_on_ranks(plan, layer)[0]


def blueprint(top_k: int) -> Any:
    return SimpleNamespace(top_k=top_k, row_size=2048)


def test_as_asked_for_or_by_the_rule() -> None:
    asked, auto = way("gather"), way("auto")
    assert (asked.answer, asked.how, asked.why) == ("gather", "given", "asked for")
    assert (auto.answer, auto.how) == ("dedup", "default") and "not nvlink: there is no CUDA device" in auto.why
    assert way("auto", None).answer == "nvlink"
    with pytest.raises(ValueError, match="transport='pigeon' is not known"):
        way("pigeon")


@pytest.mark.parametrize(
    ("nodes", "top_k", "gpu", "answer"),
    [(2, 8, "H100", "hierarchical"), (2, 2, "H100", "dedup"), (1, 8, "H100", "nvlink"), (16, 8, "H100", "dedup")],
)
def test_a_prediction_knows_the_rule_for_several_nodes(nodes: int, top_k: int, gpu: str, answer: str) -> None:
    machine = Machine(Topology.even(16, nodes), find_hardware(gpu), 0, cuda=True, here=False)
    way = expected_transport(Config(), Degrees(fsdp=16, ep=16), blueprint(top_k), machine)
    assert way.answer == answer, way.why


def test_without_nvlink_nobody_reaches_peers_memory() -> None:
    machine = Machine(Topology.even(4), replace(find_hardware("H100"), nvlink=None), 0, cuda=True, here=False)
    way = expected_transport(Config(), Degrees(fsdp=4, ep=4), blueprint(8), machine)
    assert way.answer == "dedup" and "H100 has no NVLink" in way.why


def test_a_resumed_run_takes_what_it_recorded_while_it_can(tmp_path: Path) -> None:
    first = way("auto", None)
    # As if the rule had been another then.
    record = {**TRANSPORT_KIND.record(first), "name": "alltoall"}
    (tmp_path / "run.json").write_text(json.dumps({"decisions": {"transport": record}}))
    again = way("auto", None, tmp_path)
    assert again.answer == "alltoall" and again.why == "as recorded in this run (default)"
    gone = way("auto", "its ranks are on 2 hosts", tmp_path)
    assert gone.answer == "dedup" and "chosen anew: unfit was [], is ['nvlink']" in gone.why
    assert way("gather", None, tmp_path).answer == "gather"
