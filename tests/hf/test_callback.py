"""Carpool's numbers in the logs of transformers' Trainer."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from transformers import AutoModelForCausalLM, TrainerControl, TrainerState, TrainingArguments
from transformers.distributed import DistributedConfig
from transformers.trainer_callback import CallbackHandler

from carpool.hf import CarpoolCallback
from carpool.transport import BufferOverflowError
from carpool.transport.nvlink import Buffers, NVLink
from tests.hf.meshes import reuse_meshes
from tests.hf.parity import quiet
from tests.hf.test_behaviours import Tokens
from tests.hf.tiny_models import discover, tiny_model
from tests.ranks import Ranks


def _trainer(path: str, model: Any, **settings: Any) -> transformers.Trainer:
    arguments = transformers.TrainingArguments(
        output_dir=f"{path}/out",
        max_steps=4,
        per_device_train_batch_size=2,
        logging_steps=2,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        **settings,
    )
    trainer = transformers.Trainer(model, arguments, train_dataset=Tokens(), eval_dataset=Tokens())
    trainer.remove_callback(transformers.PrinterCallback)
    return trainer


def _logs(path: str) -> tuple[list[dict[str, float]], str]:
    quiet()
    if dist.get_rank() == 0:
        tiny_model(discover()["olmoe"]).save_pretrained(path)
    dist.barrier()
    reuse_meshes()
    # The snippet of the README, on two ranks.
    model = AutoModelForCausalLM.from_pretrained(
        path,
        dtype="bfloat16",
        distributed_config=DistributedConfig(fsdp_size=2, ep_size=2, ep_implementation="carpool"),
    )
    trainer = _trainer(path, model)
    CarpoolCallback.add_to(trainer)
    trainer.train()
    logs = [log for log in trainer.state.log_history if "loss" in log]
    # The same training again, with evaluations before it, between logs and at them.
    model = AutoModelForCausalLM.from_pretrained(
        path, dtype="bfloat16", distributed_config=model.config.distributed_config
    )
    evaluated = _trainer(path, model, eval_strategy="steps", eval_steps=1, eval_on_start=True)
    CarpoolCallback.add_to(evaluated)
    evaluated.train()
    again = [log for log in evaluated.state.log_history if "loss" in log]
    for log, other in zip(logs, again, strict=True):
        counted = {key for key in log if key.startswith("carpool/") and "/ms/" not in key}
        assert {key: log[key] for key in counted} == {key: other[key] for key in counted}
    assert len([log for log in evaluated.state.log_history if "eval_loss" in log]) == 5
    plain = _trainer(path, AutoModelForCausalLM.from_pretrained(path))
    CarpoolCallback.add_to(plain)
    with pytest.raises(ValueError) as error:
        plain.callback_handler.on_train_begin(plain.args, plain.state, plain.control)
    return logs, str(error.value)


def test_an_overflow_is_told_before_the_optimizer_uses_it() -> None:
    callback = CarpoolCallback()
    handler = CallbackHandler([callback], torch.nn.Linear(1, 1), None, None, None)
    event = (TrainingArguments(report_to=[]), TrainerState(), TrainerControl())
    handler.on_pre_optimizer_step(*event)  # not begun
    buffers = Buffers(None, torch.device("cpu"), max_tokens=4)
    layers = [SimpleNamespace(transport=NVLink(None, 4, None, buffers)) for _ in range(2)]
    callback._metrics = SimpleNamespace(layers=[SimpleNamespace(transport=None), *layers])  # type: ignore[assignment]
    handler.on_pre_optimizer_step(*event)
    buffers.needed.fill_(5)
    with pytest.raises(BufferOverflowError, match="5 were needed"):
        handler.on_pre_optimizer_step(*event)


def test_trainer_logs_what_rode(two_ranks: Ranks, tmp_path: Path) -> None:
    for logs, message in two_ranks(_logs, str(tmp_path)):
        assert [log["step"] for log in logs] == [2, 4]
        for log in logs:
            assert 1 <= log["carpool/copies_per_token"] <= 2  # top-2
            assert 0 < log["carpool/bytes_remote"] < log["carpool/bytes_remote_alltoall"]
            assert log["carpool/load_max_over_mean"] >= 1 and log["carpool/ms/experts/total"] > 0
        assert "no Carpool layers" in message
