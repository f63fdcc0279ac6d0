"""Writes docs/models.md: which MoE architectures of the installed transformers run on Carpool, and which cannot.

    python -m tools.models_table

It measures every architecture on four ranks, as tests/hf/test_every_model.py does and with the same code, which
takes two minutes. An architecture that fails stops it: nothing is written that was not measured.
"""

from __future__ import annotations

import math
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import transformers

from carpool.hf.seam.find_modules import experts_modules
from carpool.train.blueprint import meta_model, model_config, model_size, top_k_of
from carpool.train.config.published import published_models
from tests.hf import parity
from tests.hf.tiny_models import MoEArchitecture, discover
from tests.ranks import Ranks

DOCS = Path(__file__).parents[1] / "docs" / "models.md"
COLUMNS = ("architecture", "class", "experts", "EP plan of transformers", "computed by", "largest error", "remarks")
PUBLISHED_COLUMNS = ("name", "architecture", "layers", "experts", "top-k", "parameters", "active per token")
NOT_POSSIBLE = "not possible"

INTRODUCTION = """\
# Models

Carpool runs every model for which Transformers has an *expert-parallel plan*: a list of the modules whose experts may
live on different ranks. `python -m tools.models_table` writes this table from measurements. For every folder of the
installed Transformers ({version}) that defines experts, it puts a small random model on four ranks (`fsdp_size=4,
ep_size=4, ep_implementation="carpool"`) and compares logits, loss and the gradient of every parameter with those of
the unmodified model in one process, in float32. The *largest error* is the largest max |ours − theirs| / max
|theirs|. {measured} of {total} architectures run; loading one of the others with `ep_size > 1` is refused.

*Computed by*: Carpool computes experts that have Transformers' experts decorator, in whatever layout. It calls the
forward of others as it is, on the tokens that arrived. Models that wrap one of these as their language model inherit
its plan.

{table}

## Published configurations

`model.config = "qwen3-30b-a3b"` trains a model of that shape from scratch ([other ways to name
one](train.md#a-published-model)). Parameters are those of the published weights, without the layers that predict
future tokens ([`mtp.depth`](reference/multi-token.md) adds them). `deepseek-v3-cut` has the shapes of DeepSeek-V3 in 4
layers of 64 experts.

{published}

## What was tested

Each line is a test in `tests/hf/test_behaviours.py`, on tiny OLMoE, gpt-oss, DeepSeek-V3 or Qwen3-MoE models.

- **Activation checkpointing**, reentrant or not: the same gradients, bitwise.
- **Frozen** experts, or everything else frozen: gradients as in one process.
- **Tied embeddings** stay tied when saved. `carpool train` refuses to shard them by FSDP2 over ranks that do not
  divide the vocabulary.
- **LoRA** (peft) on attention, routers and experts, also `all-linear`, rsLoRA and, except for experts and routers,
  DoRA: `get_peft_model(...)` or `model.add_adapter(...)`, and nothing else. Carpool makes adapters equal on all ranks
  and averages their gradients. `save_pretrained` on all ranks writes the adapter. Trainable parameters of your own
  need `carpool.hf.synchronize_adapters(model)`; without it the first forward is refused.
- **What peft computes from whole weights** is refused: PiSSA, `modules_to_save`, prompt and prefix tuning, and
  `merge_and_unload`. Save the adapter, and [merge](finetune.md#merge) it.
- **Tensor parallelism** of attention is Transformers' own. Plans that forget to sum the gradients of a norm per head
  are refused at the first training forward: GLM-4.5 with `use_qk_norm`, Qwen3-VL-MoE, Qwen3-Omni-MoE, Doge.
  `clip_qkv` (OLMoE) has no gradient there and is refused.
- **`output_router_logits=True`** adds a balance loss from one rank's tokens, and the mean over ranks is not the loss
  of the batch. Use `carpool.hf.balance_loss(output.router_logits, top_k)`, which sums statistics over the ranks.
  `carpool train` does.
- **bf16** parameters, FSDP's mixed precision, or autocast: as exact as Transformers' own `all_to_all`.
- **Quantised** checkpoints are refused before anything is read: load one in a single process, call
  `model.dequantize()`, and save it again.
- **`device_map`** has no effect with FSDP and is refused with tensor parallelism.
- **`generate()`** with different prompts and lengths on each rank: the same tokens as in one process.
- **`Trainer`**, with gradient accumulation and clipping: the same losses and gradient norms as with `all_to_all`.
- **Loading** reads exactly a rank's share.
- **Saving**: `save_pretrained` on all ranks writes a checkpoint that plain Transformers loads; with
  `distributed_checkpoint=True`, one that loads on another mesh.
"""


def main() -> int:
    rows, failed = [], []
    ranks = Ranks()
    for folder, architecture in discover().items():
        row, error = _row(ranks, architecture)
        rows.append(row)
        bound = parity.HANDLING.get(folder, parity.Handling()).bound
        if error > bound:
            failed.append(f"{folder}: error {error:.1e} is above its bound of {bound:.0e}")
        print(" | ".join(row), flush=True)
    ranks.stop()
    if failed:
        print(f"{DOCS} is not written:", *failed, sep="\n", file=sys.stderr)
        return 1
    text = INTRODUCTION.format(
        version=transformers.__version__,
        measured=sum(row[5] != NOT_POSSIBLE for row in rows),
        total=len(rows),
        table=_table(COLUMNS, rows),
        published=_table(PUBLISHED_COLUMNS, [published_row(name) for name in published_models()]),
    )
    DOCS.write_text(text, encoding="utf-8")
    return 0


def published_row(name: str) -> list[str]:
    """What the page says of a published configuration, counted on the meta device."""
    model = meta_model(model_config(name))
    experts, top_k = experts_modules(model), top_k_of(model)
    size = model_size(model, experts, top_k)
    layers, most = model.config.num_hidden_layers, max(experts.values())
    numbers = (str(layers), str(most), str(top_k), f"{size.total:,}", f"{size.active:,}")
    return [name, type(model).__name__, *numbers]


def read_rows() -> list[list[str]]:
    """The rows of the table in docs/models.md as lists of cells."""
    lines = [line for line in DOCS.read_text(encoding="utf-8").splitlines() if line.startswith("| `")]
    return [[cell.strip(" `") for cell in line.strip("| ").split(" | ")] for line in lines]


def _row(ranks: Ranks, architecture: MoEArchitecture) -> tuple[list[str], float]:
    folder, class_name = f"`{architecture.folder}`", architecture.class_name or "none"
    if reason := parity.EXCEPTIONS.get(architecture.folder):
        return [folder, class_name, "–", "no", "–", NOT_POSSIBLE, reason], 0.0
    with tempfile.TemporaryDirectory() as path:
        outcome = ranks(parity.measure, architecture.folder, path, parity.Mesh())[0]
    handling = parity.HANDLING.get(architecture.folder, parity.Handling())
    remarks = "; ".join(text for text in (handling.cannot_load, handling.note) if text)
    error = f"< 1e{math.floor(math.log10(outcome.error)) + 1}"
    return [folder, class_name, outcome.experts, outcome.plan, outcome.computed_by, error, remarks], outcome.error


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return "\n".join(_line(cells) for cells in [columns, ["---"] * len(columns), *rows])


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    sys.exit(main())
