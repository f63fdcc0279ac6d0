"""Which steps are captured as CUDA graphs. What a capture computes needs GPUs: tests/gpu/test_graphs_gpu.py."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from carpool.train.config import load_config
from carpool.train.run import graphs
from carpool.train.run.graphs import why_no_graphs


class OnGpu(nn.Module):
    """As far as `why_no_graphs` looks."""

    def __init__(self, attention: str = "sdpa", device: str = "cuda") -> None:
        super().__init__()
        text = SimpleNamespace(_attn_implementation=attention)
        self.config: Any = SimpleNamespace(get_text_config=lambda: text)
        self.device = torch.device(device)

    def parameters(self, recurse: bool = True) -> Any:
        return iter([SimpleNamespace(device=self.device)])


def layer(graphable: bool = True, replicas: int = 0, own: bool = False) -> Any:
    return SimpleNamespace(
        transport=SimpleNamespace(name="some", graphable=graphable),
        compute=None if own else object(),
        layout=SimpleNamespace(num_replicas=replicas),
    )


@pytest.mark.parametrize(
    ("model", "one", "overrides", "schedule", "why"),
    [
        (OnGpu(), layer(), [], "none", None),
        (OnGpu(), layer(), [], "chunks", None),
        (OnGpu(device="cpu"), layer(), [], "none", "there is no GPU"),
        (OnGpu(), layer(graphable=False), [], "none", "transport some waits for the host"),
        (OnGpu(), layer(own=True), [], "none", "own forward"),
        (OnGpu(), layer(), [], "two-batch", "two threads"),
        (OnGpu(), layer(replicas=2), [], "none", "copies"),
        (OnGpu(), layer(), ["placement.every=10"], "none", "move"),
        (OnGpu("flash_attention_2"), layer(), [], "none", "lengths of documents"),
        (OnGpu(), layer(), ["memory.dense=recompute"], "none", "random numbers"),
        (OnGpu(), layer(), ["memory.experts=host"], "none", "host memory"),
    ],
)
def test_why_steps_are_not_captured(model: Any, one: Any, overrides: list[str], schedule: str, why: str | None) -> None:
    found = why_no_graphs(load_config(None, overrides), model, [one], schedule)
    assert found is None if why is None else why in (found or "")


def test_fsdp_is_not_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs.fsdp, "states", lambda model: [object()])
    model: Any = OnGpu()
    assert "FSDP" in (why_no_graphs(load_config(None, []), model, [layer()], "none") or "")
