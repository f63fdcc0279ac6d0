"""Sparse snapshots of every step, and recovery from them (MoEvement, arXiv 2412.15411v5).

A window has W steps. After each, 1/W of the *operators* is copied to host memory with all of its state: masters and
moments. An operator is an expert, or a parameter that is none of an expert. Of operators that come later in the window
only what the forward computes with is copied: their weights.

    W = 3, after step    4              5              6              7              8 ...
    full state of        operators 0    operators 1    operators 2    operators 0    operators 1
    weights of           1, 2           2              -              1, 2           2

No file holds a whole state, and none has to: recovery loads the first of a window and repeats its steps.

    load 4      0 whole, weights of 1 and 2      repeat step 5      0 is updated; 1 and 2 are frozen
    load 5      1 whole, weights of 2            repeat step 6      0 and 1 are updated; 2 is frozen
    load 6      2 whole                          all are whole: the state after step 6, bit by bit

A frozen operator has the weights that it had in that step, so every forward and every gradient is that of the run
without the fault, and so are the norm and the updates of operators that are whole. What an update makes of a frozen
operator is overwritten by the next snapshot. The paper skips its weight gradients; here they are computed, because
exact clipping wants the norm of all.

With several nodes of as many ranks, each snapshot is sent to a rank of the next node, too, by a thread and over gloo,
and comes back from there if a node is replaced. Files are in memory that outlives the process (`memory_files`), one for
each step and rank. 2 W + 1 of them are kept: a whole window of all ranks is always among them, also where one rank
begins a snapshot before another has finished the one before.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from safetensors import safe_open

from carpool.optim.update import local
from carpool.parallel.ranks import gather, rank, together, world
from carpool.parallel.replicated import sharded_parameters
from carpool.train.checkpoints import memory_files
from carpool.train.checkpoints.host_copy import copy_files
from carpool.train.checkpoints.memory_files import ROOM, MemoryFiles, check_room
from carpool.train.checkpoints.shard_files import Piece, ShardFile
from carpool.train.checkpoints.state_tensors import (
    Tensors,
    model_tensors,
    optimizer_tensors,
    rng_state,
    set_rng_state,
)
from carpool.train.run.finish import run_state
from carpool.train.run.loop import Run
from carpool.train.run.rollback import restore_state
from carpool_systems.beside import Beside

WEIGHT = "weight"
# Of the time of a step, what a copy beside it may take.
SHARE = 0.5
MOST_STEPS = 32
# Steps whose times are known before a window is chosen, the first not counted.
MEASURED = 3
_OF_PEERS = "of-peers"


class Kept(NamedTuple):
    """A snapshot: the steps of its window, what parts of tensors ranks have (`_layout`), bytes of its file."""

    window: int
    layout: str
    bytes: int


class Operator(NamedTuple):
    """Rows `first` to `stop` of this rank's part of a parameter, and its place in the window."""

    name: str
    first: int
    stop: int
    position: int


def operators(sizes: Mapping[str, tuple[int, int, bool]], window: int) -> list[Operator]:
    """Divides parameters among the steps of a window, the same way on all ranks.

    Args:
        sizes: by name: elements over all ranks, rows of this rank's part, and whether rows are experts.

    Example: 4 experts on this rank and W = 2: rows 0 and 1 come with the first step, rows 2 and 3 with the second."""
    found, load = [], [0] * window
    for name, (elements, rows, experts) in sorted(sizes.items(), key=lambda one: (-one[1][0], one[0])):
        if experts:
            cuts = [rows * place // window for place in range(window + 1)]
            found += [Operator(name, cuts[place], cuts[place + 1], place) for place in range(window)]
            continue
        place = load.index(min(load))
        load[place] += elements
        found.append(Operator(name, 0, rows, place))
    return found


def choose_window(full: int, weights: int, bytes_per_second: float, step_seconds: float) -> int:
    """The shortest window whose largest snapshot is copied within `SHARE` of a step: short windows are recovered from
    sooner. With all steps of `MOST_STEPS` too short for it, that many, and the copy is waited for.

    Args:
        full, weights: bytes of a rank's whole state, and of its weights alone."""
    for window in range(1, MOST_STEPS):
        if (full + (window - 1) * weights) / window <= SHARE * step_seconds * bytes_per_second:
            return window
    return MOST_STEPS


class State:
    """This rank's memory of all that snapshots hold, by operator.

    Attributes:
        of: tensors by parameter: WEIGHT, and names of the optimizer's state, all with the parameter's rows.
        common: small tensors without rows, and buffers: in every snapshot.
    """

    def __init__(self, model: Any, optimizer: Any) -> None:
        weights, states = model_tensors(model), optimizer_tensors(model, optimizer)
        self._optimizer, self._seen = optimizer, tensors_of(optimizer)
        self._model, self.of, self.common = model, dict[str, Tensors](), Tensors()
        self.sizes: dict[str, tuple[int, int, bool]] = {}
        for name, parameter in model.named_parameters():
            if not parameter.requires_grad:  # as at the start of the run
                weights.pop(name, None)
        for name, weight in weights.items():
            own = {n.rsplit(".", 1)[1]: one for n, one in states.items() if n.startswith(f"state.{name}.")}
            if not own:
                self.common[name] = local(weight)
                continue
            self.of[name] = {WEIGHT: local(weight)}
            rows = len(local(weight))
            self.sizes[name] = (weight.numel(), rows, weight.dim() == 3)
            for key, one in own.items():
                if one.dim() and len(local(one)) == rows:
                    self.of[name][key] = local(one)
                else:
                    self.common[f"{name}.{key}"] = local(one)

    def holds(self) -> bool:
        """Whether the optimizer's state is in this memory still: its first step may have given it other."""
        return self._seen == tensors_of(self._optimizer)

    def bytes(self) -> tuple[int, int]:
        """(all, weights alone)."""
        full = sum(one.nbytes for tensors in self.of.values() for one in tensors.values())
        return full, sum(tensors[WEIGHT].nbytes for tensors in self.of.values())

    def pieces(self, chosen: Sequence[Operator], position: int) -> Iterator[tuple[str, torch.Tensor]]:
        """What the snapshot at a place of the window holds, by name in its file."""
        yield from ((f"common {name}", one) for name, one in self.common.items())
        for name, first, stop, place in chosen:
            for key, one in self.of[name].items():
                if place == position or (place > position and key == WEIGHT):
                    yield f"{'full' if place == position else 'frozen'} {name} {first}:{stop} {key}", one[first:stop]

    @torch.no_grad()
    def load(self, file: Path, chosen: Sequence[Operator], position: int) -> None:
        """Put a snapshot back."""
        with safe_open(file, "pt") as stored, sharded_parameters(self._model, write=True):
            for name, tensor in self.pieces(chosen, position):
                tensor.copy_(stored.get_tensor(name))


def tensors_of(optimizer: Any) -> list[int]:
    """By which one sees whether an optimizer's state has moved."""
    return [id(value) for state in optimizer.state.values() for value in state.values()]


class SnapshotFiles(MemoryFiles):
    """The files of a rank's snapshots, all of one size.

    Args:
        run, device: as of `MemoryFiles`.
        peer: the rank whose snapshots they are, if another's.
    """

    def __init__(self, run: Path, device: torch.device, peer: int | None = None) -> None:
        owner = f"rank-{rank() if peer is None else peer:05d}"
        super().__init__(run, device, owner if peer is None else f"{_OF_PEERS}/{owner}")

    def keep(self, like: Kept) -> None:
        """Remove snapshots of another kind, with which nobody goes on, and those of ranks that are no more."""
        for step, kept in self.steps().items():
            if kept != like:
                self._forget(self.path(step))
        for folder in self.folder.parent.glob("rank-*"):
            if int(folder.name[5:]) >= world():
                shutil.rmtree(folder, ignore_errors=True)

    def steps(self) -> dict[int, Kept]:
        """The snapshots that are whole, by step."""
        found = {}
        for step in sorted(int(path.stem[5:]) for path in self.folder.glob("step-*.safetensors")):
            about = self.about(step)
            found[step] = Kept(about["window"], about["layout"], self.path(step).stat().st_size)
        return found


class Peers:
    """Each rank's snapshots in the memory of another node, too: of the rank with the same place there.

    Args:
        node_W: the node of each rank. All must have as many ranks.
    """

    def __init__(self, run: Path, node_W: Sequence[int]) -> None:
        nodes = [[r for r, its in enumerate(node_W) if its == node] for node in sorted(set(node_W))]
        node, place = next((n, ranks.index(rank())) for n, ranks in enumerate(nodes) if rank() in ranks)
        self._to, source = nodes[(node + 1) % len(nodes)][place], nodes[node - 1][place]
        self._source, self.files = source, SnapshotFiles(run, torch.device("cpu"), source)
        self._group = dist.new_group(backend="gloo")

    @staticmethod
    def why_not(node_W: Sequence[int]) -> str:
        """Why there are none; "": there are."""
        sizes = [list(node_W).count(node) for node in set(node_W)]
        return "there is one node" if len(sizes) < 2 else "nodes have unequal ranks" if len(set(sizes)) > 1 else ""

    def exchange(self, step: int, number: int, mine: torch.Tensor) -> None:
        """Send a snapshot to its peer, and keep that of another; by a thread of each rank, step after step."""
        buffer = self.files.turn(step, number, mine.numel())
        sent = dist.isend(mine, self._to, self._group)
        dist.recv(buffer.memory[: mine.numel()], self._source, self._group)
        if sent is not None:
            sent.wait()
        self.files.name(step, buffer)

    def kept(self) -> dict[int, dict[int, Kept]]:
        """By rank, the snapshots of others that are in this host's memory, whoever put them there."""
        there = [int(path.name[5:]) for path in self.files.folder.parent.glob("rank-*")]
        return {one: self.of(one).steps() for one in there}

    def of(self, owner: int) -> SnapshotFiles:
        return SnapshotFiles(self.files.run, torch.device("cpu"), owner)

    def hand_back(self, files: SnapshotFiles, step: int, owner: int, holder: int, size: int) -> None:
        """Bring a snapshot from a peer's memory to that of its owner. All ranks call it."""
        if rank() == holder:
            content = torch.frombuffer(bytearray(self.of(owner).path(step).read_bytes()), dtype=torch.uint8)
            dist.send(content, owner, self._group)
        elif rank() == owner:
            buffer = files.turn(step, 1 << 30, size)
            dist.recv(buffer.memory[:size], holder, self._group)
            files.name(step, buffer)


class SparseSnapshots:
    """Snapshots of a run, and its recovery from those of the run before it; of one rank. All ranks call it alike.

    Args:
        window: steps of a window; None: as bandwidth and step time say (`choose_window`), after three steps.
    """

    def __init__(self, run: Run, window: int | None) -> None:
        self.window, self._run = window, run
        self.files = SnapshotFiles(run.folder, run.built.device)
        node_W = run.plan.machine.topology.node_of
        self.peers = Peers(run.folder, node_W) if not Peers.why_not(node_W) else None
        self._state: State | None = None
        self._replay = range(0)
        self._taken_from, self._last, self._size = run.step, run.step - 1, 0
        self._layout = _layout(run)
        self.beside = Beside(run.built.device, f"there is no snapshot in {self.files.folder}")
        run.checkpoints.copying.append(self.beside.settle)
        second = f"only on their own host ({Peers.why_not(node_W)})" if self.peers is None else "and a peer's host"
        run.records.say(f"snapshots: of every step, in {memory_files.MEMORY}, {second}")

    @property
    def state(self) -> State:
        if self._state is None or not self._state.holds():
            self._state = State(self._run.built.model, self._run.built.optimizer)
        return self._state

    def recover(self) -> bool:
        """Go back to the first snapshot of the newest window that all ranks have whole, if its last step is after the
        run's own. The steps in between are repeated: the run is `incomplete` meanwhile."""
        run = self._run
        everything = gather((self.files.steps(), {} if self.peers is None else self.peers.kept()))

        def holder(owner: int, step: int, like: Kept) -> int | None:
            """The rank whose host has a snapshot of the owner's: itself, or a peer."""
            where = (owner, *(one for one in range(world()) if owner in everything[one][1]))
            found = (everything[one][0] if one == owner else everything[one][1][owner] for one in where)
            return next((one for one, its in zip(where, found, strict=True) if its.get(step, None) == like), None)

        kept = {step: one for own, others in everything for its in (own, *others.values()) for step, one in its.items()}
        for first, one in sorted(kept.items(), reverse=True):
            steps = range(first, first + one.window)
            holders = {(owner, step): holder(owner, step, one) for owner in range(world()) for step in steps}
            fits = one.layout == self._layout and (first - 1) % one.window == 0
            if fits and None not in holders.values() and run.step <= max(steps[-1], first + 1) <= run.last_step:
                break
        else:
            return False
        for (owner, step), where in holders.items():
            if where != owner and self.peers is not None and where is not None:
                self.peers.hand_back(self.files, step, owner, where, one.bytes)
        window = one.window
        about, self.window, self._size, self._replay = self.files.about(first), window, one.bytes, steps[1:]
        self._load(first)
        restore_state(run, {**about["state"], "step": first})
        run.data.train.load_state_dict(about["state"]["loader"])
        set_rng_state(about["rng"])
        run.start, run.incomplete = first, window > 1
        self._taken_from, self._last = steps[-1] + 1, first
        return True

    def _load(self, step: int) -> None:
        assert self.window is not None
        state = self.state
        state.load(self.files.path(step), operators(state.sizes, self.window), (step - 1) % self.window)

    def after_step(self) -> None:
        """While steps are repeated: operators become whole, or get the weights that they had then."""
        step = self._run.step
        if step in self._replay and self._run.incomplete:
            self._load(step)
            self._run.incomplete = step != self._replay[-1]

    def take(self, step: int) -> None:
        """The snapshot of the step that was done last, whose numbers are recorded."""
        run = self._run
        if step <= self._last:  # the run was rolled back
            self._taken_from = step
        self._last = step
        if step < self._taken_from:
            return
        state = self.state
        if self.window is None:
            if len(run.records.steps) < MEASURED:
                return
            hardware, (full, weights) = run.plan.machine.hardware, state.bytes()
            rate = (hardware.host or hardware.node).bytes_per_second
            seconds = min(one["step_ms"] for one in run.records.steps[1:]) / 1e3
            self.window = max(gather(choose_window(full, weights, rate, seconds)))
            run.records.say(
                f"snapshots: windows of {self.window} steps, by {rate / 1e9:.1f} GB/s and {seconds:.3f} s a step"
            )
        about = {"window": self.window, "layout": self._layout, "state": run_state(run), "rng": rng_state()}
        chosen, text = operators(state.sizes, self.window), {"snapshot": json.dumps(about)}

        def file(position: int) -> ShardFile:
            pieces = state.pieces(chosen, position)
            return ShardFile.of([Piece(name, (0,) * one.dim(), one) for name, one in pieces], text, self._size)

        if not self._size:
            largest = max(gather(max(file(position).bytes for position in range(self.window))))
            self._size = -(-(largest + ROOM) // 4096) * 4096
            self._make_room(Kept(self.window, self._layout, self._size))
        self._begin(step, file((step - 1) % self.window), 2 * self.window + 1)

    def _make_room(self, like: Kept) -> None:
        """Remove files that are of no use. Collective. Raises ValueError where there is no room for those to come."""
        node_W = self._run.plan.machine.topology.node_of
        own = (self.files, *(() if self.peers is None else (self.peers.files,)))
        for files in own:
            files.keep(like)
        gather(None)  # all ranks of this host have
        with together(ValueError, ""):
            needed = list(node_W).count(node_W[rank()]) * len(own) * (2 * like.window + 1) * like.bytes
            what = f"snapshots of windows of {like.window} steps"
            check_room(self.files.home, needed, what, "lower snapshots.window")

    def _begin(self, step: int, file: ShardFile, number: int) -> None:
        """Copy a snapshot, and send it to a peer, beside what follows; `settle` before its tensors change."""

        def copy(stream: torch.cuda.Stream | None, copied: Callable[[], None]) -> None:
            buffer = self.files.turn(step, number, file.bytes)
            copy_files({"": file}, buffer, stream)
            copied()
            self.files.name(step, buffer)
            if self.peers is not None:
                self.peers.exchange(step, number, buffer.memory[: file.bytes])

        self.beside.begin(copy)

    def clean(self, everything: bool) -> None:
        """Remove files (`SnapshotFiles.clean`). Collective."""
        self.beside.wait()
        gather(None)  # no rank of this host writes any more
        for files in (self.files, *(() if self.peers is None else (self.peers.files,))):
            files.clean(everything)


def _layout(run: Run) -> str:
    """What parts of which tensors ranks have, and how the optimizer keeps its state: only a run with the same goes on
    from a snapshot. Collective."""
    own = [(name, one.dtype, local(one).shape) for name, one in model_tensors(run.built.model).items()]
    optimizer = run.built.optimizer.describe()
    nodes = run.plan.machine.topology.node_of
    text = repr((gather(own), run.plan.degrees, tuple(nodes), run.layouts().to_dict(), optimizer))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def is_sparse(files: SnapshotFiles) -> bool:
    """Whether some window's files, and none of them alone, have all of each expert, and weights of those to come."""
    held: dict[int, tuple[set[str], set[str]]] = {}
    for step in files.steps():
        with safe_open(files.path(step), "pt") as stored:
            names = [name.rsplit(" ", 1) for name in stored.keys() if ".experts." in name]  # noqa: SIM118
        kinds = {
            kind: {name.split(" ", 1)[1] for name, _ in names if name.startswith(kind)} for kind in ("full", "frozen")
        }
        held[step] = kinds["full"], kinds["frozen"]
    return any(
        held[step][0] and held[step][0].isdisjoint(held[step + 1][0]) and held[step][1] == held[step + 1][0]
        for step in held
        if step + 1 in held
    )
