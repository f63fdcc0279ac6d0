"""`carpool bench generate` on gloo ranks: all contenders make the same tokens, and all are timed."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from transformers import AutoConfig

from carpool.bench import bench_generate as generate
from carpool.bench.bench_settings import GENERATE_CONTENDERS, GenerateSettings
from carpool.bench.contest import measure_on_rank
from carpool.train.config import load_config
from tests.hf.meshes import reuse_meshes
from tests.hf.tiny_models import discover, tiny_config
from tests.ranks import Ranks


def _measure(folder: str) -> list[list[str]]:
    """All contenders in turns; then the groups of a memory that holds one model."""
    reuse_meshes()
    settings = GenerateSettings(
        model=f"{folder}/config.json", batch=3, prompt=5, new_tokens=4, rounds=2, out=folder
    ).resolve(cuda=False, num_ranks=2)
    given = json.loads(json.dumps(settings.to_json()))
    measure_on_rank(load_config(None, []), "carpool.bench.bench_generate:BENCHMARK", given, "carpool bench generate")
    once = replace(settings, contenders=("transformers", "carpool-eager", "carpool"), rounds=1)
    with patch.object(generate, "rank_memory", lambda *_: max(generate._needs(once, _config(folder)).values())):
        (case,) = generate.measure(once, torch.device("cpu"), "")
    assert all(row.same_tokens == 1.0 and len(row.decode_ms) == 1 for row in case.rows)
    return case.groups


def _config(folder: str) -> Any:
    return AutoConfig.from_pretrained(folder)


def test_all_contenders_make_the_same_tokens(two_ranks: Ranks, tmp_path: Path) -> None:
    tiny_config(discover()["qwen3_moe"]).save_pretrained(tmp_path)
    for groups in two_ranks(_measure, str(tmp_path)):
        assert groups == [["transformers"], ["carpool-eager", "carpool"]]
    (case,) = json.loads((tmp_path / "generate.json").read_text())["cases"]
    assert (case["num_ranks"], case["batch"], case["prompt"], case["new_tokens"]) == (2, 3, 5, 4)
    rows: dict[str, Any] = {row["label"]: row for row in case["rows"]}
    assert list(rows) == list(GENERATE_CONTENDERS) and case["groups"] == [list(GENERATE_CONTENDERS)]
    for row in rows.values():
        assert row["same_tokens"] == 1.0
        assert len(row["prefill_ms"]) == len(row["decode_ms"]) == 2 and min(row["prefill_ms"] + row["decode_ms"]) > 0
    assert rows["carpool"]["decoding"] == "eager: there is no GPU"


def test_rates_are_of_all_ranks() -> None:
    row = generate.Row("carpool", "eager", [50.0, 100.0, 200.0], [2.0, 4.0, 8.0])
    case = generate.Case("A", 1, 4, 8, 16, 3, [["carpool"]], [row])
    assert case.prefill_rate(row) == 4 * 8 * 16 / 0.1
    assert case.decode_rate(row) == 4 * 8 / 0.004


def test_models_that_do_not_fit_together() -> None:
    needs = {"carpool": 60, "transformers": 40}
    assert generate.groups_that_fit(needs, 110) == [["carpool", "transformers"]]
    assert generate.groups_that_fit(needs, 105) == [["carpool"], ["transformers"]]
    with pytest.raises(ValueError, match=r"carpool does not fit: .* lower --layers"):
        generate.groups_that_fit(needs, 59)
