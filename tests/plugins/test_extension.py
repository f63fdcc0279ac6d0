"""An extension in one file outside the package brings a section of settings, and takes part in a run."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import pytest
from pydantic import Field

from carpool.train.config import describe, load_config
from carpool.train.config.schema import Config
from carpool.train.config.schema_base import Section
from carpool.train.extensions import EXTENSIONS, Extension, extensions_in_use, register
from carpool.train.plan.dry_run import dry_run
from tests.plugins.outside import forget, train_with
from tests.ranks import Ranks
from tests.train.test_loop import MODEL, losses


def test_its_section_is_a_section_as_any_other(deeper: Any, tmp_path: Path) -> None:
    config: Any = load_config(None, ["deeper.layers=2"])
    assert config.deeper == deeper.DeeperSection(layers=2)
    assert ("deeper.layers", "integer", "0", "Layers that are added to the model's.") in list(describe())
    (tmp_path / "config.toml").write_text(config.to_toml(comments=True))
    assert load_config(tmp_path / "config.toml") == config
    assert pickle.loads(pickle.dumps(config)) == config
    for wrong, told in {
        "deeper.layer=1": r"unknown key deeper\.layer .*did you mean deeper\.layers\?",
        "deper.layers=1": r"unknown section deper .*did you mean deeper\?",
        "deeper.layers=-1": r"deeper\.layers = -1 \(on the command line\): expected a number at least 0",
    }.items():
        with pytest.raises(ValueError, match=told):
            load_config(None, [wrong])
    with pytest.raises(ValueError, match=r"deeper\.layers needs a model from scratch"):
        load_config(None, ["deeper.layers=1", "model.path=somewhere"])


def test_without_it_there_is_no_section_and_with_defaults_it_is_off(deeper: Any) -> None:
    assert [type(one) for one in extensions_in_use(load_config(None, ["deeper.layers=1"]))] == [deeper.Deeper]
    assert extensions_in_use(load_config(None)) == [] and extensions_in_use(Config()) == []
    forget("deeper")
    with pytest.raises(ValueError, match="unknown section deeper"):
        load_config(None, ["deeper.layers=1"])


def test_it_changes_the_model_and_the_estimate_of_a_dry_run(deeper: Any, tmp_path: Path) -> None:
    two = [*MODEL, "parallelism.device=cpu", "parallelism.num_ranks=2", f"training.output_dir={tmp_path / 'run'}"]
    plain = dry_run(load_config(None, two))
    changed = dry_run(load_config(None, [*two, "deeper.device_bytes=1073741824"]))
    assert plain != changed and "extensions" in str(changed) and "extensions" not in str(plain)
    with pytest.raises(ValueError, match=r"deeper\.layers = 9: the model may have 4 layers at most"):
        dry_run(load_config(None, [*two, "deeper.layers=9"]))


def test_it_takes_part_in_a_run(two_ranks: Ranks, tmp_path: Path, text: list[str]) -> None:
    few = [*text, "training.max_steps=2", "training.save_steps=none", "training.eval_steps=none"]
    assert two_ranks(train_with, "deeper", str(tmp_path / "plain"), few) == [""] * 2
    assert two_ranks(train_with, "deeper", str(tmp_path / "deeper"), [*few, "deeper.layers=1"]) == [""] * 2
    models = [json.loads((tmp_path / name / "run.json").read_text())["model"] for name in ("plain", "deeper")]
    assert models[1]["parameters"] > models[0]["parameters"]
    assert losses(tmp_path / "plain") != losses(tmp_path / "deeper")
    lines = [json.loads(line) for line in (tmp_path / "deeper" / "metrics.jsonl").read_text().splitlines()]
    first, second = (line["called"] for line in lines if line["kind"] == "deeper")
    assert first[1:] == ["Objective", "before"] and first[0].endswith(" layers") and second == ["before"]


def test_an_extension_that_lacks_something_is_refused() -> None:
    class Bare(Section):
        size: int = Field(0)

    class Undescribed(Extension):
        name, section, help = "undescribed", Bare, "A section without descriptions."

    class Taken(Extension):
        name, section, help = "moe", Section, "A name that another section has."

    with pytest.raises(ValueError, match=r"undescribed\.size needs a default and a description"):
        register(Undescribed)
    register(Taken)
    try:
        with pytest.raises(ValueError, match="extension 'moe' has the name of a section that Carpool has"):
            load_config(None)
    finally:
        EXTENSIONS._things.pop("moe")
