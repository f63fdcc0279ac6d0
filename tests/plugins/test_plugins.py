"""A transport and an expert computation in one file each, outside the package, are seen wherever there is a list."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from carpool.bench.bench_settings import TransportSettings as Settings
from carpool.bench.options import RideShape as Shape
from carpool.bench.transport import ride_contest as bench
from carpool.experts import EXPERTS
from carpool.layout import ExpertLayout
from carpool.metrics.counters import Traffic
from carpool.parallel.degrees import Degrees
from carpool.placement.objective import evaluate
from carpool.placement.predicted_volume import predict
from carpool.placement.trace import LayerTrace
from carpool.planner.machine.cost import CostModel
from carpool.train.config import load_config
from carpool.train.plan.dry_run import dry_run
from carpool.train.plan.transport_choice import most_tokens, transport_options
from carpool.transport import TRANSPORTS, NVLinkOptions, TransportOptions, choose_transport, make_transport
from tests.plugins.outside import HERE, imported
from tests.ranks import Ranks, mesh
from tests.train.test_loop import MODEL, losses, run


def trained(output: str, overrides: list[str]) -> tuple[str, set[str]]:
    """On a rank: train with both; the error, and what the experts did."""
    with imported("ring"), imported("counting") as module:
        return run(output, overrides), set(module.Counting.calls)


def test_a_run_rides_and_computes_as_with_the_packages_own(ranks: Ranks, tmp_path: Path, text: list[str]) -> None:
    settings = [*MODEL, *text, "training.max_steps=2", "training.save_steps=none", "training.eval_steps=none"]
    ours = ["moe.transport=ring", "moe.experts=counting"]
    ours += ["moe.transport_options.reverse=true", "moe.expert_options.label=!"]
    for error, calls in ranks(trained, str(tmp_path / "ring"), [*settings, *ours]):
        assert error == "" and calls == {"forward!", "backward"}
    for error, calls in ranks(trained, str(tmp_path / "gather"), [*settings, "moe.transport=gather"]):
        assert error == "" and not calls
    got, want = losses(tmp_path / "ring"), losses(tmp_path / "gather")
    assert got.keys() == want.keys()
    for step in got:
        assert got[step] == pytest.approx(want[step], rel=1e-4)
    told = json.loads((tmp_path / "ring" / "run.json").read_text())
    assert told["transport"]["name"] == "ring" and told["predicted"]["copies_per_token_uniform"] == 4


def measured() -> dict[str, Any]:
    """On a rank: `carpool bench transport`, which checks answers, and bytes against what the class says."""
    with imported("ring"):
        settings = Settings(shapes=(Shape(16, 8, 8, 2),), transports=("ring", "dedup"), repetitions=1, backward=True)
        made = bench.TransportBenchmark(settings.resolve(cuda=False, num_ranks=4), torch.device("cpu"))
        return {row.label: row.unavailable for case in made.measure_all() for row in case.rows}


def test_the_benchmark_measures_it_and_finds_its_answers_and_bytes_right(ranks: Ranks) -> None:
    assert ranks(measured) == [{"ring": None, "dedup": None}] * 4


def went(reverse: bool) -> list[int]:
    """On a rank: rows of a dispatch to each rank, each of which has three tokens."""
    group, traffic = mesh((4,), ("ep",)).get_group(), Traffic(4, dist.get_rank())
    with imported("ring") as ring:
        transport = make_transport("ring", group, 1, ring.RingOptions(reverse=reverse))
        transport.dispatch(torch.ones(3, 2), transport.plan(torch.zeros(3, 1).int(), torch.ones(3, 1), traffic)).wait()
    return list(traffic.rows["dispatch"])


@pytest.mark.parametrize("reverse", [False, True])
def test_it_is_made_with_its_options_and_says_what_they_send(ring: Any, reverse: bool, ranks: Ranks) -> None:
    options, layout = ring.RingOptions(reverse=reverse), ExpertLayout.contiguous(4, 4)
    said = predict("ring", [np.zeros((3, 1), int)] * 4, layout, hidden=2, element_size=4, options=options)
    assert ranks(went, reverse) == said.rows_WW.tolist()


def test_options_come_from_the_configuration(ring: Any, counting: Any) -> None:
    chosen = ["moe.transport=ring", "moe.experts=counting"]
    config = load_config(None, [*chosen, "moe.transport_options.reverse=true", "moe.expert_options.label=a"])
    assert config.moe.expert_options == {"label": "a"}
    degrees = Degrees(fsdp=4, ep=4)
    tokens = most_tokens(config, degrees)
    assert transport_options(config, degrees, "ring") == ring.RingOptions(tokens, reverse=True)
    assert transport_options(config, degrees, "dedup") == TransportOptions(tokens)
    # Of another transport's, what means something to any.
    assert ring.Ring.own_options(NVLinkOptions(max_tokens=7)) == ring.RingOptions(7)
    for settings, error in (
        ([*chosen, "moe.transport_options.revers=true"], r"moe.transport_options.revers: did you mean .*\.reverse\?"),
        ([*chosen, "moe.transport_options.x=1"], "moe.transport_options.x: transport 'ring' has the options reverse"),
        ([*chosen, "moe.transport_options.max_tokens=1"], "unknown key moe.transport_options.max_tokens"),
        ([*chosen, "moe.transport_options.reverse=7"], "moe.transport_options.reverse = 7: .*valid boolean"),
        (["moe.transport_options.reverse=true"], "moe.transport = 'auto' may become any transport"),
        (["moe.transport=nvlink", "moe.transport_options.keep=again"], r"are the section \[nvlink\]"),
        (["moe.transport=dedup", "moe.transport_options.a=1"], "transport 'dedup' has no options"),
        ([*chosen, "moe.expert_options.labl=a"], r"moe.expert_options.labl: did you mean moe.expert_options.label\?"),
        (["moe.experts=grouped", "moe.expert_options.recompute=true"], "experts 'grouped' have no options of this"),
    ):
        with pytest.raises(ValueError, match=error):
            load_config(None, settings)


def test_volumes_objectives_and_estimates_know_it(ring: Any) -> None:
    layout = ExpertLayout.contiguous(4, 2)
    routings = [np.array([[0, 1], [1, 2], [1, 2]]), np.array([[0, 3]])]
    volume = predict("ring", routings, layout, hidden=8, element_size=4)
    assert volume.rows_WW.tolist() == [[3, 3], [3, 3]]
    assert volume.bytes_WW["dispatch"].tolist() == [[3 * 48] * 2] * 2

    trace = LayerTrace(np.array([[0, 1], [1, 2], [1, 2], [0, 3]]), np.arange(4), 4)
    cost = CostModel(hidden=8, expert_hidden=8, element_size=4, tokens_per_rank=2, transport="ring")
    assert evaluate(trace, layout, cost=cost).sent_WW.sum() == 8

    assert choose_transport("ring", 4, 8) == ("ring", "asked for")
    assert choose_transport("auto", 4, 8)[0] == "dedup", "a plug-in is asked for by its name"
    settings = [*MODEL, "moe.transport=ring", "parallelism.num_ranks=4", "parallelism.device=cpu"]
    assert "# transport ring: asked for" in dry_run(load_config(None, settings))


def test_a_name_that_nobody_has_registered() -> None:
    with pytest.raises(ValueError, match=r"moe.transport = 'ring': expected one of auto, nvlink, alltoall, dedup, ga"):
        load_config(None, ["moe.transport=ring"])
    with pytest.raises(ValueError, match=r"moe.experts = 'counting': expected one of auto, grouped, reference, fp8"):
        load_config(None, ["moe.experts=counting"])
    with pytest.raises(ValueError, match=r"moe.transport = 'dedupe'.*; did you mean dedup\?"):
        load_config(None, ["moe.transport=dedupe"])


def test_a_class_that_lacks_something_is_refused_when_it_is_registered() -> None:
    from carpool import experts, transport

    class Half(transport.Transport):
        name = "half"

    class Nothing:
        name = "nothing"

    class Old(transport.Transport):
        name = "old"
        rows_sent = copies_per_token = None

    with pytest.raises(ValueError, match="earlier version: rows_sent is now tokens_sent, copies_per_token is now ran"):
        transport.register(Old)
    with pytest.raises(ValueError, match=r"transport 'half' \(Half\) does not implement combine, .*tokens_sent"):
        transport.register(Half)
    with pytest.raises(ValueError, match="transport 'nothing' must be a subclass"):
        transport.register(Nothing)
    with pytest.raises(ValueError, match=r"experts 'nothing' .*have no forward and no backward"):
        experts.register(Nothing)
    assert "half" not in TRANSPORTS and "nothing" not in EXPERTS


def test_the_command_sees_a_file_that_the_environment_names() -> None:
    """Nothing is installed, and no script of one's own is run."""
    path = os.pathsep.join([str(HERE), str(HERE.parents[1]), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-c", "from carpool import cli; cli.app()", "train", "--dry-run", *MODEL,
         "moe.transport=ring", "moe.experts=counting", "parallelism.device=cpu", "parallelism.num_ranks=2"],
        env={**os.environ, "PYTHONPATH": path, "CARPOOL_PLUGINS": "ring,counting"},
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "# transport ring: asked for" in done.stdout
