"""What holds an expert: its home.

Every logical expert has one *home*: the rank and row that own its parameter, its optimizer state and its entry
in checkpoints (those are always in logical expert order, whatever the layout), and that compute it. Ranks may hold
unequal numbers. The rows of a rank are its first *slots*; replicas, which follow each micro-batch, come into spare
slots behind them (`carpool.ride.balanced`), and are no part of a layout.

    4 experts on 2 ranks        homes  rank 0: [0, 1]     rank 1: [2, 3]        expert_WS = [[0, 1], [2, 3]]

    A global slot id is rank * S + slot with S the largest number of homes of a rank (here 2): expert 2 has slot 2.

An expert may be cut into slices (expert tensor parallelism). A slice is a part of F, the expert's hidden dimension: its
columns of gate and up, and its rows of down. Each slice gives a partial sum of the expert's output, and partial sums
add up in the combine as they do anyway. Homes then hold slices: slice i of expert e is number e * slices + i. A row
goes to every slice of an expert that it chose.

    2 experts in 2 slices on 2 ranks: expert 0 is slices 0 and 1, expert 1 is slices 2 and 3

        ExpertLayout.sliced(2, 1, 2)    homes [[0, 2], [1, 3]]    each rank computes one half of F of both experts

Ranks of unequal speed hold unequal numbers of slices.

Dimension letters, used as suffixes of tensor names in all of Carpool: T tokens of this rank, H hidden, F expert
hidden, E logical experts, K experts per token, W ranks of the expert-parallel group, S slots of one rank, R rows
that a rank receives, J slots beside such a row, P pairs of a row and a slot, C pieces of a ride. N counts what the
function at hand lists, such as the rows that a rank sends. slot_TK are global slot ids; slot_RJ, beside rows that
arrived, slots of the rank itself.

`assign` says which slot serves each choice of each token. The layer, placement, planner and tests all call it:
otherwise counted bytes could not equal predicted ones.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from operator import index
from pathlib import Path
from typing import Any

import torch

from carpool.kernels.device import on_gpu

Lists = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class ExpertLayout:
    """Which rank holds which expert. Immutable; compares and hashes by content.

    Args:
        homes: for each rank, the experts whose parameters it owns and which it computes, in row order. Every expert
            exactly once.
        slices: into how many slices each expert is cut. With more than 1, homes name slices, not experts.

    Raises:
        ValueError: an expert (or a slice) is missing, homed twice, or out of range.
    """

    homes: Lists
    slices: int = 1
    _slots_by_device: dict[torch.device, torch.Tensor] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def __post_init__(self) -> None:
        object.__setattr__(self, "homes", _freeze(self.homes))
        owned = sorted(expert for rank in self.homes for expert in rank)
        what = "expert" if self.slices == 1 else "slice"
        if not owned:
            raise ValueError("an expert layout needs at least one expert on at least one rank")
        if owned != list(range(len(owned))):
            raise ValueError(
                f"homes must name each {what} 0..{len(owned) - 1} exactly once; got {_duplicates_or_gaps(owned, what)}"
            )
        if self.slices < 1 or len(owned) % self.slices:
            raise ValueError(f"homes name {len(owned)} slices, which are no experts of {self.slices} slices each")
        # torch.compile cannot enter the lock under which Python 3.11 computes a cached property.
        for name in ("num_rows", "slots_per_rank", "home_of"):
            getattr(self, name)

    # -- making one -------------------------------------------------------------------------------------------

    @classmethod
    def contiguous(cls, num_experts: int, num_ranks: int) -> ExpertLayout:
        """Experts in order, equally many per rank (the first `num_experts % num_ranks` ranks hold one more)."""
        if num_ranks < 1 or num_experts < num_ranks:
            raise ValueError(
                f"{num_experts} experts cannot be spread over {num_ranks} ranks: each rank needs at least one; "
                "use fewer expert-parallel ranks"
            )
        base, more = divmod(num_experts, num_ranks)
        ends = [base * (r + 1) + min(r + 1, more) for r in range(num_ranks)]
        return cls(tuple(tuple(range(start, end)) for start, end in zip([0, *ends], ends, strict=False)))

    @classmethod
    def chunked(cls, num_experts: int, num_ranks: int) -> ExpertLayout:
        """Experts in order, ceil(E / W) on each rank, and on the last ones what is left: as DTensor shards rows."""
        each = -(-num_experts // num_ranks)
        experts = range(num_experts)
        return cls(tuple(tuple(experts[rank * each : (rank + 1) * each]) for rank in range(num_ranks)))

    @classmethod
    def permuted(cls, order: Sequence[int], num_ranks: int) -> ExpertLayout:
        """As `contiguous`, with expert `order[i]` in place of expert i."""
        plain = cls.contiguous(len(order), num_ranks)
        return cls(tuple(tuple(int(order[i]) for i in rank) for rank in plain.homes))

    @classmethod
    def sliced(cls, num_experts: int, ep: int, etp: int) -> ExpertLayout:
        """Expert tensor parallelism: `ep` groups of `etp` ranks, the ranks of a group next to each other. Experts are
        spread over the groups as by `contiguous`, and each rank of a group has one of `etp` slices of all of its
        group's experts.

        Example: 2 experts, ep 2, etp 2: homes [[0], [1], [2], [3]]: ranks 0 and 1 have the slices of expert 0."""
        groups = cls.contiguous(num_experts, ep).homes
        return cls(tuple(tuple(e * etp + i for e in group) for group in groups for i in range(etp)), slices=etp)

    # -- reading it -------------------------------------------------------------------------------------------

    @property
    def num_ranks(self) -> int:
        return len(self.homes)

    @property
    def num_experts(self) -> int:
        return self.num_rows // self.slices

    @cached_property
    def num_rows(self) -> int:
        """Rows of a parameter of all experts: what homes name, experts or their slices."""
        return sum(len(rank) for rank in self.homes)

    @cached_property
    def slots_per_rank(self) -> int:
        """S: the largest number of homes of a rank; global slot ids count in steps of it."""
        return max(len(rank) for rank in self.homes)

    @property
    def slices_together(self) -> bool:
        """Whether each rank has one slice of all of its experts, and the ranks of an expert have the same experts in
        one order, as by `sliced`."""
        ranks = Counter(tuple(row // self.slices for row in rank) for rank in self.homes if rank)
        one = all(len({row % self.slices for row in rank}) <= 1 for rank in self.homes)
        return one and set(ranks.values()) == {self.slices}

    @property
    def kind(self) -> str:
        """One word for logs and reports."""
        if self.slices > 1:
            return "sliced"
        if len({len(rank) for rank in self.homes}) > 1:
            return "uneven"
        return "contiguous" if self == ExpertLayout.contiguous(self.num_experts, self.num_ranks) else "permuted"

    @cached_property
    def home_of(self) -> tuple[tuple[int, int], ...]:
        """(rank, row) of each expert's home, indexed by expert (or slice)."""
        where = {e: (rank, row) for rank, experts in enumerate(self.homes) for row, e in enumerate(experts)}
        return tuple(where[e] for e in range(self.num_rows))

    @cached_property
    def expert_WS(self) -> torch.Tensor:
        """(W, S) int32 on the CPU: the expert in each slot, -1 where empty."""
        rows = [list(rank) + [-1] * (self.slots_per_rank - len(rank)) for rank in self.homes]
        named_WS = torch.tensor(rows, dtype=torch.int32)
        return torch.where(named_WS < 0, -1, named_WS // self.slices)

    def slot_E(self, device: torch.device) -> torch.Tensor:
        """(E,) int32: global slot id of each expert; (E * slices,) where experts are sliced. Kept per device."""
        if device not in self._slots_by_device:
            slots = [rank * self.slots_per_rank + row for rank, row in self.home_of]
            self._slots_by_device[device] = torch.tensor(slots, dtype=torch.int32).to(device)
        return self._slots_by_device[device]

    # -- files ------------------------------------------------------------------------------------------------

    def __reduce__(self) -> tuple[Any, ...]:
        # Without its tensors on devices: a process that gets a pickled layout may see no GPU.
        return type(self), (self.homes, self.slices)

    def to_dict(self) -> dict[str, Any]:
        plain: dict[str, Any] = {"homes": [list(r) for r in self.homes]}
        return plain if self.slices == 1 else {**plain, "slices": self.slices}

    @classmethod
    def from_dict(cls, data: Any) -> ExpertLayout:
        """What `to_dict` gave. Raises KeyError, TypeError, AttributeError or ValueError for anything else."""
        homes = _freeze(data["homes"])
        # Of versions whose layouts had replicas.
        if _freeze(data.get("slots", ())) not in ((), homes):
            raise ValueError(
                "its slots hold replicas, which follow each micro-batch now: give homes alone, and set moe.spare_slots "
                "(spare_slots of a layer in a script)"
            )
        return cls(homes, index(data.get("slices", 1)))

    def save(self, path: str | Path) -> None:
        """Write the layout as JSON, which `[moe] layout = "PATH"` accepts."""
        Path(path).write_text(json.dumps(self.to_dict()) + "\n")

    @classmethod
    def load(cls, path: str | Path) -> ExpertLayout:
        """Read what `save` wrote. Raises ValueError naming the file if it is no layout."""
        try:
            data = json.loads(Path(path).read_text())
            return cls.from_dict(data)
        except OSError as error:
            raise ValueError(f"cannot read the expert layout {path}: {error.strerror}") from error
        except (KeyError, TypeError, AttributeError, json.JSONDecodeError) as error:
            raise ValueError(
                f'{path} is not an expert layout: expected {{"homes": [[0, 1], [2, 3]]}} ({error})'
            ) from error
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{path}: {error}") from error


def _freeze(lists: Iterable[Iterable[int]]) -> Lists:
    return tuple(tuple(index(e) for e in rank) for rank in lists)


def _duplicates_or_gaps(owned: list[int], what: str) -> str:
    twice = sorted({e for e in owned if owned.count(e) > 1})
    strange = sorted(set(owned) - set(range(len(owned))))
    missing = sorted(set(range(len(owned))) - set(owned))
    return f"{what}s {twice} more than once, {missing} not at all, and {strange}, which do not exist"


def assign(expert_TK: torch.Tensor, layout: ExpertLayout) -> torch.Tensor:
    """The slot that serves each choice of each token.

    Args:
        expert_TK: (T, K) logical ids, -1 for no expert.
        layout: where the experts are.

    Returns:
        slot_TK: (T, K) int32 global slot ids (rank * S + slot), -1 where there is no expert. Of sliced experts
            (T, K * slices): those of all slices of the first choice, then of the second, and so on.

    Example, homes [[0, 1], [3, 2]]: expert_TK = [[1, 2], [3, -1]]  ->  slot_TK = [[1, 3], [2, -1]]
    """
    slot_E = layout.slot_E(expert_TK.device)
    if not torch.compiler.is_compiling() and on_gpu(expert_TK):
        from carpool.layout.assign_kernel import look_up

        return look_up(expert_TK, slot_E, layout.slices)
    expert_TK = slices_of(expert_TK, layout.slices)
    return torch.where(expert_TK < 0, -1, slot_E[expert_TK.clamp(min=0).long()])


def slices_of(expert_TK: torch.Tensor, slices: int) -> torch.Tensor:
    """(T, K * slices): the number of each slice of the experts, -1 where there is none.

    Example, 2 slices: [[3, -1]]  ->  [[6, 7, -1, -1]]"""
    if slices == 1:
        return expert_TK
    expert_TK1 = expert_TK.unsqueeze(2)
    slice_C = torch.arange(slices, device=expert_TK.device, dtype=expert_TK.dtype)
    return torch.where(expert_TK1 < 0, -1, expert_TK1 * slices + slice_C).flatten(1)
