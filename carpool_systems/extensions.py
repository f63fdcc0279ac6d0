"""Sections of settings that published systems need. Read with every configuration, so what they do is imported late."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal

from annotated_types import Ge
from pydantic import Field

from carpool.train.config.declarations import Excludes, Needs, Was
from carpool.train.config.schema_base import Section
from carpool.train.extensions import Extension

if TYPE_CHECKING:
    from pathlib import Path

    from transformers import PreTrainedModel

    from carpool.hf.seam.expert_rides import ExpertRides
    from carpool.train.build.assemble import Built
    from carpool.train.plan.resolve import Plan
    from carpool.train.run.loop import Run
    from carpool_systems.expert_copies import Copies
    from carpool_systems.sparse_snapshots import SparseSnapshots

_PLAIN, _EQUAL = {"moe.schedule": "none"}, {"parallelism.rank_speeds": None}


class CpuExpertsSection(Section):
    """The CPU computes experts with few tokens."""

    max_tokens: Annotated[
        Annotated[int, Ge(0)] | Literal["auto"],
        Was("memory.few_tokens", default=0),
        Was("memory.cpu_expert_tokens", default=0),
        Needs(
            "memory.experts=host and memory.expert_loading=popular",
            "experts in host memory that need not come: memory.experts=host and memory.expert_loading=popular",
        ),
    ] = 0
    """With memory.experts = host and memory.expert_loading = popular: an expert with at most so many tokens stays in
    host memory, and the CPU computes it, with the same bits each time, and those of the device to rounding. auto: as
    many as it takes less time for than loading; measured before the first step, and recorded."""


class CpuExperts(Extension):
    name, section = "cpu_experts", CpuExpertsSection
    help = "The CPU computes experts with few tokens, which stay in host memory (APTMoE). Off by default."

    def prepare_layers(self, plan: Plan, model: PreTrainedModel, layers: list[ExpertRides]) -> None:
        for own in layers:
            own.whole_rides = True

    def prepare_run(self, plan: Plan, built: Built) -> None:
        from carpool_systems.cpu_experts import choose_few_tokens, compute_few_on_cpu

        assert built.offloaded is not None, "the setting needs experts in host memory"
        wanted, layer = self.settings.max_tokens, built.rides[0]
        self.few = choose_few_tokens(wanted, layer, plan.dtype, built.device, plan.decisions)
        compute_few_on_cpu(built.model, built.offloaded, self.few.answer)

    def describe(self) -> str:
        return f"the CPU computes experts with up to {self.few.answer} tokens: {self.few.why}"


class HiddenProjectionSection(Section):
    """Hidden states are projected before dispatch."""

    size: Annotated[
        int | None,
        Was("model.travel_size", default="none"),
        Excludes("parallelism.tp_size", "gradients of projections would be of a part of the tokens"),
        Excludes("parallelism.pp_size", "projections are not cut into stages"),
        Excludes("parallelism.etp_size", "experts in slices are made of whole ones of the model's own size"),
        Excludes(
            "adapter.kind",
            "adapters go with a checkpoint, and hidden states are projected in models from scratch",
            instead={"adapter.kind": None},
        ),
    ] = Field(default=None, gt=0)
    """ANOTHER MODEL, for one from scratch: hidden states are projected to so many elements before they are sent,
    experts compute at that size, and their outputs are projected back (BigMac). It has other parameters, and is not
    exported to Transformers, which does not know it. none: hidden states are sent as they are."""


class HiddenProjection(Extension):
    name, section, architecture = "hidden_projection", HiddenProjectionSection, ("size",)
    help = "Hidden states are projected to fewer elements before dispatch (BigMac): another model. Off by default."


class SequenceMovesSection(Section):
    """Sequences move between layers."""

    every: Annotated[
        int | None,
        Was("moe.move_sequences", default="none"),
        Excludes("parallelism.pp_size", "sequences that move would be in stages whose micro-batch they are not of"),
        Excludes("parallelism.cp_size", "each rank has a part of every sequence, so whole ones cannot move"),
        Excludes(
            "parallelism.tp_size", "tensor-parallel ranks have the same sequences, and would all have to move them"
        ),
        Excludes("parallelism.etp_size", "experts in slices are on several ranks, and none is nearest"),
        Excludes("mtp.depth", "further tokens would have to move with their sequences"),
        Excludes("moe.schedule=two-batch", "two halves of a micro-batch are in different layers", instead=_PLAIN),
        Excludes(
            "memory.layer_activations=recompute or memory.budget",
            "layers that are computed again would move their sequences again",
            instead={"memory.layer_activations": "save", "memory.budget": None},
        ),
        Excludes("parallelism.rank_speeds", "ranks would have different numbers of sequences", instead=_EQUAL),
    ] = Field(default=None, ge=1)
    """Before every so many layers with experts, sequences may move to another rank of their expert-parallel group,
    with their targets: to where its exchanges and the move take least, by a guess of its router before attention and
    the rates of parallelism.hardware. Every rank has as many as before, and losses stay as they are. The host waits for
    the device at each such layer. none: sequences stay."""


class MoveSequences(Extension):
    name, section = "sequence_moves", SequenceMovesSection
    help = "Sequences move between layers to the ranks where their experts are (NetMoE, LUFFY). Off by default."

    def check_plan(self, plan: Plan) -> None:
        from carpool.train.data.formats import are_packed
        from carpool_systems.sequence_moves import check_moves

        check_moves(self.settings.every, len(plan.blueprint.expert_counts), plan.degrees.ep)
        self.check_data(plan, are_packed(plan.config.data))

    def check_data(self, plan: Plan, packed: bool) -> None:
        if packed or plan.config.data.packing == "off":
            raise ValueError(
                "sequence_moves.every moves sequences of running text (data.packing = 'stream'), not of examples, "
                "whose masks and padding would have to move, too: leave one of them out"
            )

    def prepare_run(self, plan: Plan, built: Built) -> None:
        from carpool_systems.sequence_moves import MovingSequences

        every, hardware = self.settings.every, plan.machine.hardware
        built.objective.moving = MovingSequences(
            built.model, every, plan.blueprint.top_k, built.ep_topology, hardware
        ).targets
        built.no_graphs = built.no_graphs or "the host decides which sequences move"

    def describe(self) -> str:
        every = self.settings.every
        often = "each layer with experts" if every == 1 else f"every {every} layers with experts"
        return f"sequences may move to other ranks before {often} but the first"


def _goes_on(run: Run) -> bool:
    """Whether a run, whose records are not open yet, takes its state from memory, if that is there. That of a run whose
    folder was emptied is not its own. Collective."""
    from carpool.parallel.ranks import from_rank_0
    from carpool.train.records.run_folder import METRICS

    there = from_rank_0((run.folder / METRICS).exists)
    return there and run.config.training.resume_from_checkpoint in ("last", "auto")


class SnapshotsSection(Section):
    """Snapshots of every step in memory that outlives the process."""

    window: Annotated[
        Annotated[int, Ge(1)] | Literal["auto"] | None,
        Excludes("placement.every", "experts would move in the middle of a window"),
        Excludes("parallelism.pp_size", "snapshots are not tried with stages"),
        Excludes("training.ema_decay", "snapshots do not hold averages of weights"),
        Excludes("memory.experts", "experts are in host memory already, and come and go in the middle of a copy"),
        Excludes("training.optimizer_offload!=none", "the optimizer's state is in host memory already"),
    ] = None
    """Sparse snapshots (MoEvement): after each step, 1 / window of the experts and other parameters are copied to
    /dev/shm with their optimizer state, and the weights alone of those that come later in the window. A run that goes
    on (training.resume_from_checkpoint=last or auto) on the same mesh and hosts repeats the newest whole window, bit by
    bit, if that is newer than the last checkpoint. Takes 2 * window + 1 files of a rank. auto: as many steps
    as the copy needs to be hidden behind a step. none: no snapshots."""


class Snapshots(Extension):
    name, section = "snapshots", SnapshotsSection
    help = "Snapshots of every step in memory that outlives the process (MoEvement). Off by default."
    taken: SparseSnapshots | None = None
    goes_on = False

    def restore(self, run: Run, checkpoint: Path | None) -> dict[str, Any] | None:
        self.goes_on = _goes_on(run)
        return None

    def before_step(self, run: Run) -> None:
        from carpool.train.run.loop import record, set_learning_rate
        from carpool_systems.sparse_snapshots import SparseSnapshots

        if self.taken is not None:
            record(run)
            self.taken.take(run.step - 1)
            return
        window = None if self.settings.window == "auto" else self.settings.window
        self.taken = SparseSnapshots(run, window)
        self.taken.clean(everything=not self.goes_on)
        if self.goes_on and self.taken.recover():
            replayed = f"; the {self.taken.window} steps of its window are repeated" if run.incomplete else ""
            run.records.say(f"snapshot of step {run.step}{replayed}")
            run.step += 1
            set_learning_rate(run)

    def after_step(self, run: Run) -> None:
        if self.taken is not None:
            self.taken.after_step()

    def finish(self, run: Run) -> None:
        if self.taken is not None and run.saved_at == run.step:
            self.taken.clean(everything=True)


class CopiesSection(Section):
    """Copies of experts in the memory of several nodes."""

    fewest: Annotated[
        Annotated[int, Ge(1)] | None,
        Excludes("snapshots.window", "both keep the state after each step"),
        Excludes("placement.every", "experts would be elsewhere than in the run before"),
        Excludes("moe.layout!=contiguous", "copies are of experts in logical order"),
        Excludes("parallelism.pp_size", "copies are not tried with stages"),
        Excludes("parallelism.tp_size", "parts of fused weights are no rectangles"),
        Excludes("parallelism.etp_size", "copies are of whole experts"),
        Excludes("training.ema_decay", "copies do not hold averages of weights"),
        Excludes("memory.experts", "experts come and go in the middle of a copy"),
        Excludes("training.optimizer_offload!=none", "the optimizer's state is in host memory already"),
    ] = None
    """After each step, so many nodes at least keep each expert in /dev/shm, with its optimizer state, and all nodes
    keep what is no expert's. Copies are placed so that the death of nodes loses an expert as seldom as possible
    (Lazarus, maximum rank overlap). A run that goes on (training.resume_from_checkpoint=last or auto), on any number of
    ranks, takes its state from copies that are left, if they are all there and newer than the last checkpoint. Takes
    two files of each rank that sends, and of itself. none: no copies."""
    slots: Annotated[int, Needs("copies.fewest", "copies: copies.fewest=2")] = Field(default=0, ge=0)
    """Further slots of a node in each layer, which the experts with most tokens get."""
    every: Annotated[int, Needs("copies.slots", "slots for popular experts: copies.slots=1")] = Field(default=100, ge=1)
    """Steps after which slots are divided anew, by the tokens of experts since."""


class ExpertCopies(Extension):
    name, section = "copies", CopiesSection
    help = "Copies of experts, with optimizer state, in the memory of several nodes (Lazarus). Off by default."
    kept: Copies | None = None

    def restore(self, run: Run, checkpoint: Path | None) -> dict[str, Any] | None:
        from carpool_systems.expert_copies import Copies as Made

        self.kept = Made(run, self.settings.fewest, self.settings.slots, self.settings.every)
        goes_on = _goes_on(run)
        self.kept.clean(everything=not goes_on)
        return self.kept.recover(checkpoint) if goes_on else None

    def before_step(self, run: Run) -> None:
        from carpool.train.run.loop import record

        assert self.kept is not None
        if self.kept.said:
            run.records.say(self.kept.said)
            self.kept.said = ""
        if self.settings.slots and run.unrecorded is not None:
            self.kept.add_loads(run.unrecorded.rode.read().load_LE)
        record(run)
        self.kept.take(run.step - 1)

    def finish(self, run: Run) -> None:
        if self.kept is not None and run.saved_at == run.step:
            self.kept.clean(everything=True)
