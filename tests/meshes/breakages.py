"""One deliberate mistake for each reduction of a step, and a case that must notice it.

Each is a context manager inside of which a run is built and takes its step. What a mistake changes is said too: the
numbers that it must leave alone are those by which a person would have noticed it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard import _fsdp_collectives

import carpool
from carpool.hf import tensor_parallel as heads
from carpool.hf.routing import router_balance as balance
from carpool.layout import expert_layout
from carpool.optim import clip
from carpool.parallel import fsdp, replicated, sequence
from carpool.parallel.degrees import Degrees
from carpool.replicas import slots
from carpool.train.steps.training_objective import Objective
from tests.meshes.cases import Case


class Without:
    """`torch.distributed` in which one collective does nothing."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Any:
        return (lambda *args, **kwargs: None) if name == self._name else getattr(dist, name)


def _without(module: Any, name: str = "all_reduce") -> AbstractContextManager[Any]:
    return mock.patch.object(module, "dist", Without(name))


@contextmanager
def fsdp_adds() -> Iterator[None]:
    """FSDP adds gradients instead of averaging them."""
    right = _fsdp_collectives._get_gradient_divide_factors

    def wrong(*args: Any, **kwargs: Any) -> Any:
        found = right(*args, **kwargs)
        return (None, None, dist.ReduceOp.SUM, dist.ReduceOp.SUM) if found[0] is found[1] is None else found

    with mock.patch.object(_fsdp_collectives, "_get_gradient_divide_factors", wrong):
        yield


@contextmanager
def fsdp_averages() -> Iterator[None]:
    """FSDP averages gradients of a loss whose gradients are to be added, as those of experts that it has not are."""
    with mock.patch.object(fsdp, "sum_gradients", lambda model: None):
        yield


@contextmanager
def experts_averaged_over_copies() -> Iterator[None]:
    """Experts' gradients are averaged over the ranks that hold them, not over all that sent tokens: too large by ep."""
    with mock.patch.object(FSDPModule, "set_gradient_divide_factor", lambda self, factor: None):
        yield


@contextmanager
def copies_not_added() -> Iterator[None]:
    """Copies of the model keep their own gradients (dp_replicate)."""
    with _without(_fsdp_collectives), _without(replicated):
        yield


@contextmanager
def whole_parameters_averaged() -> Iterator[None]:
    """Gradients of whole non-expert parameters are added, and the loss is one whose gradients are averaged."""
    right = Objective.__init__

    def wrong(self: Objective, *args: Any, **kwargs: Any) -> None:
        right(self, *args, **kwargs)
        self.share = 1.0

    with mock.patch.object(Objective, "__init__", wrong):
        yield


@contextmanager
def loss_of_each_rank() -> Iterator[None]:
    """The loss is the mean of the ranks' means."""
    right = Objective.accumulate

    def wrong(self: Objective, batches: Any, tokens: int, *args: Any) -> Any:
        own = sum(int((batch["labels"][:, 1:] != -100).sum()) for batch in batches)
        return right(self, batches, own * self.dp_size, *args)

    with mock.patch.object(Objective, "accumulate", wrong):
        yield


@contextmanager
def sequences_of_tensor_parallel_ranks() -> Iterator[None]:
    """Ranks that share tokens are taken for ranks with tokens of their own."""
    right = Objective.__init__

    def wrong(self: Objective, *args: Any, **kwargs: Any) -> None:
        right(self, *args, **kwargs | {"dp_size": dist.get_world_size()})

    with mock.patch.object(Objective, "__init__", wrong):
        yield


@contextmanager
def norm_of_one_rank() -> Iterator[None]:
    """Each rank clips by the norm of what it holds."""
    with _without(clip):
        yield


@contextmanager
def norm_counts_copies() -> Iterator[None]:
    """What several ranks hold is counted once for each of them."""
    right = clip._gradient_shards

    def wrong(*args: Any) -> Any:
        shards: dict[Any, list[torch.Tensor]] = {}
        for (device, dtype, _), local in right(*args).items():
            shards.setdefault((device, dtype, 1), []).extend(local)
        return shards

    with mock.patch.object(clip, "_gradient_shards", wrong):
        yield


@contextmanager
def balance_of_one_rank() -> Iterator[None]:
    """Each rank balances its own tokens."""
    with _without(balance):
        yield


@contextmanager
def norms_of_own_heads() -> Iterator[None]:
    """Norms of queries and keys get the gradients of a rank's own heads."""
    with _without(heads):
        yield


@contextmanager
def parts_of_sequences_not_added() -> Iterator[None]:
    """With sequence parallelism, weights that all ranks hold get the gradients of a rank's own tokens."""
    with mock.patch.object(sequence, "sum_gradients", lambda parameters, group: None):
        from carpool.hf import tensor_parallel as sequence_parallel

        with mock.patch.object(sequence_parallel, "sum_gradients", lambda parameters, group: None):
            yield


@contextmanager
def skipped_replica() -> Iterator[None]:
    """Only the first slot of each expert gives its gradient to the home."""
    right = slots.ordered_sum

    def wrong(values: torch.Tensor, index: torch.Tensor, num_rows: int) -> torch.Tensor:
        rows = index.tolist()
        first = [i for i, row in enumerate(rows) if row not in rows[:i]]
        return right(values[first], index[first], num_rows)

    with mock.patch.object(slots, "ordered_sum", wrong):
        yield


@contextmanager
def forgotten_router_term() -> Iterator[None]:
    """Routing weights get no gradient from the rides."""
    cls = carpool.transport.TRANSPORTS["dedup"]
    right = cls.combine_gradients

    def wrong(self: Any, route: Any, dx_RH: Any, dweight_RJ: Any) -> Any:
        return right(self, route, dx_RH, torch.zeros_like(dweight_RJ))

    with mock.patch.object(cls, "combine_gradients", wrong):
        yield


@contextmanager
def norm_of_all_stages_alike() -> Iterator[None]:
    """Each stage's parameters are taken to be on all ranks of the pipeline."""
    right = clip._gradient_shards
    with mock.patch.object(clip, "_gradient_shards", lambda parameters, ranks: right(parameters, None)):
        yield


@contextmanager
def parts_of_sequences_as_sequences() -> Iterator[None]:
    """Context-parallel ranks are not among those over which FSDP averages."""
    right = Objective.__init__

    def wrong(self: Objective, *args: Any, **kwargs: Any) -> None:
        right(self, *args, **kwargs | {"dp_size": kwargs["dp_size"] // 2})

    with mock.patch.object(Objective, "__init__", wrong):
        yield


@contextmanager
def one_slice_of_each_expert() -> Iterator[None]:
    """A token visits the first slice of each of its experts only, so the other partial sums are not added."""
    right = expert_layout.slices_of

    def wrong(expert_TK: torch.Tensor, number: int) -> torch.Tensor:
        rows = right(expert_TK, number)
        return torch.where(rows % number == 0, rows, -1)

    with mock.patch.object(expert_layout, "slices_of", wrong):
        yield


@contextmanager
def travelling_rows_added() -> Iterator[None]:
    """Gradients of hidden states that stages put together from tensor-parallel ranks' rows are taken for terms of a
    sum."""
    from carpool.train.steps import pipeline_objective as pipeline

    right = pipeline.gather_tokens

    def wrong(*args: Any, partial: bool) -> torch.Tensor:
        return right(*args, partial=True)

    with mock.patch.object(pipeline, "gather_tokens", wrong):
        yield


class Broken(NamedTuple):
    """A mistake, the case that must notice it, and words of what it must find wrong and must not."""

    mistake: Callable[[], AbstractContextManager[None]]
    case: Case
    wrong: str
    right: str = "loss"


FSDP, TP, HSDP = Degrees(fsdp=2, ep=2), Degrees(tp=2, ep=2), Degrees(dp_replicate=2, fsdp=2, ep=2)
BREAKAGES: dict[str, Broken] = {
    broken.mistake.__name__: broken
    for broken in (
        Broken(fsdp_adds, Case(Degrees(fsdp=2), transport="local"), "q_proj"),
        Broken(fsdp_averages, Case(FSDP), "q_proj", "experts"),
        Broken(experts_averaged_over_copies, Case(Degrees(fsdp=4, ep=2)), "experts", "q_proj"),
        Broken(copies_not_added, Case(HSDP), "q_proj"),
        Broken(whole_parameters_averaged, Case(FSDP, dense="zero1"), "q_proj"),
        Broken(loss_of_each_rank, Case(FSDP, packing="examples"), "loss", "balance"),
        Broken(sequences_of_tensor_parallel_ranks, Case(TP), "q_proj"),
        Broken(norm_of_one_rank, Case(FSDP), "norm", "q_proj"),
        Broken(norm_counts_copies, Case(HSDP), "norm", "q_proj"),
        Broken(balance_of_one_rank, Case(FSDP), "balance"),
        Broken(norms_of_own_heads, Case(TP, family="qwen3_moe", sequence="off"), "q_norm"),
        Broken(parts_of_sequences_not_added, Case(TP, family="qwen3_moe"), "layernorm"),
        Broken(skipped_replica, Case(FSDP, layout="replicated"), "experts"),
        Broken(forgotten_router_term, Case(FSDP), "mlp.gate"),
        Broken(norm_of_all_stages_alike, Case(Degrees(pp=2), transport="local", micro_batches=2), "norm", "q_proj"),
        Broken(travelling_rows_added, Case(Degrees(pp=2, tp=2, ep=2), micro_batches=2), "layers.0.self_attn.q_proj"),
        Broken(parts_of_sequences_as_sequences, Case(Degrees(cp=2, ep=2)), "q_proj"),
        Broken(one_slice_of_each_expert, Case(Degrees(fsdp=2, etp=2)), "loss", "nothing else"),
    )
}
