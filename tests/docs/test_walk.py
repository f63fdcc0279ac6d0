"""The walk of one token in docs/architecture.md is the one that it takes."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import torch

import carpool
from tests.ranks import Ranks, mesh

PAGE = Path(__file__).parents[2] / "docs" / "architecture.md"
MOST_FILES = 14


def _told(heading: str) -> list[tuple[str, str]]:
    section = PAGE.read_text().split(f"### {heading}\n")[1].split("\n### ")[0]
    return re.findall(r"^\| \d+ \| `(carpool/[^`]+)` \| `([^`]+)` \|", section, flags=re.MULTILINE)


def _walk() -> tuple[list[tuple[str, str]], list[tuple[str, str]]]:
    """Every function of Carpool that one forward and one backward call, in order."""
    package = Path(carpool.__file__).parent
    calls: list[tuple[str, str]] = []

    def note(frame: Any, event: str, _: Any) -> None:
        file = frame.f_code.co_filename
        if event == "call" and file.startswith(str(package)):
            calls.append((Path(file).relative_to(package.parent).as_posix(), frame.f_code.co_qualname))

    moe = carpool.MoE(16, 32, num_experts=8, num_experts_per_tok=2, ep_mesh=mesh((4,), ("ep",)), transport="dedup")
    x_TH = torch.randn(6, 16, requires_grad=True)
    moe(x_TH).sum().backward()  # what is made once is made
    with torch.autograd.set_multithreading_enabled(False):
        sys.setprofile(note)
        try:
            loss = moe(x_TH).sum()
            forward = list(calls)
            calls.clear()
            loss.backward()
        finally:
            sys.setprofile(None)
    return forward, calls


def test_the_walk_is_as_told(ranks: Ranks) -> None:
    told = {heading: _told(heading) for heading in ("Forward", "Backward")}
    assert all(len(steps) > 8 for steps in told.values())
    assert len({file for steps in told.values() for file, _ in steps}) <= MOST_FILES
    for (heading, steps), calls in zip(told.items(), ranks(_walk)[0], strict=True):
        rest = iter(calls)
        for step in steps:
            assert step in rest, f"{heading}: {step} is not called, or not in this place of the walk"
