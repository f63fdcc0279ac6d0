"""A training step through the stages of a pipeline (`carpool.parallel.pipeline`), with the interface of `Objective`.

Every rank of a pipeline reads the same batches, so labels, positions and padding need not travel. What does is

    hidden_BLH          what the layers so far have made
    embedding_BLH       of future tokens, for each multi-token prediction layer of the last stage (`hf.multi_token`)
    statistics_LS       of the routers so far (`Objective.statistics`), a row for each MoE layer

and their gradients travel back. The last stage has the loss, the balance loss of all layers included: it is not the sum
of the stages' balance losses, because all layers are balanced together, and a stage cannot know how often the others'
experts are chosen. Here the last stage knows, and what each router's probabilities are to be changed by comes back as
the gradient of the statistics. No collective of a pipeline's ranks is needed for that.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from carpool.activations import Arena
from carpool.hf.pipeline_stages import Part, Stages
from carpool.hf.routing.router_balance import RouterLogits
from carpool.hf.step_graphs import Batch, BeforeBackward
from carpool.parallel.pipeline import Pipeline, Tensors, Work
from carpool.parallel.schedules import SCHEDULES
from carpool.parallel.sequence import gather_tokens, tokens_per_rank
from carpool.ride.forward_backward import ForwardBesideBackward
from carpool.ride.split_backward import SplitBackward
from carpool.train.steps.training_objective import Objective


class PipelineObjective(Objective):
    """As `Objective`, of a model that is cut into stages.

    Args:
        model: of which this rank keeps its stages' layers;  parts: of all stages.
        schedule: one of `carpool.parallel.schedules.SCHEDULES`.
        group: the ranks of this pipeline, in order;  stage_group: those with the same stages as this one.
        routers: the layers that have a router with a balance loss, and the number of its experts.
        dtype: in which hidden states travel.
    """

    def __init__(
        self,
        model: Any,
        parts: Sequence[Part],
        *,
        schedule: str,
        group: dist.ProcessGroup,
        stage_group: dist.ProcessGroup,
        routers: Mapping[int, int],
        dtype: torch.dtype,
        **settings: Any,
    ) -> None:
        # The two batches of a pipeline are the forward and the backward of a pair, in a schedule that has pairs.
        paired = settings.pop("two_batch", False)
        super().__init__(model, **settings)
        self.beside = ForwardBesideBackward(model, self._processors) if paired else None
        self.stage_group, self.dtype = stage_group, dtype
        self.hidden = model.config.get_text_config().hidden_size
        device = next(model.parameters()).device
        self.split = SplitBackward(model, self.riding) if SCHEDULES[schedule].splits else None
        work = Work(self.compute, self.around_backward, lane=self.use_lane)
        if self.split is not None:
            work = work._replace(weights=self.split.weights)
        pairs = None if self.beside is None else self.beside.run
        self.pipeline = Pipeline(schedule, group, len(parts), work, device, pairs)
        self.stages = Stages(model, {number: parts[number] for number in self.pipeline.stages})
        # Losses are on the ranks of the last stage alone. (`ranks_per_sequence` counts labels, which all have.)
        self.ranks_per_copy //= dist.get_world_size(group)
        # Tensor-parallel ranks may all have the same. Others have no head, and cannot know.
        self.copies, self.cross_entropy.copies = self.cross_entropy.copies, 1
        self.experts, layers = max(routers.values(), default=0), sorted(routers)
        self.moe_layers = len(layers)
        self.columns = 2 * self.experts + 1 + len(self.layer_coefs)
        # The multi-token prediction layers follow those of the last part.
        ends = [(part.layers.start, math.inf if part.last else part.layers.stop) for part in parts]
        self.rows = {
            number: range(*(sum(layer < end for layer in layers) for end in both)) for number, both in enumerate(ends)
        }

    def _collector(self) -> RouterLogits:
        return RouterLogits(self.model, none=True)

    def forward(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Without gradients: cross-entropy summed over this rank's tokens on the last stage, 0 on others."""
        self.begin([batch], 0.0, torch.zeros(self.sums, dtype=torch.float64, device=batch["input_ids"].device))
        self.pipeline.forward_only(1, self.travels(batch))
        return self._sums[0].clone(), None

    def _accumulate(
        self, batches: Sequence[Batch], factor: float, sums: torch.Tensor, before_backward: BeforeBackward | None
    ) -> None:
        assert before_backward is None, "gradients are consumed in one backward, and a pipeline has several"
        self.begin(batches, factor, sums)
        for arena in self._arenas():
            arena.make_lanes(self.pipeline.lanes(len(batches)))
        with self.rides_first or nullcontext(), self.split or nullcontext():
            try:
                self.pipeline.step(len(batches), self.travels(batches[0]))
            finally:
                self.use_lane(0)
        self.end()

    def begin(self, batches: Sequence[Batch], factor: float | torch.Tensor, sums: torch.Tensor) -> None:
        """A step of these micro-batches begins. `factor`: of the loss of each; `sums`: where losses are added."""
        self._batches, self._factor, self._sums, self._first = batches, factor, sums, True
        if self.counts is not None:
            self.counts.begin()

    def end(self) -> None:
        """After the last backward of a step: what has come is reduced."""
        if self.kept is not None:
            self.kept.begin(first=False)

    @contextmanager
    def around_backward(self) -> Iterator[None]:
        """Around each backward of a stage."""
        if self.kept is not None:
            # A bucket may have parameters of two stages, which are complete only after all backwards.
            self.kept.begin(self._first, last=False)
            self._first = False
        yield

    def _arenas(self) -> list[Arena]:
        """In which rides keep rows, each once."""
        arenas = (own.transport.arena for own in self.riding if own.transport is not None)
        return list({id(arena): arena for arena in arenas if arena is not None}.values())

    def use_lane(self, number: int) -> None:
        """Rides keep rows in this lane of their arenas from now on."""
        for arena in self._arenas():
            arena.use_lane(number)

    def travels(self, batch: Batch) -> Tensors:
        """On the device "meta": what goes from a stage to the next one."""
        with self.inputs(batch) as (part, _):
            shape = part["input_ids"].shape
        if self.shard is not None:
            shape = torch.Size((1, tokens_per_rank(shape.numel(), self.shard.group)))
        hidden = torch.empty(*shape, self.hidden, dtype=self.dtype, device="meta")
        travelling = (hidden,) * (1 if self.active_mtp is None else 1 + self.active_mtp.depth)
        if self.router_logits is None:
            return travelling
        return *travelling, torch.empty(self.moe_layers, self.columns, dtype=torch.float32, device="meta")

    def compute(self, stage: int, number: int, received: Tensors) -> Tensors:
        """A stage's forward on a micro-batch: what travels; on the last one, the loss."""
        part, aux = self.stages.parts[stage], self.router_logits is not None
        collected: AbstractContextManager[list[torch.Tensor]] = nullcontext([])
        if self.router_logits is not None:
            skipped = self.mtp.routers if part.last and self.mtp and not self.model.training else 0
            collected = self.router_logits.collect(len(self.rows[stage]) - skipped)
        with self.inputs(self._batches[number]) as (batch, settings), collected as logits:
            if not part.first:
                settings = {**settings, "inputs_embeds": self._whole(received[0], batch["input_ids"].shape)}
            ids_BL, mtp = batch["input_ids"] if part.first else None, self.active_mtp
            # As views: what is received is not handed on itself.
            embeddings = () if mtp is None else tuple(one.view_as(one) for one in received[1 : 1 + mtp.depth])
            if part.last:
                with self.stages.only(stage, settings.get("inputs_embeds")), self._mtp_losses(batch, embeddings) as own:
                    ce, _ = self.cross_entropy(ids_BL, batch["target"], **settings)
            else:
                more = [] if mtp is None or not part.first else mtp.embed(batch)
                hidden_BLH, *made = self.stages.hidden(stage, more, input_ids=ids_BL, **settings)
                hidden_BLH = hidden_BLH.to(self.dtype)
                embeddings = tuple(one.to(self.dtype) for one in made) or embeddings
                if self.shard is not None:
                    # Equally many on all ranks, also where the last ones have fewer tokens.
                    most = tokens_per_rank(batch["input_ids"].numel(), self.shard.group)
                    hidden_BLH = F.pad(hidden_BLH, (0, 0, 0, most - hidden_BLH.shape[1]))
        found: Tensors = (self._add_statistics(stage, received, logits, batch),) if aux else ()
        if not part.last:
            return (hidden_BLH, *embeddings, *found)
        self._count(ce / self.copies, own, self._sums)
        loss = ce * (self._factor.to(ce.dtype) if isinstance(self._factor, torch.Tensor) else self._factor)
        if aux and torch.is_grad_enabled():
            routers = self.router_losses(found[0], self.stage_group)
            loss = self._with_routers(loss, routers, len(self._batches), self._sums)
        return (loss,)

    def _whole(self, hidden: torch.Tensor, shape: torch.Size) -> torch.Tensor:
        """(B, L, H) of what has travelled: tensor-parallel ranks that divide tokens have each sent their own."""
        if self.shard is None:
            return hidden
        rows = hidden.shape[1] * self.shard.ranks
        whole_TH = gather_tokens(hidden.flatten(0, 1), rows, self.shard.group, partial=False)
        return whole_TH[: shape.numel()].view(*shape, -1)

    def _add_statistics(
        self, stage: int, received: Tensors, logits: Sequence[torch.Tensor], batch: Batch
    ) -> torch.Tensor:
        """The routers' statistics of all layers up to this stage's; zeros for those to come."""
        rows = self.rows[stage]
        if received:
            before_LS = received[-1]
        else:
            shape = (self.moe_layers, self.columns)
            before_LS = torch.zeros(shape, device=self._sums.device, requires_grad=torch.is_grad_enabled())
        if not rows:
            return before_LS.clone()
        own_LS = self.statistics(logits, batch, self.stage_group)
        return torch.cat([before_LS[: rows.start], own_LS, before_LS[rows.stop :]])
