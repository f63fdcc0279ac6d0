"""One deliberate mistake for each reduction of a step, and a case that must notice it.

Each is a context manager inside of which a run is built and takes its step. What a mistake changes is said too: the
numbers that it must leave alone are those by which a person would have noticed it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard import _fsdp_collectives

import carpool
from carpool.hf import tensor_parallel as heads
from carpool.hf.routing import router_balance as balance
from carpool.hf.routing import router_losses
from carpool.layout import expert_layout
from carpool.optim import clip
from carpool.parallel import flat_buffers, fsdp, replicated, sequence
from carpool.parallel.degrees import Degrees
from carpool.replicas import slots
from carpool.train.steps import pipeline_objective
from carpool.train.steps.training_objective import Objective
from tests.meshes.cases import Case
from tests.mistakes import instead_of


class Without:
    """`torch.distributed` in which `all_reduce` does nothing."""

    def __getattr__(self, name: str) -> Any:
        return (lambda *args, **kwargs: None) if name == "all_reduce" else getattr(dist, name)


@contextmanager
def _without(*modules: Any) -> Iterator[None]:
    with ExitStack() as patches:
        for module in modules:
            patches.enter_context(mock.patch.object(module, "dist", Without()))
        yield


@instead_of(_fsdp_collectives, "_get_gradient_divide_factors")
def fsdp_adds(right: Any, *args: Any, **kwargs: Any) -> Any:
    """FSDP adds gradients instead of averaging them."""
    found = right(*args, **kwargs)
    return (None, None, dist.ReduceOp.SUM, dist.ReduceOp.SUM) if found[0] is found[1] is None else found


@instead_of(fsdp, "sum_gradients")
def fsdp_averages(right: Any, model: Any) -> None:
    """FSDP averages gradients of a loss whose gradients are to be added, as those of experts that it has not are."""


@instead_of(FSDPModule, "set_gradient_divide_factor")
def experts_averaged_over_copies(right: Any, self: Any, factor: float) -> None:
    """Experts' gradients are averaged over the ranks that hold them, not over all that sent tokens: too large by ep."""


@instead_of(flat_buffers.FlatBuffers, "reduce")
def shared_experts_of_own_tokens(right: Any, self: flat_buffers.FlatBuffers, bucket: Any) -> Any:
    """Of experts that several expert-parallel groups hold, each rank has the gradient of its own group's tokens."""
    if "efsdp" not in (bucket.places[0].shard.device_mesh.mesh_dim_names or ()):
        return right(self, bucket)
    rows = self._bucket(bucket).view(self.ranks, -1)
    self._reduced[bucket.start : bucket.stop] = rows[dist.get_rank(self.group)]


@instead_of(Objective, "__init__")
def whole_parameters_averaged(right: Any, self: Objective, *args: Any, **kwargs: Any) -> None:
    """Gradients of whole non-expert parameters are added, and the loss is one whose gradients are averaged."""
    right(self, *args, **kwargs)
    self.share = 1.0


@instead_of(Objective, "accumulate")
def loss_of_each_rank(right: Any, self: Objective, batches: Any, tokens: int, *args: Any) -> Any:
    """The loss is the mean of the ranks' means."""
    own = sum(int((batch["labels"][:, 1:] != -100).sum()) for batch in batches)
    return right(self, batches, own * self.dp_size, *args)


@instead_of(Objective, "__init__")
def sequences_of_tensor_parallel_ranks(right: Any, self: Objective, *args: Any, **kwargs: Any) -> None:
    """Ranks that share tokens are taken for ranks with tokens of their own."""
    right(self, *args, **kwargs | {"dp_size": dist.get_world_size()})


@instead_of(clip, "_gradient_shards")
def norm_counts_copies(right: Any, *args: Any) -> Any:
    """What several ranks hold is counted once for each of them."""
    shards: dict[Any, list[torch.Tensor]] = {}
    for (device, dtype, _), local in right(*args).items():
        shards.setdefault((device, dtype, 1), []).extend(local)
    return shards


@contextmanager
def parts_of_sequences_not_added() -> Iterator[None]:
    """With sequence parallelism, weights that all ranks hold get the gradients of a rank's own tokens."""
    with (
        mock.patch.object(sequence, "sum_gradients", lambda *_: None),
        mock.patch.object(heads, "sum_gradients", lambda *_: None),
    ):
        yield


@instead_of(slots, "ordered_sum")
def skipped_replica(right: Any, values: torch.Tensor, index: torch.Tensor, num_rows: int) -> torch.Tensor:
    """Only the first slot of each expert gives its gradient to the home."""
    rows = index.tolist()
    first = [i for i, row in enumerate(rows) if row not in rows[:i]]
    return right(values[first], index[first], num_rows)


@instead_of(carpool.transport.TRANSPORTS["dedup"], "combine_gradients")
def forgotten_router_term(right: Any, self: Any, route: Any, dx_RH: Any, dweight_RJ: Any) -> Any:
    """Routing weights get no gradient from the rides."""
    return right(self, route, dx_RH, torch.zeros_like(dweight_RJ))


@instead_of(clip, "_gradient_shards")
def norm_of_all_stages_alike(right: Any, parameters: Any, ranks: Any) -> Any:
    """Each stage's parameters are taken to be on all ranks of the pipeline."""
    return right(parameters, None)


@instead_of(Objective, "__init__")
def parts_of_sequences_as_sequences(right: Any, self: Objective, *args: Any, **kwargs: Any) -> None:
    """Context-parallel ranks are not among those over which FSDP averages."""
    right(self, *args, **kwargs | {"dp_size": kwargs["dp_size"] // 2})


@instead_of(expert_layout, "slices_of")
def one_slice_of_each_expert(right: Any, expert_TK: torch.Tensor, number: int) -> torch.Tensor:
    """A token visits the first slice of each of its experts only, so the other partial sums are not added."""
    rows = right(expert_TK, number)
    return torch.where(rows % number == 0, rows, -1)


@instead_of(pipeline_objective, "gather_tokens")
def travelling_rows_added(right: Any, *args: Any, partial: bool) -> torch.Tensor:
    """Gradients of hidden states that stages put together from tensor-parallel ranks' rows are taken for terms of a
    sum."""
    return right(*args, partial=True)


class Broken(NamedTuple):
    """A mistake, the case that must notice it, and words of what it must find wrong and must not."""

    mistake: Callable[[], AbstractContextManager[None]]
    case: Case
    wrong: str
    right: str = "loss"


FSDP, TP, HSDP = Degrees(fsdp=2, ep=2), Degrees(tp=2, ep=2), Degrees(dp_replicate=2, fsdp=2, ep=2)
BREAKAGES: dict[str, Broken] = {
    # Copies of the model keep their own gradients (dp_replicate).
    "copies_not_added": Broken(partial(_without, _fsdp_collectives, replicated), Case(HSDP), "q_proj"),
    # Each rank clips by the norm of what it holds.
    "norm_of_one_rank": Broken(partial(_without, clip), Case(FSDP), "norm", "q_proj"),
    # Each rank balances its own tokens.
    "balance_of_one_rank": Broken(partial(_without, balance), Case(FSDP), "balance"),
    # A rank balances its own parts of sequences.
    "balance_of_parts": Broken(
        partial(_without, router_losses), Case(Degrees(cp=2, ep=2), balance="sequence"), "balance2"
    ),
    # Norms of queries and keys get the gradients of a rank's own heads.
    "norms_of_own_heads": Broken(partial(_without, heads), Case(TP, family="qwen3_moe", sequence="off"), "q_norm"),
} | {
    broken.mistake.__name__: broken  # type: ignore[attr-defined]
    for broken in (
        Broken(fsdp_adds, Case(Degrees(fsdp=2), transport="local"), "q_proj"),
        Broken(fsdp_averages, Case(FSDP), "q_proj", "experts"),
        Broken(experts_averaged_over_copies, Case(Degrees(fsdp=4, ep=2)), "experts", "q_proj"),
        Broken(shared_experts_of_own_tokens, Case(Degrees(fsdp=4, ep=2), dense="zero1"), "experts", "q_proj"),
        Broken(whole_parameters_averaged, Case(FSDP, dense="zero1"), "q_proj"),
        Broken(loss_of_each_rank, Case(FSDP, packing="examples"), "loss", "balance"),
        Broken(sequences_of_tensor_parallel_ranks, Case(TP), "q_proj"),
        Broken(norm_counts_copies, Case(HSDP), "norm", "q_proj"),
        Broken(parts_of_sequences_not_added, Case(TP, family="qwen3_moe"), "layernorm"),
        Broken(skipped_replica, Case(FSDP, spare=2), "experts"),
        Broken(forgotten_router_term, Case(FSDP), "mlp.gate"),
        Broken(norm_of_all_stages_alike, Case(Degrees(pp=2), transport="local", micro_batches=2), "norm", "q_proj"),
        Broken(travelling_rows_added, Case(Degrees(pp=2, tp=2, ep=2), micro_batches=2), "layers.0.self_attn.q_proj"),
        Broken(parts_of_sequences_as_sequences, Case(Degrees(cp=2, ep=2)), "q_proj"),
        Broken(one_slice_of_each_expert, Case(Degrees(fsdp=2, etp=2)), "loss", "nothing else"),
    )
}
