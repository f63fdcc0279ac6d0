"""`carpool plan`: a table, files that the trainer takes, a page."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from carpool.cli import app
from carpool.cli.planning import number_of
from carpool.train.config import load_config
from tests.environment import TRACES


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


def test_what_cannot_be_planned_says_why() -> None:
    asked = ["plan", "--model", "qwen3-235b-a22b", "--hardware", "H100", "--gpus", "8", "--tokens-per-batch", "32K"]
    result = CliRunner().invoke(app, asked)
    assert result.exit_code == 1 and "no configuration fits: the least that one needs is" in result.output
    assert number_of("4M") == 2**22 and number_of("1_000") == 1000
    with pytest.raises(ValueError, match="expected a number such as"):
        number_of("4G")


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"--tokens-per-batch": "1K"}, "1,024 tokens, less than one sequence of 4,096"),
        ({"--hardware": "H1000"}, "did you mean H100?"),
        ({"--hardware": "half.json"}, "half.json is no whole JSON file"),
        ({"--hardware": "list.json"}, "list.json is not what 'carpool doctor --measure'"),
        ({"--hardware": "cpu"}, "say what a rank may use, such as --memory 70GiB"),
        ({"--policy": "alpine"}, "--policy alpine is not known; there are aceso, alpa,"),
        ({"--policy": "nnscaler"}, "--policy nnscaler is not known; there are aceso, alpa,"),
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
        "carpool.planner.search.why, carpool.bench.result_files; assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
