"""`python -m carpool.conformance` finds each deliberate mistake in the case that is made for it, and nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest

from carpool import conformance
from tests.hf import broken_experts
from tests.ranks import Ranks

RANKS_IMPORT = ["carpool.conformance", "tests.hf.broken_experts"]
MESH = "fsdp2 ep2"
# The mistake, the cases that must find it, what they must find wrong, and right.
SEEN = ["gradients", "norm and clipping", "accumulation", "skew", "empty ranks", "inference"]
MISTAKES = {
    "lost_gradient": (SEEN[:5], "gate.weight", "logits"),
    "weights_twice": (SEEN, "logits", "nothing else"),
    "wrong_order": (SEEN, "logits", "nothing else"),
    "stale_choices": (["accumulation"], "logits", "nothing else"),
    "dropped_tokens": (["skew", "empty ranks"], "logits", "nothing else"),
    "no_number": (SEEN, "logits", "nothing else"),
    "norm_of_shards": (["norm and clipping"], "norm", "logits"),
}


def measure(text: str, cases: list[str], path: str, mesh: str = MESH) -> list[conformance.Result]:
    return [conformance.measure(text, case, mesh, str(Path(path, str(n)))) for n, case in enumerate(cases)]


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes(two_ranks: Ranks, tmp_path: Path, name: str) -> None:
    failing, wrong, right = MISTAKES[name]
    results = two_ranks(measure, f"{broken_experts.__name__}:{name}", SEEN, str(tmp_path))[0]
    assert [one.case for one in results if one.verdict == "FAIL"] == failing, conformance.table(results)
    for one in results:
        bad = [what for what, error in one.errors.items() if error > conformance.BOUND]
        assert bool(bad) == (one.case in failing)
        assert not bad or any(wrong in what for what in bad), one
        assert not any(right in what for what in bad), one


def test_right_ones(two_ranks: Ranks, tmp_path: Path) -> None:
    for name in ("all_to_all", "carpool", "all_to_all+batched_mm"):
        results = two_ranks(measure, name, list(conformance.CASES), str(tmp_path / name))[0]
        expected = [
            "not counted" if case == "balance of batch" and name != "carpool" else "pass" for case in conformance.CASES
        ]
        assert [one.verdict for one in results] == expected, conformance.table(results)
    refused, *_ = two_ranks(measure, "all_reduce", ["gradients"], str(tmp_path / "refused"))[0]
    assert refused.verdict == "refused" and "ep_size == tp_size" in refused.why


@pytest.mark.parametrize(
    ("option", "value", "says"),
    [
        ("--implementation", "..", ".. is neither an implementation in Transformers nor a module"),
        ("--json", "no/x.json", "cannot be written (No such file or directory)"),
        ("--timeout", "0", "give 1 to 86,400"),
    ],
)
def test_bad_options_are_refused_before_ranks_start(
    option: str, value: str, says: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(conformance, "launch", None)
    with pytest.raises(SystemExit):
        conformance.main(["--implementation", "all_to_all", option, value])
    assert says in capsys.readouterr().err


def test_skewed_choices() -> None:
    """The cases are what their names say."""
    shares = {}
    for name in ("gradients", "skew", "empty ranks"):
        out = conformance.tiny_model(conformance.CASES[name])(input_ids=conformance.batch(0), output_router_logits=True)
        first = [(logits.topk(2).indices < 2).float().mean().item() for logits in out.router_logits]
        shares[name] = min(first), max(first)
    assert shares["gradients"][1] < 0.35 and 0.6 < shares["skew"][0] <= shares["skew"][1] < 0.95
    assert shares["empty ranks"] == (1.0, 1.0)


@pytest.mark.slow  # further processes, which import all; the same cases run above
def test_command(capsys: pytest.CaptureFixture[str]) -> None:
    """A rank that fails alone does not end the table; a file names implementations."""
    arguments = ["--case", "gradients", "--case", "inference", "--mesh", MESH, "--timeout", "20"]
    assert conformance.main(["--implementation", f"{broken_experts.__file__}:dead_rank", *arguments]) == 1
    lines = [line for line in capsys.readouterr().out.splitlines() if MESH in line]
    assert len(lines) == 2 and "| FAIL |" in lines[0] and "no memory left" in lines[0] and "| pass |" in lines[1]
    assert conformance.main(["--implementation", "auto", "--case", "inference", "--mesh", MESH]) == 0


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("nothing_here", "nor a module"),
        ("auto+nothing", "nothing is not one of"),
        ("missing.py", "nor a module"),
        ("tests.hf.broken_experts", "choose one as"),
        ("tests.hf.broken_experts:other", "choose one as"),
    ],
)
def test_names(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        conformance.find_implementation(text)
