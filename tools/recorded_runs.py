"""Six short training runs whose losses must not change when code moves: record them before a change, compare after.

    python -m tools.recorded_runs --record before.json
    python -m tools.recorded_runs --compare before.json              exits with 1 where a loss or gradient norm differs
    python -m tools.recorded_runs --compare before.json --only pipeline

Every number is compared to the last bit, so both must run on the same machine, with the same PyTorch. The runs take
about 90 seconds on two cores. They cover a plain MoE, a model whose first layers have no experts and whose routers have
biases, an adapter, a pipeline, context parallelism, and experts that move while the run goes on.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Collection
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
COMMON = (
    "training.max_steps=6", "training.eval_on_start=false", "training.eval_steps=6", "training.save_steps=none",
    "training.report_to=[]", "training.save_pretrained=false", "data.max_bytes=200000", "data.sequence_length=64",
    "training.per_device_train_batch_size=4",
)  # fmt: skip
SMALL = (
    "hidden_size = 64, intermediate_size = 64, moe_intermediate_size = 32, num_hidden_layers = 3, "
    "num_attention_heads = 4, num_key_value_heads = 4"
)
DEEPSEEK = (
    "model.model_type=deepseek_v3",
    "model.config={ " + SMALL + ", first_k_dense_replace = 1, n_routed_experts = 8, num_experts_per_tok = 2, "
    "n_group = 2, topk_group = 1, n_shared_experts = 1, q_lora_rank = 16, kv_lora_rank = 16, qk_nope_head_dim = 16, "
    "qk_rope_head_dim = 8, v_head_dim = 16 }",
)
QWEN = (
    "model.model_type=qwen3_moe",
    "model.config={ " + SMALL + ", head_dim = 16, num_experts = 8, num_experts_per_tok = 2 }",
)
# The adapter's base is the model of the first run.
RUNS = {
    "moe": ("training.save_pretrained=true", "parallelism.num_ranks=4"),
    "dense-layers": (*DEEPSEEK, "parallelism.num_ranks=2"),
    "adapter": ("model.path={moe}/model", "data.train=stdlib", "adapter.kind=lora", "adapter.rank=4",
                "parallelism.num_ranks=2"),
    "pipeline": (*QWEN, "parallelism.num_ranks=4", "parallelism.pp_size=2", "parallelism.pp_schedule=1F1B",
                 "training.gradient_accumulation_steps=4", "model.config.num_hidden_layers=4"),
    "context": (*QWEN, "parallelism.num_ranks=4", "parallelism.cp_size=2", "moe.schedule=chunks"),
    "placement": (*QWEN, "parallelism.num_ranks=4", "placement.every=2", "placement.hysteresis=0.0"),
}  # fmt: skip
# What is compared, of each step and of the evaluation.
NUMBERS = ("loss", "aux_loss", "grad_norm")


def run(name: str, folder: Path) -> list[dict[str, Any]]:
    """The numbers of each step of one run, whose directory is a folder of its name in `folder`."""
    settings = [*COMMON, *(one.format(moe=folder / "moe") if "{moe}" in one else one for one in RUNS[name])]
    command = [sys.executable, "-m", "carpool", "train", *settings, f"training.output_dir={folder / name}"]
    command.append(f"data.cache_dir={folder / 'cache'}")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{name}: {' '.join(command)}\nended with {done.returncode}:\n{done.stdout}\n{done.stderr}")
    records = map(json.loads, (folder / name / "metrics.jsonl").read_text().splitlines())
    return [
        {"kind": record["kind"], "step": record["step"], **{key: record.get(key) for key in NUMBERS}}
        for record in records
        if record["kind"] in ("train", "eval")
    ]


def differences(before: list[dict[str, Any]], after: list[dict[str, Any]]) -> list[str]:
    """One line for each number that differs."""
    if len(before) != len(after):
        return [f"{len(before)} records before, {len(after)} after"]
    return [
        f"{old['kind']} {old['step']}: {key} {old.get(key)!r} before, {new.get(key)!r} after"
        for old, new in zip(before, after, strict=True)
        for key in old
        if old[key] != new.get(key)
    ]


def with_needed(names: Collection[str]) -> list[str]:
    """Those runs and what they start from, in order."""
    needed = {*names, *(("moe",) if "adapter" in names else ())}
    return [name for name in RUNS if name in needed]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--record", type=Path)
    what.add_argument("--compare", type=Path)
    parser.add_argument("--only", nargs="*", choices=RUNS, default=list(RUNS))
    given = parser.parse_args()
    before = {} if given.compare is None else json.loads(given.compare.read_text())
    found, status = {}, 0
    with tempfile.TemporaryDirectory() as folder:
        for name in with_needed(given.only):
            found[name] = run(name, Path(folder))
            print(f"{name}: last training loss {found[name][-2]['loss']}", flush=True)
            for line in differences(before[name], found[name]) if before else ():
                print(f"  {line}", flush=True)
                status = 1
    if given.record is not None:
        given.record.write_text(json.dumps(found, indent=1) + "\n")
    return status


if __name__ == "__main__":
    raise SystemExit(main())
