"""The scripts of benchmarks/: options parse, what runs on CPUs does so with tiny settings, every command of
`benchmarks.pending` is one that would run, and one that fails ends no other."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import checkpoints, one_gpu, pending
from benchmarks.bubbles import Bubble, Measured, formula, played
from benchmarks.peaks import SETTINGS, growth, measure
from benchmarks.pending import PENDING, Measurement, markdown, rows, why_not
from carpool.bench.timing import rounds
from carpool.train.config import load_config
from carpool.train.plan.memory_fit import CLEARLY
from tests.bench.started import GPU, check_command
from tests.environment import ROOT
from tests.ranks import Ranks


def test_names_are_different_and_the_list_has_what_each_needs(capsys: pytest.CaptureFixture[str], monkeypatch) -> None:
    assert len({one.name for one in PENDING}) == len(PENDING)
    monkeypatch.setattr(sys, "argv", ["pending", "--list"])
    pending.main()
    said = capsys.readouterr().out.splitlines()
    heads = [line for line in said if not line.startswith("    ")]
    assert len(heads) == len(PENDING)
    seconds = [int(head.split(" s; ")[0].rpartition(" ")[2]) for head in heads]
    assert seconds == sorted(seconds), "shortest first"
    assert any("NCCL_HOSTID=node$NODE NCCL_NET=Socket NCCL_SOCKET_IFNAME=lo" in line for line in said)


def _ways() -> list[tuple[Measurement, int]]:
    """Each measurement, over each number of GPUs that it can run on."""
    there = {(one.name, one.ranks(gpus)): one for one in PENDING if one.command for gpus in (1, 2, 4)}
    return [(one, ranks) for (_, ranks), one in there.items() if ranks is not None]


@pytest.mark.parametrize(("one", "ranks"), _ways(), ids=lambda it: getattr(it, "name", str(it)))
def test_a_command_is_taken(one: Measurement, ranks: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert ranks <= one.gpus and ranks % one.nodes == 0
    monkeypatch.chdir(ROOT)  # paths in commands are relative to the checkout
    check_command(one.words(ranks, str(tmp_path)), ranks)


@pytest.mark.parametrize("one", one_gpu.rows()[::4], ids=lambda it: it.name)
def test_a_row_of_the_table_of_one_gpu_is_taken(one: Measurement, tmp_path: Path) -> None:
    needs, has = one_gpu.memory_of(one, GPU)
    if needs > CLEARLY * has:
        with pytest.raises(ValueError, match="does not fit in the"):
            check_command(one.words(1, str(tmp_path)), 1)
        one = one_gpu.with_fewer_layers(one, needs, has)
    check_command(one.words(1, str(tmp_path)), 1)


def test_a_model_that_does_not_fit_is_measured_with_fewer_layers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, commands, has = one_gpu.rows()[6], list[str](), [0.0]
    monkeypatch.setattr(one_gpu, "memory_of", lambda _: (212.4 * 2**30, has[0] * 2**30))

    def measure(one: Measurement, *_: object) -> dict[str, str]:
        commands.append(one.command)
        return {"status": "failed", "command": str(one.command)}

    monkeypatch.setattr(one_gpu, "measure", measure)
    monkeypatch.setattr(sys, "argv", ["one_gpu", "--only", one.name, "--out", str(tmp_path)])
    # Clearly too little; too little, but it may go; enough, so that it failed for another reason.
    for has[0], layers in ((79.2, [13]), (200, [None, 34]), (300, [None])):
        commands.clear()
        one_gpu.main()
        assert commands == [one.command if fit is None else f"{one.command} --layers {fit}" for fit in layers]
    row = {"tokens_per_second": 5000.0, "reserved_bytes": 2**30, "predicted_bytes": 2**31, "mfu": 0.25}
    case = {"layers": 13, "rows": [{**row, "unavailable": None}]}
    found = {"name": one.name, "status": "measured", "needs": 212.4, "written": {"model.json": {"cases": [case]}}}
    cells = one_gpu.cells(found)
    assert cells == [
        "GLM-4.5-Air", "LoRA", "float32", "5,000", "1.0", "2.0", "25.0%", "13 layers; all layers need 212 GiB",
    ]  # fmt: skip
    failed = {"name": one.name, "status": "failed", "error": ["error: no"], "written": {}}
    assert one_gpu.cells(failed)[-1] == "failed: error: no"


def test_how_many_gpus_are_taken() -> None:
    one = Measurement("a", "b", 4, 1, "-c pass", least=2)
    assert [one.ranks(gpus) for gpus in (1, 2, 3, 4, 8)] == [None, 2, 2, 4, 4]
    peer = Measurement("a", "b", 4, 1, None, module="a_module_that_is_nowhere")
    assert why_not(peer, 8) == "not installed: a_module_that_is_nowhere"
    assert "no benchmark here calls it yet" in str(why_not(Measurement("a", "b", 4, 1, None, module="json"), 8))


LIST = """
import sys
from benchmarks import pending
from benchmarks.pending import Measurement

import torch
torch.cuda.device_count = lambda: 1
write = "import json,sys; json.dump({'results': [{'name': 'x', 'ms': 2.5}]}, open(sys.argv[1] + '/a.json', 'w'))"
pending.PENDING[:] = [
    Measurement("right", "a.md", 1, 2, f'-c "{write}" {{out}}'),
    Measurement("wrong", "b.md", 1, 1, '-c "import a_module_that_is_nowhere"'),
    Measurement("slow", "c.md", 1, 3, '-c "import time; time.sleep(600)"'),
    Measurement("large", "d.md", 2, 3, "-c pass"),
    Measurement("long", "e.md", 1, 500, "-c pass"),
]
sys.argv = ["pending", "--minutes", "0.15", "--out", sys.argv[1]]
pending.main()
"""


def test_one_that_fails_or_takes_too_long_ends_no_other(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", LIST, str(tmp_path)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    report = json.loads((tmp_path / "pending.json").read_text())
    found = {one["name"]: one for one in report["results"]}
    assert list(found) == ["wrong", "right", "slow", "large", "long"]
    assert found["wrong"]["status"] == "failed" and "No module named" in found["wrong"]["error"][-1]
    assert found["right"]["status"] == "measured" and found["right"]["written"]["a.json"]["results"][0]["ms"] == 2.5
    assert found["slow"]["status"].startswith("ended after") and found["slow"]["seconds"] < 15
    assert found["large"]["status"] == "waits for 2 GPUs; there are 1"
    assert found["long"]["status"].startswith("not begun")
    assert (
        report["environment"]["torch"] and report["environment"]["commit"] and "hostname" not in report["environment"]
    )
    table = (tmp_path / "pending.md").read_text()
    assert "| x | ms 2.5 |" in table and "python -c" in table and "| wrong | failed |" in table
    assert str(tmp_path) not in json.dumps(report["results"]), "no temporary folder"


def test_rows_of_what_benchmarks_write() -> None:
    """The files of docs/measurements are what commands have written."""
    measured = {name: json.loads((ROOT / "docs" / "measurements" / f"{name}.json").read_text())
                for name in ("qwen3_48_layers", "points", "peaks", "transport", "nodes_2x4")}  # fmt: skip
    found = {name: dict(rows(written)) for name, written in measured.items()}
    row = measured["qwen3_48_layers"]["cases"][0]["rows"][0]
    of_model = next(numbers for what, numbers in found["qwen3_48_layers"].items() if row["label"] in what)
    assert of_model["tokens/s"] == row["tokens_per_second"] and of_model["MFU"] == row["mfu"]
    point = measured["points"]["points"][0]
    assert found["points"][point["point"]]["ms a step"] == point["milliseconds"]
    assert all(len(one) >= 2 for one in found.values())
    where = {"device": "d", "torch": "t", "commit": "c"}
    one = {"name": "n", "completes": "m", "command": "python x", "gpus": 2, "status": "measured", "written": measured}
    assert f"| {point['point']} | ms a step" in markdown({"environment": where, "results": [one]})


@pytest.mark.slow
def test_two_nodes_of_one_machine(tmp_path: Path) -> None:
    """Without GPUs: ranks that are started for two nodes agree that they are on two, and write what they measured."""
    command = "-m benchmarks.chunks --transport hierarchical --shapes 32,16,16,8,2 --repetitions 2 --out {out}/a.json"
    found = pending.measure(Measurement("two", "a.md", 4, 1, command, least=2, nodes=2), gpus=2, seconds=200)
    assert found["status"] == "measured", found
    assert found["written"]["a.json"]["results"] and found["gpus"] == 2
    assert found["reduced"] == "over 2 instead of 4 GPUs"
    assert "--nnodes 2 --node-rank $NODE --nproc-per-node 1" in found["command"]


SCRIPTS = [path.stem for path in sorted((ROOT / "benchmarks").glob("*.py")) if "__main__" in path.read_text()]


def test_rounds_turn_about_and_forget_who_left() -> None:
    running = {"a": 1, "b": 2}
    seen = []
    for number, order in rounds(running, repetitions=2, warmup=1):
        seen.append((number, order))
        if number == 0:
            del running["a"]
    assert seen == [(-1, ["a", "b"]), (0, ["b", "a"]), (1, ["b"])]


@pytest.mark.parametrize("script", SCRIPTS)
def test_options_parse(script: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", [script, "--help"])
    module = importlib.import_module(f"benchmarks.{script}")
    with pytest.raises(SystemExit) as left:
        module.main()
    assert left.value.code == 0
    assert capsys.readouterr().out.startswith("usage: ")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "options"),
    [
        ("chunks", "--transport dedup --shapes 32,16,16,8,2 --repetitions 2"),
        ("overlap", "--model tiny --transport dedup --sequence 32 --layers 2 --steps 2 --chunks 2"),
        ("priority", "--model tiny --transport dedup --sequence 32 --layers 2 --steps 2"),
        ("bubbles", "--micro-batches 4 --steps 1 --sleep 2"),
        ("slot_fetch", "--transport dedup --shapes 64,32,16,2 --repetitions 2"),
        ("latency", "--transports dedup --tokens 8 --hidden 16 --experts 8 --top-k 2 --verbs 3 --delays 1"),
    ],
)
def test_a_tiny_run(script: str, options: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command += ["-m", f"benchmarks.{script}", *options.split(), "--out", str(tmp_path / "out.json")]
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads((tmp_path / "out.json").read_text())
    assert found["results"] and found["environment"]["torch"] and "out" not in found["settings"]


@pytest.mark.slow
def test_a_tiny_run_of_adapters(tmp_path: Path) -> None:
    """On one process. Both contenders begin with the same model."""
    keys = {
        "hidden_size": 32, "num_experts": 8, "moe_intermediate_size": 16, "num_attention_heads": 2,
        "num_key_value_heads": 1, "head_dim": 16, "vocab_size": 64,
    }  # fmt: skip
    command = [sys.executable, "-m", "benchmarks.adapters", "--layers", "1", "--tokens", "32", "--repetitions", "1"]
    command += ["--warmup", "0", "--keys", json.dumps(keys), "--out", str(tmp_path / "out.json")]
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stderr[-3000:]
    carpool, peft = json.loads((tmp_path / "out.json").read_text())["results"]
    assert carpool["loss"] == pytest.approx(peft["loss"], rel=1e-4) and carpool["trained"] == peft["trained"]


def _checkpoints(folder: str) -> None:
    config = load_config(None, [f"training.output_dir={folder}", "parallelism.num_ranks=2"])
    numbers = {"steps": 1, "saves": 1, "seconds": 200, "interval": 10.0, "predict": 8}
    checkpoints.measure_all(config, {"only": ["clipped"], "tiny": True, "out": f"{folder}/out.json", **numbers})


def test_a_tiny_run_of_checkpoints(two_ranks: Ranks, tmp_path: Path) -> None:
    two_ranks(_checkpoints, str(tmp_path))
    (found,) = json.loads((tmp_path / "out.json").read_text())["results"]
    (one,) = found["saves"]
    assert 0 < one["waited"] < one["between"] and one["steps"] > 0 and one["copied"] < one["written"]
    assert found["predicted"]["bytes"] > 5 * found["bytes"]


def count(folder: str, only: list[str]) -> None:
    config = load_config(None, [f"training.output_dir={folder}", "parallelism.num_ranks=4"])
    measure(config, {"only": only, "steps": 1, "seconds": 200, "tiny": True, "out": f"{folder}/peaks.json"})


def check(ranks: Ranks, folder: Path, only: list[str]) -> None:
    ranks(count, str(folder), only)
    found = json.loads((folder / "peaks.json").read_text())
    assert found["failed"] == {}
    assert [one["setting"] for one in found["results"]] == only
    for one in found["results"]:
        assert one["measured"]["tensors"] > one["measured"]["stays"] > 0, one["setting"]
        assert one["ratios"]["tensors"] == pytest.approx(1, abs=0.1), one["setting"]


def test_a_setting_is_a_run(two_ranks: Ranks, tmp_path: Path) -> None:
    check(two_ranks, tmp_path, ["adapters"])


@pytest.mark.slow
def test_all_settings_are_runs(ranks: Ranks, tmp_path: Path) -> None:
    check(ranks, tmp_path, list(SETTINGS))


def test_the_growth_of_memory_is_the_most_that_is_there_at_a_time() -> None:
    def work() -> None:
        one = torch.empty(1000)
        two = torch.empty(500)
        del one
        three = torch.empty(700)
        del two, three

    assert growth(work) == pytest.approx(6000, rel=0.05)


def test_bubbles_of_orders_are_the_published_ones() -> None:
    for schedule in ("GPipe", "1F1B", "Interleaved1F1B"):
        assert played(schedule, 4, 8, (1.0, 1.5, 0.5)) == pytest.approx(formula(schedule, 4, 8))
    # ZBV: (p - 1) F / 2 of 3 m F and that (arXiv 2401.10241, section 6).
    assert formula("ZBVZeroBubble", 4, 8) == pytest.approx(1.5 / 25.5)


def bubble(schedule: str) -> Measured:
    one = Bubble(schedule, 4, torch.device("cpu"), sleep=4.0)
    return one.summary([one.step() for _ in range(2)][1:])


@pytest.mark.parametrize("schedule", ["1F1B", "DualPipeV"])
def test_ranks_wait_at_least_as_long_as_on_paper(two_ranks: Ranks, schedule: str) -> None:
    found = two_ranks(bubble, schedule)[0]
    assert found.played - 0.05 < found.measured < 0.7
    # Forward 4 ms; backward 8 ms in all, of which weight gradients are half where they are apart.
    forward, inputs, weights = found.seconds
    assert forward >= 4e-3 and inputs + weights >= 8e-3 and (weights >= 4e-3) == (schedule == "DualPipeV")
