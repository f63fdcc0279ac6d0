"""Under transformers' Trainer: `FastSteps` gives the same losses, says what it captures and why not, and Carpool's
numbers are in the logs. On GPUs: tests/gpu/test_fast_steps_gpu.py."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, TrainerControl, TrainerState, TrainingArguments
from transformers.distributed import DistributedConfig
from transformers.trainer_callback import CallbackHandler

from carpool.hf import CarpoolCallback, FastSteps, fast_steps, replay, rides
from carpool.hf.fast_steps import BodyGraphs
from carpool.routing import Routing
from carpool.transport import BufferOverflowError
from carpool.transport.nvlink import Buffers, NVLink
from tests.hf.meshes import reuse_meshes
from tests.hf.parity import quiet
from tests.hf.test_behaviours import Tokens
from tests.hf.test_compiled import make
from tests.hf.tiny_models import discover, tiny_model
from tests.ranks import Ranks
from tests.replayed import Again


class Rows(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Sequences of so many tokens each."""

    def __init__(self, *lengths: int) -> None:
        self.lengths = lengths

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids = (torch.arange(self.lengths[index]) * 3 + index) % 64
        return {"input_ids": ids, "labels": ids, "attention_mask": torch.ones_like(ids)}


def model_of(adapters: bool = True, **more: Any) -> Any:
    model = make("qwen3_moe", num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, head_dim=16, **more)
    lora = LoraConfig(r=2, target_modules=["q_proj"], target_parameters=["experts.gate_up_proj", "experts.down_proj"])
    return get_peft_model(model, lora) if adapters else model


def trained(
    path: Path, model: Any, fast: FastSteps | None, data: Rows, pieces: bool = False, **settings: Any
) -> tuple[list[Any], Any]:
    """Losses of all kinds in order, and what was trained."""
    arguments = transformers.TrainingArguments(
        output_dir=str(path), per_device_train_batch_size=1, logging_steps=1, save_strategy="no", report_to=[],
        use_cpu=True, disable_tqdm=True, learning_rate=1e-2, **{"max_steps": 6, **settings},
    )  # fmt: skip
    trainer = transformers.Trainer(
        model, arguments, train_dataset=data, eval_dataset=Rows(9, 9), callbacks=[] if fast is None else [fast]
    )
    if pieces:
        FastSteps.add_to(trainer, compiled=False)
    trainer.remove_callback(transformers.PrinterCallback)
    trainer.train()
    kept = ("loss", "eval_loss", "grad_norm")
    found = [{key: log[key] for key in kept if key in log} for log in trainer.state.log_history]
    return found, {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}


@pytest.fixture
def replayed(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, bool]]:
    """In place of a GPU: what is captured is computed again. Gives what was replayed."""
    seen: list[tuple[str, bool]] = []

    class Graphs(BodyGraphs):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args[:-1], lambda: None, Again)

        def _repeat(self, key: Any) -> None:
            seen.append(key)
            super()._repeat(key)

        def _adds(self) -> bool:
            return all(parameter.grad is not None for parameter, _ in self._gradients)

    monkeypatch.setattr(fast_steps, "BodyGraphs", Graphs)
    monkeypatch.setattr(FastSteps, "_why_not", lambda *_: None)
    return seen


@pytest.mark.parametrize(
    ("adapters", "settings"),
    [
        (True, {"gradient_accumulation_steps": 2, "max_grad_norm": 0.1, "eval_strategy": "steps", "eval_steps": 2}),
        (False, {"gradient_checkpointing": True}),
    ],
)
def test_the_same_losses(
    tmp_path: Path, replayed: list[Any], adapters: bool, settings: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    data = Rows(*[12] * 16)
    want, wanted = trained(tmp_path, model_of(adapters), None, data, **settings)
    model = model_of(adapters)
    got, found = trained(tmp_path, model, FastSteps(compiled=True, backend="eager"), data, **settings)
    assert len(got) == len(want) and all(
        one == pytest.approx(other, rel=1e-5) for one, other in zip(got, want, strict=True)
    )
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-6)
    # Three micro-batches that begin a step are eager, and with accumulation one more that goes with each.
    pair = [("forward", True), ("backward", True)]
    assert replayed == 3 * ([*pair, ("forward", False), ("backward", False)] if "eval_steps" in settings else pair)
    # And nothing is left behind.
    base = model.get_base_model() if adapters else model
    assert "forward" not in vars(base.base_model) and "FastSteps" not in capsys.readouterr().out


@pytest.mark.parametrize("accumulation", [1, 2])
def test_a_loss_in_chunks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, accumulation: int) -> None:
    data, more = Rows(*[12] * 8), {"gradient_accumulation_steps": accumulation, "max_steps": 3}
    want, _ = trained(tmp_path, model_of(False), None, data, **more)
    seen: list[bool] = []
    own = fast_steps.HeadLoss.__call__
    monkeypatch.setattr(fast_steps.HeadLoss, "__call__", lambda *a, **k: seen.append(True) or own(*a, **k))
    got, _ = trained(tmp_path, model_of(False), None, data, pieces=True, **more)
    assert all(one == pytest.approx(other, rel=1e-4) for one, other in zip(got, want, strict=True))
    assert len(seen) == 3 * accumulation


def test_a_loss_of_labels_that_are_shifted_already(tmp_path: Path) -> None:
    model = model_of(False).train()
    ids = torch.arange(12)[None]
    shifted, labels = (ids * 5) % 64, torch.full_like(ids, 7)
    shifted[0, 3] = -100
    in_chunks = fast_steps._forward_in_chunks(model)
    for given in ({"shift_labels": shifted}, {"shift_labels": shifted.flatten(), "num_items_in_batch": 5}, {}):
        want, got = (run(input_ids=ids, labels=labels, **given) for run in (model.forward, in_chunks))
        assert got.logits is None and got.loss.item() == pytest.approx(want.loss.item(), rel=1e-5)
    # Another word for "no label" is the model's own loss's to know.
    assert in_chunks(input_ids=ids, labels=labels, ignore_index=7).logits is not None


def test_a_loss_that_others_see_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fast_steps, "HeadLoss", None)
    trained(tmp_path, model_of(False), None, Rows(12, 12), pieces=True, max_steps=1, label_smoothing_factor=0.1)
    trained(tmp_path, model_of(False, output_router_logits=True), None, Rows(12, 12), pieces=True, max_steps=1)


def test_batches_of_other_shapes_are_eager(
    tmp_path: Path, replayed: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    lengths = Rows(*[12] * 5, 7, *[12] * 2)
    settings = {"max_steps": 8, "train_sampling_strategy": "sequential"}
    want, _ = trained(tmp_path, model_of(), None, lengths, **settings)
    got, _ = trained(tmp_path, model_of(), FastSteps(), lengths, **settings)
    assert got == want and replayed == [("forward", True), ("backward", True)] * 4
    assert not capsys.readouterr().out
    replayed.clear()
    mixed = Rows(*range(5, 15))
    want, _ = trained(tmp_path, model_of(), None, mixed, max_steps=10)
    fast = FastSteps()
    got, _ = trained(tmp_path, model_of(), fast, mixed, max_steps=10)
    assert got == want and not replayed
    assert "batches differ in shape" in capsys.readouterr().out and "pad" in (fast.why_not or "")


def test_gradients_that_are_zeros_when_a_step_begins_are_eager(
    tmp_path: Path, replayed: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    found, data = [], Rows(*[12] * 6)
    for fast in (None, FastSteps()):
        model = model_of()
        model.zero_grad = partial(type(model).zero_grad, model, set_to_none=False)
        found.append(trained(tmp_path, model, fast, data)[0])
    assert found[0] == found[1] and not replayed
    said = capsys.readouterr().out
    assert said.count("FastSteps") == 1 and "set them to None (zero_grad(set_to_none=True))" in said


def test_what_is_computed_before_a_backward_is_eager(replayed: list[Any]) -> None:
    model, told = model_of(), list[Any]()
    body = model.get_base_model().base_model.train()
    graphs = fast_steps.BodyGraphs(body, list(rides(body).values()), told.append, False, None)
    ids = torch.arange(12)[None]
    run = partial(graphs.forward, body.forward, {"input_ids": ids, "use_cache": False})
    for _ in range(4):
        want = run().last_hidden_state
        want.square().sum().backward()
        gradients = {name: p.grad for name, p in body.named_parameters() if p.grad is not None}
        model.zero_grad()
    one, other = run().last_hidden_state, run().last_hidden_state
    assert replayed.count(("forward", True)) == 2 and told == [None]
    assert torch.equal(one, want) and torch.equal(other, want)
    (one.square().sum() + other.square().sum()).backward()
    for name, parameter in body.named_parameters():
        assert name not in gradients or torch.allclose(parameter.grad, 2 * gradients[name])
    # Nor do graphs know choices that are replayed.
    model.zero_grad()
    graphs.begin_step()
    replayed.clear()
    with replay(model, {name: Routing((own.routing.expert_TK + 1) % 4, None) for name, own in rides(model).items()}):
        assert not torch.equal(run().last_hidden_state, want) and not replayed
    assert told[1:] == ["choices are replayed (carpool.hf.replay), others in each forward"]


def test_why_nothing_is_captured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fast = FastSteps()
    trained(tmp_path, model_of(), fast, Rows(12, 12), max_steps=1)
    assert fast.why_not == "there is no GPU"
    assert capsys.readouterr().out == "FastSteps: no CUDA graphs, because there is no GPU\n"
    with pytest.raises(ValueError, match="FastSteps compiles its layers"):
        trained(tmp_path, model_of(), FastSteps(), Rows(12), torch_compile=True, torch_compile_backend="eager")
    with pytest.raises(ValueError, match="no Carpool layers"):
        trained(tmp_path, transformers.GPT2LMHeadModel(transformers.GPT2Config(n_layer=1)), FastSteps(), Rows(12))


@pytest.mark.parametrize(
    ("settings", "more", "why"),
    [
        ({}, {}, None),
        ({"captured": False}, {}, "asked for"),
        ({}, {"tie_word_embeddings": True}, "one parameter, which is trained"),
        ({"again": True}, {"attention_dropout": 0.1}, "drop-out"),
        ({"world_size": 2}, {}, "average gradients"),
        ({"activation_offloading": True}, {}, "activation_offloading"),
    ],
)
def test_reasons_known_before_the_first_step(settings: dict[str, Any], more: dict[str, Any], why: str | None) -> None:
    model = model_of(False, **more)
    given = {"world_size": 1, "n_gpu": 1, "activation_offloading": False, **settings}
    arguments: Any = type("Arguments", (), given)
    fast = FastSteps(captured=settings.get("captured", True))
    on_gpu = pytest.MonkeyPatch()
    on_gpu.setattr(torch.nn.Parameter, "device", torch.device("cuda"))
    try:
        found = fast._why_not(arguments, model, model.base_model, settings.get("again", False))
    finally:
        on_gpu.undo()
    assert found is None if why is None else why in (found or "")


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
