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

from carpool.hf.seam.layers import experts_modules
from carpool.train.blueprint import meta_model, model_config, top_k_of
from carpool.train.config.published import published_models
from carpool.train.flops import model_size
from tests.hf import parity
from tests.hf.tiny_models import MoEArchitecture, discover
from tests.ranks import Ranks

DOCS = Path(__file__).parents[1] / "docs" / "models.md"
COLUMNS = ("architecture", "class", "experts", "EP plan of transformers", "computed by", "largest error", "remarks")
PUBLISHED_COLUMNS = ("name", "architecture", "layers", "experts", "top-k", "parameters", "active per token")
NOT_POSSIBLE = "not possible"

INTRODUCTION = """\
# Models

Carpool takes the tokens to the experts of every model for which Transformers has an *expert-parallel plan*: a list of
the modules whose experts may live on different ranks. This table is measured, not claimed: `python -m
tools.models_table` finds every folder of the installed Transformers ({version}) that defines experts and puts a small
random model of it (two layers, eight experts) on four ranks, with `fsdp_size=4, ep_size=4,
ep_implementation="carpool"`. Logits, loss and the gradient of every parameter are compared with those of the
unmodified model in one process on the whole batch, in float32. The *largest error* is the largest of max |ours −
theirs| / max |theirs| over all of them. {measured} of {total} architectures run; the others have no plan, and loading
them with `ep_size > 1` is refused with a message that says so.

*Computed by*: experts with Transformers' experts decorator have two stacked weights and a gate or an activation, and
Carpool computes them itself, whatever their layout. It calls the others as they are, on the rows that arrived.

Models that wrap one of these as their language model (through `AutoModel`) inherit its plan, and with it its row.

{table}

## Published configurations

`model.config = "qwen3-30b-a3b"` trains a model of that shape from scratch; [train](train.md#a-published-model) has the
other ways to name one. Parameters are those of the published weights, without the layers that predict further tokens,
which Transformers leaves out. `deepseek-v3-cut` has the shapes of DeepSeek-V3 in 4 layers of 64 experts.

{published}

## What people do with models

Each line is a test in `tests/hf/test_behaviours.py`, on tiny OLMoE, gpt-oss, DeepSeek-V3 or Qwen3-MoE models.

- **Gradient checkpointing**, reentrant or not: the same gradients, bitwise.
- **Frozen** experts, or everything but the experts frozen: gradients as in one process.
- **Tied embeddings**: gradients as in one process; they stay tied when saved. `carpool train` refuses to shard them
  by FSDP2 over ranks that do not divide the vocabulary, because FSDP2 would then update one of two copies.
- **LoRA** (peft) on attention, routers and experts, also `all-linear`, rsLoRA and, but for experts and routers, DoRA:
  `get_peft_model(...)` or `model.add_adapter(...)`, and nothing else. FSDP does not know parameters that are added
  after it sharded the model, so Carpool makes them equal on all ranks and averages their gradients. Adapters of experts
  (`target_parameters`) lie with their experts ([fine-tune](finetune.md#adapters)).
  `save_pretrained` on all ranks writes the adapter. Loaded adapters that train on (`load_adapter`, peft's
  `low_cpu_mem_usage=True`) need nothing more either. Parameters of your own need
  `carpool.hf.synchronize_adapters(model)`; without it the first forward is refused.
- **What peft computes from whole weights** is refused on all ranks before anything is computed: PiSSA and other starts
  from the weights, `modules_to_save`, prompt and prefix tuning, and `merge_and_unload`. Save the adapter, and merge it
  into a model that one process has loaded.
- **Tensor parallelism** (`tp_size` > 1) of attention is Transformers' own. Norms of queries and keys over all heads
  (OLMoE, FlexOlmo, MiniMax-M2) have right gradients, and so have most of those per head (Qwen3-MoE). Where a model's
  plan forgets to add up the gradients of a norm per head, the first training forward is refused: GLM-4.5 with
  `use_qk_norm`, Qwen3-VL-MoE, Qwen3-Omni-MoE, Doge. `clip_qkv` (OLMoE) has no gradient there: `carpool train` refuses
  it, elsewhere PyTorch says that a view is modified in place.
- **`output_router_logits=True`**: the loss that Transformers then adds takes its statistics from one rank's tokens. The
  mean of the ranks' losses is not the loss of the batch, since a product of two means is not linear in the batch. Take
  `carpool.hf.balance_loss(output.router_logits, top_k)` instead, which sums the statistics over the ranks.
  `carpool train` does so by itself.
- **bf16** parameters, FSDP's mixed precision, or autocast: as exact as with Transformers' own `all_to_all`.
- **Quantised** checkpoints are refused, on all ranks, before anything is read: load one in a single process, call
  `model.dequantize()`, and save it again.
- **`device_map`** has no effect with FSDP (Transformers lets the mesh decide where a rank's shard lives) and is refused
  with tensor parallelism.
- **`generate()`** with prompts and outputs of other lengths on each rank: the same tokens as in one process. Ranks that
  no token visits take part.
- **`Trainer`**, with gradient accumulation and clipping: the same losses and gradient norms as with `all_to_all`.
- **Loading** reads exactly a rank's share: with four ranks, a quarter of the expert weights, be they stored one by one
  or stacked.
- **Saving**: `save_pretrained` on all ranks writes a checkpoint that plain Transformers loads with the same weights;
  with `distributed_checkpoint=True`, one that loads on another mesh.
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
