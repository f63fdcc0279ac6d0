"""How long the call path of one MoE layer is, and that the table in docs/architecture.md names it in the real order.

`sys.setprofile` sees every Python function that runs, generators and comprehensions too. The two bounds are what was
measured: whoever makes the path shorter lowers them, and nobody raises them.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

import carpool
from carpool.train.config import load_config
from carpool.train.run.loop import update
from carpool.train.run.run import start_run
from tests.ranks import Ranks, mesh
from tests.train.test_loop import MODEL

PAGE = Path(__file__).parents[2] / "docs" / "architecture.md"
# Of one forward and one backward of `carpool.MoE` over `dedup`: files of the package that run, and calls into them.
MOST_FILES, MOST_CALLS = 18, 242
# The same of one step of training a model with two layers of experts on two ranks: `carpool.train.run.loop.update`.
# Alone it passes 32 files; after a test of context parallelism, Transformers' masks pass one more, with a few calls.
MOST_STEP_FILES, MOST_STEP_CALLS = 35, 775


def _documented(heading: str) -> list[tuple[str, str]]:
    section = PAGE.read_text().split(f"### {heading}\n")[1].split("\n### ")[0]
    return re.findall(r"^\| \d+ \| `(carpool/[^`]+)` \| `([^`]+)` \|", section, flags=re.MULTILINE)


@contextmanager
def _calls() -> Iterator[list[tuple[str, str]]]:
    """(file, function) of every call into Carpool inside, in order."""
    package = Path(carpool.__file__).parent
    calls: list[tuple[str, str]] = []

    def note(frame: Any, event: str, _: Any) -> None:
        file = frame.f_code.co_filename
        if event == "call" and file.startswith(str(package)):
            calls.append((Path(file).relative_to(package.parent).as_posix(), frame.f_code.co_qualname))

    with torch.autograd.set_multithreading_enabled(False):
        sys.setprofile(note)
        try:
            yield calls
        finally:
            sys.setprofile(None)


def _layer() -> tuple[list[tuple[str, str]], list[tuple[str, str]]]:
    """What one forward and one backward of a layer call."""
    moe = carpool.MoE(16, 32, num_experts=8, num_experts_per_tok=2, ep_mesh=mesh((4,), ("ep",)), transport="dedup")
    x_TH = torch.randn(6, 16, requires_grad=True)
    moe(x_TH).sum().backward()  # what is made once is made
    with _calls() as forward:
        loss = moe(x_TH).sum()
    with _calls() as backward:
        loss.backward()
    return forward, backward


def _step(output: str, overrides: list[str]) -> list[tuple[str, str]]:
    """What the third or the fourth step of a training run calls, whichever passes fewer files: now and then one has to
    make something that earlier tests of its process have thrown away."""
    run = start_run(load_config(None, [f"training.output_dir={output}", *overrides]), None, "test")
    try:
        with run.stop:
            for _ in range(2):
                update(run)
            with _calls() as third:
                update(run)
            with _calls() as fourth:
                update(run)
    finally:
        run.close()
    return min(third, fourth, key=lambda calls: len({file for file, _ in calls}))


def test_the_call_path_is_short_and_as_documented(ranks: Ranks) -> None:
    forward, backward = ranks(_layer)[0]
    files = {file for file, _ in (*forward, *backward)}
    assert len(files) <= MOST_FILES, sorted(files)
    assert len(forward) + len(backward) <= MOST_CALLS
    for heading, calls in (("Forward", forward), ("Backward", backward)):
        steps = _documented(heading)
        assert len(steps) > 8
        rest = iter(calls)
        for step in steps:
            assert step in rest, f"{heading}: {step} is not called, or not in this place of the table"


def test_the_call_path_of_a_training_step_is_short(two_ranks: Ranks, text: list[str], tmp_path: Path) -> None:
    never = ["training.eval_on_start=false", "training.eval_steps=none", "training.save_steps=none"]
    calls = two_ranks(_step, str(tmp_path / "run"), [*MODEL, *text, *never])[0]
    # Once a process has had context parallelism, each call of attention passes its file.
    files = {file for file, _ in calls} - {"carpool/hf/context_parallel.py"}
    assert len(files) <= MOST_STEP_FILES, "\n".join(sorted(files))
    assert len(calls) <= MOST_STEP_CALLS, len(calls)
