"""What holds an expert: homes, slots, and which of its slots serves a token.

Every logical expert has one *home*: the rank and row that own its parameter, its optimizer state and its entry
in checkpoints (those are always in logical expert order, whatever the layout). *Slots* are where experts are
computed. In the plain layout the slot is the home; a permuted layout moves homes; a replica is one more slot of
the same expert, filled from the home before the forward and summed back to it, in a fixed order, after the
backward. Ranks may hold unequal numbers of both.

    4 experts on 2 ranks, expert 1 replicated on rank 1:

        homes  rank 0: [0, 1]     rank 1: [2, 3]          who owns the parameter
        slots  rank 0: [0, 1]     rank 1: [2, 3, 1]       who computes;  expert_WS = [[0, 1, -1], [2, 3, 1]]

    A global slot id is rank * S + slot with S the largest number of slots of a rank (here 3), so expert 1 has
    the slots 1 (rank 0) and 5 (rank 1).

`assign` is the one place where a token's copy of an expert is chosen. It is a pure, deterministic function, which
transports, tests, placement and planner all call: otherwise counted bytes could not equal predicted ones.

Dimension letters, used as suffixes of tensor names in all of Carpool: T tokens of this rank, H hidden, F expert
hidden, E logical experts, K experts per token, W ranks of the expert-parallel group, S slots of one rank, R rows
that a rank receives, C copies of an expert.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from operator import index
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from carpool.routing import Routing

Lists = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class ExpertLayout:
    """Which slot of which rank holds which expert. Immutable; compares and hashes by content.

    Args:
        homes: for each rank, the experts whose parameters it owns, in row order. Every expert exactly once.
        slots: for each rank, the experts it computes, in slot order (-1: an empty slot). Every expert at least
            once, and at most once per rank. Defaults to the homes.

    Raises:
        ValueError: an expert is missing, homed twice, out of range, or twice on one rank.
    """

    homes: Lists
    slots: Lists = field(default=())

    def __post_init__(self) -> None:
        object.__setattr__(self, "homes", _freeze(self.homes))
        object.__setattr__(self, "slots", _freeze(self.slots) or self.homes)
        owned = sorted(expert for rank in self.homes for expert in rank)
        if not owned:
            raise ValueError("an expert layout needs at least one expert on at least one rank")
        if owned != list(range(len(owned))):
            raise ValueError(
                f"homes must name each expert 0..{len(owned) - 1} exactly once; got {_duplicates_or_gaps(owned)}"
            )
        if len(self.slots) != len(self.homes):
            raise ValueError(f"homes name {len(self.homes)} ranks but slots name {len(self.slots)}")
        for rank, experts in enumerate(self.slots):
            filled = [e for e in experts if e != -1]
            if bad := [e for e in filled if not 0 <= e < len(owned)]:
                raise ValueError(f"slots of rank {rank} name experts {bad}, but experts are 0..{len(owned) - 1}")
            if len(set(filled)) != len(filled):
                raise ValueError(f"slots of rank {rank} hold an expert twice: {list(experts)}")
        if missing := set(owned) - {e for rank in self.slots for e in rank}:
            raise ValueError(f"experts {sorted(missing)} have no slot: no rank would compute them")

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
    def permuted(cls, order: Sequence[int], num_ranks: int) -> ExpertLayout:
        """As `contiguous`, with expert `order[i]` in place of expert i."""
        plain = cls.contiguous(len(order), num_ranks)
        return cls(tuple(tuple(int(order[i]) for i in rank) for rank in plain.homes))

    def with_replicas(self, replicas: Iterable[tuple[int, int]]) -> ExpertLayout:
        """The same layout with one more slot for each (expert, rank) given."""
        slots = [list(rank) for rank in self.slots]
        for expert, rank in replicas:
            if not 0 <= expert < self.num_experts:
                raise ValueError(f"cannot replicate expert {expert}: experts are 0..{self.num_experts - 1}")
            if not 0 <= rank < self.num_ranks:
                raise ValueError(f"cannot replicate expert {expert} on rank {rank}: ranks are 0..{self.num_ranks - 1}")
            slots[rank].append(expert)
        return ExpertLayout(self.homes, _freeze(slots))

    # -- reading it -------------------------------------------------------------------------------------------

    @property
    def num_ranks(self) -> int:
        return len(self.homes)

    @cached_property
    def num_experts(self) -> int:
        return sum(len(rank) for rank in self.homes)

    @cached_property
    def slots_per_rank(self) -> int:
        """S: the largest number of slots of a rank; global slot ids count in steps of it."""
        return max(len(rank) for rank in self.slots)

    @property
    def num_replicas(self) -> int:
        """Slots beyond the first of each expert."""
        return sum(e != -1 for rank in self.slots for e in rank) - self.num_experts

    @property
    def slot_is_home(self) -> bool:
        """Whether every rank computes just what it owns, row for row, so that nothing has to be filled."""
        return self.slots == self.homes

    @property
    def kind(self) -> str:
        """One word for logs and reports."""
        if self.num_replicas:
            return "replicated"
        if len({len(rank) for rank in self.slots}) > 1:
            return "uneven"
        return "contiguous" if self == ExpertLayout.contiguous(self.num_experts, self.num_ranks) else "permuted"

    @cached_property
    def home_of(self) -> tuple[tuple[int, int], ...]:
        """(rank, row) of each expert's home, indexed by expert."""
        where = {e: (rank, row) for rank, experts in enumerate(self.homes) for row, e in enumerate(experts)}
        return tuple(where[e] for e in range(self.num_experts))

    @cached_property
    def slots_of(self) -> tuple[tuple[int, ...], ...]:
        """Global slot ids of each expert in rank order, indexed by expert."""
        found: list[list[int]] = [[] for _ in range(self.num_experts)]
        for rank, experts in enumerate(self.slots):
            for slot, e in enumerate(experts):
                if e != -1:
                    found[e].append(rank * self.slots_per_rank + slot)
        return tuple(tuple(f) for f in found)

    @cached_property
    def expert_WS(self) -> torch.Tensor:
        """(W, S) int32 on the CPU: the expert in each slot, -1 where empty."""
        rows = [list(rank) + [-1] * (self.slots_per_rank - len(rank)) for rank in self.slots]
        return torch.tensor(rows, dtype=torch.int32)

    @cached_property
    def _copies_by_device(self) -> dict[torch.device, torch.Tensor]:
        return {}

    def copies_EC(self, device: torch.device) -> torch.Tensor:
        """(E, C) int32: global slot ids of each expert's copies, -1 where it has fewer. Kept per device."""
        if device not in self._copies_by_device:
            most = max(len(s) for s in self.slots_of)
            rows = [list(s) + [-1] * (most - len(s)) for s in self.slots_of]
            self._copies_by_device[device] = torch.tensor(rows, dtype=torch.int32).to(device)
        return self._copies_by_device[device]

    @cached_property
    def _slots_by_device(self) -> dict[torch.device, torch.Tensor]:
        return {}

    def slot_EW(self, device: torch.device) -> torch.Tensor:
        """(E, W) int32: global slot id of each expert's copy on each rank, -1 where it has none. Kept per device."""
        if device not in self._slots_by_device:
            rows = [[-1] * self.num_ranks for _ in range(self.num_experts)]
            for expert, slots in enumerate(self.slots_of):
                for slot in slots:
                    rows[expert][slot // self.slots_per_rank] = slot
            self._slots_by_device[device] = torch.tensor(rows, dtype=torch.int32).to(device)
        return self._slots_by_device[device]

    @cached_property
    def _most_shared(self) -> int:
        """How many experts with several copies a token may name, if one ride can serve two of them; else 0."""
        several = {e for e, slots in enumerate(self.slots_of) if len(slots) > 1}
        return len(several) if any(len(several.intersection(rank)) > 1 for rank in self.slots) else 0

    def shared_rounds(self, top_k: int) -> int:
        """How many ranks a token can visit each for the sake of two or more experts with several copies."""
        return min(top_k, self._most_shared) // 2

    # -- files ------------------------------------------------------------------------------------------------

    def to_dict(self) -> dict[str, Any]:
        return {"homes": [list(r) for r in self.homes], "slots": [list(r) for r in self.slots]}

    def save(self, path: str | Path) -> None:
        """Write the layout as JSON, which `[moe] layout = "PATH"` accepts."""
        Path(path).write_text(json.dumps(self.to_dict()) + "\n")

    @classmethod
    def load(cls, path: str | Path) -> ExpertLayout:
        """Read what `save` wrote. Raises ValueError naming the file if it is no layout."""
        try:
            data = json.loads(Path(path).read_text())
            return cls(_freeze(data["homes"]), _freeze(data.get("slots", ())))
        except OSError as error:
            raise ValueError(f"cannot read the expert layout {path}: {error.strerror}") from error
        except (KeyError, TypeError, json.JSONDecodeError) as error:
            raise ValueError(
                f'{path} is not an expert layout: expected {{"homes": [[0, 1], [2, 3]], "slots": ...}} ({error})'
            ) from error
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error


def on_gpu(tensor: torch.Tensor) -> bool:
    """Whether the kernel is used."""
    return tensor.is_cuda and importlib.util.find_spec("triton") is not None


def assign(
    routing: Routing, layout: ExpertLayout, source_rank: int, serving_TW: torch.Tensor | None = None
) -> torch.Tensor:
    """The slot that serves each choice of each token, so that the token visits few ranks.

    An expert with one slot leaves no choice. With replicas, the fewest ranks that hold all experts of a token are a
    small set cover:
      1. The token's own rank serves what it can: no ride.
      2. Ranks of experts with a single slot are visited whatever we choose; they serve what else they hold.
      3. Of what is left, the rank that holds most is visited next, and so on while one holds at least two. Among
         ranks that hold equally many, the one whose experts have the fewest alternatives (the sum, over the ranks that
         hold an expert, of how many each of them holds), then the tokens take turns.
      4. What is then left shares no ride: copy number `token index mod copies`, which spreads the load.
    An expert that several visited ranks hold is served by one of them, in turn.

    Greedy set cover is not always the optimum, but nearly: of 1000 random tokens each, top-8, with replicas of popular
    experts, it was the optimum for all on 4, 8 and 16 ranks (64 experts, up to 64 replicas) and for 999 on 32 ranks
    (256 experts, 256 replicas); `tests/placement/test_assign.py` compares with brute force. It is a fixed number of
    dense operations on (T, K, W) without host synchronisation, K / 2 rounds at most; none of it without replicas. On
    CUDA one kernel does the same (carpool/layout/assign_kernel.py), except where `torch.compile` fuses them.

    Args:
        routing: `expert_TK`, logical ids, -1 for no expert.
        layout: where the experts are.
        source_rank: the rank, in the expert-parallel group, that holds the tokens.
        serving_TW: bool, the ranks that may serve each token, if its routing is limited to some
            (carpool/routing/limit.py). An expert that has no copy there is served by any.

    Returns:
        slot_TK: (T, K) int32 global slot ids (rank * S + slot), -1 where there is no expert.

    Example, layout of the module's docstring, tokens on rank 0:
        expert_TK = [[1, 2], [3, -1]]  ->  slot_TK = [[1, 3], [4, -1]]      expert 1 is served at home
        and on rank 1: expert_TK = [[1, 2]]  ->  [[5, 3]]                   by the replica there
    """
    expert_TK = routing.expert_TK
    if not torch.compiler.is_compiling() and on_gpu(expert_TK):
        from carpool.layout import assign_kernel

        if assign_kernel.fits(expert_TK.shape[1], layout.num_ranks):
            return assign_kernel.assign(expert_TK, layout, source_rank, serving_TW)
    index_TK = expert_TK.clamp(min=0).long()
    copies_EC = layout.copies_EC(expert_TK.device)
    if copies_EC.shape[1] == 1:
        slot_TK = copies_EC[:, 0][index_TK]
        return torch.where(expert_TK < 0, -1, slot_TK)

    slot_TKW = layout.slot_EW(expert_TK.device)[index_TK]
    held_TKW = (slot_TKW >= 0) & (expert_TK >= 0).unsqueeze(-1)
    if serving_TW is not None:
        within_TKW = held_TKW & serving_TW.unsqueeze(1)
        held_TKW = torch.where(within_TKW.any(-1, keepdim=True), within_TKW, held_TKW)
    number_TK1 = held_TKW.sum(-1, keepdim=True, dtype=torch.int32)
    rank_W = torch.arange(layout.num_ranks, device=expert_TK.device, dtype=torch.int32)
    token_T1 = torch.arange(expert_TK.shape[0], device=expert_TK.device, dtype=torch.int32).unsqueeze(1)

    own_W = rank_W == source_rank
    visits_TW = (held_TKW & (number_TK1 == 1)).any(dim=1) | own_W
    visits_TW = _share_rides(held_TKW, visits_TW, rank_W, token_T1, layout.shared_rounds(expert_TK.shape[1]))

    # Lower is better: own rank, then a visited one, then the token's turn.
    most = layout.num_ranks
    turn_TKW = (held_TKW.cumsum(-1, dtype=torch.int32) - 1 - token_T1.unsqueeze(1)) % number_TK1.clamp(min=1)
    cost_TKW = turn_TKW + torch.where(own_W, 0, torch.where(visits_TW, most, 2 * most)).unsqueeze(1)
    best_TK1 = torch.where(held_TKW, cost_TKW, 3 * most).argmin(dim=-1, keepdim=True)
    slot_TK = slot_TKW.gather(2, best_TK1).squeeze(-1)
    return torch.where(expert_TK < 0, -1, slot_TK)


def _share_rides(
    held_TKW: torch.Tensor, visits_TW: torch.Tensor, rank_W: torch.Tensor, token_T1: torch.Tensor, rounds: int
) -> torch.Tensor:
    """Step 3 of `assign`: the ranks visited, with those that serve two or more experts which no visited rank holds."""
    top_k, num_ranks = held_TKW.shape[1:]
    tie = 1 << (num_ranks - 1).bit_length()  # above any turn
    step = top_k * top_k * num_ranks + 1  # above any sum of alternatives
    # Every rank has another number for each token, and of any two ranks each is first for half of the tokens.
    turn_TW = (rank_W ^ token_T1) & (tie - 1)
    open_TK1 = ~(held_TKW & visits_TW.unsqueeze(1)).any(dim=-1, keepdim=True)
    for _ in range(rounds):
        wanted_TKW = held_TKW & open_TK1
        count_TW = wanted_TKW.sum(1)
        alternatives_TK1 = (wanted_TKW * count_TW.unsqueeze(1)).sum(-1, keepdim=True)
        score_TW = count_TW * step - (wanted_TKW * alternatives_TK1).sum(1)
        best_T1 = (score_TW * tie - turn_TW).argmax(dim=1, keepdim=True)
        next_TW = (rank_W == best_T1) & (count_TW > 1)
        visits_TW = visits_TW | next_TW
        open_TK1 = open_TK1 & ~(held_TKW & next_TW.unsqueeze(1)).any(dim=-1, keepdim=True)
    return visits_TW


def _freeze(lists: Iterable[Iterable[int]]) -> Lists:
    return tuple(tuple(index(e) for e in rank) for rank in lists)


def _duplicates_or_gaps(owned: list[int]) -> str:
    twice = sorted({e for e in owned if owned.count(e) > 1})
    strange = sorted(set(owned) - set(range(len(owned))))
    missing = sorted(set(range(len(owned))) - set(owned))
    return f"experts {twice} more than once, {missing} not at all, and {strange}, which do not exist"
