"""`carpool plan`: a table, files that the trainer takes, a page."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from carpool.cli import app
from carpool.cli.plan import number_of
from carpool.train.config import load_config


def test_a_plan_is_a_table_files_and_a_page(tmp_path: Path) -> None:
    asked = "plan --model deepseek-v3-cut --hardware H100 --gpus 8 --tokens-per-batch 128K --best 2 --memory 70GiB"
    result = CliRunner().invoke(app, [*asked.split(), "--out", str(tmp_path)])
    assert result.exit_code == 0, result.output
    assert "The step goes to: " in result.output and "With network half as fast: " in result.output
    for number in (1, 2):
        config = load_config(tmp_path / f"plan-{number}.toml")
        degrees = config.parallelism.resolve(8, 64)
        tokens = config.training.per_device_train_batch_size * config.training.gradient_accumulation_steps * 4096
        assert tokens * degrees.dp == 2**17
    page = (tmp_path / "plan.html").read_text()
    assert "deepseek-v3-cut on 8 x H100, 131,072 tokens a step" in page and "<svg" in page
    assert "links between nodes" in page and "assumed" in page


def test_what_cannot_be_planned_says_why() -> None:
    asked = ["plan", "--model", "qwen3-235b-a22b", "--hardware", "H100", "--gpus", "8", "--tokens-per-batch", "32K"]
    result = CliRunner().invoke(app, asked)
    assert result.exit_code == 1 and "no configuration fits: the least that one needs is" in result.output
    assert number_of("4M") == 2**22 and number_of("1_000") == 1000
    with pytest.raises(ValueError, match="expected a number such as"):
        number_of("4G")
