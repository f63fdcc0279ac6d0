"""A change of the architecture in one file outside the package is trained, recorded, and exported if it can be."""

from __future__ import annotations

import json
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
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
from carpool.train.config import load_config
from carpool.train.extensions import EXTENSIONS, Extension, extensions_in_use
from tests.plugins.outside import forget, train_with
from tests.ranks import Ranks
from tests.train.test_loop import losses


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
