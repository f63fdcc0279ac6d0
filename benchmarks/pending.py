"""The measurements that the documentation still lacks, shortest first, on as many GPUs as there are.

    python -m benchmarks.pending --list                          # what is lacking, and what it needs; no GPU
    python -m benchmarks.pending --minutes 10                    # as many as fit into ten minutes
    python -m benchmarks.pending --minutes 10 --only qwen3       # of those whose names begin so

A measurement that is taken over fewer GPUs than the documentation wants is "reduced": its row says over how many. One
that means nothing there waits. Each runs in processes of its own; one that fails does not end the rest, and the last
lines that it wrote are kept. Results are written after each:

    OUT/pending.json    what each command wrote as JSON, the command itself, hardware, versions and commit
    OUT/pending.md      a row for each number that people look for, as tables of docs/measurements.md have them

To add a measurement, add an entry to PENDING; one that has been measured, and whose row is in the docs, leaves it.
tests/bench/test_pending.py passes each command through the checks of a run on GPUs, without one.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
TORCHRUN = "-m torch.distributed.run --standalone --nproc-per-node {ranks}"
QWEN3 = "-m carpool bench model --model qwen3-30b-a3b --ranks {ranks} --rounds 2 --steps 3 --out {out}"
QWEN3 += " --contenders carpool-compiled --set training.optimizer=one-pass"
EIGHT = "-m carpool bench model --model qwen3-30b-a3b --ranks {ranks} --rounds 2 --steps 3 --out {out} --layers 8"
EIGHT += " --contenders carpool-compiled --set training.optimizer_state_dtype=bfloat16"
RECOMPUTED = " --set memory.layer_activations=recompute --set memory.expert_activations=recompute"
STAGE = "--set parallelism.pp_size=2 --set parallelism.pp_schedule=1F1B"
# Two nodes of one machine: NCCL takes them for different hosts, and what crosses goes over sockets.
OF_A_NODE = {"NCCL_NET": "Socket", "NCCL_SOCKET_IFNAME": "lo"}
SHAPES = ("4096,7168,256,8", "8192,2048,64,8", "8192,4096,128,8", "8192,2048,128,8")
LAST_LINES = 12


@dataclass(frozen=True)
class Measurement:
    """One that is lacking.

    Attributes:
        completes: the passage of the docs.
        gpus: how many it wants; it runs over as many as there are, if these are at least `least`.
        seconds: that it is expected to take.
        command: arguments of Python. {ranks}: GPUs that it runs on; {out}: an empty folder for its JSON file.
        least: None: `gpus`.
        fewer: by the number of GPUs, what is added to the command there: a model of fewer layers, for example.
        nodes: of one machine, among which the GPUs are divided; the command is then what each rank runs.
        module: that must be installed. A measurement without a command says how far it is without one.
    """

    name: str
    completes: str
    gpus: int
    seconds: int
    command: str | None
    least: int | None = None
    fewer: Mapping[int, str] = field(default_factory=dict)
    nodes: int = 1
    module: str | None = None

    def ranks(self, gpus: int) -> int | None:
        """Over how many of the GPUs it runs; None: they are too few."""
        least = self.gpus if self.least is None else self.least
        return next((n for n in (self.gpus, *(4, 2, 1)) if n <= min(gpus, self.gpus) and n >= least), None)

    def words(self, ranks: int, out: str) -> list[str]:
        assert self.command is not None
        text = f"{self.command} {self.fewer.get(ranks, '')}"
        return [word.replace("{ranks}", str(ranks)).replace("{out}", out) for word in shlex.split(text)]


PENDING = [
    # One GPU is enough.
    Measurement(
        "experts at the shape of README's layer", "measurements.md, what experts compute, at this commit", 1, 45,
        "-m carpool bench experts --shape 8192,2048,1024,64,8 --experts grouped --against grouped_mm --repetitions 5 "
        "--out {out}",
    ),
    Measurement(
        "fp8 in loss, bf16", "measurements.md, what FP8 costs in loss: the commands have not been run on a GPU", 1, 100,
        "-m carpool train training.max_steps=600 training.per_device_train_batch_size=8 training.eval_steps=100 "
        "parallelism.num_ranks={ranks} training.output_dir={out}/run",
    ),
    Measurement(
        "fp8 in loss, fp8", "measurements.md, what FP8 costs in loss: the commands have not been run on a GPU", 1, 110,
        "-m carpool train training.max_steps=600 training.per_device_train_batch_size=8 training.eval_steps=100 "
        "moe.experts=fp8 parallelism.num_ranks={ranks} training.output_dir={out}/run",
    ),
    # Fine-tuning on one GPU.
    Measurement(
        "table of fine-tuning on one GPU", "fine-tuning-one-gpu.md: five models by three methods: one row", 1, 240,
        "-m benchmarks.one_gpu --only \"GLM-4.5-Air, full\" --minutes 4 --out {out}",
    ),
    Measurement(
        "checkpoints beside training", "reliability.md: how long training waits, 8 layers of Qwen3-30B-A3B", 1, 240,
        "-m benchmarks.checkpoints --ranks 1 --only clipped --saves 1 --out {out}/checkpoints.json",
    ),
    Measurement(
        "snapshots of every step", "reliability.md: what snapshots cost, 8 layers of Qwen3-30B-A3B, and 1", 1, 280,
        "-m benchmarks.snapshots --ranks 1 --rounds 3 --out {out}/snapshots.json",
    ),
    # Qwen3-30B-A3B, all 48 layers.
    Measurement(
        "qwen3, as measured before", "measurements.md, Qwen3-30B-A3B on two GPUs, at this commit", 2, 150,
        QWEN3 + " --set training.optimizer_state_dtype=int8 --set training.optimizer_in_backward=true "
        "--set training.max_grad_norm=0 --set parallelism.data_parallel=zero1",
        least=1, fewer={1: "--layers 12"},
    ),
    Measurement(
        "qwen3, clipped by the norm before, 16-bit moments", "README's row of Qwen3-30B-A3B without its restrictions",
        2, 170,
        QWEN3 + " --batch 1 --set training.optimizer_state_dtype=bfloat16 --set training.optimizer_in_backward=true "
        "--set training.grad_clipping=delayed --set parallelism.data_parallel=fsdp" + RECOMPUTED,
        least=1, fewer={1: "--layers 12"},
    ),
    Measurement(
        "qwen3, fsdp, gradients kept and clipped", "measurements.md, the first row of Qwen3-30B-A3B, at this commit",
        2, 180,
        QWEN3 + " --set training.optimizer_state_dtype=int8 --set parallelism.data_parallel=fsdp" + RECOMPUTED,
        least=1, fewer={1: "--layers 12"},
    ),
    Measurement(
        "qwen3, 4 GPUs, clipped, 16-bit moments", "README's row of Qwen3-30B-A3B without its restrictions", 4, 170,
        QWEN3 + " --set training.optimizer_state_dtype=bfloat16 --set parallelism.data_parallel=zero1",
    ),
    Measurement(
        "qwen3, 4 GPUs, fsdp, clipped, 16-bit moments", "README's row of Qwen3-30B-A3B without its restrictions",
        4, 180,
        QWEN3 + " --set training.optimizer_state_dtype=bfloat16 --set parallelism.data_parallel=fsdp",
    ),
    Measurement(
        "qwen3, the example's file", "train.md: examples/train_from_config/qwen3_30b_a3b.toml, whole", 2, 300,
        "-m carpool train --config examples/train_from_config/qwen3_30b_a3b.toml training.max_steps=12 "
        "training.eval_steps=none training.eval_on_start=false training.save_steps=none training.save_pretrained=false "
        "training.logging_steps=1 parallelism.num_ranks={ranks} training.output_dir={out}/run",
        least=1, fewer={1: "model.config.num_hidden_layers=12"},
    ),
    # Experts that two expert-parallel groups hold: whole on each rank and captured, or in FSDP2. On two GPUs a group is
    # one rank.
    *(
        Measurement(
            f"olmoe, {gpus} GPUs, shared experts, {way}", "measurements.md, experts of several expert-parallel groups",
            gpus, 100,
            "-m carpool bench model --model olmoe-1b-7b --ranks {ranks} --rounds 2 --steps 3 --out {out} "
            f"--contenders carpool-compiled --set training.optimizer=one-pass --set parallelism.ep_size={gpus // 2} "
            f"--set training.optimizer_state_dtype=int8 --set parallelism.data_parallel={way}",
        )
        for gpus in (2, 4)
        for way in ("zero1", "fsdp")
    ),
    # Dispatch and combine.
    *(
        Measurement(
            f"dispatch {shape}, {gpus} GPUs", "measurements.md, dispatch and combine over NVLink", gpus, 45,
            f"-m carpool bench transport --ranks {{ranks}} --shape {shape} --ctas 8 --ctas 16 --backward --decode "
            "--fp8 --repetitions 11 --out {out}",
        )
        for gpus in (2, 4)
        for shape in SHAPES
    ),
    Measurement(
        "dispatch in FP8 over NCCL", "measurements.md: how long FP8 takes beside NCCL has not been measured", 4, 60,
        "-m benchmarks.nodes --trace docs/traces/e64-1435.npz --tokens 4096 --hidden 2048 --dtype bfloat16 --codec fp8 "
        "--out {out}/nodes.json",
        least=2, nodes=2,
    ),
    Measurement(
        "two nodes, all transports", "measurements.md: two nodes of GPUs", 4, 60,
        "-m benchmarks.nodes --trace docs/traces/e64-1435.npz --tokens 8192 --hidden 2048 --dtype bfloat16 "
        "--out {out}/nodes.json",
        least=2, nodes=2,
    ),
    Measurement(
        "two nodes, hierarchical in chunks", "measurements.md: both hops at once have not been timed on GPUs", 4, 90,
        "-m benchmarks.chunks --transport hierarchical --shapes 8192,2048,1024,64,8 --out {out}/chunks.json",
        least=2, nodes=2,
    ),
    Measurement(
        "two nodes, schedules", "measurements.md, two nodes of one GPU, over hierarchical", 4, 120,
        "-m benchmarks.overlap --model olmoe --layers 4 --transport hierarchical --chunks 2 4 --tiles --steps 4 "
        "--out {out}/overlap.json",
        least=2, nodes=2,
    ),
    # Pipeline, sequence and context parallelism.
    Measurement(
        "bubbles", "parallelism.md: bubbles on GPUs have not been run", 4, 90,
        TORCHRUN + " -m benchmarks.bubbles --steps 3 --out {out}/bubbles.json", least=2,
    ),
    *(
        Measurement(
            f"context parallelism, {way}", "parallelism.md: which of ulysses and ring is faster", 4, 90,
            "-m carpool bench model --model qwen3-30b-a3b --layers 8 --sequence 16384 --batch {ranks} --ranks {ranks} "
            "--contenders carpool --steps 3 --rounds 2 --set parallelism.cp_size={ranks} "
            f"--set parallelism.cp_attention={way} --out {{out}}",
            least=2,
        )
        for way in ("ulysses", "ring")
    ),
    Measurement(
        "two batches at a time", "measurements.md: rides of 4 GPUs beside the computation of another batch", 4, 120,
        "-m carpool bench model --model olmoe-1b-7b --accumulation 2 --ranks {ranks} --out {out} --steps 3 --rounds 2 "
        "--contenders carpool-compiled,carpool-compiled+moe.schedule=two-batch",
        least=2,
    ),
    *(
        Measurement(
            f"sequence parallelism {way}", "parallelism.md: what it saves in time has not been measured", 2, 90,
            "-m carpool bench model --model qwen3-30b-a3b --layers 8 --ranks {ranks} --contenders carpool --steps 3 "
            "--rounds 2 --set parallelism.tp_size=2 --set parallelism.data_parallel=fsdp "
            f"--set parallelism.sequence_parallel={way} --out {{out}}",
        )
        for way in ("on", "off")
    ),
    Measurement(
        "hosts of stages", "measurements.md, the host of captured stages: ZBVZeroBubble, DualPipeV, pairs", 4, 400,
        "-m benchmarks.points --ranks {ranks} --only stage --steps 4 --rounds 3 --seconds 360 --out {out}/points.json",
        least=2,
    ),
    # A rank's layers as a stage of two, and the same layers by themselves: compiled and captured, four micro-batches.
    *(
        Measurement(
            f"{layers} layers of qwen3 {what}, {gpus} GPUs",
            "parallelism.md: a stage of pp_size=2 beside the same layers without a pipeline", gpus, 150,
            f"-m carpool bench model --model qwen3-30b-a3b --rounds 2 --steps 3 --batch 1 --accumulation 4 "
            f"--layers {of_all} --ranks {{ranks}} --contenders carpool-compiled --set training.optimizer=one-pass "
            f"--set training.optimizer_state_dtype=int8 --set parallelism.ep_size={ep} {more} --out {{out}}",
        )
        for gpus, layers, of_all, ep, what, more in (
            (1, 12, 12, 1, "without a pipeline", ""),
            (2, 12, 24, 1, "in a stage of two", STAGE),
            (2, 24, 24, 2, "without a pipeline", ""),
            (4, 24, 48, 2, "in a stage of two", STAGE),
        )
    ),
    *(
        Measurement(
            f"8 layers of qwen3, 4 GPUs, shared experts, {way}",
            "measurements.md, experts of several expert-parallel groups", 4, 120,
            f"{EIGHT} --set training.optimizer=one-pass --set parallelism.ep_size=2 "
            f"--set parallelism.data_parallel={way}",
        )
        for way in ("zero1", "fsdp")
    ),
    *(
        Measurement(
            f"schedules, 4 GPUs, {model}", "measurements.md, schedules: with 4 GPUs, where rides are longer", 4, 120,
            TORCHRUN + f" -m benchmarks.overlap --model {model} --batch {batch} --arena-gib 34 --chunks 2 --ctas 16 "
            "--out {out}/overlap.json",
        )
        for model, batch in (("olmoe", 4), ("qwen3", 4), ("deepseek", 1))
    ),
    # What the planner is fitted to and compared with.
    Measurement(
        "memory, predicted and taken", "measurements.md, memory: on 2 GPUs", 2, 420,
        "-m benchmarks.peaks --ranks {ranks} --seconds 380 --out {out}/peaks.json", least=1,
    ),
    Measurement(
        "points of the planner", "planner.md, is it right?: points at this commit", 2, 440,
        "-m benchmarks.points --ranks {ranks} --seconds 400 --out {out}/points.json", least=2,
    ),
    Measurement(
        "resumed with moving experts", "measurements.md: tests/gpu/test_resume_gpu.py has not been run whole", 2, 240,
        "-m pytest -q -p no:cacheprovider tests/gpu/test_resume_gpu.py", least=2,
    ),
    Measurement(
        "matrices of parity", "measurements.md: matrices over nccl and nvlink since there are spare slots", 1, 300,
        "-m pytest -q -p no:cacheprovider -m gpu tests/gpu/test_gpu.py tests/gpu/test_nvlink_gpu.py -k parity_matrix",
    ),
    # In runs/nanochat: what prepare.py writes of the text that the example's README names.
    *(
        Measurement(
            f"nanochat, {name}", "examples/nanochat_moe/README.md: ten minutes each, micro-batches as graphs", 1, 780,
            "examples/nanochat_moe/train.py runs/nanochat {out}/run.json --minutes 10 --capture " + more,
        )
        for name, more in (("dense", "--compile blocks"), ("64 experts", "--experts 64 --top-k 8"))
    ),
    # Peers that were published since the comparison in README: nothing here calls them yet.
    *(
        Measurement(f"peer: {peer}", "README and log.md: the best peer at each shape", 4, 0, None, module=module)
        for peer, module in (
            ("DeepEP V2", "deep_ep"), ("Hybrid-EP", "hybrid_ep_cpp"), ("NCCL EP", "nccl_ep"),
            ("LigerCute", "liger_cute"),
        )
    ),
]  # fmt: skip


def why_not(one: Measurement, gpus: int) -> str | None:
    """Why it cannot run here; None: it can."""
    if one.module is not None and importlib.util.find_spec(one.module) is None:
        return f"not installed: {one.module}"
    if one.command is None:
        return f"{one.module} is installed, and no benchmark here calls it yet: write one, and give its command"
    if one.ranks(gpus) is None:
        least = one.gpus if one.least is None else one.least
        return f"waits for {gpus_text(least)}; there are {gpus}"
    return None


def gpus_text(gpus: int) -> str:
    return "1 GPU" if gpus == 1 else f"{gpus} GPUs"


def shell(one: Measurement, ranks: int, out: str) -> str:
    """The command as people would type it."""
    words = shlex.join(["python", *one.words(ranks, out)])
    if one.nodes == 1:
        return words
    of_a_node = " ".join(f"{name}={value}" for name, value in OF_A_NODE.items())
    return f"on each of {one.nodes} nodes: NCCL_HOSTID=node$NODE {of_a_node} {agent(one, ranks, out, 'PORT')}"


def agent(one: Measurement, ranks: int, out: str, port: str) -> str:
    start = (
        f"python -m torch.distributed.run --nnodes {one.nodes} --node-rank $NODE --nproc-per-node {ranks // one.nodes}"
    )
    return f"{start} --master-addr 127.0.0.1 --master-port {port} {shlex.join(one.words(ranks, out))}"


def start(one: Measurement, ranks: int, out: Path, log: Any) -> list[subprocess.Popen[bytes]]:
    """Its processes, one for each node."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))}
    environment.setdefault("OMP_NUM_THREADS", "1")
    # Not every machine's links do multicast well; no measurement of the docs uses it.
    environment |= {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1"}
    if one.nodes == 1:
        commands = [(one.words(ranks, str(out)), environment)]
    else:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = str(free.getsockname()[1])
        each, commands = ranks // one.nodes, []
        for node in range(one.nodes):
            words = shlex.split(agent(one, ranks, str(out), port).replace("$NODE", str(node)))[1:]
            devices = ",".join(str(node * each + number) for number in range(each))
            own = {**environment, **OF_A_NODE, "NCCL_HOSTID": f"node{node}", "CUDA_VISIBLE_DEVICES": devices}
            commands.append((words, own))
    return [
        subprocess.Popen([sys.executable, *words], cwd=ROOT, env=own, stdout=log, stderr=log, start_new_session=True)
        for words, own in commands
    ]


def measure(one: Measurement, gpus: int, seconds: float) -> dict[str, Any]:
    """Run it for at most so long; what it wrote as JSON, or its last lines."""
    ranks = one.ranks(gpus)
    assert ranks is not None
    began, failed = time.perf_counter(), False
    with tempfile.TemporaryDirectory() as folder, (Path(folder) / "log").open("wb") as log:
        out = Path(folder) / "out"
        out.mkdir()
        processes = start(one, ranks, out, log)
        try:
            for process in processes:
                failed |= process.wait(max(0.0, seconds - (time.perf_counter() - began))) != 0
            why = "failed" if failed else None
        except subprocess.TimeoutExpired:
            why = f"ended after {seconds:.0f} s, when the minutes were over"
        finally:
            for process in processes:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)  # ranks, too, whatever state they are in
                process.wait()
        written = {str(path.relative_to(out)): json.loads(path.read_text()) for path in json_files(out)}
        lines = (Path(folder) / "log").read_text(errors="replace").replace(folder, "WORK").splitlines()
    found: dict[str, Any] = {"command": shell(one, ranks, "OUT"), "gpus": ranks, "status": why or "measured"}
    if ranks < one.gpus:
        found["reduced"] = f"over {ranks} instead of {gpus_text(one.gpus)}"
        found["reduced"] += f", with {one.fewer[ranks]}" if ranks in one.fewer else ""
    if why is not None:
        found["error"] = lines[-LAST_LINES:]
    elif not written:
        found["said"] = lines[-LAST_LINES:]
    return {**found, "seconds": time.perf_counter() - began, "written": written}


def json_files(out: Path) -> Iterator[Path]:
    """What commands wrote for others to read: results of benchmarks, and the summary of a run."""
    for path in sorted(out.rglob("*.json")):
        if path.parent == out or path.name == "summary.json":
            yield path


# Numbers that people look for, as results name them: how a row calls them, and by what they are divided.
NUMBERS = {
    "milliseconds": ("ms a step", 1), "host_ms": ("host ms", 1),
    "ms": ("ms", 1), "us_median": ("us", 1), "tokens_per_second": ("tokens/s", 1),
    "mfu": ("MFU", 1), "tflops": ("TFLOP/s", 1), "peak_bytes": ("peak GiB", 2**30), "measured": ("measured", 1),
    "predicted": ("predicted", 1), "tensors": ("tensors GiB", 2**30), "used": ("used GiB", 2**30),
    "eval_loss": ("loss held out", 1), "median": ("median", 1), "step_ms": ("ms a step", 1),
}  # fmt: skip
LABELS = ("label", "point", "setting", "name", "schedule", "transport", "contender", "mode")


def rows(written: Any, label: str = "") -> Iterator[tuple[str, dict[str, float]]]:
    """(what, its numbers) of each part of a result that has some, however deep it is."""
    if isinstance(written, list):
        for one in written:
            yield from rows(one, label)
    if not isinstance(written, dict):
        return
    here = next((written[key] for key in LABELS if isinstance(written.get(key), str)), "")
    label = ", ".join(filter(None, [label, here]))
    numbers = {
        text: value / unit
        for key, (text, unit) in NUMBERS.items()
        if isinstance(value := written.get(key), int | float) and not isinstance(value, bool)
    }
    if numbers:
        yield label, numbers
    for key, one in written.items():
        if key not in ("settings", "environment", "config", "rounds", "kinds", "rooflines", "ratios", "before"):
            yield from rows(one, label if isinstance(one, list) else ", ".join(filter(None, [label, key])))


def markdown(report: Mapping[str, Any]) -> str:
    """Tables of what was measured, each with its command, and the list of what was not."""
    where = report["environment"]
    about = f"{where['device']}, torch {where['torch']}, commit {where['commit']}"
    lines: list[str] = []
    for one in report["results"]:
        if one["status"] != "measured":
            continue
        lines += ["", f"**{one['name']}** ({one['completes']}): `{one['command']}`, {one['gpus']} × {about}"]
        lines += [f"Reduced: {one['reduced']}."] if "reduced" in one else []
        lines += ["", "| what | numbers |", "|---|---|"]
        found = [row for written in one["written"].values() for row in rows(written)]
        for what, numbers in found:
            lines.append(f"| {what} | {', '.join(f'{name} {value:,.4g}' for name, value in numbers.items())} |")
        lines += [f"| {line} | |" for line in one.get("said", [])[-3:]]
    lines += ["", "| not measured | why |", "|---|---|"]
    lines += [f"| {one['name']} | {one['status']} |" for one in report["results"] if one["status"] != "measured"]
    return "\n".join(lines).strip() + "\n"


def where() -> dict[str, Any]:
    """Hardware, versions and commit."""
    import torch

    from carpool.metrics.host import environment

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    found = environment(device, torch.cuda.device_count())
    return {name: value for name, value in found.items() if name != "hostname"}


def write(out: Path, minutes: float, environment: dict[str, Any], results: list[dict[str, Any]]) -> None:
    report = {"settings": {"minutes": minutes}, "environment": environment, "results": results}
    out.mkdir(parents=True, exist_ok=True)
    (out / "pending.json").write_text(json.dumps(report, indent=1) + "\n")
    (out / "pending.md").write_text(markdown(report))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10, help="after which no measurement goes on")
    parser.add_argument("--list", action="store_true", help="what is lacking and what it needs; nothing is measured")
    parser.add_argument("--only", nargs="+", default=[""], metavar="NAME", help="beginnings of names")
    parser.add_argument("--gpus", type=int, default=None, help="of this machine; default: all")
    parser.add_argument("--out", type=Path, default=Path("runs/pending"), help="folder for pending.json and pending.md")
    args = parser.parse_args()
    wanted = [one for one in PENDING if one.name.startswith(tuple(args.only))]
    if not wanted:
        parser.error(f"--only {' '.join(args.only)}: no measurement begins so; --list shows them")
    wanted.sort(key=lambda one: one.seconds)
    if args.list:
        for one in wanted:
            needs = gpus_text(one.gpus) + (f", at least {one.least}" if one.least not in (None, one.gpus) else "")
            print(f"{one.name}: {needs}, {one.seconds} s; {one.completes}")
            print(f"    {shell(one, one.gpus, 'OUT') if one.command else f'no command yet; needs {one.module}'}")
        return
    import torch

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # `measure` then ends what it has started
    gpus = torch.cuda.device_count() if args.gpus is None else min(args.gpus, torch.cuda.device_count())
    began, environment, results = time.perf_counter(), where(), list[dict[str, Any]]()
    for one in wanted:
        left = 60 * args.minutes - (time.perf_counter() - began)
        found: dict[str, Any] = {"name": one.name, "completes": one.completes}
        if (why := why_not(one, gpus)) is not None:
            found["status"] = why
        elif one.seconds > left:
            found["status"] = f"not begun: takes about {one.seconds} s, {max(0, left):.0f} s were left"
        else:
            found |= measure(one, gpus, left)
        results.append(found)
        print(
            f"{one.name}: {found['status']}" + (f", {found['seconds']:.0f} s" if "seconds" in found else ""), flush=True
        )
        for line in found.get("error", []):
            print(f"    {line}", flush=True)
        write(args.out, args.minutes, environment, results)
    print(f"wrote {args.out / 'pending.json'} and {args.out / 'pending.md'}")


if __name__ == "__main__":
    main()
