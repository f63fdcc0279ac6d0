"""The memory that LoRA of published models takes on one GPU, beside what a dry run predicts.

    python -m benchmarks.one_gpu_memory --out one_gpu.json
    python -m benchmarks.one_gpu_memory --rows qwen-experts --limit-gb 24 training.cuda_graphs=on
    python -m benchmarks.one_gpu_memory --rows load-nf4 load-mxfp4
    python -m benchmarks.one_gpu_memory --tiny                      # on a CPU, to see that it runs

A row is a run of the trainer with a file of examples/one_gpu, in a process of its own, in which PyTorch may take
`--limit-gb` of the GPU (`torch.cuda.set_per_process_memory_fraction`). Weights have a published model's shapes; they
are drawn and quantised layer by layer, so nothing large is downloaded or written. Data are Python's standard library.

    reserved     the most that PyTorch's allocator held once weights were there, in GB of 1e9 bytes, evaluation
                 included; tensors: its tensors
    used         what the device says is in use at the end, as nvidia-smi does: with CUDA's context
    predicted    the same as `carpool train --dry-run` says: without the context, for reserved; and with it
    loading      the most that was reserved before the first step

Rows "load-..." write a few layers of such a checkpoint, as it is published, and read it: how much host memory (of this
process, without files that are mapped) and device memory that takes, beside the size of the files.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from transformers import PreTrainedConfig

from benchmarks.script import make_parser, show, write_results
from carpool.hf.build_model import build_model
from carpool.train.blueprint import model_config
from carpool.train.build import assemble
from carpool.train.config import load_config
from carpool.train.config.published import read_keys
from carpool.train.run.loop import loop
from carpool.train.run.run import start_run
from tools.random_checkpoint import plan, write

GB = 1e9
ATTENTION = [
    "adapter.targets=['attention']", "training.optimizer_in_backward=false", "training.grad_clipping=exact",
    "training.gradient_accumulation_steps=4",
]  # fmt: skip
# The published model, the file of settings, and what differs from it.
ROWS: dict[str, tuple[str, str, list[str]]] = {
    "qwen-attention": ("qwen3-30b-a3b", "24gb", ATTENTION),
    "qwen-experts": ("qwen3-30b-a3b", "24gb", []),
    "oss-attention": ("gpt-oss-20b", "24gb", ATTENTION),
    "oss-experts": ("gpt-oss-20b", "24gb", []),
    "qwen-48": ("qwen3-30b-a3b", "48gb", []),
    "qwen-80": ("qwen3-30b-a3b", "80gb", []),
}
LOADS = {"load-nf4": ("qwen3-30b-a3b", 4), "load-mxfp4": ("gpt-oss-20b", 8)}
TINY = {
    "hidden_size": 64, "num_hidden_layers": 2, "intermediate_size": 64, "moe_intermediate_size": 64, "head_dim": 32,
    "num_attention_heads": 2, "num_key_value_heads": 2, "vocab_size": 320, "eos_token_id": 1, "pad_token_id": None,
}  # fmt: skip


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--rows", nargs="+", choices=[*ROWS, *LOADS], default=list(ROWS)[:4])
    parser.add_argument("--limit-gb", type=float, default=24, help="that PyTorch may reserve")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--tiny", action="store_true", help="small models")
    parser.add_argument("--row", help=argparse.SUPPRESS)
    parser.add_argument("settings", nargs="*", help="further settings of all rows")
    args = parser.parse_intermixed_args()
    if args.row is not None:
        with tempfile.TemporaryDirectory() as folder:
            one = measure_load if args.row in LOADS else measure
            args.out.write_text(json.dumps(one(args, Path(folder))))
        if dist.is_initialized():
            dist.destroy_process_group()  # else the process may hang at its end
        return
    found = []
    for row in args.rows:
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / "row.json"
            given = ["--limit-gb", str(args.limit_gb), "--steps", str(args.steps), *(["--tiny"] if args.tiny else [])]
            command = [sys.executable, "-m", "benchmarks.one_gpu_memory", *given, "--row", row, "--out", str(out)]
            done = subprocess.run([*command, *args.settings], stdout=sys.stderr, check=False)
            found.append({"row": row} | (json.loads(out.read_text()) if out.is_file() else {"failed": done.returncode}))
        print(json.dumps(found[-1]), flush=True)
    numbers = ["tensors", "reserved", "used", "predicted", "predicted_used", "loading", "host"]
    columns = ["row", "ms", *(f"{number}_gb" for number in numbers)]
    rows = [[_text(one.get(column)) for column in columns] for one in found]
    show("LoRA of rank 16 on one GPU, GB", columns, rows)
    write_results(args, _device(), results=found)


def _text(value: Any) -> str:
    return f"{value:,.2f}" if isinstance(value, float) else str(value if value is not None else "")


def _device() -> torch.device:
    return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")


def file_of(row: str) -> Path:
    """The file of settings of a row."""
    return Path(__file__).parents[1] / "examples" / "one_gpu" / f"{ROWS[row][1]}.toml"


def settings_of(row: str, folder: Path, steps: int, tiny: bool = False) -> list[str]:
    """What a row sets beside its file and its model. `folder`: of the run."""
    return [
        "data.train=stdlib", "data.tokenizer=bytes", "data.max_bytes=400000", f"data.cache_dir={folder}/cache",
        f"training.max_steps={steps}", "training.save_steps=none", "training.eval_steps=none",
        "training.sample_prompt=none", f"training.output_dir={folder}/run", *ROWS[row][2],
        *(["data.sequence_length=64"] if tiny else []),
    ]  # fmt: skip


def measure(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Run some steps of a row."""
    published, _, _ = ROWS[args.row]
    device, base = _device(), folder / "base"
    config, packed = _published(published, base, args.tiny)

    def random_model(path: Any, **options: Any) -> Any:
        return build_model(config, **(options | ({"base_dtype": "mxfp4"} if packed else {})))

    assemble.build_model = random_model  # type: ignore[assignment]
    if device.type == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, args.limit_gb * GB / total), device)
    store = dist.FileStore(str(folder / "store"), 1)
    group: dict[str, Any] = {"device_id": device} if device.type == "cuda" else {}
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=store, rank=0, world_size=1, **group)
    settings = [f"model.path={base}", *settings_of(args.row, folder, args.steps, args.tiny), *args.settings]
    run = start_run(load_config(file_of(args.row), settings), None, "benchmarks.one_gpu_memory")
    loading = 0
    if device.type == "cuda":
        # Weights that are drawn have been there in 16 bits, a layer at a time; those of files in 4 bits never are.
        loading = torch.cuda.max_memory_reserved()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    try:
        loop(run)
        memory = run.records.info["predicted"]["memory_per_rank_bytes"]
    finally:
        run.close()
    lines = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    times = [line["step_ms"] for line in lines if "step_ms" in line]
    found: dict[str, Any] = {"ms": statistics.median(times[len(times) // 2 :]) if times else math.nan}
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        found |= {
            "tensors_gb": torch.cuda.max_memory_allocated() / GB,
            "reserved_gb": torch.cuda.max_memory_reserved() / GB,
            "used_gb": (total - free) / GB,
        }
    return found | {
        "predicted_gb": (memory["total"] - memory.get("context", 0)) / GB,
        "predicted_used_gb": memory["total"] / GB,
        "loading_gb": loading / GB,
        "parts_gb": {name: size / GB for name, size in memory.items()},
        "limit_gb": args.limit_gb,
        "loss": [line["loss"] for line in lines if "step_ms" in line],
    }


def _published(name: str, folder: Path, tiny: bool) -> tuple[PreTrainedConfig, bool]:
    """A model's configuration, and a folder with it that looks like a checkpoint; whether its experts are in MXFP4."""
    config, packed = model_config(_keys(name, tiny)), name == "gpt-oss-20b"
    config.dtype = torch.bfloat16
    folder.mkdir()
    config.save_pretrained(folder)
    if packed:
        text = json.loads((folder / "config.json").read_text()) | {"quantization_config": {"quant_method": "mxfp4"}}
        (folder / "config.json").write_text(json.dumps(text))
    save_file({"none": torch.zeros(1)}, folder / "model.safetensors")
    return config, packed


def _keys(name: str, tiny: bool, layers: int | None = None) -> dict[str, Any]:
    """Of a published model, or of one of its kind."""
    changed = TINY if tiny else {} if layers is None else {"num_hidden_layers": layers}
    own = read_keys(name)
    keys = {key: value for key, value in changed.items() if key in own or key == "pad_token_id"}
    if "layer_types" in own and "num_hidden_layers" in keys:
        keys["layer_types"] = own["layer_types"][: keys["num_hidden_layers"]]
    return {"from": name, **keys}


def measure_load(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Write a few layers of a checkpoint, and read them."""
    name, layers = LOADS[args.row]
    config, layout = plan(_keys(name, args.tiny, layers), None, 4.0)
    if packed := args.row == "load-mxfp4":
        _write_packed(folder / "base", config, layout)
    else:
        write(folder / "base", config, layout, 0, lambda _: None)
    size = sum(path.stat().st_size for path in (folder / "base").glob("*.safetensors"))
    gc.collect()
    device, before, watch = _device(), _host_bytes(), _Watch()
    begin = time.perf_counter()
    with watch:
        model = build_model(
            folder / "base", distributed_config=None, dtype=torch.bfloat16, seed=0, device=device,
            base_dtype=None if packed else "nf4",
        )  # fmt: skip
    found: dict[str, Any] = {"seconds": time.perf_counter() - begin, "files_gb": size / GB}
    found["host_gb"] = (watch.most - before) / GB
    if device.type == "cuda":
        found |= {"loading_gb": torch.cuda.max_memory_reserved() / GB, "model_gb": torch.cuda.memory_allocated() / GB}
    return found | {"parameters": sum(parameter.numel() for parameter in model.parameters())}


def _write_packed(folder: Path, config: PreTrainedConfig, layout: Any) -> None:
    """Random bytes for experts in MXFP4, one layer a file."""
    folder.mkdir()
    config.save_pretrained(folder)
    text = json.loads((folder / "config.json").read_text()) | {"quantization_config": {"quant_method": "mxfp4"}}
    (folder / "config.json").write_text(json.dumps(text))
    weights: dict[str, str] = {}
    entries = [pair for file in layout.files.values() for pair in file.items()]
    for number, (name, entry) in enumerate(entries):
        tensors = {name: 0.02 * torch.randn(entry.shape, dtype=torch.bfloat16)}
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            experts, inputs, outputs = entry.shape
            blocks = torch.randint(256, (experts, outputs, inputs // 32, 16), dtype=torch.uint8)
            scales = torch.full(blocks.shape[:-1], 120, dtype=torch.uint8)
            tensors = {f"{name}_blocks": blocks, f"{name}_scales": scales}
        save_file(tensors, folder / f"model-{number:05d}.safetensors", metadata={"format": "pt"})
        weights |= dict.fromkeys(tensors, f"model-{number:05d}.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weights}))


def _host_bytes() -> int:
    """This process's own memory, without mapped files."""
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    return 1024 * int(next(line for line in status.splitlines() if line.startswith("RssAnon")).split()[1])


class _Watch:
    """Inside, the most of `_host_bytes`, looked at a hundred times a second."""

    most = 0

    def __enter__(self) -> _Watch:
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._look)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._done.wait(0.01):
            self.most = max(self.most, _host_bytes())


if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    main()
