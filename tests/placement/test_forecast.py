"""Predictors of loads on histories whose future is known."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.placement import compare
from carpool.placement.policies import PREDICTORS, ema, forecast, last

DRAW = np.random.default_rng(0)


def noisy(steps: int = 60, experts: int = 37) -> np.ndarray:
    """Constant popularity, small batches."""
    share_E = DRAW.dirichlet(np.full(experts, 2.0))
    return DRAW.multinomial(400, share_E, size=steps)


def drifting(steps: int = 80, experts: int = 32) -> np.ndarray:
    """Popularity waves through the experts, large batches."""
    step_N1, phase_E = np.arange(steps)[:, None], np.linspace(0, 2 * np.pi, experts, endpoint=False)
    return 1000 * (1.5 + np.sin(0.25 * step_N1 + phase_E))


@pytest.mark.parametrize("name", PREDICTORS)
def test_a_constant_load_is_predicted_exactly(name: str) -> None:
    load_E = np.array([5, 0, 17, 3])
    for steps in (1, 2, 5, 40):
        np.testing.assert_allclose(forecast(name, np.tile(load_E, (steps, 1))), load_E, atol=1e-9)


@pytest.mark.parametrize("name", PREDICTORS)
def test_predictions_keep_the_sum_and_see_only_the_past(name: str) -> None:
    history_NE = noisy()
    guess_E = forecast(name, history_NE[:30])
    assert guess_E.sum() == pytest.approx(400) and (guess_E >= 0).all()
    changed_NE = history_NE.copy()
    changed_NE[30:] = 0
    np.testing.assert_array_equal(forecast(name, changed_NE[:30]), guess_E)


def test_ema_weighs_by_age() -> None:
    np.testing.assert_allclose(ema(np.array([[4, 0], [0, 4]]), decay=0.5), [4 / 3, 8 / 3])
    assert last(np.array([[4, 0], [0, 4]])).tolist() == [0, 4]


def test_averages_win_on_noise_and_the_last_step_on_drift() -> None:
    error = {name: {one["name"]: one["error"] for one in compare(history, 4, warmup=20)}
             for name, history in (("noise", noisy()), ("drift", drifting()))}  # fmt: skip
    assert error["noise"]["ema"] < 0.8 * error["noise"]["last"]
    assert error["drift"]["last"] < error["drift"]["ema"]


def test_compare_knows_the_best_possible() -> None:
    records = {one["name"]: one for one in compare(drifting(), 4, warmup=10, every=3)}
    assert records["oracle"]["error"] == pytest.approx(0)
    for name in PREDICTORS:
        assert records[name]["load_ratio"] >= records["oracle"]["load_ratio"] - 1e-3
        assert float(records[name]["error"]) > 0


def test_an_idle_step_is_no_error() -> None:
    history_NE = np.zeros((30, 4))
    for name in PREDICTORS:
        assert forecast(name, history_NE).tolist() == [0, 0, 0, 0]
    assert compare(history_NE, 2)[0]["error"] == 0


def test_what_is_no_history_is_refused() -> None:
    with pytest.raises(ValueError, match=r"\(steps, experts\)"):
        last(np.zeros(4))
    with pytest.raises(ValueError, match="not negative"):
        ema(np.array([[1.0, -1.0]]))
    with pytest.raises(ValueError, match="no load predictor 'mean'; use one of last, ema"):
        forecast("mean", np.ones((3, 3)))
    with pytest.raises(ValueError, match="leaves nothing to predict"):
        compare(np.ones((5, 3)), 1, warmup=5)
