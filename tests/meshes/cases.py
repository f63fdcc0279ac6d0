"""The cases of the parity matrix over meshes: drawn so that every two values of every two factors meet.

The first factor is the mesh: all degrees that tile 4 or 8 ranks. An axis joins the matrix by its line in `AXES`, a
setting by its line in `FACTORS`. What settings declare that they exclude is left out by asking it, and `CANNOT`
says what else does not exist, such as a second node of two ranks.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from carpool.parallel.degrees import Degrees
from carpool.parallel.schedules import SCHEDULES, check_micro_batches
from carpool.train.config.declarations import declared
from carpool.train.config.schema import Config

# Largest degree of each axis. Models have 8 heads of keys and 8 experts.
AXES = {"pp": 2, "dp_replicate": 4, "fsdp": 8, "cp": 4, "tp": 4, "ep": 8, "etp": 2}
RANKS_PER_NODE = 2
SEQUENCES = 8
MTP_WEIGHT = 0.7

FACTORS: dict[str, tuple[Any, ...]] = {
    "transport": ("gather", "alltoall", "dedup", "hierarchical", "1d", "2d", "2dh", "local"),
    "family": ("olmoe", "qwen3_moe", "mixtral", "deepseek_v3", "gpt_oss"),
    "layout": ("contiguous", "permuted"),
    "schedule": ("none", "chunks", "two-batch"),
    "packing": ("stream", "examples", "off"),
    "dense": ("fsdp", "zero1"),
    "sequence": ("auto", "off"),
    "attention": ("auto", "ring"),
    "recompute": ("save", "recompute", "with rides"),
    "rows": ("save", "resend", "offload"),
    "hidden": ("save", "recompute", "offload"),
    "micro_batches": (1, 2, 4),
    "pipeline": tuple(SCHEDULES),
    "balance": ("none", "model", "layer", "step", "sequence"),
    "experts": ("grouped", "reference"),
    "spare": (0, 1, 2),
}


@dataclass(frozen=True)
class Case:
    """One cell of the matrix; all fields but the first and the last are factors of `FACTORS`."""

    mesh: Degrees
    transport: str = "dedup"
    family: str = "olmoe"
    layout: str = "contiguous"
    schedule: str = "none"
    packing: str = "stream"
    dense: str = "fsdp"
    sequence: str = "auto"
    attention: str = "auto"
    recompute: str = "save"
    rows: str = "save"
    hidden: str = "save"
    micro_batches: int = 1
    pipeline: str = "1F1B"
    balance: str = "model"
    experts: str = "grouped"
    spare: int = 0
    # Not drawn: cases with them are written out.
    priority: bool = False
    depth: int = 0

    def __str__(self) -> str:
        sizes = {axis: self.mesh.size(axis) for axis in AXES}
        mesh = " ".join(f"{axis}{size}" for axis, size in sizes.items() if size > 1)
        return "-".join([mesh, *(str(getattr(self, name)) for name in FACTORS)])

    @property
    def settings(self) -> dict[str, dict[str, Any]]:
        """Sections of a configuration."""
        size = SEQUENCES // (self.mesh.dp * self.micro_batches)
        return {
            "parallelism": {
                "num_ranks": self.mesh.world_size,
                "ranks_per_node": RANKS_PER_NODE,
                "data_parallel": self.dense,
                "sequence_parallel": self.sequence,
                "cp_attention": self.attention,
                "pp_schedule": self.pipeline,
                **{f"{axis}_size": self.mesh.size(axis) for axis in AXES},
            },
            "moe": {
                "transport": self.transport,
                "schedule": self.schedule,
                "experts": self.experts,
                "priority": self.priority,
                "router_aux_loss_coef": 0.0 if self.balance in ("none", "sequence") else 0.05,
                "balance_scope": "layer" if self.balance in ("layer", "step") else "model",
                "balance_batch": "global" if self.balance == "step" else "micro",
                "router_z_loss_coef": 0.02 if self.balance in ("step", "sequence") else 0.0,
                "sequence_aux_loss_coef": 0.03 if self.balance == "sequence" else 0.0,
                "bias_update_rate": 0.0,
                **({"spare_slots": self.spare, "balance_limit": 1.0} if self.spare else {}),
            },
            "memory": {
                "expert_inputs": self.rows,
                "expert_activations": self.hidden,
                "layer_activations": self.recompute.replace("with rides", "recompute"),
                "moe_outputs": "recompute" if self.recompute == "with rides" else "save",
            },
            "training": {
                "per_device_train_batch_size": size,
                "gradient_accumulation_steps": self.micro_batches,
                "bf16": False,
            },
            "data": {"packing": self.packing},
            **({"mtp": {"depth": self.depth, "loss_weight": MTP_WEIGHT}} if self.depth else {}),
        }

    @property
    def layers(self) -> int:
        """Two stages for each rank of a pipeline."""
        return max(2, 2 * self.mesh.pp)

    @property
    def refused(self) -> bool:
        """Whether there is no such combination."""
        settings = {f"{name}.{key}": value for name, keys in self.settings.items() for key, value in keys.items()}
        return declared(Config).refusal(settings) is not None or any(cannot(self) for cannot in CANNOT)


def _not_piped(case: Case) -> bool:
    """Whether the schedule of stages cannot run these micro-batches, or puts a tied weight on two ranks."""
    try:
        check_micro_batches(case.pipeline, case.mesh.pp, case.micro_batches)
    except ValueError:
        return True
    return case.family == "qwen3_moe" and not SCHEDULES[case.pipeline].is_v


def _one_node(mesh: Degrees) -> bool:
    """Whether ranks of an expert-parallel group share a node, or nodes have different numbers of them."""
    nodes = Counter(rank // RANKS_PER_NODE for rank in mesh.ranks_along(0, "ep", "etp"))
    return len(nodes) < 2 or set(nodes.values()) != {RANKS_PER_NODE}


# What does not exist, apart from what the trainer refuses as a combination of axes.
CANNOT: tuple[Callable[[Case], bool], ...] = (
    # A micro-batch of a rank has a sequence at least; two batches at a time are two micro-batches, or two halves, each
    # with a balance loss of its own.
    lambda case: SEQUENCES % (case.mesh.dp * case.micro_batches) != 0,
    lambda case: case.schedule == "two-batch" and case.micro_batches == 1,
    lambda case: case.transport in ("hierarchical", "1d", "2d", "2dh") and _one_node(case.mesh),
    # A single rank sends nothing.
    lambda case: (case.transport == "local") != (case.mesh.ep * case.mesh.etp == 1),
    # Nothing to balance.
    lambda case: bool(case.spare) and case.mesh.ep == 1,
    lambda case: case.dense == "zero1" and case.mesh.dp_cp == 1,
    lambda case: case.experts == "reference" and case.hidden == "recompute",
    lambda case: case.recompute == "with rides" and "offload" in (case.rows, case.hidden),
    # DeepSeek-V3 has no balance loss in transformers, and gpt-oss attention of its own, which the ring does not know.
    lambda case: case.family == "deepseek_v3" and case.balance not in ("none", "sequence"),
    lambda case: case.attention == "ring" and (case.mesh.cp == 1 or case.family == "gpt_oss"),
    lambda case: case.sequence == "off" and case.mesh.tp == 1,
    lambda case: case.pipeline != "1F1B" and case.mesh.pp == 1,
    lambda case: case.mesh.pp > 1 and (_not_piped(case) or case.layout != "contiguous"),
)


@functools.cache
def meshes(ranks: int) -> tuple[Degrees, ...]:
    """All degrees of so many ranks that are not refused."""
    dense = [axis for axis in AXES if axis not in ("ep", "etp")]
    found = []
    for sizes in itertools.product(*(_powers(AXES[axis]) for axis in dense)):
        if math.prod(sizes) != ranks:
            continue
        of = dict(zip(dense, sizes, strict=True))
        copy = of["fsdp"] * of["cp"] * of["tp"]
        for ep, etp in itertools.product(_powers(AXES["ep"]), _powers(AXES["etp"])):
            if copy % (ep * etp) or (ep * etp > 1 and ep * etp % of["tp"]) or _refused({**of, "ep": ep, "etp": etp}):
                continue
            found.append(Degrees(**of, ep=ep, etp=etp))
    return tuple(found)


def _refused(sizes: dict[str, int]) -> bool:
    return declared(Config).refusal({f"parallelism.{axis}_size": size for axis, size in sizes.items()}) is not None


def _powers(most: int) -> list[int]:
    return [2**power for power in range(most.bit_length()) if 2**power <= most]


@functools.cache
def cases(ranks: int) -> list[Case]:
    """Cases in which each mesh meets each value of each factor, and any two values of two factors meet; those that
    cannot be are left out. Deterministic."""
    missing = dict.fromkeys(_pairs(ranks))
    used: Counter[Any] = Counter()
    found: list[Case] = []
    for pair in list(missing):
        if pair not in missing:
            continue
        del missing[pair]
        case = _complete(dict(pair), ranks, missing, used)
        if case is not None:
            found.append(case)
    return found


def _pairs(ranks: int) -> Iterator[frozenset[tuple[str, Any]]]:
    factors = {"mesh": meshes(ranks), **FACTORS}
    for (a, of_a), (b, of_b) in itertools.combinations(factors.items(), 2):
        yield from (frozenset({(a, one), (b, other)}) for one in of_a for other in of_b)


def _complete(
    chosen: dict[str, Any], ranks: int, missing: dict[frozenset[tuple[str, Any]], None], used: Counter[Any]
) -> Case | None:
    """A case with these values; each other factor has the value that meets most new pairs, and among equals the one
    used least. None if there is none."""
    factors = {"mesh": meshes(ranks), **FACTORS}

    def worth(name: str, value: Any, others: dict[str, Any]) -> tuple[int, int]:
        new = sum(frozenset({(name, value), other}) in missing for other in others.items())
        return -new, used[name, value]

    def search(others: dict[str, Any], left: list[str]) -> dict[str, Any] | None:
        if not left:
            return others if not Case(**others).refused else None
        name = left[0]
        for value in sorted(factors[name], key=lambda value: worth(name, value, others)):
            trial = {**others, name: value}
            # Factors that are open have the values with which nothing is refused, as far as there are any.
            if not _hopeless(trial) and (done := search(trial, left[1:])) is not None:
                return done
        return None

    done = search(chosen, [name for name in factors if name not in chosen])
    if done is None:
        return None
    used.update(done.items())
    for pair in itertools.combinations(done.items(), 2):
        missing.pop(frozenset(pair), None)
    return Case(**done)


def _hopeless(partial: dict[str, Any]) -> bool:
    """Whether values that are known exclude each other whatever the others are."""
    if "mesh" not in partial:
        return False
    mesh = partial["mesh"]
    neutral = {
        "transport": "local" if mesh.ep * mesh.etp == 1 else "dedup",
        "family": "olmoe",
        "layout": "contiguous",
        "schedule": "none",
        "dense": "fsdp",
        "balance": "none",
    }
    if mesh.pp > 1:
        neutral["pipeline"] = "ZBVZeroBubble"
    numbers = [partial["micro_batches"]] if "micro_batches" in partial else FACTORS["micro_batches"]
    return all(Case(**{**neutral, **partial, "micro_batches": number}).refused for number in numbers)
