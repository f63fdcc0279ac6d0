"""Sections of settings that published systems need. Read with every configuration, so what they do is imported late."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from pydantic import Field

from carpool.train.config.schema_base import Section
from carpool.train.extensions import Extension

if TYPE_CHECKING:
    from carpool.train.build.assemble import Built
    from carpool.train.config.schema import Config
    from carpool.train.plan.resolve import Plan

log = logging.getLogger("carpool")


class SequenceMovesSection(Section):
    every: int | None = Field(
        default=None,
        ge=1,
        description="Before every so many layers with experts, sequences may move to another rank of their "
        "expert-parallel group, with their targets: to where its rides and the move take least, by a guess of "
        "its router before attention and the rates of parallelism.hardware. Every rank keeps as many as it has, and "
        "losses stay as they are. The host waits for the device at each such layer. none: sequences stay.",
    )


class MoveSequences(Extension):
    name, section = "sequence_moves", SequenceMovesSection
    help = "Sequences move between layers to the ranks where their experts are (NetMoE, LUFFY). Off by default."

    def check(self, config: Config) -> None:
        memory, every = config.memory, self.settings.every
        why = {
            "moe.schedule": config.moe.schedule == "two-batch"
            and "two halves of a micro-batch are in different layers",
            "memory.layer_activations": (memory.layer_activations == "recompute" or memory.budget is not None)
            and "layers that are computed again would move their sequences again",
            "parallelism.rank_speeds": config.parallelism.rank_speeds is not None
            and "ranks would have different numbers of sequences",
        }
        if found := [f"with {key}: {reason}" for key, reason in why.items() if reason]:
            raise ValueError(f"sequence_moves.every = {every} does not work {found[0]}; leave one of them out")

    def check_plan(self, plan: Plan) -> None:
        degrees = plan.degrees
        for key, size, reason in (
            ("pp_size", degrees.pp, "sequences that move would be in stages whose micro-batch they are not of"),
            ("cp_size", degrees.cp, "each rank has a part of every sequence, so whole ones cannot move"),
            ("tp_size", degrees.tp, "tensor-parallel ranks have the same sequences, and would have to move them alike"),
            ("etp_size", degrees.etp, "experts in slices are on several ranks, and none is nearest"),
        ):
            if size > 1:
                raise ValueError(f"sequence_moves.every does not work with parallelism.{key} = {size}: {reason}")
        from carpool.train.data.rows import are_packed
        from carpool_systems.sequence_moves import check_moves

        check_moves(self.settings.every, len(plan.blueprint.expert_counts), degrees.ep)
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
        often = "each layer with experts" if every == 1 else f"every {every} layers with experts"
        log.info("sequences may move to other ranks before %s but the first", often)
