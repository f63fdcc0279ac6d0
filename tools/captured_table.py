"""Writes docs/reference/captured.md: which steps are compiled, and which are CUDA graphs.

    python -m tools.captured_table

A cell is what `carpool train` itself says of such a run: settings that exclude each other are refused by its schema,
and the rest is the planner's candidate of the run. tests/train/test_graphs.py compares the page with this.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path

from carpool.parallel.schedules import PAIRED, SCHEDULES
from carpool.planner import candidate
from carpool.planner.decisions.configured import candidate_of
from carpool.planner.machine.hardware import HARDWARE
from carpool.planner.model.shape import ModelShape
from carpool.train.config import load_config
from carpool.train.config.published import read_keys

DOCS = Path(__file__).parents[1] / "docs" / "reference" / "captured.md"
ZERO1, FSDP = "parallelism.data_parallel=zero1", "parallelism.data_parallel=fsdp"
# Ranks and settings.
MESHES: Mapping[str, tuple[int, tuple[str, ...]]] = {
    "1 GPU": (1, ()),
    "ep 8": (8, (ZERO1, "parallelism.ep_size=8", "moe.transport=nvlink")),
    "ep 8, two batches": (8, (ZERO1, "parallelism.ep_size=8", "moe.transport=nvlink", "moe.schedule=two-batch")),
    "ep 8 over alltoall": (8, (ZERO1, "parallelism.ep_size=8", "moe.transport=alltoall")),
    "ep 16 over hierarchical": (16, (ZERO1, "parallelism.ep_size=16", "moe.transport=hierarchical")),
    "efsdp 2, ep 4, zero1": (8, (ZERO1, "parallelism.ep_size=4", "moe.transport=nvlink")),
    "efsdp 2, ep 4, fsdp": (8, (FSDP, "parallelism.ep_size=4", "moe.transport=nvlink")),
    **{
        f"pp 2, ep 4, {schedule}{', pairs' if way == 'two-batch' else ''}": (
            8,
            (
                *(ZERO1, "parallelism.pp_size=2", "parallelism.ep_size=4", "moe.transport=nvlink"),
                *(f"parallelism.pp_schedule={schedule}", f"moe.schedule={way}"),
            ),
        )
        for schedule in SCHEDULES
        for way in ("none", *(("two-batch",) if schedule in PAIRED else ()))
    },
}  # fmt: skip
FEATURES: Mapping[str, tuple[str, ...]] = {
    "plain": (),
    "accumulation": ("training.gradient_accumulation_steps=8",),
    "recompute": ("memory.layer_activations=recompute",),
    "clipping": ("training.max_grad_norm=1.0",),
    "adapters": ("adapter.kind=lora",),
    "experts move": ("placement.every=100",),
}

# What `carpool train` says, {} being some word, and what of it no graph can hold.
CAUSES: Mapping[str, str] = {
    candidate.FSDP: (
        "FSDP2 gathers and frees by Python's hooks around each module. Eager steps of Qwen3-30B-A3B with 2 x 4,096 "
        "tokens on 2 H200 took 1,077 ms with them, 976 ms of it the host's, and captured ones 564 ms with "
        "`parallelism.data_parallel=zero1` ([measurements](../measurements.md))"
    ),
    candidate.FSDP_SHARDS: "The same hooks",
    candidate.of_transport("{}"): (
        "Sizes of what NCCL and gloo send are arguments of a call. The host reads from the device how many tokens "
        "come, in each MoE layer. Over `nvlink` and `hierarchical` they have bounds that are known"
    ),
    candidate.PLANS: "A planner in Python reads the load of each ride on the host. Others are kernels",
    candidate.PLANS_OF: (
        "Collectives of PyTorch take the numbers of experts to send from the host. Those of `nvlink` do not"
    ),
    candidate.LENGTHS: (
        "Flash attention takes the longest document as a number of the host. Models that take ends of documents get it "
        "once for a batch, before the graph"
    ),
    candidate.SHAPES: "A graph has one shape, and memory for all that layers save: each length would be another graph",
    candidate.RANDOM: (
        "Drop-out draws from an offset inside of its graph. The forward of a stage is one graph and its backward "
        "another, in which the offset means nothing"
    ),
    candidate.TEACHER: (
        "Its experts travel over a transport of their own, which waits for the host. A teacher's log-probabilities "
        "from files (`distillation.logits`) are part of a batch, and leave steps as they are"
    ),
    candidate.RECORDED: (
        "The place of a sample is a number of the host. Only steps before a look are recorded, so that fewer tokens, "
        "or more steps between looks, leave the others to graphs"
    ),
    "experts come from {}": "The host starts each copy, as memory of the device is freed for it",
    "saved activations of two batches go to host memory": (
        "Copies of two micro-batches in turns are two sequences, whose events one graph would have to join: not tried"
    ),
    "saved activations of a stage go to host memory in one graph, and come back in another": (
        "An event that one graph records cannot be waited for in another"
    ),
    "the optimizer runs in the backward, with a state that comes from {}": "Threads of the host read and write files",
    "experts run the model's own forward, which may wait for the host": "It is code of Transformers, which often does",
    "experts {} ask the host how many rows each of them has": "They are a loop in Python over experts",
    "PyTorch's grouped product takes bfloat16 and multiples of 8, and experts are {}": (
        "Other dtypes and sizes are computed expert by expert, for which the host reads how many rows each has"
    ),
    "Nsight watches, and a graph has no names of layers": "It would show one range",
    "training.cuda_graphs = 'off'": "As asked for",
    "there is no GPU": "Graphs are of CUDA",
}

PAGE = """\
# What is compiled and captured

`python -m tools.captured_table` writes this page. Each cell is what `carpool train` says of a run of Qwen3-30B-A3B on
H100 GPUs with `training.torch_compile=on`, 8 GPUs to a node and a micro-batch of 2 sequences; a pipeline's step has 8
micro-batches. **yes**: decoder layers are compiled, and forward and backward are CUDA graphs: one for a step, or one
for each forward, backward and pair of a stage. GPU tests hold captured steps against the same steps uncaptured, bit by
bit (`tests/gpu/test_graphs_gpu.py`, `tests/gpu/test_pipeline_gpu.py`).

{table}

{notes}

## Why not

| reason | what no graph can hold |
| --- | --- |
{causes}
"""


def main() -> int:
    DOCS.write_text(page(), encoding="utf-8")
    return 0


def page() -> str:
    """The whole page."""
    reasons: dict[str, int] = {}
    rows = [[mesh, *(_text(answer(mesh, feature), reasons) for feature in FEATURES)] for mesh in MESHES]
    lines = [_row(["mesh and schedule", *FEATURES]), _row(["---"] * (1 + len(FEATURES))), *map(_row, rows)]
    notes = "\n".join(f"{number}. {reason}" for reason, number in reasons.items())
    causes = "\n".join(_row([reason.replace("{}", "…"), f"{cause}."]) for reason, cause in CAUSES.items())
    return PAGE.format(table="\n".join(lines), notes=notes, causes=causes)


def cause(reason: str) -> str | None:
    """Of a reason that steps are not graphs: what no graph can hold."""
    return next((text for key, text in CAUSES.items() if fnmatchcase(reason, key.replace("{}", "*"))), None)


def answer(mesh: str, feature: str) -> tuple[str, str | None]:
    """("yes", "compiled", "no" or "refused"; why it is not yes)."""
    ranks, settings = MESHES[mesh]
    pipeline = "parallelism.pp_size=2" in settings
    more = ["training.gradient_accumulation_steps=8"] if pipeline or "two-batch" in str(settings) else []
    common = ["model.config=qwen3-30b-a3b", "model.dtype=bfloat16", "training.torch_compile=on"]
    common += ["training.per_device_train_batch_size=2", "model.config.tie_word_embeddings=false"]
    try:
        config = load_config(None, [*common, f"parallelism.num_ranks={ranks}", *settings, *more, *FEATURES[feature]])
    except ValueError as error:
        return "refused", str(error).split("\n")[-1].strip()
    shape, degrees = ModelShape.read(read_keys("qwen3-30b-a3b")), config.parallelism.resolve(ranks, 128)
    one, _ = candidate_of(config.model_dump(), degrees, shape, HARDWARE["H100"], 8)
    compiled, why = one.layers_compiled, one.why_eager
    return {(True, True): "yes", (True, False): "compiled"}.get((compiled, why is None), "no"), why


def _text(found: tuple[str, str | None], reasons: dict[str, int]) -> str:
    what, why = found
    return what if why is None else f"{what} ({reasons.setdefault(why, len(reasons) + 1)})"


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    sys.exit(main())
