"""When copies of the optimizer's state are hidden: the example of the module, and its limits."""

from __future__ import annotations

import math

import pytest

from carpool.planner.machine.hardware import hardware_of
from carpool.planner.step.lengths import break_even_tokens, stream_seconds

H200 = hardware_of("NVIDIA H200")


def test_the_example_of_the_module() -> None:
    state, per_token = 30.5e9 * (2 + 2 * (1 + 4 / 256)), 6 * 3.3e9
    seconds = stream_seconds(state, H200)
    assert seconds == pytest.approx(3.05, abs=0.05)
    tokens = break_even_tokens(state, per_token, H200, "in the backward")
    assert tokens == pytest.approx(114_000, rel=0.01)
    # By definition: two thirds of the step's operations last as long as the copies.
    assert tokens * per_token * 2 / 3 / H200.flops == pytest.approx(seconds)


def test_nothing_hides_what_waits_for_the_norm() -> None:
    assert break_even_tokens(1e9, 1e9, H200, "after the norm") == math.inf
    assert break_even_tokens(0, 1e9, H200, "after the norm") == 0
    with pytest.raises(ValueError, match="beside = 'sometimes' is not known"):
        break_even_tokens(1e9, 1e9, H200, "sometimes")
