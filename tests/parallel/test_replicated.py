"""Whole non-expert parameters with sharded optimizer state, against one process that has the whole batch."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode

from carpool.parallel.replicated import Replicated, replicated, sharded_parameters
from tests.ranks import Ranks, mesh, on_ranks

HIDDEN, LAYERS = 6, 3


class Net(nn.Module):
    """Odd sizes, a parameter that is tied, one that is frozen, and one that only some batches use."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(HIDDEN, HIDDEN) for _ in range(LAYERS))
        self.first, self.tied = nn.Linear(HIDDEN, 9, bias=False), nn.Linear(9, HIDDEN, bias=False)
        self.twice = nn.Parameter(torch.randn(HIDDEN))
        self.frozen = nn.Parameter(torch.randn(5, HIDDEN), requires_grad=False)
        self.rare, self.never = nn.Parameter(torch.randn(1, HIDDEN)), nn.Parameter(torch.randn(2))
        self.again = self.twice

    def forward(self, x: torch.Tensor, rare: bool = False) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x)) + self.twice
        x = self.tied(self.first(x)) * self.again + self.frozen.sum(0)
        return (x + self.rare if rare else x).square().sum()


def make_net(dtype: torch.dtype = torch.float64) -> Net:
    torch.manual_seed(3)
    return Net().to(dtype)


def shard_net(net: Net, copies: int = 1, experts: bool = False) -> Net:
    """As transformers gives parameters to FSDP2."""
    world, shards = dist.get_world_size(), "efsdp" if experts else "fsdp"
    names = (shards,) if copies == 1 else ("dp_replicate", shards)
    axes = mesh((world,) if copies == 1 else (copies, world // copies), names)
    placements = [Shard(0)] if copies == 1 else [Replicate(), Shard(0)]
    made: dict[int, nn.Parameter] = {}
    for module in net.modules():
        for name, parameter in module._parameters.items():
            if parameter is None:  # a linear layer without bias
                continue
            if id(parameter) not in made:
                whole = distribute_tensor(parameter.detach(), axes, placements)
                made[id(parameter)] = nn.Parameter(whole, requires_grad=parameter.requires_grad)
            module._parameters[name] = made[id(parameter)]
    return net


def _batch(step: int, dtype: torch.dtype) -> torch.Tensor:
    """(micro-batches, ranks, rows, HIDDEN)"""
    return torch.randn(2, 4, 3, HIDDEN, generator=torch.Generator().manual_seed(step), dtype=torch.float64).to(dtype)


def _reference(steps: int = 3) -> dict[str, torch.Tensor]:
    net, found = make_net(), {}
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
    for step in range(steps):
        for micro, batch in enumerate(_batch(step, torch.float64)):
            (net(batch.flatten(0, 1), rare=step > 0 and micro == 1)).backward()
        found |= {f"{step} {name}": p.grad.clone() for name, p in net.named_parameters() if p.grad is not None}
        optimizer.step()
        optimizer.zero_grad()
    return found | {f"after {name}": p.detach().clone() for name, p in net.named_parameters()}


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def _train(
    copies: int = 1, steps: int = 3, bucket_bytes: int = 4 * 8 * 60, experts: bool = False
) -> dict[str, torch.Tensor]:
    """`experts`: parameters are those of experts, in and outside of layers, and written beside the next forward."""
    net = shard_net(make_net(), copies, experts)
    layers = net.layers if experts else ()
    kept = Replicated(net, bucket_bytes=bucket_bytes // (8 if experts else 1), layers=layers)  # or no bucket is theirs
    kept.writes_late = experts
    assert replicated(net) is kept and not any(isinstance(p, DTensor) for p in net.parameters())
    addresses = [p.data_ptr() for p in net.parameters()]
    with sharded_parameters(net):
        named = dict(net.named_parameters())
    optimizer = torch.optim.AdamW(named.values(), lr=0.1)
    found: dict[str, torch.Tensor] = {}
    for step in range(steps):
        for micro, batch in enumerate(_batch(step, torch.float64)):
            kept.begin(first=micro == 0, last=micro == 1)
            net(batch[dist.get_rank()], rare=step > 0 and micro == 1).backward()
        kept.finish()
        found |= {f"{step} {name}": _whole(p.grad) for name, p in named.items() if p.grad is not None}
        optimizer.step()
        optimizer.zero_grad()
        kept.write()
    with torch.no_grad():
        net(batch[dist.get_rank()])
    assert addresses == [p.data_ptr() for p in net.parameters()] and net.twice is net.again
    found |= {f"after {name}": p.detach().clone() for name, p in net.named_parameters()}
    return found


def _worst(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> float:
    assert ours.keys() == theirs.keys()
    return max((ours[name] - value).abs().max().item() for name, value in theirs.items())


@pytest.mark.parametrize(("copies", "experts"), [(1, False), (2, False), (4, False), (2, True)])
def test_gradients_and_steps_are_those_of_one_process(ranks: Ranks, copies: int, experts: bool) -> None:
    of_ranks = ranks(_train, copies, experts=experts)
    theirs = _reference()
    assert "1 rare" in theirs and "0 rare" not in theirs and "2 never" not in theirs
    for ours in of_ranks:
        assert _worst(ours, theirs) < 1e-11
        assert all(torch.equal(value, of_ranks[0][name]) for name, value in ours.items())
    assert all(
        torch.equal(value, of_ranks[0][name]) for name, value in ranks(_train, copies, experts=experts)[0].items()
    )


def _count() -> tuple[list[dict[str, int]], int]:
    net = shard_net(make_net())
    kept = Replicated(net, bucket_bytes=4 * 8 * 30)
    phases = []
    for step in range(2):
        for micro, batch in enumerate(_batch(step, torch.float64)):
            kept.begin(first=micro == 0, last=micro == 1)
            with CommDebugMode() as counted:
                net(batch[dist.get_rank()]).backward()
            phases.append(_names(counted))
        with CommDebugMode() as counted:
            kept.finish()
        phases.append(_names(counted))
        with CommDebugMode() as counted:
            kept.write()
        phases.append(_names(counted))
    return phases, sum(len(buffers.buckets) for buffers in kept.buffers if buffers.trained)


def _names(counted: CommDebugMode) -> dict[str, int]:
    found: Counter[str] = Counter()
    for name, number in counted.get_comm_counts().items():
        found[
            "reduce_scatter" if "reduce_scatter" in str(name) else "all_gather" if "all" in str(name) else str(name)
        ] += number
    return dict(found)


def test_collectives_are_counted(ranks: Ranks) -> None:
    phases, buckets = ranks(_count)[0]
    assert buckets > 2
    for first, last, finish, write in (phases[:4], phases[4:]):
        assert first == {} and write == {"all_gather": 1}
        # Not in the backward: buckets behind one whose parameters have no gradient.
        assert last.get("reduce_scatter", 0) + finish.get("reduce_scatter", 0) == buckets
        assert not (last.keys() | finish.keys()) - {"reduce_scatter"}


@on_ranks()
def test_states_have_shards_under_the_models_names() -> None:
    net = shard_net(make_net())
    kept = Replicated(net)
    names = [name for name, _ in net.named_parameters(remove_duplicate=False)]
    state = net.state_dict()
    assert list(state) == names and all(isinstance(t, DTensor) for t in state.values())
    assert not any(isinstance(p, DTensor) for p in net.parameters())
    doubled = {name: 2 * tensor for name, tensor in state.items()}
    net.load_state_dict(doubled)
    for name, parameter in net.named_parameters():
        assert torch.equal(parameter, _whole(doubled[name])), name
    with pytest.raises(RuntimeError, match="stop"), kept.shards(write=True):
        raise RuntimeError("stop")
    assert not any(isinstance(p, DTensor) for p in net.parameters())
    with pytest.raises(AssertionError, match=r"without Replicated\.begin"):
        net(torch.zeros(1, HIDDEN, dtype=torch.float64)).backward()


@on_ranks()
def test_bfloat16_parameters_have_float32_shards_and_sums() -> None:
    """float32 shards, bfloat16 parameters; a micro-batch is added in float32."""
    net = shard_net(make_net(torch.float32))
    kept = Replicated(net, torch.bfloat16)
    assert net.twice.dtype == torch.bfloat16
    with sharded_parameters(net):
        twice = net.twice
    assert twice.dtype == torch.float32
    for micro in range(2):
        kept.begin(micro == 0, micro == 1)
        # Gradients 1 and 2**-10 of rank 0: their sum has more digits than bfloat16.
        (net.twice.sum() * (1.0, 2.0**-10)[micro] * (dist.get_rank() == 0)).backward()
    kept.finish()
    assert twice.grad is not None
    assert twice.grad.dtype == torch.float32 and _whole(twice.grad)[0].item() == 1 + 2.0**-10


@on_ranks()
def test_a_model_that_is_not_sharded_is_refused() -> None:
    with pytest.raises(
        ValueError, match="no non-expert parameter of this model is sharded, so there is nothing to keep whole"
    ):
        Replicated(make_net())
