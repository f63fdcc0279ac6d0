"""transformers' Trainer saves and resumes a sharded model."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM
from transformers.distributed import DistributedConfig

from carpool.hf.seam.moved_experts import set_layout
from carpool.layout import ExpertLayout
from carpool.train.checkpoints.checkpoint_files import CheckpointError
from carpool.train.checkpoints.export import export_checkpoint, find_checkpoint
from carpool.train.checkpoints.trainer import CarpoolTrainer
from tests.full_tensor import full_tensor
from tests.hf.meshes import reuse_meshes
from tests.hf.parity import quiet
from tests.hf.test_behaviours import Tokens
from tests.hf.tiny_models import discover, tiny_model
from tests.ranks import Ranks

MOVED = ExpertLayout.permuted([7, 6, 5, 4, 3, 2, 1, 0], 2)


def _trainer(path: str, trainer_class: type = CarpoolTrainer, moved: bool = False, **settings: Any) -> Any:
    reuse_meshes()
    model = AutoModelForCausalLM.from_pretrained(
        f"{path}/published",
        distributed_config=DistributedConfig(fsdp_size=2, ep_size=2, ep_implementation="carpool"),
    )
    if moved:
        set_layout(model, MOVED)
    arguments = transformers.TrainingArguments(
        **{"output_dir": f"{path}/out", "max_steps": 4, "save_steps": 2, "logging_steps": 1, "learning_rate": 1e-2}
        | {"per_device_train_batch_size": 2, "report_to": [], "use_cpu": True, "disable_tqdm": True, **settings}
    )
    trainer = trainer_class(model, arguments, train_dataset=Tokens())
    trainer.remove_callback(transformers.PrinterCallback)
    return trainer


def _weights(model: Any) -> dict[str, torch.Tensor]:
    return {name: full_tensor(tensor).detach().clone() for name, tensor in model.state_dict().items()}


def _train_and_resume(path: str, moved: bool) -> tuple[list[float], list[float], bool, dict[str, torch.Tensor]]:
    """Losses of a whole run, of one that was resumed in its middle, whether they end equal, and how."""
    quiet()
    if dist.get_rank() == 0:
        tiny_model(discover()["olmoe"]).save_pretrained(f"{path}/published")
    dist.barrier()
    trainer = _trainer(path)
    trainer.train()
    whole, weights = [log["loss"] for log in trainer.state.log_history if "loss" in log], _weights(trainer.model)
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.move(f"{path}/out/checkpoint-4", f"{path}/finished")
    dist.barrier()
    resumed = _trainer(path, moved=moved)
    resumed.train(resume_from_checkpoint=True)
    ours = _weights(resumed.model)
    losses = [log["loss"] for log in resumed.state.log_history if "loss" in log]
    return whole, losses, all(torch.equal(ours[name], tensor) for name, tensor in weights.items()), weights


@pytest.mark.parametrize("moved", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["same", "moved"])
def test_a_resumed_run_equals_one_that_went_on(two_ranks: Ranks, tmp_path: Path, moved: bool) -> None:
    """Also with experts on other ranks than before."""
    results = two_ranks(_train_and_resume, str(tmp_path), moved)
    for whole, losses, equal, _ in results:
        assert len(set(whole)) == 4
        if moved:
            assert losses == pytest.approx(whole, rel=1e-3)
        else:
            assert losses == whole and equal
    run = tmp_path / "finished"
    out = export_checkpoint(run, find_checkpoint(run, 4), tmp_path / "model").folder
    exported = AutoModelForCausalLM.from_pretrained(out).state_dict()
    assert all(torch.equal(exported[name], tensor) for name, tensor in results[0][-1].items())


def _refusals(path: str) -> list[str]:
    quiet()
    if dist.get_rank() == 0:
        tiny_model(discover()["olmoe"]).save_pretrained(f"{path}/published")
    dist.barrier()
    messages = []
    with pytest.raises(ValueError) as plain:
        _trainer(path, transformers.Trainer)
    messages.append(str(plain.value))
    with pytest.raises(CheckpointError) as none:
        _trainer(path).train(resume_from_checkpoint=f"{path}/published")
    messages.append(str(none.value))
    # Without an optimizer's state to save, everything is Trainer's own.
    trainer = _trainer(path, save_only_model=True, max_steps=2)
    trainer.train()
    dist.barrier()
    messages += sorted(file.name for file in Path(f"{path}/out/checkpoint-2").glob("*.safetensors"))
    assert any(isinstance(parameter, DTensor) for parameter in trainer.model.parameters())
    return messages


def test_what_cannot_be_resumed_is_told(two_ranks: Ranks, tmp_path: Path) -> None:
    for plain, none, *files in two_ranks(_refusals, str(tmp_path)):
        assert "Resuming is not supported" in plain, "Trainer saves sharded models itself now: drop our class"
        assert "holds no whole checkpoint of a sharded model" in none
        assert files == ["model.safetensors"]
