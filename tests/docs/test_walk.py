"""How long the call path of one MoE layer is, and that the table in docs/architecture.md names it in the real order.

`sys.setprofile` sees every Python function that runs, generators and comprehensions too. The two bounds are what was
measured: whoever makes the path shorter lowers them, and nobody raises them.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import torch

import carpool
from tests.ranks import Ranks, mesh

PAGE = Path(__file__).parents[2] / "docs" / "architecture.md"
# Of one forward and one backward of `carpool.MoE` over `dedup`: files of the package that run, and calls into them.
MOST_FILES, MOST_CALLS = 27, 248


def _documented(heading: str) -> list[tuple[str, str]]:
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


def test_the_call_path_is_short_and_as_documented(ranks: Ranks) -> None:
    forward, backward = ranks(_walk)[0]
    files = {file for file, _ in (*forward, *backward)}
    assert len(files) <= MOST_FILES, sorted(files)
    assert len(forward) + len(backward) <= MOST_CALLS
    for heading, calls in (("Forward", forward), ("Backward", backward)):
        steps = _documented(heading)
        assert len(steps) > 8
        rest = iter(calls)
        for step in steps:
            assert step in rest, f"{heading}: {step} is not called, or not in this place of the table"
