"""What a step minimises: the loss of the global batch, and its gradient.

The loss is the sum of the cross-entropies of all predicted tokens of the global batch over their number, wherever
they lie: a mean of per-rank means would weigh tokens by how full their rank happens to be. FSDP averages gradients over
the data-parallel ranks, so each rank differentiates `its sum * ranks / tokens`. Where non-expert parameters are whole
(`carpool.parallel.replicated`), gradients are summed, and it is `its sum / tokens of all`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from carpool.hf.context_parallel import ContextParallel
from carpool.hf.documents import fastest_attention, one_row_only, packed, packed_settings, unpacked
from carpool.hf.loss_head import HeadLoss, next_tokens
from carpool.hf.routing.router_balance import RouterLogits, balance_loss
from carpool.hf.seam.expert_rides import WithoutExperts, rides
from carpool.hf.step_graphs import Batch, BeforeBackward, StepGraphs
from carpool.hf.tensor_parallel import sequence_shard
from carpool.parallel.replicated import replicated
from carpool.ride.priority import RidesFirst
from carpool.ride.two_batch import TwoBatch


@dataclass(frozen=True)
class Losses:
    """Of one step, over all ranks: mean cross-entropy per token, mean balance loss (None if off), tokens."""

    loss: float
    aux_loss: float | None
    tokens: int


class Objective:
    """The loss that is minimised: cross-entropy plus `aux_coef` times the balance loss of the whole batch.

    Args:
        model: a causal language model of transformers.
        aux_coef: 0 turns the balance loss off;  balance_layers: balance each layer by itself, not all together.
        two_batch: two micro-batches run half a layer apart (`carpool.ride.two_batch`), and an odd last one by
            itself. If there is only one, its halves do; the balance loss is then of each half.
        rides_first: what reductions wait for (`carpool.ride.priority`).
        dp_size: ranks with distinct tokens.
        context: ranks share sequences, and it makes parts of them. None: each rank has whole ones.
        autocast: compute in this dtype by autocast; None where FSDP casts already or nothing is to be cast.
        loss_chunk_size: as `training.loss_chunk_size`.

    Raises:
        ValueError: a balance loss for a model that does not return router logits.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        top_k: int,
        aux_coef: float,
        dp_size: int,
        autocast: torch.dtype | None,
        balance_layers: bool = False,
        two_batch: bool = False,
        rides_first: RidesFirst | None = None,
        loss_chunk_size: int | None = None,
        context: ContextParallel | None = None,
    ) -> None:
        returns_logits = "output_router_logits" in inspect.signature(model.forward).parameters
        if aux_coef and not returns_logits:
            raise ValueError(
                f"moe.router_aux_loss_coef = {aux_coef:g}, but {type(model).__name__} does not return router logits, "
                "so there is no balance loss to weigh; set moe.router_aux_loss_coef=0"
            )
        self.model, self.top_k, self.aux_coef, self.dp_size, self.autocast = model, top_k, aux_coef, dp_size, autocast
        self.cross_entropy = HeadLoss(model, loss_chunk_size)
        self.router_logits = self._collector() if aux_coef else None
        # A configuration may ask for them, and for a balance loss of this rank's tokens.
        self.settings = {"use_cache": False, **({"output_router_logits": False} if returns_logits else {})}
        self.balance_layers = balance_layers
        self.two_batch = TwoBatch(model) if two_batch else None
        self.at_once = 2 if two_batch else 1
        self.rides_first, self.context = rides_first, context
        # Entered with the targets around each forward that trains: an extension may move sequences, and change them.
        self.moving: Callable[[torch.Tensor], AbstractContextManager[None]] | None = None
        # With it, gradients are summed over ranks; without it, FSDP averages them.
        self.kept = replicated(model)
        self.share = 1.0 if self.kept is None else 1 / dp_size
        # Computes steps without the host, once there is something to capture.
        self.graphs: StepGraphs | None = None
        # Ranks with the same tokens, and with the same sequences.
        self.ranks_per_copy = (dist.get_world_size() if dist.is_initialized() else 1) // dp_size
        self.ranks_per_sequence = self.ranks_per_copy * (1 if context is None else context.cut.ranks)
        self.riding = list(rides(model).values())
        # Of tensor-parallel ranks each has tokens of its own, and gradients are summed over them.
        self.shard = sequence_shard(model)

    def _collector(self) -> RouterLogits:
        """Of what the balance loss is made of."""
        return RouterLogits(self.model)

    def forward(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Cross-entropy summed over this rank's tokens, and the balance loss; both float32 scalars."""
        routers, moves = self.router_logits, self.moving if self.model.training else None
        collected: AbstractContextManager[Any] = nullcontext() if routers is None else routers.collect()
        with (
            self.inputs(batch) as (batch, settings),
            collected as logits,
            nullcontext() if moves is None else moves(batch["target"]),
        ):
            ce, _ = self.cross_entropy(batch["input_ids"], batch["target"], **settings)
        if self.router_logits is None:
            return ce, None
        return ce, balance_loss(logits, self.top_k, per_layer=self.balance_layers, padding_T=self.padding(batch))

    def padding(self, batch: Batch) -> torch.Tensor | None:
        """(T,) of what `inputs` has given: true where a router of this rank sees no token but padding."""
        padding_T = batch["padding"].flatten() if "padding" in batch else None
        return padding_T if padding_T is None or self.shard is None else self.shard.own(padding_T)

    @contextmanager
    def inputs(self, batch: Batch) -> Iterator[tuple[Batch, dict[str, Any]]]:
        """Inside, the model computes as it is trained: this rank's part of a batch, with each position's target, and
        what the model's forward is told besides tokens. Padding chooses no experts."""
        batch = {**batch, "target": next_tokens(batch["labels"])}
        ends_BD = batch.pop("document_ends", None)
        if "position_ids" in batch and one_row_only(self.model):
            batch = {name: value.view(1, -1) for name, value in batch.items()}
        ids_BL, position_BL = batch["input_ids"], batch.get("position_ids")
        device, settings = ids_BL.device, self.settings
        if position_BL is not None:
            settings = settings | packed_settings(self.model, position_BL, ends_BD)
        whole: AbstractContextManager[None] = nullcontext()
        if self.context is not None:
            settings = settings | self.context.settings(ids_BL, position_BL)
            whole = self.context.whole(ids_BL.shape[1], position_BL)
            batch = {name: self.context.cut.part(value) for name, value in batch.items()}
        padding_T = self.padding(batch)
        for own in () if padding_T is None else self.riding:
            own.padded = True
        with (
            nullcontext() if padding_T is None else WithoutExperts(padding_T),
            self.cast(device),
            fastest_attention(device),
            unpacked() if position_BL is None else packed(),
            whole,
        ):
            yield batch, settings

    def cast(self, device: torch.device) -> AbstractContextManager[None]:
        """Inside, the model computes as it is trained."""
        return torch.autocast(device.type, self.autocast) if self.autocast else nullcontext()

    def targets(self, batches: Iterable[Batch]) -> int:
        """Predicted tokens of these batches over all ranks."""
        count = sum((b["labels"][:, 1:] != -100).sum() for b in batches)
        assert isinstance(count, torch.Tensor)
        if dist.is_initialized():
            dist.all_reduce(count)
        return int(count.item()) // self.ranks_per_sequence

    def backward(self, batches: Sequence[Batch], tokens: int | None = None) -> Losses:
        """Accumulate the gradients of one global batch, given in micro-batches. Collective; waits for the device.
        `tokens`: that it predicts, over all ranks with distinct sequences. None: they are counted."""
        if tokens is None:
            tokens = self.targets(batches)
        return self.losses(self.accumulate(batches, tokens).tolist(), tokens)

    def losses(self, means: Sequence[float], tokens: int) -> Losses:
        """What `accumulate` has returned, on the host."""
        return Losses(loss=means[0], aux_loss=means[1] if self.aux_coef else None, tokens=tokens)

    def accumulate(
        self,
        batches: Sequence[Batch],
        tokens: int,
        beside: Sequence[float] = (),
        before_backward: BeforeBackward | None = None,
    ) -> torch.Tensor:
        """As `backward`, without waiting for the device.

        Args:
            beside: numbers of this rank, to be summed over ranks.
            before_backward: of a single batch, is called with its loss between forward and backward.

        Returns:
            (2 + n,) float64 on the device, over all ranks: mean cross-entropy per token, mean balance loss, and sums of
            what is beside.
        """
        if tokens == 0:
            raise ValueError("a step's batch has no token to predict: all labels are -100")
        if self.two_batch is not None and len(batches) == 1:
            batches = in_two(batches[0])
        sums = torch.zeros(2 + len(beside), dtype=torch.float64, device=batches[0]["input_ids"].device)
        for place, number in enumerate(beside, 2):
            if number:
                sums[place] = number

        factor = self.share * self.dp_size / tokens
        # In the backward too: layers that are computed again there must save what they saved before.
        with fastest_attention(sums.device):
            if self.graphs is not None and (captured := self.graphs.run(batches, factor, before_backward)) is not None:
                sums[:2] += captured
            else:
                self._accumulate(batches, factor, sums, before_backward)
        if self.shard is not None:
            self.shard.sum_gradients()
        if dist.is_initialized():
            dist.all_reduce(sums)
        sums[0] /= self.cross_entropy.copies
        sums[0] /= tokens
        sums[1] /= self.dp_size * self.ranks_per_copy
        return sums

    def _accumulate(
        self, batches: Sequence[Batch], factor: float, sums: torch.Tensor, before_backward: BeforeBackward | None
    ) -> None:
        """Eagerly: the gradients of micro-batches, and the sums of their losses in `sums`."""
        with self.rides_first or nullcontext():
            for first in range(0, len(batches), self.at_once):
                together, last = batches[first : first + self.at_once], first + self.at_once >= len(batches)
                self.run_together(together, factor, len(batches), sums, first == 0, last, before_backward)

    def run_together(
        self,
        batches: Sequence[Batch],
        factor: float | torch.Tensor,
        number: int,
        sums: torch.Tensor,
        first: bool,
        last: bool,
        before_backward: BeforeBackward | None = None,
    ) -> None:
        """The gradients of one of a step's `number` micro-batches, or of two at the same time, and their losses added
        to `sums`, without a word from the host: so it can be captured.

        Args:
            first, last: they are the first of the step, or the last.
            before_backward: as of `accumulate`; not of two."""
        if self.kept is not None:
            self.kept.begin(first, last, len(batches))
        losses = [partial(self._loss, batch, factor, number, sums) for batch in batches]
        if self.two_batch is not None and len(losses) == 2:
            self.two_batch.backward(losses, self._processors())
            return
        (loss_of,) = losses
        loss = loss_of()
        if before_backward is not None:
            before_backward(loss.detach())
        loss.backward()

    def _loss(self, batch: Batch, factor: float | torch.Tensor, number: int, sums: torch.Tensor) -> torch.Tensor:
        """What a micro-batch differentiates. `factor`: of its cross-entropy."""
        ce, aux = self.forward(batch)
        loss = ce * (factor.to(ce.dtype) if isinstance(factor, torch.Tensor) else factor)
        sums[0] += ce.detach()
        return loss if aux is None else self._with_balance(loss, aux, number, sums)

    def _with_balance(self, loss: torch.Tensor, aux: torch.Tensor, number: int, sums: torch.Tensor) -> torch.Tensor:
        """A loss and the balance loss of one of a step's `number` micro-batches, which is added to `sums`."""
        ranks = 1 if self.shard is None else self.shard.ranks
        sums[1] += aux.detach() / number
        return loss + aux * (self.share * self.aux_coef / (number * ranks))

    def _processors(self) -> int:
        """Multiprocessors that the model's rides take."""
        transports = (own.transport for own in self.riding)
        return max((transport.processors for transport in transports if transport is not None), default=0)


def in_two(batch: Batch) -> tuple[Batch, Batch]:
    """The first and the second half of a micro-batch's sequences; of an odd number, the first has one more.

    Raises:
        ValueError: there is only one."""
    sequences = batch["input_ids"].shape[0]
    if sequences < 2:
        raise ValueError(
            "two batches at a time cut each rank's only micro-batch in two, but it has only one sequence; set "
            "training.gradient_accumulation_steps to 2 or more, whose micro-batches then run in pairs, or "
            "training.per_device_train_batch_size to 2 or more, or choose another schedule"
        )
    middle = -(-sequences // 2)
    return {k: v[:middle] for k, v in batch.items()}, {k: v[middle:] for k, v in batch.items()}
