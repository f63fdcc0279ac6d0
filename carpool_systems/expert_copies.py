"""Copies of each expert's state on several nodes, and recovery from those that are left (Lazarus, arXiv 2407.04656v2).

In Lazarus several nodes compute with an expert, and each updates its own copy. Here an expert's home alone has its
optimizer state: what spare slots hold comes and goes with every micro-batch. So its copies are in host memory. After
each step every rank keeps what it would write of a checkpoint, weights, masters and moments, and sends it to nodes:

    an expert           to the nodes that `rank_overlap` says
    everything else     to all nodes, as in the paper, where all have it

    4 nodes of 2 experts, 2 copies     0 1 0 1 | 0 1 0 1 ...     experts 0 to 3 on nodes 0 and 1, 4 to 7 on 2 and 3

A run that goes on, on any number of ranks, takes every tensor from a copy that is left: of the newest step of which all
is there, if that is later than the newest checkpoint. Who lacks a piece gets it from a rank that has it. Values are
copies of bytes: on the same ranks the run is that without the fault, bit by bit, and on others to rounding.

    after step n   | forward and backward of step n + 1 .......  | update | ...
                   | device -> own memory | -> other nodes | all have it
                     the update waits       nobody waits     step n - 1 may be overwritten

Each rank keeps the last two steps of itself and of each rank that sends to it: a step is overwritten when all ranks
have the next one. How large files are follows from the plan of copies. That changes with the loads, if there are slots
for popular experts; a new plan takes effect with the next step, since every step has all.
"""

from __future__ import annotations

import hashlib
import json
import socket
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from safetensors import safe_open
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from carpool.hf.seam.expert_rides import rides
from carpool.optim.update import local
from carpool.parallel.ranks import gather, rank, together, world
from carpool.parallel.replicated import sharded_parameters
from carpool.train.checkpoints.checkpoint_files import MODEL, OPTIMIZER, read_state
from carpool.train.checkpoints.host_copy import HostBuffer, copy_files
from carpool.train.checkpoints.memory_files import ROOM, MemoryFiles, check_room
from carpool.train.checkpoints.shard_files import Piece, ShardFile, ShardPlanner
from carpool.train.checkpoints.state_tensors import (
    Tensors,
    as_rectangles,
    model_tensors,
    optimizer_tensors,
    rng_state,
    set_rng_state,
)
from carpool.train.run.finish import run_state
from carpool.train.run.rollback import restore_state
from carpool_systems.beside import Beside
from carpool_systems.rank_overlap import Held, allocate, place
from carpool_systems.sparse_snapshots import tensors_of

if TYPE_CHECKING:
    from carpool.train.run.loop import Run

# Steps that are kept.
_STEPS = 2
Offsets = tuple[int, ...]


class Cut(NamedTuple):
    """A part of a tensor, and the nodes that keep it. `buffer`: a forward may change it."""

    piece: Piece
    nodes: frozenset[int]
    buffer: bool


class Stored(NamedTuple):
    """A part of a tensor in a file of this host."""

    file: str
    key: str
    name: str
    offsets: Offsets
    shape: Offsets


class Kept(NamedTuple):
    """What one file holds: of which group of ranks, step and kinds of tensors."""

    group: float
    step: int
    kinds: str
    pieces: list[Stored]


class Copies:
    """The copies of a run, and its recovery from those of the run before it; of one rank. All ranks call it alike.

    Args:
        fewest: nodes that keep each expert, at least.
        slots: of a node in each layer, for further copies of popular experts.
        every: steps between two plans of copies, if there are such slots.

    Attributes:
        held_L: by layer, the experts that each node keeps.
        said: what there is to say of the recovery, before the run has records.
    """

    def __init__(self, run: Run, fewest: int, slots: int, every: int) -> None:
        self._run, self._fewest, self._slots, self._every = run, fewest, slots, every
        self._node_W = run.plan.machine.topology.node_of
        self._nodes = max(self._node_W) + 1
        self._group, self._id = dist.new_group(backend="gloo"), gather(time.time())[0]
        self._hosts = gather(socket.gethostname())
        self._files = {rank(): self._of(rank())}
        self._planner, self._staging = ShardPlanner(), dict[int, HostBuffer]()
        self._sizes: dict[int, dict[int, int]] = {}
        self._cuts: list[Cut] | None = None
        self._kinds = ""
        self._seen: list[int] = []
        self._load_LE: list[list[int]] | None = None
        self._planned, self._begun, self._tidy = 0, False, False
        self.held_L: dict[str, Held] = {}
        self.said = f"expert copies: on {min(fewest, self._nodes)} of {self._nodes} nodes at least"
        self.beside = Beside(run.built.device, "expert copies are not whole")
        run.checkpoints.copying.append(self.beside.settle)

    def _of(self, source: int) -> MemoryFiles:
        device = self._run.built.device if source == rank() else torch.device("cpu")
        return MemoryFiles(self._run.folder, device, f"rank-{rank():05d}/of-{source:05d}")

    # -- keeping

    def add_loads(self, load_LE: list[list[int]]) -> None:
        """Tokens of each expert in a step, the same on all ranks."""
        before = self._load_LE or [[0] * len(one) for one in load_LE]
        self._load_LE = [[a + b for a, b in zip(*both, strict=True)] for both in zip(before, load_LE, strict=True)]

    def take(self, step: int) -> None:
        """Keep the state after a step, whose numbers are recorded."""
        if not self._begun:
            self._begun = True  # what the run begins with
            return
        again = self._slots > 0 and step >= self._planned + self._every
        if self._cuts is None or again or self._seen != tensors_of(self._run.built.optimizer):
            self._plan(step)
        cuts, sizes = self._cuts, self._sizes
        assert cuts is not None
        about = {"group": self._id, "step": step, "source": rank(), "state": run_state(self._run), "rng": rng_state()}
        text = {"snapshot": json.dumps({**about, "world": world(), "kinds": self._kinds})}
        now = [one.piece._replace(tensor=one.piece.tensor.clone()) if one.buffer else one.piece for one in cuts]
        own = ShardFile.of(now, text, sizes[rank()][rank()])

        def work(stream: torch.cuda.Stream | None, copied: Callable[[], None]) -> None:
            buffers = {rank(): self._files[rank()].turn(step, _STEPS, own.bytes)}
            copy_files({"": own}, buffers[rank()], stream)
            copied()
            starts = {id(tensor): start for tensor, start in own.placed}
            memory, under_way = buffers[rank()].memory, []
            for source in sorted(self._files.keys() - {rank()}):
                size = sizes[source][rank()]
                buffers[source] = self._files[source].turn(step, _STEPS, size)
                under_way.append(dist.irecv(buffers[source].memory[:size], source, self._group))
            for to, size in sizes[rank()].items():
                if to != rank():
                    kept = [
                        piece._replace(tensor=_view(memory, starts[id(piece.tensor)], piece.tensor))
                        for piece, cut in zip(now, cuts, strict=True)
                        if self._node_W[to] in cut.nodes
                    ]
                    copy_files({"": ShardFile.of(kept, text, size)}, self._staging[to], None)
                    under_way.append(dist.isend(self._staging[to].memory[:size], to, self._group))
            for one in under_way:
                if one is not None:
                    one.wait()
            for source, buffer in buffers.items():
                self._files[source].name(step, buffer)
            dist.barrier(self._group)
            if not self._tidy:
                self._remove_old()
                self._tidy = True

        self.beside.begin(work)

    def _plan(self, step: int) -> None:
        """Which nodes keep what, and how large files are. Collective."""
        self.beside.wait()
        run = self._run
        parts = _tensors(run)
        whole = {part: as_rectangles(its) for part, its in parts.items()}
        named = _named(whole)
        if any(local(named[name]).data_ptr() != local(one).data_ptr() for name, one in _named(parts).items()):
            raise ValueError("copies.fewest does not know how tensors of this mesh are divided: leave it out")
        with tempfile.TemporaryDirectory() as folder:
            pieces = {
                f"{part}/{one.name}": one
                for part, its in self._planner.pieces(Path(folder), whole).items()
                for one in its
            }
        self._kinds, layer_of = _sizes(named)[1], _layers(run.built.model, named)
        homes = defaultdict[str, list[set[int]]](lambda: [set() for _ in range(self._nodes)])
        of_ranks = gather([_rows(n, one.offsets, one.tensor.shape, layer_of) for n, one in pieces.items()])
        for one, its in enumerate(of_ranks):
            for layer, first, stop in filter(None, its):
                homes[layer][self._node_W[one]].update(range(first, stop))
        for number, (layer, own) in enumerate(rides(run.built.model).items()):
            experts, homes_N = own.num_experts, homes[layer]
            load_E = [1] * experts if self._load_LE is None else self._load_LE[number]
            slots = -(-min(self._fewest, self._nodes) * experts // self._nodes) + self._slots
            copies_E = allocate(load_E, self._nodes * slots, self._fewest, self._nodes)
            its_N = place(copies_E, slots, homes_N)
            self.held_L[layer] = [plan | home for plan, home in zip(its_N, homes_N, strict=True)]
        buffers = {one.data_ptr() for one in run.built.model.buffers()}
        self._cuts = [
            Cut(piece, nodes, one.tensor.data_ptr() in buffers)
            for name, one in pieces.items()
            for piece, nodes in self._divided(name, one, layer_of)
        ]
        own_node = self._node_W[rank()]
        mine = {rank(): [cut.piece for cut in self._cuts]}
        for node in sorted(set(self._node_W) - {own_node}):
            ranks = [one for one, its in enumerate(self._node_W) if its == node]
            place_here = [one for one, its in enumerate(self._node_W) if its == own_node].index(rank())
            mine[ranks[place_here % len(ranks)]] = [cut.piece for cut in self._cuts if node in cut.nodes]
        sizes_W = gather({to: _pages(ShardFile.of(its).bytes + ROOM) for to, its in mine.items()})
        self._sizes = dict(enumerate(sizes_W))
        sources = {one for one, its in self._sizes.items() if rank() in its}
        self._files |= {one: self._of(one) for one in sorted(sources - self._files.keys())}
        self._staging = {to: HostBuffer(torch.device("cpu")) for to in mine if to != rank()}
        self._load_LE, self._planned, self._seen = None, step, tensors_of(run.built.optimizer)
        with together(ValueError, ""):
            here = [one for one, host in enumerate(self._hosts) if host == self._hosts[rank()]]
            needed = _STEPS * sum(size for its in sizes_W for to, size in its.items() if to in here)
            check_room(self._files[rank()].home, needed, "expert copies", "lower copies.fewest or copies.slots")

    def _divided(self, name: str, whole: Piece, layer_of: Mapping[str, str]) -> Iterator[tuple[Piece, frozenset[int]]]:
        """A piece in runs of experts that the same nodes keep; all nodes keep what is no expert's."""
        rows, everywhere = _rows(name, whole.offsets, whole.tensor.shape, layer_of), frozenset(range(self._nodes))
        layer, first, stop = rows or ("", 0, 1)
        held = self.held_L[layer] if rows else []
        nodes_of = [frozenset(n for n, its in enumerate(held) if e in its) or everywhere for e in range(first, stop)]
        begin = 0
        for end in range(1, stop - first + 1):
            if end == stop - first or nodes_of[end] != nodes_of[begin]:
                offsets = (first + begin, *whole.offsets[1:]) if rows else whole.offsets
                tensor = whole.tensor[begin:end] if rows else whole.tensor
                yield Piece(f"{name}@{'-'.join(map(str, offsets))}", offsets, tensor), nodes_of[begin]
                begin = end

    def _remove_old(self) -> None:
        """Files of groups before this one, where no other rank writes."""
        for folder in self._files[rank()].home.glob("rank-*/of-*"):
            owner = int(folder.parent.name[5:])
            if owner != rank() and owner < world() and self._hosts[owner] == self._hosts[rank()]:
                continue
            for path in folder.glob("step-*"):
                with suppress(FileNotFoundError):  # another rank removes it, too
                    if _about(path)["group"] != self._id:
                        path.unlink()

    def clean(self, everything: bool) -> None:
        """Remove files (`MemoryFiles.clean`). Collective."""
        self.beside.wait()
        gather(None)  # no rank of this host writes any more
        for files in self._files.values():
            files.clean(everything)

    def overlaps(self) -> bool:
        """Whether each expert is on several nodes, experts with the fewest copies on the same ones or none of the same,
        and this rank, alone on its node, has files with all experts that the plan gives it."""
        self.beside.wait()
        there, layer_of = defaultdict[str, set[int]](set), _layers(self._run.built.model, _named(_tensors(self._run)))
        for files in self._files.values():
            for path in sorted(files.folder.glob("step-*"))[-1:]:
                for name, offsets, shape in (one[2:] for kept in _kept(path) for one in kept.pieces):
                    if name.startswith(OPTIMIZER) and (rows := _rows(name, offsets, shape, layer_of)) is not None:
                        there[rows[0]].update(range(*rows[1:]))
        for layer, held in self.held_L.items():
            nodes_of = [frozenset(n for n, its in enumerate(held) if e in its) for e in set().union(*held)]
            fewest = min(map(len, nodes_of))
            few = {its for its in nodes_of if len(its) == fewest}
            if fewest < 2 or any(a & b for a, b in combinations(few, 2)) or there[layer] != held[self._node_W[rank()]]:
                return False
        return bool(self.held_L)

    # -- recovery

    def recover(self, checkpoint: Path | None) -> dict[str, Any] | None:
        """Go on from the newest step of which every tensor has a copy, if it is later than the checkpoint: what
        `load_state` returns; None: there is none."""
        run = self._run
        before = 0 if checkpoint is None else read_state(checkpoint)["step"]
        last = min(run.config.training.steps, run.config.training.stop_at_step or run.config.training.steps)
        kept = [one for path in sorted(self._files[rank()].home.glob("rank-*/of-*/step-*")) for one in _kept(path)]
        everything = gather(kept)
        # Clocks of hosts differ: what this group keeps counts as newer all the same.
        self._id = max([self._id, *(one.group + 1 for its in everything for one in its)])
        targets = _named({part: as_rectangles(its) for part, its in _tensors(run).items()})
        layer_of = _layers(run.built.model, targets)
        sizes, kinds = _sizes(targets)
        found = {one[:2] for its in everything for one in its if before < one.step < last and one.kinds == kinds}
        lost, newest = "", max(found, default=(0.0, 0))
        for group, step in sorted(found, reverse=True):
            of_ranks = [[p for one in its if one[:2] == (group, step) for p in one.pieces] for its in everything]
            missing = _lost((one for its in of_ranks for one in its), sizes, layer_of)
            if not missing:
                break
            if group == newest[0]:  # its last step may be on its way to some nodes
                lost = f"of step {step}, {missing} no copy that is left"
        else:
            goes_on = "its beginning" if checkpoint is None else f"the checkpoint {checkpoint.name}"
            self.said = f"expert copies: {lost}; the run goes on from {goes_on}" if lost else self.said
            return None
        with sharded_parameters(run.built.model, write=True):
            self._fill(targets, of_ranks)
        abouts = gather([_about(Path(one.pieces[0].file)) for one in kept if one[:2] == (group, step) and one.pieces])
        by_source = {one["source"]: one for its in abouts for one in its}
        state = {**next(iter(by_source.values()))["state"], "step": step}
        restore_state(run, state)
        if (own := by_source.get(rank())) is not None and own["world"] == world():
            set_rng_state(own["rng"])
        self.said = f"expert copies: after step {step} all tensors have one that is left; no checkpoint is read"
        return state

    @torch.no_grad()
    def _fill(self, targets: Tensors, of_ranks: Sequence[Sequence[Stored]]) -> None:
        """Put pieces into this rank's parts of tensors: those of this host's memory, and what other ranks send."""
        sources = dict[tuple[str, Offsets], tuple[int, Stored]]()
        for one in (rank(), *range(world())):
            for piece in of_ranks[one]:
                sources.setdefault((piece.name, piece.offsets), (one, piece))
        by_name = defaultdict[str, list[tuple[int, Stored]]](list)
        for (name, _), source in sources.items():
            by_name[name].append(source)
        wanted: list[tuple[int, Stored]] = []
        for name, tensor in targets.items():
            for owner, piece in by_name[name]:
                if _overlap(tensor, piece) is None:
                    continue
                if owner == rank():
                    _put(tensor, piece, _read(piece))
                else:
                    wanted.append((owner, piece))
        for needs, its in enumerate(gather(wanted)):
            for owner, piece in its:
                if owner == rank():
                    dist.send(_read(piece).reshape(-1).view(torch.uint8), needs, self._group)
                elif needs == rank():
                    tensor = targets[piece.name]
                    values = torch.empty(piece.shape, dtype=tensor.dtype)
                    dist.recv(values.reshape(-1).view(torch.uint8), owner, self._group)
                    _put(tensor, piece, values)


def _tensors(run: Run) -> dict[str, Tensors]:
    """What copies hold, by part of a checkpoint: all that is trained, and buffers."""
    model = run.built.model
    frozen = {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
    weights = {name: one for name, one in model_tensors(model).items() if name not in frozen}
    return {MODEL: weights, OPTIMIZER: optimizer_tensors(model, run.built.optimizer)}


def _named(parts: Mapping[str, Tensors]) -> Tensors:
    """All of them, by PART/NAME."""
    return {f"{part}/{name}": one for part, its in parts.items() for name, one in its.items()}


def _layers(model: Any, tensors: Tensors) -> dict[str, str]:
    """The layer of each tensor that has a row for each expert, by the names of `_tensors`."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    own_of = {names[id(p)]: (layer, own) for layer, own in rides(model).items() for p in own.experts.parameters()}
    found = {}
    for name, tensor in tensors.items():
        part, _, own = name.partition("/")
        parameter = own if part == MODEL else own.removeprefix("state.").rpartition(".")[0]
        if parameter in own_of and tensor.dim() and len(tensor) == own_of[parameter][1].num_experts:
            found[name] = own_of[parameter][0]
    return found


def _rows(
    name: str, offsets: Offsets, shape: Sequence[int], layer_of: Mapping[str, str]
) -> tuple[str, int, int] | None:
    """(layer, first expert, last expert + 1) of a part of a tensor; None: it has no rows of experts."""
    return (layer_of[name], offsets[0], offsets[0] + shape[0]) if name in layer_of else None


def _pages(size: int) -> int:
    return -(-size // 4096) * 4096


def _view(memory: torch.Tensor, start: int, like: torch.Tensor) -> torch.Tensor:
    return memory[start : start + like.nbytes].view(like.dtype).view(like.shape)


def _header(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        found: dict[str, Any] = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    return found


def _about(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(_header(path)["__metadata__"]["snapshot"])
    return found


def _kept(path: Path) -> Iterator[Kept]:
    """What a file holds; nothing where it is no copy, or is gone by now."""
    with suppress(FileNotFoundError, KeyError, ValueError):
        header = _header(path)
        about, offsets = (json.loads(header["__metadata__"][key]) for key in ("snapshot", "DCP_SHARDING_INFO"))
        pieces = [
            Stored(str(path), key, key.rpartition("@")[0], tuple(one["saved_offsets"]), tuple(header[key]["shape"]))
            for key, one in offsets.items()
        ]
        yield Kept(about["group"], about["step"], about["kinds"], pieces)


def _sizes(tensors: Tensors) -> tuple[dict[str, torch.Size], str]:
    """Of all ranks' tensors: sizes by name, and what tells them from another model's or optimizer's. Collective."""
    of_ranks = gather({name: (one.shape, one.dtype) for name, one in tensors.items()})
    everywhere = {name: one for its in of_ranks for name, one in its.items()}
    kinds = hashlib.sha256(repr(sorted(everywhere.items())).encode()).hexdigest()[:16]
    return {name: size for name, (size, _) in everywhere.items()}, kinds


def _lost(pieces: Iterable[Stored], sizes: Mapping[str, torch.Size], layer_of: Mapping[str, str]) -> str:
    """What is not whole, in words; "": all is."""
    there = {(one.name, one.offsets): one for one in pieces}
    elements, rows = defaultdict[str, int](int), defaultdict[str, set[int]](set)
    for one in there.values():
        elements[one.name] += torch.Size(one.shape).numel()
        if (its := _rows(one.name, one.offsets, one.shape, layer_of)) is not None:
            rows[one.name].update(range(*its[1:]))
    missing = [name for name, size in sizes.items() if elements[name] != size.numel()]
    if not missing:
        return ""
    experts = defaultdict[str, set[int]](set)
    for name in missing:
        if name in layer_of:
            experts[layer_of[name]] |= set(range(sizes[name][0])) - rows[name]
    if not experts:
        return f"{missing[0]} and {len(missing) - 1} more tensors have"
    layer, lost = next(iter(experts.items()))
    more = f" (and in {len(experts) - 1} further layers)" if len(experts) > 1 else ""
    return f"experts {', '.join(map(str, sorted(lost)))} of {layer}{more} have"


def _read(piece: Stored) -> torch.Tensor:
    with safe_open(piece.file, "pt") as stored:
        found: torch.Tensor = stored.get_tensor(piece.key)
    return found


def _overlap(tensor: torch.Tensor, piece: Stored) -> tuple[tuple[slice, ...], tuple[slice, ...]] | None:
    """Where a piece goes in this rank's part of a tensor, and from where in the piece; None: nowhere."""
    first: Sequence[int] = (0,) * tensor.dim()
    if isinstance(tensor, DTensor):
        _, first = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    own, other = [], []
    for begin, size, start, length in zip(first, local(tensor).shape, piece.offsets, piece.shape, strict=True):
        low, high = max(begin, start), min(begin + size, start + length)
        if low >= high:
            return None
        own.append(slice(low - begin, high - begin))
        other.append(slice(low - start, high - start))
    return tuple(own), tuple(other)


def _put(tensor: torch.Tensor, piece: Stored, values: torch.Tensor) -> None:
    found = _overlap(tensor, piece)
    assert found is not None
    local(tensor)[found[0]].copy_(values[found[1]])
