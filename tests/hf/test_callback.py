"""Carpool's numbers in the logs of transformers' Trainer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
import transformers
from transformers import AutoModelForCausalLM
from transformers.distributed import DistributedConfig

from carpool.hf import CarpoolCallback
from tests.hf.meshes import reuse_meshes
from tests.hf.parity import quiet
from tests.hf.test_behaviours import Tokens
from tests.hf.tiny_models import discover, tiny_model
from tests.ranks import Ranks


def _trainer(path: str, model: Any) -> transformers.Trainer:
    arguments = transformers.TrainingArguments(
        output_dir=f"{path}/out",
        max_steps=4,
        per_device_train_batch_size=2,
        logging_steps=2,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
    )
    trainer = transformers.Trainer(model, arguments, train_dataset=Tokens())
    trainer.remove_callback(transformers.PrinterCallback)
    return trainer


def _logs(path: str) -> tuple[list[dict[str, float]], str]:
    quiet()
    if dist.get_rank() == 0:
        tiny_model(discover()["olmoe"]).save_pretrained(path)
    dist.barrier()
    reuse_meshes()
    # The snippet of the README, word for word.
    model = AutoModelForCausalLM.from_pretrained(
        path,
        dtype="bfloat16",
        distributed_config=DistributedConfig(fsdp_size=4, ep_size=4, ep_implementation="carpool"),
    )
    trainer = _trainer(path, model)
    CarpoolCallback.add_to(trainer)
    trainer.train()
    logs = [log for log in trainer.state.log_history if "loss" in log]
    plain = _trainer(path, AutoModelForCausalLM.from_pretrained(path))
    CarpoolCallback.add_to(plain)
    with pytest.raises(ValueError) as error:
        plain.callback_handler.on_train_begin(plain.args, plain.state, plain.control)
    return logs, str(error.value)


def test_trainer_logs_what_rode(ranks: Ranks, tmp_path: Path) -> None:
    for logs, message in ranks(_logs, str(tmp_path)):
        assert [log["step"] for log in logs] == [2, 4]
        for log in logs:
            assert 1 <= log["carpool/copies_per_token"] <= 2  # top-2
            assert 0 < log["carpool/bytes_remote"] < log["carpool/bytes_remote_alltoall"]
            assert log["carpool/load_max_over_mean"] >= 1 and log["carpool/ms/experts/total"] > 0
        assert "no Carpool layers" in message
