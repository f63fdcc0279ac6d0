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
from carpool.hf.documents import (
    fastest_attention,
    one_row_only,
    packed,
    packed_settings,
    row_lengths,
    takes_lengths,
    unpacked,
)
from carpool.hf.loss_head import Computed, HeadLoss, next_tokens
from carpool.hf.multi_token import FutureLosses, MultiTokenPredictor
from carpool.hf.routing.router_balance import RouterLogits, StepCounts, loss_of_statistics, router_statistics
from carpool.hf.routing.router_losses import RouterTokens, layer_losses
from carpool.hf.seam.expert_rides import WithoutExperts, rides
from carpool.hf.step_graphs import Batch, BeforeBackward, StepGraphs
from carpool.hf.tensor_parallel import sequence_shard
from carpool.parallel.replicated import replicated
from carpool.ride.priority import RidesFirst
from carpool.ride.two_batch import TwoBatch


@dataclass(frozen=True)
class Losses:
    """Of one step, over all ranks: mean cross-entropy per token, mean balance loss (None if off), tokens; z-loss and
    balance loss of sequences, as means over layers; mean divergence from a teacher (None if off); mean cross-entropies
    of multi-token prediction (MTP) layers (None without)."""

    loss: float
    aux_loss: float | None
    tokens: int
    z_loss: float | None = None
    sequence_aux_loss: float | None = None
    distillation_loss: float | None = None
    mtp_losses: list[float] | None = None


class Objective:
    """The loss that is minimised: cross-entropy plus `aux_coef` times the balance loss of the whole batch, and what
    each MoE layer adds (`carpool.hf.routing.router_losses`).

    Args:
        model: a causal language model of transformers.
        aux_coef: 0 turns the balance loss off;  balance_layers: balance each layer by itself, not all together;
            balance_step: by the choices of all micro-batches of a step so far.
        z_coef, sequence_coef: of each layer's z-loss and balance loss of sequences; 0: off.  sigmoid: scores of
            routers are sigmoids.
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
        balance_step: bool = False,
        z_coef: float = 0.0,
        sequence_coef: float = 0.0,
        sigmoid: bool = False,
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
        self.z_coef, self.sequence_coef, self.sigmoid = z_coef, sequence_coef, sigmoid
        # The losses that layers have for themselves, and what sums of a step there are: cross-entropy, balance, these.
        self.layer_coefs = [coef for coef in (z_coef, sequence_coef) if coef]
        self.sums = self.router_sums = 2 + len(self.layer_coefs)
        self.mtp: MultiTokenPredictor | None = None
        self.router_logits = self._collector() if aux_coef or self.layer_coefs else None
        self.moe_layers = 0 if self.router_logits is None else self.router_logits.count
        self.counts = StepCounts() if balance_step else None
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

    def train_mtp(self, weight: float) -> None:
        """Train the model's multi-token prediction (MTP) layers, too. `weight`: the weight of their mean loss."""
        self.mtp = MultiTokenPredictor(self.model, weight)
        # Each layer has a sum of cross-entropies and their number.
        self.sums += 2 * self.mtp.depth

    @property
    def active_mtp(self) -> MultiTokenPredictor | None:
        """The predictor of future tokens in the next forward, or None."""
        return self.mtp if self.model.training else None

    def forward(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Cross-entropy summed over this rank's tokens, in training with those of MTP layers, and (1 + n,), the
        balance loss and means of those of layers; float32."""
        return self.computed(batch, None)

    def computed(
        self, batch: Batch, instead: Callable[[Batch], Computed] | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """As `forward`. `instead`: of the batch that the model sees, what computes another loss than cross-entropy."""
        ce, aux, _ = self._computed(batch, instead)
        return ce, aux

    def _computed(
        self, batch: Batch, instead: Callable[[Batch], Computed] | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None, FutureLosses | None]:
        routers, moves = self.router_logits, self.moving if self.model.training else None
        skipped = 0 if self.mtp is None or self.model.training else self.mtp.routers
        collected: AbstractContextManager[Any] = nullcontext()
        if routers is not None:
            collected = routers.collect(routers.count - skipped)
        with (
            self.inputs(batch) as (batch, settings),
            collected as logits,
            nullcontext() if moves is None else moves(batch["target"]),
            self._mtp_losses(batch) as future,
        ):
            own = settings if instead is None else {**settings, "compute": instead(batch)}
            ce, _ = self.cross_entropy(batch["input_ids"], batch["target"], **own)
        aux = None if self.router_logits is None else self.router_losses(self.statistics(logits, batch))
        return ce, aux, future

    def _mtp_losses(
        self, batch: Batch, embeddings: Sequence[torch.Tensor] | None = None
    ) -> AbstractContextManager[FutureLosses | None]:
        """Inside, a forward of the model adds the losses of MTP layers, if they are trained. `batch`: as `inputs` has
        given it; `embeddings`: from another stage of a pipeline."""
        mtp = self.active_mtp
        return nullcontext() if mtp is None else mtp.losses(batch, embeddings)

    def statistics(
        self, logits: Sequence[torch.Tensor], batch: Batch, group: dist.ProcessGroup | None = None
    ) -> torch.Tensor:
        """(layers, S): what the balance loss needs of each layer, and in further columns the losses that it has for
        itself. `batch`: as `inputs` has given it; `group`: all ranks with these layers."""
        padding_T = self.padding(batch)
        own_LS = router_statistics(logits, self.top_k, padding_T)
        if not self.layer_coefs:
            return own_LS
        tokens = RouterTokens(padding_T)
        if self.sequence_coef:
            sequence_T = batch["sequence"].flatten()
            divided: list[Any] = [] if self.context is None else [self.context.group]
            if self.shard is not None:
                sequence_T = self.shard.own(sequence_T)
                divided.append(self.shard.group)
            tokens = RouterTokens(padding_T, sequence_T == batch["sequences"].unsqueeze(1), divided)
        uses: dict[str, bool] = {"z": bool(self.z_coef), "sequence": bool(self.sequence_coef)}
        own_LN = layer_losses(logits, self.top_k, tokens, group, sigmoid=self.sigmoid, **uses)
        return torch.cat([own_LS, own_LN], dim=1)

    def router_losses(self, own_LS: torch.Tensor, group: dist.ProcessGroup | None = None) -> torch.Tensor:
        """What `forward` returns, of the statistics of all layers."""
        ends = own_LS.shape[1] - len(self.layer_coefs)
        balance = own_LS.new_zeros(())
        if self.aux_coef:
            balance = loss_of_statistics(own_LS[:, :ends], group, per_layer=self.balance_layers, counts=self.counts)
        return torch.cat([balance.view(1), own_LS[:, ends:].mean(0)])

    def padding(self, batch: Batch) -> torch.Tensor | None:
        """(T,) of what `inputs` has given: true where a router of this rank sees no token but padding."""
        padding_T = batch["padding"].flatten() if "padding" in batch else None
        return padding_T if padding_T is None or self.shard is None else self.shard.own(padding_T)

    @contextmanager
    def inputs(self, batch: Batch) -> Iterator[tuple[Batch, dict[str, Any]]]:
        """Inside, the model computes as it is trained: this rank's part of a batch, with each position's target, and
        what the model's forward is told besides tokens. Padding chooses no experts."""
        batch = {**batch, "target": next_tokens(batch["labels"])}
        if (mtp := self.active_mtp) is not None:
            batch |= mtp.shifted(batch)
        number_S = torch.arange(len(batch["input_ids"]), device=batch["input_ids"].device)
        if self.sequence_coef:
            batch["sequence"] = number_S.unsqueeze(1).expand_as(batch["input_ids"])
        ends_BD = batch.pop("document_ends", None)
        settings, (rows, length) = self.settings, batch["input_ids"].shape
        if "position_ids" in batch and one_row_only(self.model):
            batch = {name: value.reshape(1, -1, *value.shape[2:]) for name, value in batch.items()}
        ids_BL, position_BL = batch["input_ids"], batch.get("position_ids")
        device, documents = ids_BL.device, position_BL is not None and ends_BD is not None
        if self.context is None and takes_lengths(self.model) and (documents or len(ids_BL) == 1):
            settings = settings | row_lengths(rows, length, ends_BD if documents else None, device)
        if position_BL is not None:
            settings = settings | packed_settings(self.model, position_BL, ends_BD)
        whole: AbstractContextManager[None] = nullcontext()
        if self.context is not None:
            settings = settings | self.context.settings(ids_BL, position_BL)
            whole = self.context.whole(ids_BL.shape[1], position_BL)
            batch = {name: self.context.cut.part(value) for name, value in batch.items()}
        padding_T = self.padding(batch)
        if self.sequence_coef:
            batch["sequences"] = number_S
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
        coefs = {"z_loss": self.z_coef, "sequence_aux_loss": self.sequence_coef}
        own = dict(zip((name for name, coef in coefs.items() if coef), means[2 : self.router_sums], strict=True))
        mtp_losses = None
        if self.mtp is not None:
            pairs = zip(
                means[self.router_sums : self.sums : 2], means[self.router_sums + 1 : self.sums : 2], strict=True
            )
            mtp_losses = [total / number if number else 0.0 for total, number in pairs]
        aux = means[1] if self.aux_coef else None
        return Losses(loss=means[0], aux_loss=aux, tokens=tokens, **own, mtp_losses=mtp_losses)

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
            (sums + n,) float64 on the device, over all ranks: mean cross-entropy per token, mean balance loss, those of
            layers, sums and numbers of MTP layers, and sums of what is beside.
        """
        if tokens == 0:
            raise ValueError("a step's batch has no token to predict: all labels are -100")
        if self.two_batch is not None and len(batches) == 1:
            batches = in_two(batches[0])
        sums = torch.zeros(self.sums + len(beside), dtype=torch.float64, device=batches[0]["input_ids"].device)
        for place, number in enumerate(beside, self.sums):
            if number:
                sums[place] = number

        factor = self.share * self.dp_size / tokens
        # In the backward too: layers that are computed again there must save what they saved before.
        with fastest_attention(sums.device):
            if self.graphs is not None and (captured := self.graphs.run(batches, factor, before_backward)) is not None:
                sums[: self.sums] += captured
            else:
                self._accumulate(batches, factor, sums, before_backward)
        if self.shard is not None:
            self.shard.sum_gradients()
        if dist.is_initialized():
            dist.all_reduce(sums)
        sums[0] /= self.cross_entropy.copies
        sums[0] /= tokens
        sums[1 : self.sums] /= self.dp_size * self.ranks_per_copy
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
        if first and self.counts is not None:
            self.counts.begin()
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
        ce, aux, future = self._computed(batch)
        loss = ce * (factor.to(ce.dtype) if isinstance(factor, torch.Tensor) else factor)
        self._count(ce, future, sums)
        return loss if aux is None else self._with_routers(loss, aux, number, sums)

    def _count(self, ce: torch.Tensor, future: FutureLosses | None, sums: torch.Tensor) -> None:
        """Add a micro-batch's cross-entropies to a step's sums."""
        if future is None:
            sums[0] += ce.detach()
        else:
            sums[0] += future.main
            sums[self.router_sums : self.sums] += future.sums

    def _with_routers(self, loss: torch.Tensor, found_N: torch.Tensor, number: int, sums: torch.Tensor) -> torch.Tensor:
        """A loss and those of routers of one of a step's `number` micro-batches, which are added to `sums`."""
        ranks = 1 if self.shard is None else self.shard.ranks
        sums[1 : self.router_sums] += found_N.detach() / number
        loss = loss + found_N[0] * (self.share * self.aux_coef / (number * ranks))
        for place, coef in enumerate(self.layer_coefs, 1):
            # Each layer adds its own.
            loss = loss + found_N[place] * (self.share * coef * self.moe_layers / (number * ranks))
        return loss

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
