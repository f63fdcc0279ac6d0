"""An adapter's way, family by family: trained, as peft reads it, merged, and as servers would read it.

    tiny random model -> `carpool train` over four ranks -> RUN/adapter -> plain transformers and peft, in a process
    without Carpool -> `carpool merge` -> plain transformers

`tests/train/test_served_adapter.py` compares the logits, and `python -m tools.adapters_table` writes what it finds
into docs/reference/adapters.md.
"""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from safetensors.torch import load_file, save_file

from carpool.train.checkpoints.adapter_files import merge_adapter, save_adapter
from carpool.train.config import load_config
from carpool.train.run import finish
from carpool.train.run.run import train
from tests.hf.tiny_models import discover, tiny_model
from tests.ranks import Ranks

FAMILIES = (
    "qwen3_moe", "gpt_oss", "deepseek_v3", "olmoe", "mixtral", "qwen2_moe", "deepseek_v2", "glm4_moe", "granitemoe",
    "phimoe", "ernie4_5_moe", "minimax_m2", "dots1", "hunyuan_v1_moe", "jamba", "nemotron_h", "lfm2_moe",
)  # fmt: skip
# How far training moves logits at least, and how far they may then be from those that were trained.
MOVED, BOUND = 0.02, 2e-5
IDS = torch.randint(3, 255, (2, 12), generator=torch.Generator().manual_seed(3))

_PLAIN = """
import sys, torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
base, adapter, merged, ids, out = sys.argv[1:]
ids, load = load_file(ids)["ids"], AutoModelForCausalLM.from_pretrained
with torch.no_grad():
    found = {name: load(path, dtype=torch.float32).eval()(input_ids=ids).logits for name, path in
             (("base", base), ("merged", merged))}
    found["peft"] = PeftModel.from_pretrained(load(base, dtype=torch.float32), adapter).eval()(input_ids=ids).logits
save_file(found, out)
assert not any(name.split(".")[0] == "carpool" for name in sys.modules)
"""


@dataclass(frozen=True)
class Outcome:
    """Largest differences of logits from the trained ones, relative to the largest logit.

    Attributes:
        moved: how far training has moved them from the base's.
        peft, merged: of base and adapter by plain peft, and of the merged model by plain Transformers.
        run: the run's folder.
    """

    moved: float
    peft: float
    merged: float
    run: Path


def follow(ranks: Ranks, family: str, folder: Path) -> Outcome:
    """Take an adapter of one family all the way, in an empty folder."""
    base, run, merged = folder / "base", folder / "run", folder / "merged"
    tiny_model(discover()[family], vocab_size=259).save_pretrained(base)
    (folder / "text").mkdir()
    for i in range(30):
        (folder / "text" / f"{i:02d}.txt").write_text(f"def f{i}(x):\n    return x + {i}\n" * 20)
    settings = [
        f"model.path={base}", f"training.output_dir={run}", "adapter.kind=lora", "adapter.rank=3",
        "data.tokenizer=bytes", "data.sequence_length=24", "data.max_bytes=4000",
        "data.packing=off", "data.too_long=truncate",
        "training.per_device_train_batch_size=1", "training.gradient_accumulation_steps=1", "training.max_steps=3",
        "training.learning_rate=2e-2", "training.warmup_steps=0", "model.dtype=float32", "training.sample_prompt=none",
        f"data.train={folder}/text", f"data.cache_dir={folder}/cache", "data.eval_fraction=0.02",
    ]  # fmt: skip
    (trained, *_) = ranks(train_and_ask, settings)
    merge_adapter(run, merged, logits=True)
    save_file({"ids": IDS}, folder / "ids")
    command = [sys.executable, "-I", "-c", _PLAIN, base, run / "adapter", merged, folder / "ids", folder / "logits"]
    done = subprocess.run([str(one) for one in command], capture_output=True, text=True, check=False, cwd=folder)
    assert done.returncode == 0, done.stderr
    found = load_file(folder / "logits")
    far = {name: ((logits - trained).abs().max() / trained.abs().max()).item() for name, logits in found.items()}
    return Outcome(far["base"], far["peft"], far["merged"], run)


def train_and_ask(settings: list[str]) -> torch.Tensor:
    """On a rank: train, and the logits of the very model that is trained when its adapter is written."""
    logits: list[torch.Tensor] = []

    def ask(model: Any, folder: Path) -> Path:
        training = model.training
        with torch.no_grad():
            logits.append(model.eval()(input_ids=IDS, use_cache=False).logits.clone())
        model.train(training)
        return save_adapter(model, folder)

    with mock.patch.object(finish, "save_adapter", ask):
        train(load_config(None, settings), command="test")
    return logits[-1]
