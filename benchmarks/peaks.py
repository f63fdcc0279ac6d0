"""Is the memory that `--dry-run` predicts the memory that a run takes? Real steps under many settings, in one go.

    python -m benchmarks.peaks --ranks 1 --out peaks.json        # on GPUs; --only plain packed for some settings
    python -m benchmarks.peaks --ranks 2 --out peaks.json        # transport nvlink, CUDA graphs, FSDP
    python -m benchmarks.peaks --ranks 2 --tiny                  # on CPUs: PyTorch's tensors alone are counted

Each setting is a run of the trainer with balanced choices of experts, `--steps` steps of it, and is then given back.
Models have the widths of published ones, fewer layers, and fewer experts where nothing else is said.

    tensors    bytes of PyTorch's tensors and of symmetric memory at the peak of a step, the highest of all ranks;
               predicted: the same of the estimate
    used       what the device says is in use after the steps, as nvidia-smi shows it; predicted: the estimate's total
    reserved   what PyTorch's allocator holds, which no other process can use

A ratio is measured / predicted. The JSON also has, for each setting: the estimate's parts, the bytes that are there
between steps (`stays`), when the forward has ended (`kept`), and the peaks of forward and backward by themselves.
"""

from __future__ import annotations

import gc
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from rich.console import Console
from torch._C._profiler import _EventType
from torch.profiler import ProfilerActivity, profile

from benchmarks.runs import QWEN_TINY, TINY, GiB, MiB, config_of_run, make_runs_parser, measure_runs, start_runs
from carpool.bench.model.model_contenders import CarpoolContender, random_corpus
from carpool.bench.result_files import print_table
from carpool.hf.seam.expert_rides import buffers_of_rides
from carpool.train.config import Config
from carpool.train.data.corpus import Corpus, Marks
from carpool.train.data.tokenizer import Tokenizer
from carpool.train.launch.machine import rank_device
from carpool.train.plan.estimate import tensors_of
from carpool.train.plan.resolve import Plan
from carpool.train.run.loop import Run, record, update
from tools.random_checkpoint import plan, write

QWEN = [
    "model.config=qwen3-30b-a3b", "model.config.num_hidden_layers=8", "model.config.num_experts=32",
    "model.dtype=bfloat16", "data.sequence_length=4096", "training.per_device_train_batch_size=2",
]  # fmt: skip
OLMOE = [
    "model.config=olmoe-1b-7b", "model.config.num_hidden_layers=6", "model.config.num_experts=32",
    "data.sequence_length=2048", "training.per_device_train_batch_size=4", "training.cuda_graphs=off",
]  # fmt: skip
EAGER, CONSUMED = "training.cuda_graphs=off", ["training.optimizer_in_backward=true", "training.max_grad_norm=0"]
# What is trained, and (ranks) how many it takes at least.
SETTINGS: dict[str, tuple[list[str], int]] = {
    "plain": ([*QWEN, EAGER], 1),
    "all experts, moments of 8 bits": (
        [*QWEN, EAGER, "model.config.num_experts=128", "training.optimizer_state_dtype=int8"], 1,
    ),
    "recompute": ([*QWEN, EAGER, "memory.layer_activations=recompute", "memory.expert_activations=recompute"], 1),
    "rides repeated": ([*QWEN, EAGER, "memory.layer_activations=recompute", "memory.moe_outputs=recompute"], 1),
    "offload": ([*QWEN, EAGER, "memory.layer_activations=offload", "memory.expert_activations=offload"], 1),
    "packed": ([*QWEN, EAGER, "data.packing=examples"], 1),
    "three micro-batches": ([*QWEN, EAGER, "training.gradient_accumulation_steps=3"], 1),
    "gradients consumed": ([*QWEN, EAGER, *CONSUMED, "training.optimizer_state_dtype=bfloat16"], 1),
    "optimizer in host memory": ([*QWEN, EAGER, *CONSUMED, "training.optimizer_offload=host"], 1),
    "experts in host memory": ([*QWEN, EAGER, *CONSUMED, "training.optimizer_offload=host", "memory.experts=host"], 1),
    "adapters": ([*QWEN, EAGER, "adapter.kind=lora"], 1),
    "float32 parameters": ([*OLMOE], 1),
    "logits whole": ([*OLMOE, "model.dtype=bfloat16", "training.loss_chunk_size=0"], 1),
    "graphs": ([*QWEN, "training.cuda_graphs=on", "parallelism.data_parallel=zero1"], 2),
    "graphs, three micro-batches": (
        [*QWEN, "training.cuda_graphs=on", "parallelism.data_parallel=zero1",
         "training.gradient_accumulation_steps=3"], 2,
    ),
    "fsdp": ([*QWEN, EAGER, "parallelism.data_parallel=fsdp"], 2),
    "experts whole on each rank": ([*QWEN, EAGER, "parallelism.data_parallel=fsdp", "parallelism.ep_size=1"], 2),
    "rows sent again": ([*QWEN, EAGER, "memory.expert_inputs=resend"], 2),
}  # fmt: skip
# Before the capture of CUDA graphs.
EAGER_STEPS = 3
# What is measured of PyTorch's tensors.
ALLOCATED = {"tensors", "stays", "kept", "setup", "forward", "backward"}


def examples(plan: Plan, tokenizer: Tokenizer) -> Corpus:
    """Packed examples of many lengths."""
    stream, length = random_corpus(plan, tokenizer), plan.config.data.sequence_length
    drawn = np.random.default_rng(0).integers(length // 8, length, size=8 * len(stream.train) // length)
    ends = drawn.cumsum()
    ends = ends[ends <= len(stream.train)]
    marks = Marks(np.ones(len(stream.train), dtype=np.bool_), ends)
    return Corpus(stream.train, stream.eval, len(ends), 0, stream.fingerprint, stream.source, marks)


def settings_of(name: str, tiny: bool, folder: Path) -> list[str]:
    """Of the run of a setting. Adapters are of the checkpoint in `folder`, which `config_of` writes."""
    given = list(SETTINGS[name][0])
    if tiny:
        given = [one for one in given if not one.startswith(("model.config.num_experts", "training.cuda_graphs"))]
        given += [*TINY, *(QWEN_TINY if "model.config=qwen3-30b-a3b" in given else [])]
    if "adapter.kind=lora" not in given:
        return given
    path = [f"model.path={folder}/base", "data.train=stdlib", "data.tokenizer=bytes"]
    of_no_config = [one for one in given if not one.startswith("model.config")]
    return [*of_no_config, *path, "training.gradient_accumulation_steps=1"]


def config_of(name: str, tiny: bool, folder: Path) -> Config:
    """The configuration of a setting. Collective: adapters need a checkpoint, which rank 0 writes.

    Raises:
        ValueError, OSError: what cannot be."""
    given = settings_of(name, tiny, folder)
    if "adapter.kind=lora" in given:
        sizes = [*SETTINGS[name][0], *(TINY if tiny else []), *(QWEN_TINY if tiny else [])]
        keys = dict(one.removeprefix("model.config.").split("=") for one in sizes if one.startswith("model.config."))
        if dist.get_rank() == 0 and not (folder / "base").exists():
            numbers = {key: int(value) for key, value in keys.items()}
            write(folder / "base", *plan({"from": "qwen3-30b-a3b", **numbers}, None, 5.0), 0, lambda _: None)
        dist.barrier()
    return config_of_run(name, given, tiny, folder)


def measure(config: Config, settings: dict[str, Any]) -> None:
    """One rank's part; the process group is there."""
    device, folder = rank_device(), Path(config.training.output_dir)
    first = used_bytes(device)

    def one(name: str) -> dict[str, Any]:
        return measure_one(name, config_of(name, settings["tiny"], folder), settings["steps"], device, first)

    found, failed = measure_runs(settings, device, one, line, "results", before=first)
    if dist.get_rank() == 0:
        show(Console(width=140), found, failed)


def measure_one(name: str, config: Config, steps: int, device: torch.device, first: int) -> dict[str, Any]:
    """Run some steps of a setting; of all ranks the highest. Collective.

    Args:
        first: what of the device was in use before any setting. What earlier settings have left is not counted."""
    before = {"allocated": allocated_bytes(device), "used": used_bytes(device)}
    begin = time.perf_counter()
    make_corpus = examples if name == "packed" else random_corpus
    run = CarpoolContender(config, "balanced", "benchmarks.peaks", make_corpus)
    try:
        plan, built = run.run.plan, run.run.built
        if built.objective.graphs is not None:
            steps += EAGER_STEPS - 1
        numbers = peaks_on_cpu(run.run, steps) if device.type == "cpu" else peaks_on_gpu(run, steps, device)
        transport, dense, graphs = built.transport.answer, plan.data_parallel.answer, built.objective.graphs
        memory, host = plan.estimate(transport, dense), plan.estimate.host_bytes(transport)
        captured = graphs is not None and graphs.bytes > 0
        what = run.state().what
    finally:
        run.close()
    for key in ALLOCATED & numbers.keys():
        numbers[key] -= before["allocated"]
    if device.type == "cuda":
        numbers["used"] -= max(0, before["used"] - first)
    ranks: list[dict[str, float]] = [{}] * dist.get_world_size()
    dist.all_gather_object(ranks, numbers)
    highest = {key: max(one[key] for one in ranks) for key in numbers}
    # What is in host memory is among a CPU's tensors.
    tensors = tensors_of(memory) + (host if device.type == "cpu" else 0)
    return {
        "setting": name,
        "what": what,
        "captured": captured,
        "measured": highest,
        "before": before,
        "predicted": {**memory, "tensors": tensors, "host": host},
        "ratios": {
            "tensors": highest["tensors"] / tensors,
            **({"used": highest["used"] / memory["total"]} if device.type == "cuda" else {}),
        },
        "seconds": time.perf_counter() - begin,
    }


def peaks_on_gpu(run: CarpoolContender, steps: int, device: torch.device) -> dict[str, float]:
    """Bytes of this rank; see the module's docstring."""
    objective, buffers = run.run.built.objective, buffers_of_rides(run.run.built.rides)
    found: dict[str, float] = {"setup": torch.cuda.max_memory_allocated(device)}
    torch.cuda.reset_peak_memory_stats(device)
    peaks = {"forward": 0, "backward": 0, "kept": 0}
    forward = objective._loss

    def loss(*args: Any) -> torch.Tensor:
        value = forward(*args)
        peaks["forward"] = max(peaks["forward"], torch.cuda.max_memory_allocated(device))
        peaks["kept"] = max(peaks["kept"], torch.cuda.memory_allocated(device))
        torch.cuda.reset_peak_memory_stats(device)
        return value

    objective._loss = loss  # type: ignore[method-assign, assignment]
    for _ in range(steps):
        run.take_step()
        torch.cuda.synchronize(device)
        peaks["backward"] = max(peaks["backward"], torch.cuda.max_memory_allocated(device))
        torch.cuda.reset_peak_memory_stats(device)
    record(run.run)
    symmetric = sum(one.symmetric for one in buffers)
    found |= {name: size + symmetric for name, size in peaks.items()}
    found["tensors"] = max(found["forward"], found["backward"], found["setup"])
    found["symmetric"] = symmetric
    found["stays"] = torch.cuda.memory_allocated(device) + symmetric
    found["reserved"] = torch.cuda.memory_reserved(device)
    found["graphs"] = 0 if objective.graphs is None else objective.graphs.bytes
    found["used"] = used_bytes(device)
    return found


def peaks_on_cpu(run: Run, steps: int = 1) -> dict[str, float]:
    """Bytes of PyTorch's tensors at the peak of a step: those that are there before it, and what the profiler sees."""
    for _ in range(steps):
        update(run)
    stays = live_bytes()
    most = stays + growth(lambda: update(run))
    return {"tensors": most, "stays": stays}


def growth(work: Callable[[], object]) -> int:
    """The most bytes that the CPU's allocator gives out during some work beyond what it had given before."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        work()
    sizes: list[tuple[int, int]] = []
    assert recorded.profiler is not None and recorded.profiler.kineto_results is not None
    for event in recorded.profiler.kineto_results.experimental_event_tree():
        _collect(event, sizes)
    now = most = 0
    for _, size in sorted(sizes, key=lambda one: one[0]):
        now += size
        most = max(most, now)
    return most


def _collect(event: Any, sizes: list[tuple[int, int]]) -> None:
    if event.tag == _EventType.Allocation:
        sizes.append((event.start_time_ns, event.extra_fields.alloc_size))
    for child in event.children:
        _collect(child, sizes)


def live_bytes() -> int:
    """Of all tensors of the CPU that Python sees, each storage once; not of the data, which other tensors share."""
    gc.collect()
    found: dict[int, int] = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for one in gc.get_objects():
            if isinstance(one, torch.Tensor) and one.device.type == "cpu":
                storage = getattr(one, "_local_tensor", one).untyped_storage()
                found[storage._cdata] = storage.nbytes()
    return sum(found.values())


def allocated_bytes(device: torch.device) -> int:
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else live_bytes()


def used_bytes(device: torch.device) -> int:
    """Of the device, by all processes; 0 on CPUs."""
    if device.type != "cuda":
        return 0
    free, total = torch.cuda.mem_get_info(device)
    return total - free


def line(result: dict[str, Any]) -> str:
    ratios = ", ".join(f"{name} {ratio:.3f}" for name, ratio in result["ratios"].items())
    return f"{ratios} of predicted; {result['seconds']:.1f} s; {result['what']}"


def show(console: Console, found: Sequence[dict[str, Any]], failed: dict[str, str]) -> None:
    unit, name = (GiB, "GiB") if any("used" in one["measured"] for one in found) else (MiB, "MiB")
    rows = []
    for one in found:
        measured, predicted = one["measured"], one["predicted"]
        row = [one["setting"], f"{predicted['tensors'] / unit:,.2f}", f"{measured['tensors'] / unit:,.2f}"]
        row.append(f"{one['ratios']['tensors']:.3f}")
        if "used" in measured:
            row += [f"{measured['reserved'] / unit:,.2f}", f"{predicted['total'] / unit:,.2f}"]
            row += [f"{measured['used'] / unit:,.2f}", f"{one['ratios']['used']:.3f}"]
        rows.append(row)
    columns = ["", f"{name} of tensors, predicted", "measured", "ratio"]
    if unit == GiB:
        columns += ["reserved", "used, predicted", "measured", "ratio"]
    print_table(console, "peak of a step, of the highest rank", columns, rows)
    for setting, why in failed.items():
        console.print(f"{setting}: {why}", highlight=False)


def main() -> None:
    parser = make_runs_parser(__doc__, "setting", seconds=150)
    parser.add_argument("--steps", type=int, default=3, help="of each setting; two more where steps are captured")
    least = {name: least for name, (_, least) in SETTINGS.items()}
    start_runs(parser, least, "benchmarks.peaks:measure", key="results")


if __name__ == "__main__":
    main()
