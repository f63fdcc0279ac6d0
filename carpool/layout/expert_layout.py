"""What holds an expert: homes and slots.

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

An expert may be cut into slices (expert tensor parallelism). A slice is a part of F, the expert's hidden dimension: its
columns of gate and up, and its rows of down. Each slice gives a partial sum of the expert's output, and partial sums
add up in the combine as they do anyway. Homes and slots then hold slices: slice i of expert e is number
e * slices + i. A row goes to every slice of an expert that it chose.

    2 experts in 2 slices on 2 ranks: expert 0 is slices 0 and 1, expert 1 is slices 2 and 3

        ExpertLayout.sliced(2, 1, 2)    homes [[0, 2], [1, 3]]    each rank computes one half of F of both experts
        the same homes, slots           [[0, 2, 1, 3]] * 2        each rank computes all of both: nothing travels but
                                                                  weights, to fill the slots

So the size of a slice is that of a parameter's row, and stays; how many ranks compute an expert is a matter of slots.
Ranks of unequal speed hold unequal numbers of slices.

Which slot serves a token is chosen in `carpool.layout.assign`.

Dimension letters, used as suffixes of tensor names in all of Carpool: T tokens of this rank, H hidden, F expert
hidden, E logical experts, K experts per token, W ranks of the expert-parallel group, S slots of one rank, R rows
that a rank receives, J slots beside such a row, P pairs of a row and a slot, C copies of an expert (in rides: pieces of
a ride). N counts what the function at hand lists, such as the rows that a rank sends. slot_TK are global slot ids;
slot_RJ, beside rows that arrived, slots of the rank itself.

`assign` says which slot serves each choice of each token, and is the one place where a replica of an expert is chosen.
It is a pure, deterministic function. The layer, placement, planner and tests all call it: otherwise counted bytes could
not equal predicted ones.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from operator import index
from pathlib import Path
from typing import Any, Protocol

import torch

from carpool.kernels.device import on_gpu

Lists = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class ExpertLayout:
    """Which slot of which rank holds which expert. Immutable; compares and hashes by content.

    Args:
        homes: for each rank, the experts whose parameters it owns, in row order. Every expert exactly once.
        slots: for each rank, the experts it computes, in slot order (-1: an empty slot). Every expert at least
            once, and at most once per rank. Defaults to the homes.
        slices: into how many slices each expert is cut. With more than 1, homes and slots name slices, not experts.

    Raises:
        ValueError: an expert (or a slice) is missing, homed twice, out of range, or twice on one rank.
    """

    homes: Lists
    slots: Lists = field(default=())
    slices: int = 1
    _copies_by_device: dict[torch.device, torch.Tensor] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )
    _slots_by_device: dict[torch.device, torch.Tensor] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def __post_init__(self) -> None:
        object.__setattr__(self, "homes", _freeze(self.homes))
        object.__setattr__(self, "slots", _freeze(self.slots) or self.homes)
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
        if len(self.slots) != len(self.homes):
            raise ValueError(f"homes name {len(self.homes)} ranks but slots name {len(self.slots)}")
        for rank, experts in enumerate(self.slots):
            filled = [e for e in experts if e != -1]
            if bad := [e for e in filled if not 0 <= e < len(owned)]:
                raise ValueError(f"slots of rank {rank} name {what}s {bad}, but {what}s are 0..{len(owned) - 1}")
            if len(set(filled)) != len(filled):
                raise ValueError(f"slots of rank {rank} hold {_a(what)} twice: {list(experts)}")
        if missing := set(owned) - {e for rank in self.slots for e in rank}:
            raise ValueError(f"{what}s {sorted(missing)} have no slot: no rank would compute them")
        # torch.compile cannot enter the lock under which Python 3.11 computes a cached property.
        for name in ("num_rows", "num_replicas", "slot_is_home", "slots_per_rank", "slots_of", "_most_shared"):
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

    def with_replicas(self, replicas: Iterable[tuple[int, int]]) -> ExpertLayout:
        """The same layout with one more slot for each (expert, rank) given; of sliced experts, (slice, rank)."""
        slots = [list(rank) for rank in self.slots]
        what = "expert" if self.slices == 1 else "slice"
        for expert, rank in replicas:
            if not 0 <= expert < self.num_rows:
                raise ValueError(f"cannot replicate {what} {expert}: {what}s are 0..{self.num_rows - 1}")
            if not 0 <= rank < self.num_ranks:
                raise ValueError(f"cannot replicate {what} {expert} on rank {rank}: ranks are 0..{self.num_ranks - 1}")
            slots[rank].append(expert)
        return ExpertLayout(self.homes, _freeze(slots), self.slices)

    def with_degree(self, degree: int) -> ExpertLayout:
        """The same homes, but a copy of an expert is computed by `degree` of the ranks that have slices of it, each
        with equally many slices (Tutel's adaptive parallelism, arXiv 2206.03382, section 3.1). So the degree can change
        between two steps, and no parameter moves: slots are filled from homes.

        Args:
            degree: a divisor of `slices`. `slices` itself: as at home, nothing is filled. 1: each of these ranks
                computes the whole expert, and a row goes to one of them. 0: every rank computes all experts, and no row
                travels (the data-centric mode of HEXA-MoE, arXiv 2411.01288).

        Example: 2 slices of one expert on 2 ranks, homes [[0], [1]]: degree 1 has slots [[0, 1], [1, 0]]

        Raises:
            ValueError: another degree."""
        if degree < 0 or (degree and self.slices % degree):
            fit = [n for n in range(1, self.slices + 1) if self.slices % n == 0]
            raise ValueError(
                f"an expert in {self.slices} slices cannot be computed by {degree} ranks; degrees are "
                f"0 (every rank computes all experts), {', '.join(map(str, fit))}"
            )
        slots = []
        for own in self.homes:
            more: Iterable[int] = range(self.num_rows)
            if degree:
                more = (e - e % self.slices + i for e in own for i in range(self.slices) if (e - i) % degree == 0)
            slots.append(list(dict.fromkeys([*own, *more])))
        return ExpertLayout(self.homes, _freeze(slots), self.slices)

    # -- reading it -------------------------------------------------------------------------------------------

    @property
    def num_ranks(self) -> int:
        return len(self.homes)

    @property
    def num_experts(self) -> int:
        return self.num_rows // self.slices

    @cached_property
    def num_rows(self) -> int:
        """Rows of a parameter of all experts: what homes and slots name, experts or their slices."""
        return sum(len(rank) for rank in self.homes)

    @cached_property
    def slots_per_rank(self) -> int:
        """S: the largest number of slots of a rank; global slot ids count in steps of it."""
        return max(len(rank) for rank in self.slots)

    @cached_property
    def num_replicas(self) -> int:
        """Slots beyond the first of each expert, or of each slice."""
        return sum(e != -1 for rank in self.slots for e in rank) - self.num_rows

    @cached_property
    def slot_is_home(self) -> bool:
        """Whether every rank computes just what it owns, row for row, so that nothing has to be filled."""
        return self.slots == self.homes

    @property
    def kind(self) -> str:
        """One word for logs and reports."""
        if self.num_replicas:
            return "replicated"
        if self.slices > 1:
            return "sliced"
        if len({len(rank) for rank in self.slots}) > 1:
            return "uneven"
        return "contiguous" if self == ExpertLayout.contiguous(self.num_experts, self.num_ranks) else "permuted"

    @cached_property
    def home_of(self) -> tuple[tuple[int, int], ...]:
        """(rank, row) of each expert's home, indexed by expert (or slice)."""
        where = {e: (rank, row) for rank, experts in enumerate(self.homes) for row, e in enumerate(experts)}
        return tuple(where[e] for e in range(self.num_rows))

    @cached_property
    def slots_of(self) -> tuple[tuple[int, ...], ...]:
        """Global slot ids of each expert in rank order, indexed by expert (or slice)."""
        found: list[list[int]] = [[] for _ in range(self.num_rows)]
        for rank, experts in enumerate(self.slots):
            for slot, e in enumerate(experts):
                if e != -1:
                    found[e].append(rank * self.slots_per_rank + slot)
        return tuple(tuple(f) for f in found)

    @cached_property
    def expert_WS(self) -> torch.Tensor:
        """(W, S) int32 on the CPU: the expert in each slot, -1 where empty."""
        return torch.where(self._named_WS < 0, -1, self._named_WS // self.slices)

    @cached_property
    def slice_WS(self) -> torch.Tensor:
        """(W, S) int32 on the CPU: which slice of its expert each slot computes, 0 of an expert that is whole, -1 where
        empty."""
        return torch.where(self._named_WS < 0, -1, self._named_WS % self.slices)

    @property
    def _named_WS(self) -> torch.Tensor:
        rows = [list(rank) + [-1] * (self.slots_per_rank - len(rank)) for rank in self.slots]
        return torch.tensor(rows, dtype=torch.int32)

    def copies_EC(self, device: torch.device) -> torch.Tensor:
        """(E, C) int32: global slot ids of each expert's copies, -1 where it has fewer; (E * slices, C) where experts
        are sliced. Kept per device."""
        if device not in self._copies_by_device:
            most = max(len(s) for s in self.slots_of)
            rows = [list(s) + [-1] * (most - len(s)) for s in self.slots_of]
            self._copies_by_device[device] = torch.tensor(rows, dtype=torch.int32).to(device)
        return self._copies_by_device[device]

    def slot_EW(self, device: torch.device) -> torch.Tensor:
        """(E, W) int32: global slot id of each expert's copy on each rank, -1 where it has none; (E * slices, W) where
        experts are sliced. Kept per device."""
        if device not in self._slots_by_device:
            rows = [[-1] * self.num_ranks for _ in range(self.num_rows)]
            for expert, slots in enumerate(self.slots_of):
                for slot in slots:
                    rows[expert][slot // self.slots_per_rank] = slot
            self._slots_by_device[device] = torch.tensor(rows, dtype=torch.int32).to(device)
        return self._slots_by_device[device]

    @cached_property
    def _most_shared(self) -> int:
        """How many experts (or slices) with several copies a token may name, if one ride can serve two; else 0."""
        several = {e for e, slots in enumerate(self.slots_of) if len(slots) > 1}
        return len(several) if any(len(several.intersection(rank)) > 1 for rank in self.slots) else 0

    def shared_rounds(self, top_k: int) -> int:
        """How many ranks a token can visit each for the sake of two or more experts (or slices) with several copies.
        top_k: choices of a token, each slice counted."""
        return min(top_k, self._most_shared) // 2

    # -- files ------------------------------------------------------------------------------------------------

    def __reduce__(self) -> tuple[Any, ...]:
        # Without its tensors on devices: a process that gets a pickled layout may see no GPU.
        return type(self), (self.homes, self.slots, self.slices)

    def to_dict(self) -> dict[str, Any]:
        plain = {"homes": [list(r) for r in self.homes], "slots": [list(r) for r in self.slots]}
        return plain if self.slices == 1 else {**plain, "slices": self.slices}

    @classmethod
    def from_dict(cls, data: Any) -> ExpertLayout:
        """What `to_dict` gave. Raises KeyError, TypeError, AttributeError or ValueError for anything else."""
        return cls(_freeze(data["homes"]), _freeze(data.get("slots", ())), index(data.get("slices", 1)))

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
                f'{path} is not an expert layout: expected {{"homes": [[0, 1], [2, 3]], "slots": ...}} ({error})'
            ) from error
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{path}: {error}") from error


def _freeze(lists: Iterable[Iterable[int]]) -> Lists:
    return tuple(tuple(index(e) for e in rank) for rank in lists)


def _a(noun: str) -> str:
    return f"{'an' if noun[0] in 'aeiou' else 'a'} {noun}"


def _duplicates_or_gaps(owned: list[int], what: str) -> str:
    twice = sorted({e for e in owned if owned.count(e) > 1})
    strange = sorted(set(owned) - set(range(len(owned))))
    missing = sorted(set(range(len(owned))) - set(owned))
    return f"{what}s {twice} more than once, {missing} not at all, and {strange}, which do not exist"


class RoutingLike(Protocol):
    """What `assign` reads of a `carpool.routing.Routing`."""

    @property
    def expert_TK(self) -> torch.Tensor: ...

    @property
    def serving_TW(self) -> torch.Tensor | None: ...


def assign(routing: RoutingLike, layout: ExpertLayout, source_rank: int) -> torch.Tensor:
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

    Of sliced experts (`ExpertLayout.slices`) a token wants every slice of each choice, and "expert" above means slice.

    Greedy set cover is not always the optimum, but nearly: of 1000 random tokens each, top-8, with replicas of popular
    experts, it was the optimum for all on 4, 8 and 16 ranks (64 experts, up to 64 replicas) and for 999 on 32 ranks
    (256 experts, 256 replicas); `tests/placement/test_assign.py` compares with brute force. It is a fixed number of
    dense operations on (T, K, W) without host synchronisation, K / 2 rounds at most; none of it without replicas. On
    CUDA one kernel does the same (carpool/layout/assign_kernel.py), except where `torch.compile` fuses them.

    Args:
        routing: `expert_TK`, logical ids, -1 for no expert; and `serving_TW`, the ranks that may serve each token, if
            its routing is limited to some (carpool/routing/limit.py). An expert that has no copy there is served by
            any.
        layout: where the experts are.
        source_rank: the rank, in the expert-parallel group, that holds the tokens.

    Returns:
        slot_TK: (T, K) int32 global slot ids (rank * S + slot), -1 where there is no expert. Of sliced experts
            (T, K * slices): those of all slices of the first choice, then of the second, and so on.

    Example, layout of `carpool.layout.expert_layout`, tokens on rank 0:
        expert_TK = [[1, 2], [3, -1]]  ->  slot_TK = [[1, 3], [4, -1]]      expert 1 is served at home
        and on rank 1: expert_TK = [[1, 2]]  ->  [[5, 3]]                   by the replica there
    """
    expert_TK, serving_TW = routing.expert_TK, routing.serving_TW
    if not torch.compiler.is_compiling() and on_gpu(expert_TK):
        from carpool.layout import assign_kernel

        if assign_kernel.fits(expert_TK.shape[1] * layout.slices, layout.num_ranks):
            return assign_kernel.assign(expert_TK, layout, source_rank, serving_TW)
    expert_TK = slices_of(expert_TK, layout.slices)
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


def slices_of(expert_TK: torch.Tensor, slices: int) -> torch.Tensor:
    """(T, K * slices): the number of each slice of the experts, -1 where there is none.

    Example, 2 slices: [[3, -1]]  ->  [[6, 7, -1, -1]]"""
    if slices == 1:
        return expert_TK
    expert_TK1 = expert_TK.unsqueeze(2)
    slice_C = torch.arange(slices, device=expert_TK.device, dtype=expert_TK.dtype)
    return torch.where(expert_TK1 < 0, -1, expert_TK1 * slices + slice_C).flatten(1)


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
