"""Sequences that move to where their experts are: fewer bytes between nodes, and the same losses and gradients."""

from __future__ import annotations

import itertools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from carpool.hf import rides, set_transport
from carpool.hf.build_model import build_model
from carpool.layout.topology import Topology
from carpool.metrics.counters import MOVES, VERBS
from carpool.parallel.degrees import Degrees
from carpool.planner.machine.hardware import hardware_of
from carpool.train.config import load_config
from carpool.train.plan.division import distributed_config
from carpool.train.steps.training_objective import Objective
from carpool.transport import set_topology
from carpool_systems.extensions import MoveSequences
from carpool_systems.sequence_moves import MovingSequences, check_stays
from carpool_systems.sequences import assign_sequences
from tests.hf.meshes import reuse_meshes
from tests.hf.parity import full_gradients, quiet
from tests.hf.tiny_models import discover, tiny_config
from tests.ranks import Ranks
from tests.train.test_loop import TWO, losses, run

NODES = Topology.even(2, 2)
BATCH, LENGTH = 12, 5


def step(transport: str, every: int | None) -> Any:
    """(loss, balance loss, gradients) of rank 0; bytes to each rank by verb; sequences that moved to other ranks."""
    quiet()
    reuse_meshes()
    rank = dist.get_rank()
    config = tiny_config(discover()["qwen3_moe"], num_experts=8, num_hidden_layers=3)
    world = dist.get_world_size()
    degrees, nodes = Degrees(fsdp=world, ep=world), Topology.even(world, 2)
    model = build_model(config, distributed_config=distributed_config(degrees, False), dtype=torch.float32, seed=0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "o_proj" in name:
                parameter.zero_()  # attention adds nothing, so routers guess right
    layers = list(rides(model).values())
    assert layers[0].group is not None
    set_topology(layers[0].group, nodes)
    set_transport(model, transport)
    for own in layers:
        own.prepare(2, config.hidden_size)
    objective = Objective(model, top_k=2, aux_coef=0.01, dp_size=world, autocast=None)
    if every is not None:
        objective.moving = MovingSequences(model, every, 2, nodes, hardware_of("NVIDIA H200")).targets
    # Tokens of one sequence are alike.
    ids_BL = torch.randint(3, 40, (BATCH, 1), generator=torch.Generator().manual_seed(rank)).expand(-1, LENGTH)
    ids_BL = ids_BL.to(next(model.parameters()).device)
    losses = objective.backward([{"input_ids": ids_BL, "labels": ids_BL}])
    sent = {verb: [sum(own.stats.traffic.bytes[verb][to] for own in layers) for to in range(world)]
            for verb in (*VERBS, *MOVES)}  # fmt: skip
    moved = sum(own.stats.traffic.remote(own.stats.traffic.rows, "sequences") for own in layers)
    gradients = full_gradients(model)
    return (losses.loss, losses.aux_loss, gradients) if rank == 0 else None, sent, moved


@pytest.mark.parametrize(
    ("sizes", "overrides", "said"),
    [
        (None, ["parallelism.pp_size=2"], "in stages whose micro-batch"),
        (None, ["parallelism.cp_size=2"], "a part of every sequence"),
        (None, ["parallelism.tp_size=2"], "would all have to move them"),
        (None, ["parallelism.etp_size=2"], "none is nearest"),
        (None, ["mtp.depth=1"], "move with their sequences"),
        ({"ep": 1}, [], "raise parallelism.ep_size"),
        ({"layers": 1}, [], "no layer before which"),
        ({}, ["data.packing=off"], "not of examples"),
        (None, ["moe.schedule=two-batch"], "two halves of a micro-batch"),
        (None, ["memory.layer_activations=recompute"], "would move their sequences again"),
        (None, ["memory.budget=10GB"], "would move their sequences again"),
        (None, ["parallelism.rank_speeds=measured"], "different numbers of sequences"),
        (None, ["sequence_moves.every=0"], "at least 1"),
    ],
)
def test_what_moves_do_not_go_with(sizes: dict[str, int] | None, overrides: list[str], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        config: Any = load_config(None, ["sequence_moves.every=1", *overrides])
        assert sizes is not None
        sizes = {"ep": 2, "layers": 3, **sizes}
        blueprint = SimpleNamespace(expert_counts=dict.fromkeys(range(sizes["layers"]), 8))
        plan: Any = SimpleNamespace(degrees=SimpleNamespace(**sizes), config=config, blueprint=blueprint)
        MoveSequences(config.sequence_moves).check_plan(plan)


def test_a_run_moves_them(two_ranks: Ranks, tmp_path: Path, text: list[str]) -> None:
    """Losses are those of a run whose sequences stay; the old name of the setting is refused with the new one."""
    settings = [*TWO, *text, "training.max_steps=2", "training.save_steps=none", "training.eval_steps=none"]
    for name, more in (("stay", []), ("move", ["sequence_moves.every=1"])):
        assert two_ranks(run, str(tmp_path / name), [*settings, *more]) == [""] * 2
    stay, move = ({step: loss for step, (loss, _) in losses(tmp_path / name).items()} for name in ("stay", "move"))
    assert move == pytest.approx(stay, rel=1e-5) and move
    with pytest.raises(ValueError, match=r"sequence_moves\.every = 1"):
        load_config(None, ["moe.move_sequences=1"])


class Layer(torch.nn.Module):
    def forward(self, hidden_states: Any, attention_mask: Any = None, **others: Any) -> Any: ...


def test_layers_that_are_given_more_of_a_sequence_are_refused() -> None:
    hidden = torch.zeros(2, 3, 4)
    check_stays(Layer(), (hidden, hidden), {"position_embeddings": (hidden, hidden), "use_cache": False})
    with pytest.raises(ValueError, match="Layer is given shared_keys"):
        check_stays(Layer(), (hidden,), {"shared_keys": {}, "position_ids": hidden})


def between_nodes(found: list[Any], *verbs: str) -> int:
    far = NODES.pairs["network"]
    return sum(
        sizes[to]
        for rank, (_, sent, _) in enumerate(found)
        for verb, sizes in sent.items()
        for to in range(NODES.num_ranks)
        if verb in verbs and far[rank, to]
    )


@pytest.mark.parametrize("transport", ["alltoall", "hierarchical"])
def test_fewer_bytes_cross_and_numbers_stay(transport: str, two_ranks: Ranks) -> None:
    stay, move = (two_ranks(step, transport, every) for every in (None, 1))
    (loss, aux, gradients), (moved_loss, moved_aux, moved_gradients) = stay[0][0], move[0][0]
    assert abs(loss - moved_loss) < 1e-5 and abs(aux - moved_aux) < 1e-5
    assert gradients.keys() == moved_gradients.keys()
    largest = max(float(gradient.abs().max()) for gradient in gradients.values())
    for name, gradient in gradients.items():
        torch.testing.assert_close(moved_gradients[name], gradient, rtol=1e-4, atol=1e-6 * largest, msg=name)
    assert all(moved for *_, moved in move) and not any(moved for *_, moved in stay)
    rows = VERBS[1:]
    assert between_nodes(move, *rows, *MOVES) < between_nodes(stay, *rows), "moves are paid for"
    assert between_nodes(move, "sequences_backward") > 0


@pytest.mark.parametrize("seed", range(8))
def test_no_other_assignment_costs_less(seed: int) -> None:
    draw = np.random.default_rng(seed)
    home_N = np.array([0, 0, 1, 2, 2, 2])
    cost_NW = draw.integers(0, 20, (6, 3))
    found_N = assign_sequences(cost_NW, home_N)
    assert (np.bincount(found_N) == np.bincount(home_N)).all()
    least = min(cost_NW[np.arange(6), order].sum() for order in set(itertools.permutations(home_N.tolist())))
    assert cost_NW[np.arange(6), found_N].sum() == least
    assert home_N.tolist() == [0, 0, 1, 2, 2, 2]


def test_who_gains_nothing_stays() -> None:
    home_N = np.arange(4).repeat(2)
    assert (assign_sequences(np.full((8, 4), 5), home_N) == home_N).all()


def test_many_sequences_on_many_ranks() -> None:
    """Each has one rank where it costs nothing; these ranks are a permutation of where they are."""
    draw = np.random.default_rng(0)
    home_N = np.arange(16).repeat(8)
    best_N = draw.permutation(home_N)
    cost_NW = draw.integers(1, 10**9, (128, 16))
    cost_NW[np.arange(128), best_N] = 0
    assert (assign_sequences(cost_NW, home_N) == best_N).all()
