"""The search, against predicting everything that fits; and what it says of numbers that do not go together."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import replace
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tomli_w
from typer.testing import CliRunner

from carpool.cli import app
from carpool.cli.planning import number_of
from carpool.parallel.degrees import Degrees
from carpool.planner.candidate import Candidate, Spare
from carpool.planner.decisions.configured import model_of
from carpool.planner.machine.hardware import LinkRate, find_hardware
from carpool.planner.model.routes import Routes
from carpool.planner.search import moves
from carpool.planner.search.enumeration import Bounds, Enumeration
from carpool.planner.search.plan import Search, plan
from carpool.planner.search.space import MOVES, POLICY_SETS, Problem, Space
from carpool.planner.search.why import in_words, longer_than, with_all_memory, without_limit
from carpool.planner.step.peak import memory_of
from carpool.planner.step.prediction import predict, step_seconds
from carpool.train.config import load_config
from carpool.train.config.declarations import declared
from carpool.train.config.published import read_keys
from carpool.train.config.schema import Config
from tests.environment import TRACES
from tests.planner.step_problem import shape as shape_of

SHAPE = shape_of("qwen3-30b-a3b", 2)
H100 = find_hardware("H100")
SMALL = Space(
    pp=(1, 2), tp=(1, 2), cp=(1,), etp=(1,), policies=POLICY_SETS[:4], micro_batches=(1, 2),
    optimizer_in_backward=(False, True), max_grad_norm=0.0, excluded=declared(Config).why_refused,
)  # fmt: skip


NUMBERS: dict[str, Any] = {"gpus": 8, "tokens": 16 * 4096, "sequence_length": 4096, "per_node": 4}


class _NoBounds(Bounds):
    def seconds(self, candidate: Candidate) -> float:
        return 0.0


class _Everything(Enumeration):
    """Without any pruning: all that fits."""

    def _that_fit(self, base: Candidate):  # type: ignore[no-untyped-def]
        for state, gradients in product(self.space.optimizer_offload, self.space.optimizer_in_backward):
            for policies in self.space.policies:
                kept = {**base.policies, **policies}
                one = replace(base, policies=kept, optimizer_offload=state, optimizer_in_backward=gradients)
                if "rows" in policies and base.degrees.ep == 1:
                    continue
                if gradients and base.accumulation > 1:
                    continue
                if self.space.excluded(one.flat_settings()) is not None:
                    continue
                total = memory_of(self.problem.model, one, self.problem.routes).total
                assert self.memories.total(one) == total, "sizes that candidates share"
                if total <= self.problem.memory:
                    yield one


@pytest.mark.parametrize("memory", [9e9, 60e9])
def test_the_best_of_everything_is_found(memory: float) -> None:
    found = plan(SHAPE, H100, **NUMBERS, memory=memory, space=SMALL, best=3)
    problem = Problem(SHAPE, H100, 8, 4, 16, 4096, memory, Routes())
    everything = Search(_Everything(problem, SMALL), _NoBounds(problem), 3)
    everything.run()
    best = [one.seconds.middle for one in everything.sorted_best()]
    # Further ones may be dominated: the best with a policy that it does not need.
    assert found.plans[0].prediction.seconds.middle == pytest.approx(best[0])
    assert found.counts["predicted"] < everything.counts["predicted"]
    assert all(one.memory.total <= memory for one in found.plans)


def test_what_the_memory_that_is_held_back_would_allow_is_named() -> None:
    numbers = {**NUMBERS, "space": replace(SMALL, schedules=("none",))}  # with halves, two plans take the same time
    roomy = plan(SHAPE, H100, **numbers, memory=60e9, best=1)
    needed = roomy.plans[0].memory.total
    # The fastest of all needs 95 % of this device.
    found = plan(SHAPE, replace(H100, capacity=needed / 0.95), **numbers, best=1)
    assert found.tight is not None and found.tight.candidate == roomy.plans[0].candidate
    assert found.plans[0].memory.total <= 0.92 * needed / 0.95 < found.tight.memory.total
    assert found.tight.prediction.seconds.middle < found.plans[0].prediction.seconds.middle
    said = with_all_memory(found, needed / 0.95)
    assert said is not None and said.startswith(found.tight.candidate.label) and "8 % are held back" in said
    # With room for it nothing is held back, and what was asked for by name is used to the end.
    assert roomy.tight is None and plan(SHAPE, H100, **numbers, memory=0.9 * needed, best=1).tight is None


def test_sequences_of_a_model_with_sinks_are_not_divided() -> None:
    shape = shape_of("gpt-oss-20b", 2)
    assert shape.sinks and not shape.layers[0].whole_scores
    found = plan(shape, H100, gpus=8, tokens=2**19, sequence_length=8192, space=replace(SMALL, cp=(1, 2)), best=3)
    assert all(one.candidate.degrees.cp == 1 for one in found.plans)
    assert any("attention with sinks" in why for why in found.refused)
    with_it = load_config(None, ["model.config=gpt-oss-20b", "parallelism.cp_size=2"]).model_dump()
    assert model_of(with_it, read_keys("gpt-oss-20b")).layers[0].whole_scores


def test_no_step_is_taken_for_shorter_than_its_bound() -> None:
    shape = shape_of("qwen3-30b-a3b")
    one = Space(
        pp=(1,), tp=(1,), cp=(1,), ep=(2,), micro_batches=(2,), transports=("nvlink",), schedules=("none",),
        data_parallel=("fsdp",), optimizer_offload=("none",),
    )  # fmt: skip
    problem = Problem(shape, H100, 8, 8, 256, 4096, 75e9, Routes())
    bounds = Bounds(problem)
    search = Search(Enumeration(problem, one), bounds, 5)
    search.run()
    assert search.found and all(-negative >= bounds.seconds(candidate) for negative, _, candidate in search.found)


@pytest.mark.parametrize(
    "candidate",
    [
        Candidate(Degrees(1, 8, 1, 8), 4096, 1, 9, data_parallel="fsdp"),
        Candidate(Degrees(1, 8, 1, 4), 4096, 1, 8, "nvlink", "two-batch", data_parallel="fsdp"),
        Candidate(Degrees(1, 4, 1, 4, pp=2), 4096, 1, 12),
        Candidate(Degrees(1, 4, 1, 4, pp=2), 4096, 1, 12, schedule="two-batch", pipeline="Interleaved1F1B"),
        Candidate(Degrees(1, 4, 1, 4, pp=2), 4096, 1, 12, schedule="two-batch", pipeline="DualPipeV"),
    ],
)
def test_bounds_are_bounds_and_the_first_micro_batches_tell_of_all(candidate: Candidate) -> None:
    shape = shape_of("gpt-oss-20b")
    shape = replace(shape, layers=shape.layers * 2)
    whole = predict(shape, H100, candidate, 8).seconds
    assert step_seconds(shape, H100, candidate, 8) == pytest.approx(whole.middle, rel=0.01)
    bound = Bounds(Problem(shape, H100, 8, 8, 256, 4096, 1e12, Routes())).seconds(candidate)
    assert 0.7 * whole.middle < bound <= whole.middle
    assert whole.low < whole.middle < whole.high


@pytest.mark.parametrize("memory", [9e9, 60e9])
def test_moves_end_near_the_best(memory: float) -> None:
    best, found = (plan(SHAPE, H100, **NUMBERS, memory=memory, space=SMALL, system=system) for system in (None, MOVES))
    (one,) = found.plans
    assert one.memory.total <= memory
    assert 1 - 1e-9 <= one.prediction.seconds.middle / best.plans[0].prediction.seconds.middle < 1.1


def test_what_a_plan_would_be_without_a_limit_of_memory_is_said() -> None:
    numbers: dict[str, Any] = {**NUMBERS, "per_node": 8, "best": 2}
    again = replace(SMALL, policies=POLICY_SETS[1:2])
    roomy, tight = (plan(SHAPE, H100, **numbers, space=space, memory=60e9).plans for space in (SMALL, again))
    assert without_limit(roomy[0], SHAPE, H100, 8, Routes(), 60e9) is None
    said = without_limit(tight[0], SHAPE, H100, 8, Routes(), 9e9)
    assert said is not None and re.fullmatch(
        r"a step of .* s, .* % MFU, with .* GiB of a rank: .*; 8.4 may be used.*", said
    )
    seconds, needed = (float(re.search(found, said)[1]) for found in (r"of ([\d.]+) s", r"with ([\d.]+) GiB"))  # type: ignore[index]
    assert seconds < tight[0].prediction.seconds.middle and needed > 8.4, said
    more = longer_than(*roomy)
    assert more.startswith(f"{roomy[1].candidate.label}: ") and "% longer" in more


def test_what_a_space_allows() -> None:
    problem = Problem(SHAPE, H100, 8, 8, 16, 4096, 60e9, Routes())
    refused = replace(SMALL, excluded=lambda flat: "pp" if flat["parallelism.pp_size"] > 1 else None)
    for space, compiled in ((refused, {False}), (replace(SMALL, excluded=lambda flat: None), {True})):
        bases = list(Enumeration(problem, space).bases())
        assert {one.compiled for one in bases if one.degrees.pp > 1} == compiled
        assert {one.compiled for one in bases if one.degrees.pp == 1} == {True}
    space = Space(pp=(1,), cp=(1,), etp=(1,), ep=(8,), policies=POLICY_SETS[:1], micro_batches=(2,), spare=Spare(2))
    found = plan(SHAPE, H100, **NUMBERS, space=space).plans
    assert found and all(one.candidate.spare == Spare(2) for one in found)
    assert "2 spare slots of a rank" in " ".join(in_words(found[0], 8))
    single = replace(found[0], candidate=replace(found[0].candidate, degrees=Degrees(), accumulation=1))
    assert in_words(single, 8)[0].startswith("1 data-parallel rank; each step of one is 1 micro-batch of ")
    small = replace(SMALL, runs=lambda one: "not whole" if one.data_parallel == "zero1" else None)
    for system in (None, MOVES):
        found = plan(SHAPE, H100, **NUMBERS, memory=60e9, space=small, system=system)
        assert found.refused["not whole"] and found.plans
        assert all(one.candidate.data_parallel == "fsdp" for one in found.plans)


@pytest.mark.parametrize(("hops", "ends"), [(0, 16), (moves.HOPS, 1)])
def test_moves_go_on_through_longer_steps(hops: int, ends: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """From 8 experts' ranks, 16 are a little better, and 1 is best, behind 4 and 2, which are worse."""
    seconds = {1: 1.0, 2: 6.0, 4: 5.0, 8: 4.0, 16: 3.0}
    places = {moves.Place(one := Degrees(1, 16, 1, ep), 1): Candidate(one, 4096, 1) for ep in seconds}
    search: Any = SimpleNamespace(
        best_of=lambda one: (seconds[one.degrees.ep], one), exposed=lambda one: {"dispatch": 1.0}
    )
    monkeypatch.setattr(moves, "HOPS", hops)
    found = moves.relieve(places, search, moves.Place(Degrees(1, 16, 1, 8), 1))
    assert found is not None and found.degrees.ep == ends


def test_pairs_are_proposed_where_rides_are_slow() -> None:
    # With few words stages have equally many layers.
    shape = replace(SHAPE, layers=SHAPE.layers * 4, vocabulary=8192)
    space = Space(pp=(2,), tp=(1,), cp=(1,), ep=(4,), policies=POLICY_SETS[:1], micro_batches=(4,))
    numbers: dict[str, Any] = {**NUMBERS, "tokens": 64 * 4096, "per_node": 8, "space": space, "best": 1}
    slow = replace(H100, nvlink=LinkRate(2e10, 1e-5), push=None)
    (one,) = plan(shape, slow, **numbers).plans
    assert one.candidate.paired and one.candidate.settings()["moe"]["schedule"] == "two-batch"
    apart = replace(one.candidate, schedule="none")
    assert one.prediction.seconds.middle < 0.97 * predict(shape, slow, apart, 8).seconds.middle
    for fixed in (replace(space, pairs=False), replace(space, pipelines=("1F1B",))):
        (other,) = plan(shape, slow, **{**numbers, "space": fixed}).plans
        assert not other.candidate.paired
    tied = plan(replace(shape, tied=True), slow, **numbers)
    assert tied.plans[0].candidate.pipeline == "DualPipeV"
    assert any("would be on two ranks" in why for why in tied.refused)


def test_what_is_found_is_a_configuration_that_the_trainer_takes(tmp_path) -> None:  # type: ignore[no-untyped-def]
    space = Space(pp=(1,), cp=(1,), etp=(1,))
    found = plan(SHAPE, H100, gpus=16, tokens=64 * 4096, sequence_length=4096, memory=40e9, space=space, best=8)
    for one in found.plans:
        settings = one.candidate.settings()
        settings["model"]["config"] = "qwen3-30b-a3b"
        (tmp_path / "plan.toml").write_text(tomli_w.dumps(settings))
        config = load_config(tmp_path / "plan.toml")
        assert config.parallelism.resolve(16, 128) == one.candidate.degrees
        assert one.candidate.tokens == 64 * 4096


def test_numbers_that_do_not_go_together_are_refused() -> None:
    numbers = {"gpus": 8, "tokens": 4096 * 8, "sequence_length": 4096}
    for changed, said in (
        ({"gpus": 12}, "12 GPUs are not whole nodes of 8"),
        ({"tokens": 5000}, "not whole sequences of 4,096"),
    ):
        with pytest.raises(ValueError, match=said):
            plan(SHAPE, H100, **{**numbers, **changed})
    with pytest.raises(ValueError, match="memory of cpu is not known"):
        plan(SHAPE, find_hardware("cpu"), **numbers)
    assert plan(SHAPE, H100, **numbers, memory=1e9).plans == ()
    asked = ["plan", "--model", "qwen3-235b-a22b", "--hardware", "H100", "--gpus", "8", "--tokens-per-batch", "32K"]
    result = CliRunner().invoke(app, asked)
    assert result.exit_code == 1 and "no configuration fits: the least that one needs is" in result.output
    assert number_of("4M") == 2**22 and number_of("1_000") == 1000
    with pytest.raises(ValueError, match="expected a number such as"):
        number_of("4G")


def test_the_optimizer_in_host_memory_may_cost_less_than_keeping_less() -> None:
    shape = replace(SHAPE, layers=SHAPE.layers * 2)
    space = Space(pp=(1,), tp=(1,), cp=(1,), etp=(1,), micro_batches=(4,))
    found = plan(
        shape, H100, gpus=8, tokens=1024 * 4096, sequence_length=4096, per_node=4, memory=19e9, space=space, best=1
    )
    best = found.plans[0]
    assert best.candidate.optimizer_offload == "host" and set(best.candidate.policies.values()) == {"save"}
    others = [
        replace(best.candidate, optimizer_offload="none", policies={**best.candidate.policies, **policies})
        for policies in POLICY_SETS
    ]
    fitting = [one for one in others if memory_of(shape, one).total <= 19e9]
    assert fitting, "keeping less would do"
    assert all(step_seconds(shape, H100, one, 4) > best.prediction.seconds.middle for one in fitting)


def test_gradients_are_consumed_where_they_would_not_fit() -> None:
    """48 layers of Qwen3-30B-A3B on two H200: 27 GiB of experts' gradients, and captured steps."""
    space = Space(moments="int8", optimizer_in_backward=(False, True), max_grad_norm=0.0)
    shape = shape_of("qwen3-30b-a3b")
    one = plan(
        shape, find_hardware("H200"), gpus=2, per_node=2, tokens=2**14, sequence_length=4096, space=space, best=1
    ).plans[0]
    training = one.candidate.settings()["training"]
    assert (one.candidate.data_parallel, one.candidate.captured, one.candidate.degrees.ep) == ("zero1", True, 2)
    assert (
        training["optimizer_in_backward"] is True and training["max_grad_norm"] == 0 and "grad_clipping" not in training
    )
    kept = replace(one.candidate, optimizer_in_backward=False)
    assert memory_of(shape, kept).total - one.memory.total > 25 * 2**30
    assert replace(one.candidate, optimizer_offload="host").captured
    assert not replace(one.candidate, optimizer_offload="disk").captured


def test_a_plan_is_a_table_files_and_a_page(tmp_path: Path) -> None:
    asked = "plan --model deepseek-v3-cut --hardware H100 --gpus 8 --tokens-per-batch 128K --best 2 --memory 70GiB "
    asked += "--only pp=1 --only tp=1 --policy bagualu --policy alpa"
    result = CliRunner().invoke(app, [*asked.split(), "--out", str(tmp_path)])
    assert result.exit_code == 0, result.output
    assert "The step goes to: " in result.output and "With network half as fast: " in result.output
    assert "alpa: least communication within a stage" in result.output
    assert re.search(r"bagualu +dp8 ep8.* \+[0-9.]+ %", result.output)
    for number in (1, 2):
        config = load_config(tmp_path / f"plan-{number}.toml")
        degrees = config.parallelism.resolve(8, 64)
        tokens = config.training.per_device_train_batch_size * config.training.gradient_accumulation_steps * 4096
        assert tokens * degrees.dp == 2**17
    page = (tmp_path / "plan.html").read_text()
    assert "deepseek-v3-cut on 8 x H100, 131,072 tokens a step" in page and "<svg" in page
    assert page.index("The best of ") < page.index("<h1>") < page.index("The best configurations"), "the verdict first"
    assert "stroke: var(--predicted)" in page and "stroke: var(--limit)" in page, "a limit is no prediction"
    assert "data-parallel ranks; each step of one is" in page and "The experts of a layer are spread over" in page
    assert "for 10¹² tokens" in page and "Seconds of a step" in page
    assert "links between nodes" in page and "assumed" in page
    assert "norms and other passes" in page and "70.0 GiB" in page and "ranks that share the experts of a layer" in page


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"--tokens-per-batch": "1K"}, "1,024 tokens, less than one sequence of 4,096"),
        ({"--hardware": "H1000"}, "did you mean H100?"),
        ({"--hardware": "half.json"}, "half.json is no whole JSON file"),
        ({"--hardware": "list.json"}, "list.json is not what 'carpool doctor --measure'"),
        ({"--hardware": "cpu"}, "say what a rank may use, such as --memory 70GiB"),
        ({"--policy": "alpine"}, "--policy alpine is not known; there are aceso, alpa,"),
        ({"--only": "memory.layer_activation=save"}, "did you mean memory.layer_activations?"),
        ({"--max-grad-norm": "inf"}, "--max-grad-norm inf must be a finite number"),
        ({"--tokens-per-batch": "9999999M"}, "--tokens-per-batch 9999999M is more than any step has"),
        ({"--only": "ep"}, "--only ep: expected NAME=VALUES such as ep=8,16"),
        (
            {"--trace": str(TRACES / "e128-1390.npz")},
            "the trace has 8 of 128 experts for each token, and the model 8 of",
        ),
    ],
)  # fmt: skip
def test_bad_input_is_told_apart(changed: dict[str, str], said: str, tmp_path: Path) -> None:
    (tmp_path / "half.json").write_text('{"hardware": {"name": ')
    (tmp_path / "list.json").write_text("[1, 2]")
    asked = {"--model": "deepseek-v3-cut", "--hardware": "H200", "--gpus": "4", "--tokens-per-batch": "32K", **changed}
    if asked["--hardware"].endswith(".json"):
        asked["--hardware"] = str(tmp_path / asked["--hardware"])
    result = CliRunner().invoke(app, ["plan", *(word for pair in asked.items() for word in pair)])
    found = " ".join(result.output.replace(str(tmp_path) + "/", "").split())
    assert result.exit_code == 1 and said in found, found


def test_the_planner_is_imported_without_pytorch() -> None:
    """Reading a model's sizes, and the search, start in a second; PyTorch would take several."""
    code = (
        "import sys; from carpool.train.config.published import read_keys; import carpool.planner.search.plan, "
        "carpool.planner.search.why, carpool.planner.machine.cost, carpool.bench.result_files; "
        "assert not {'torch', 'transformers', 'triton'} & {*sys.modules}"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
