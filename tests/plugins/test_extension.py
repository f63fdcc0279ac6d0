"""An extension, and a change of the architecture, in one file outside the package each: settings, parts of a run,
records and exports."""

from __future__ import annotations

import json
import pickle
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import Field
from transformers import AutoModelForCausalLM

from carpool.hf.architecture_changes import (
    ARCHITECTURE_CHANGES,
    KEY,
    ArchitectureChange,
    why_not_in_transformers,
)
from carpool.hf.build_model import build_model
from carpool.hf.weights.model_config import read_config
from carpool.train.checkpoints.checkpoint_files import CheckpointError
from carpool.train.checkpoints.export import export_checkpoint, find_checkpoint
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


def trained(output: str, overrides: list[str]) -> tuple[str, str]:
    """On a rank: a run with it; the error, and what it prints."""
    with redirect_stdout(StringIO()) as printed:
        return train_with("gain", output, overrides), printed.getvalue()


def parameters(folder: Path) -> int:
    return int(json.loads((folder / "run.json").read_text())["model"]["parameters"])


def test_a_run_has_the_change_and_exports_what_transformers_knows(
    gain: Any, two_ranks: Ranks, tmp_path: Path, text: list[str]
) -> None:
    few = [*text, "training.max_steps=2", "training.save_steps=2", "training.eval_steps=none"]
    few.append("training.save_pretrained=true")
    runs = {kind: tmp_path / kind for kind in ("none", "plain", "learned")}
    for kind, folder in runs.items():
        (error, printed), _ = two_ranks(trained, str(folder), [*few, f"gain.kind={kind}"])
        assert error == "" and (f"a {kind} gain behind experts (gain.kind)" in printed) == (kind != "none")
        assert (KEY in (find_checkpoint(folder, 2) / "model" / "config.json").read_text()) == (kind != "none")
        assert (folder / "model").exists() == (kind != "learned")
    assert parameters(runs["learned"]) == parameters(runs["none"]) + 2 * 32 * 32 == parameters(runs["plain"]) + 2048
    assert losses(runs["plain"]) == losses(runs["none"]) and losses(runs["learned"]) != losses(runs["none"])
    # Resumed, it is the same model, by its settings and by the checkpoint's configuration.
    more = [*few, "gain.kind=learned", "training.max_steps=3", "training.resume_from_checkpoint=last"]
    assert two_ranks(trained, str(runs["learned"]), more)[0][0] == "" and 3 in losses(runs["learned"])

    models = [AutoModelForCausalLM.from_pretrained(runs[kind] / "model") for kind in ("none", "plain")]
    assert not hasattr(models[1].config, KEY)
    assert all(map(torch.equal, *(model.state_dict().values() for model in models)))
    saved = find_checkpoint(runs["learned"], 3)
    with pytest.raises(
        CheckpointError, match=r"that Transformers cannot load: it has no gains\. It cannot be exported"
    ):
        export_checkpoint(runs["learned"], saved, tmp_path / "exported")
    with pytest.raises(ValueError, match=r"is of a run that changes the architecture.* a learned gain behind"):
        build_model(saved / "model", distributed_config=None, dtype=torch.float32, seed=0)
    forget("gain")
    with pytest.raises(ValueError, match=r"the plug-in 'gain' has changed the architecture of this model.* install"):
        why_not_in_transformers(read_config(saved / "model"))


def test_it_is_of_models_from_scratch_and_off_by_default(gain: Any, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_text("")
    with pytest.raises(ValueError, match=r"gain\.kind makes another model, but model.path = .* names a checkpoint"):
        load_config(None, [f"model.path={tmp_path}", "data.train=text.txt", "gain.kind=plain"])
    (other,) = extensions_in_use(load_config(None, ["gain.note=x"]))
    assert other.architecture_settings() == {}


def test_a_change_that_lacks_something_is_refused(gain: Any) -> None:
    class Half(ArchitectureChange):
        def describe(self) -> str:
            return "half"

    class Keyless(Extension):
        name, section, help, architecture = "keyless", gain.GainSection, "Reads what is not there.", ("size",)

    with pytest.raises(ValueError, match=r"architecture change 'half' \(Half\) does not implement apply"):
        ARCHITECTURE_CHANGES.register(Half, "half")
    with pytest.raises(ValueError, match=r"'name' .* must be a subclass of ArchitectureChange"):
        ARCHITECTURE_CHANGES.register(str, "name")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"its architecture reads keyless\.size, which its section lacks"):
        EXTENSIONS.register(Keyless)
    assert "half" not in ARCHITECTURE_CHANGES and "keyless" not in EXTENSIONS
