"""A training step: its micro-batches, its one small read from the device, and `training.full_determinism`."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import carpool
from carpool.train.config import load_config
from carpool.train.run.loop import loop
from carpool.train.run.run import start_run
from carpool.train.steps import training_objective as objective
from carpool.train.steps.diagnose import determinism
from carpool.train.steps.training_objective import Objective
from tests.hf.tiny_models import discover, tiny_batch, tiny_model
from tests.ranks import Ranks
from tests.train.test_loop import MODEL, records

PACKAGE = str(Path(carpool.__file__).parent)
STEPS = 5


class Reads(TorchDispatchMode):
    """Counts where the package reads a tensor: a number (`item`, `int`, `bool`), or all of it (`tolist`)."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def note(self) -> None:
        frame = sys._getframe(1)
        while frame.f_back is not None and not frame.f_code.co_filename.startswith(PACKAGE):
            frame = frame.f_back
        self.counts[f"{Path(frame.f_code.co_filename).relative_to(PACKAGE)}:{frame.f_code.co_name}"] += 1

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            self.note()
        return func(*args, **(kwargs or {}))


def reads(output: str, overrides: list[str]) -> Counter[str]:
    """On a rank: where the steps of a run read tensors, without what rides on a CPU must know on the host."""
    run = start_run(load_config(None, [f"training.output_dir={output}", *overrides]), None, "test")
    whole = torch.Tensor.tolist
    try:
        with run.stop, Reads() as found:

            def tolist(tensor: torch.Tensor) -> Any:
                found.note()
                return whole(tensor)

            with mock.patch.object(torch.Tensor, "tolist", tolist):
                loop(run)
    finally:
        run.close()
    rooms = ("ride", "transport", "layer", "layout", "experts", "routing")
    return Counter({place: count for place, count in found.counts.items() if place.split("/")[0] not in rooms})


def test_a_step_reads_one_tensor(two_ranks: Ranks, text: list[str], tmp_path: Path) -> None:
    settings = [*MODEL, *text, f"training.max_steps={STEPS}", "training.gradient_accumulation_steps=2"]
    settings += ["training.eval_on_start=false", "training.eval_steps=none", "training.save_steps=none"]
    found = two_ranks(reads, str(tmp_path / "run"), settings)
    for counts in found:
        # Numbers of rides are looked at once they are on the host, which a CPU cannot tell apart.
        assert (
            not {"hf/ride_metrics.py:start", "hf/observe/metrics.py:_counts", "metrics/counters.py:totals"}
            & counts.keys()
        )
        waits = {place: count for place, count in counts.items() if not place.startswith("hf/ride_metrics.py")}
        assert waits == {"train/run/loop.py:update": STEPS}, counts
    assert list(records(tmp_path / "run")) == list(range(1, STEPS + 1))


def test_a_backward_has_the_attention_of_its_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers that are computed again in the backward must take the kernels that they took before."""
    inside: list[bool] = []
    seen: list[int] = []

    @contextmanager
    def fastest(device: torch.device) -> Iterator[None]:
        inside.append(True)
        yield
        inside.pop()

    monkeypatch.setattr(objective, "fastest_attention", fastest)
    model: Any = tiny_model(discover()["olmoe"]).train()
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda _: seen.append(len(inside)))
    batch = tiny_batch(model)
    batch["labels"] = batch["input_ids"]
    Objective(model, top_k=2, aux_coef=0.0, dp_size=1, autocast=None).backward([batch])
    assert seen and min(seen) == 1 and not inside


@pytest.mark.parametrize("on", [False, True])
def test_it_holds_inside_and_ends_with_errors_too(on: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # or it stays, as a GPU's process needs it
    with pytest.raises(KeyError), determinism(on):
        assert torch.are_deterministic_algorithms_enabled() == on
        raise KeyError
    assert not torch.are_deterministic_algorithms_enabled()
    assert torch.utils.deterministic.fill_uninitialized_memory


@pytest.mark.gpu
def test_the_backward_of_fused_attention_repeats() -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 8, 2048, 64, device="cuda", requires_grad=True) for _ in range(3))
    with determinism(True):
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        grad = torch.randn_like(out)
        first, *others = (torch.autograd.grad(out, (q, k, v), grad, retain_graph=True) for _ in range(5))
    for other in others:
        assert all(torch.equal(a, b) for a, b in zip(first, other, strict=True))
