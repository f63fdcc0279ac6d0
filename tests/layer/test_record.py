"""`carpool.record`: the choices of every token of every forward, as a trace that can be placed."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import carpool
from carpool.placement.table import place
from carpool.placement.trace import Trace
from tests.ranks import Ranks, mesh

ROOT = Path(__file__).parents[2]


class Blocks(nn.Module):
    """Two layers of a model."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.layers = nn.ModuleList(carpool.MoE(8, 8, 8, 2, **options) for _ in range(2))
        self.again = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + (checkpoint(layer, x, use_reentrant=False) if self.again else layer(x))
        return x


def chosen(moe: carpool.MoE) -> torch.Tensor:
    """Of the last forward, best first."""
    assert moe.routing is not None and moe.routing.weight_TK is not None
    order_TK = moe.routing.weight_TK.sort(dim=1, descending=True, stable=True).indices
    return moe.routing.expert_TK.long().gather(1, order_TK)


def test_every_token_of_every_forward_of_every_layer(tmp_path: Path) -> None:
    model, seen = Blocks(), []
    with carpool.record(model, weights=True) as recorder:
        for _ in range(3):
            model(torch.randn(2, 5, 8))
            seen.append(torch.stack([chosen(layer) for layer in model.layers]))
    model(torch.randn(2, 5, 8))  # after the block
    recorder.trace(seed=7).save(tmp_path / "trace.npz")
    trace = Trace.load(tmp_path / "trace.npz")
    assert (trace.expert_LTK == torch.cat(seen, dim=1).numpy()).all()
    assert trace.sequence_T.tolist() == [number for number in range(6) for _ in range(5)]
    assert trace.layers == ("layers.0", "layers.1") and trace.num_experts == 8 and trace.meta["seed"] == 7
    assert trace.weight_LTK is not None and trace.token_T is None
    assert place(trace, ranks=2, solvers=["lpt"]).layouts["layers.1"].num_ranks == 2


def test_long_sequences_are_cut_and_the_newest_are_kept() -> None:
    moe, seen = carpool.MoE(8, 8, 8, 2), []
    with carpool.record(moe, 16, stretch=4) as recorder:
        for tokens in (7, 10):  # of one sequence each: (T, H)
            moe(torch.randn(tokens, 8))
            seen.append(chosen(moe))
        trace = recorder.trace()
    assert [trace.sequence_T.tolist().count(number) for number in range(4)] == [3, 4, 4, 2]
    assert (trace.expert_LTK[0] == torch.cat([seen[0][4:], seen[1]]).numpy()).all() and trace.layers == ("moe",)


def test_every_other_forward_and_chosen_layers() -> None:
    model = Blocks()
    with carpool.record(model, every=2, layers=["layers.1"]) as recorder:
        for tokens in (3, 4, 5):
            model(torch.randn(1, tokens, 8))
        trace = recorder.trace()
    assert trace.num_tokens == 8 and trace.layers == ("layers.1",)


def test_what_is_recomputed_is_recorded_once() -> None:
    model = Blocks()
    model.again = True
    with carpool.record(model) as recorder:
        for _ in range(2):
            model(torch.randn(1, 6, 8, requires_grad=True)).sum().backward()
    assert recorder.trace().num_tokens == 12


def test_what_cannot_be_recorded_is_said() -> None:
    with pytest.raises(TypeError, match=r"module is a str, not a torch.nn.Module"):
        carpool.record("moe")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="Linear has no MoE layer of Carpool"):
        carpool.record(nn.Linear(2, 2))
    with pytest.raises(ValueError, match=r"no MoE layer 'layers.2'; it has layers.0, layers.1"):
        carpool.record(Blocks(), layers=["layers.2"])
    with pytest.raises(ValueError, match="stretch=0"):
        carpool.record(Blocks(), stretch=0)
    with pytest.raises(ValueError, match=r"have \[4, 8\] experts"):
        carpool.record(nn.Sequential(carpool.MoE(8, 8, 4, 2), carpool.MoE(8, 8, 8, 2)))
    with carpool.record(Blocks()) as recorder, pytest.raises(ValueError, match="no forward was recorded yet"):
        recorder.trace()


def recorded_on_ranks() -> tuple[list[list[int]], list[int], list[list[int]]]:
    """A trace of four ranks, of which the last has no tokens, and this rank's own choices."""
    torch.manual_seed(torch.distributed.get_rank())
    moe = carpool.MoE(8, 8, 8, 2, ep_mesh=mesh((4,), ("ep",)))
    own = []
    with carpool.record(moe) as recorder:
        for _ in range(2):
            moe(torch.randn(0 if torch.distributed.get_rank() == 3 else 3, 8))
            own += chosen(moe).tolist()
    trace = recorder.trace()
    return trace.expert_LTK[0].tolist(), trace.sequence_T.tolist(), own


def test_all_ranks_get_the_same_trace(ranks: Ranks) -> None:
    found = ranks(recorded_on_ranks)
    assert all(one[:2] == found[0][:2] for one in found)
    expert_TK, sequence_T, _ = found[0]
    assert len(set(sequence_T)) == 6
    expected = [row for turn in range(2) for *_, own in found[:3] for row in own[3 * turn : 3 * turn + 3]]
    assert expert_TK == expected


def other_tokens_on_rank_1() -> str:
    model = Blocks(ep_mesh=mesh((4,), ("ep",)))
    with carpool.record(model) as recorder:
        y = model.layers[0](torch.randn(3, 8))
        model.layers[1](y[:2] if torch.distributed.get_rank() == 1 else y)
    try:
        recorder.trace()
    except ValueError as error:
        return str(error)
    return ""


def test_layers_of_other_tokens_on_one_rank_are_told_to_all(ranks: Ranks) -> None:
    first, second, *_ = ranks(other_tokens_on_rank_1)
    assert "layers.1 got 2 tokens while the model's input has 3" in second and "rank 1 has no trace" in first


def test_a_model_of_transformers() -> None:
    from carpool.hf import install
    from tests.hf.tiny_models import NUM_SEQUENCES, SEQUENCE_LENGTH, discover, tiny_batch, tiny_model

    model = tiny_model(discover()["olmoe"])
    with pytest.raises(ValueError, match=r"carpool.hf.TraceRecorder records other layers"):
        carpool.record(model)
    install(model)
    ids = tiny_batch(model, 0)["input_ids"]
    with carpool.record(model) as recorder:
        model(input_ids=ids)
    trace = recorder.trace()
    assert trace.num_tokens == NUM_SEQUENCES * SEQUENCE_LENGTH and trace.num_sequences == NUM_SEQUENCES
    with carpool.hf.TraceRecorder(model, evaluation=True, stretch=SEQUENCE_LENGTH) as other:
        model(input_ids=ids)
        first = other.trace()
    assert (first.expert_LTK == trace.expert_LTK[:, :SEQUENCE_LENGTH]).all() and first.layers == trace.layers


def test_the_example_of_the_docs(tmp_path: Path) -> None:
    """It runs as it is, and needs no transformers."""
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs/library.md").read_text(), flags=re.DOTALL)
    (example,) = [block for block in blocks if "carpool.record" in block]
    program = "import sys\nsys.modules['transformers'] = None\n" + example
    subprocess.run([sys.executable, "-c", program], check=True, cwd=tmp_path, timeout=240)
    assert Trace.load(tmp_path / "trace.npz").num_sequences == 8
