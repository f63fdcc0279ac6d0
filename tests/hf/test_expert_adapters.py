"""LoRA on experts, routers and attention: curves and adapters equal plain transformers and peft on one process.

Every function that starts with an underscore and takes `path` runs on each of the four ranks.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from peft import LoraConfig, PeftModel, get_peft_model, inject_adapter_in_model
from safetensors.torch import load_file, save_file
from torch import nn

import carpool.hf
from carpool.hf import rides, set_layout
from carpool.hf.expert_adapters import Stack
from carpool.hf.linear_adapters import multiply_in_16_bits
from carpool.layout import ExpertLayout
from tests.hf.parity import BOUND, relative_error
from tests.hf.test_behaviours import _alone, _model, _own, _save
from tests.hf.tiny_models import discover, tiny_batch, tiny_model
from tests.ranks import Ranks

EXPERTS = ["experts.gate_up_proj", "experts.down_proj"]
EP2 = {"fsdp_size": 4, "ep_size": 2}  # two ranks hold each expert


def config(targets: list[str] | str = "attention", parameters: list[str] | None = None, **others: Any) -> LoraConfig:
    """`init_lora_weights=False`: b does not begin with zeros."""
    modules = r".*self_attn.*(q_proj|v_proj|q_b_proj|o_proj)" if targets == "attention" else targets
    settings = {"r": 4, "lora_alpha": 6, "init_lora_weights": False, "task_type": "CAUSAL_LM", **others}
    return LoraConfig(
        target_modules=modules, target_parameters=EXPERTS if parameters is None else parameters, **settings
    )


def adapter(model: Any) -> dict[str, torch.Tensor]:
    """In peft's layout. Collective."""
    return {name: tensor.clone() for name, tensor in model.state_dict().items() if "lora_" in name}


def steps(model: Any, batch: dict[str, torch.Tensor], number: int) -> list[float]:
    """Losses of this many steps. At a rate at which the third depends on how the first two went."""
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.2, foreach=False)
    losses = []
    for _ in range(number):
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses


def mean(losses: list[torch.Tensor]) -> torch.Tensor:
    total = torch.stack(losses)
    dist.all_reduce(total)
    return total / dist.get_world_size()


def swapped(file: Path, to: Path, experts: int) -> None:
    """The same adapter with two columns of one b exchanged: the second of expert 0, and the first of expert 1 in the
    other order of columns."""
    tensors = load_file(file / "adapter_model.safetensors")
    name = next(n for n in sorted(tensors) if "experts.lora_B" in n)
    columns = torch.arange(tensors[name].shape[1])
    columns[[1, experts]] = columns[[experts, 1]]
    tensors[name] = tensors[name][:, columns].contiguous()
    to.mkdir()
    save_file(tensors, to / "adapter_model.safetensors", metadata={"format": "pt"})
    (to / "adapter_config.json").write_text((file / "adapter_config.json").read_text())


def _curves(path: str, folder: str, sizes: dict[str, int], kwargs: dict[str, Any]) -> dict[str, float]:
    _save(folder, path)
    torch.manual_seed(dist.get_rank())  # values that differ between ranks, as they would by chance
    base = _model(folder, path, sizes=sizes)
    model = get_peft_model(base, config(**kwargs))
    torch.manual_seed(0)
    single = get_peft_model(_alone(folder, path), config(**kwargs))
    with torch.no_grad():
        model(**_own(base))  # the first forward makes adapters equal on all ranks
    start = adapter(model)
    errors = {"start": max(relative_error(start[n], t) for n, t in adapter(single).items())}

    ours, theirs = mean(steps(model, _own(base), 3)), torch.stack(steps(single, tiny_batch(base), 3))
    errors["losses"] = relative_error(ours, theirs)
    trained, reference = adapter(model), adapter(single)
    assert trained.keys() == reference.keys()
    errors["adapter"] = max(relative_error(trained[n] - start[n], t - start[n], 1e-3) for n, t in reference.items())
    frozen = [p for n, p in model.named_parameters() if "lora_" not in n]
    assert all(p.grad is None and not p.requires_grad for p in frozen)

    model.save_pretrained(f"{path}/adapter")
    dist.barrier()
    logits = model(**_own(base)).logits.detach()
    loaded = PeftModel.from_pretrained(_alone(folder, path), f"{path}/adapter")
    errors["loaded"] = relative_error(loaded(**_own(base)).logits, logits)
    merged = loaded.merge_and_unload()
    errors["merged"] = relative_error(merged(**_own(base)).logits, logits)
    again = PeftModel.from_pretrained(_model(folder, path, sizes=sizes), f"{path}/adapter", is_trainable=True)
    errors["loaded here"] = relative_error(again(**_own(base)).logits, logits)
    with model.disable_adapter():
        errors["disabled"] = relative_error(model(**_own(base)).logits, _alone(folder, path)(**_own(base)).logits)
    if dist.get_rank() == 0:
        swapped(Path(path, "adapter"), Path(path, "swapped"), next(iter(rides(model).values())).num_experts)
    dist.barrier()
    wrong = PeftModel.from_pretrained(_alone(folder, path), f"{path}/swapped")
    errors["swapped"] = relative_error(wrong(**_own(base)).logits, logits)
    return errors


def check(errors: dict[str, float]) -> None:
    assert errors.pop("start") == 0
    assert errors.pop("adapter") <= 100 * BOUND  # of small changes of large values
    assert errors.pop("swapped") > 20 * BOUND, "the comparison does not see a column in the wrong place"
    assert max(errors.values()) <= BOUND, errors


# Of OLMoE, peft adapts attention, router and experts with "all-linear", gate and up with twice the rank.
ALL_LINEAR = {"targets": "all-linear", "parameters": []}
CASES: list[tuple[str, dict[str, int], dict[str, Any]]] = [
    ("gpt_oss", EP2, {"use_rslora": True}),
    ("olmoe", {"fsdp_size": 2, "dp_replicate_size": 2, "ep_size": 2}, ALL_LINEAR),
    ("olmoe", {}, ALL_LINEAR),
    *((folder, {}, {}) for folder in ("olmoe", "qwen3_moe", "mixtral", "deepseek_v3", "glm4_moe")),
]


@pytest.mark.parametrize(
    ("folder", "sizes", "kwargs"),
    [pytest.param(*case, marks=pytest.mark.slow if number else []) for number, case in enumerate(CASES)],
)
def test_adapters_train_as_on_one_process(
    ranks: Ranks, tmp_path: Path, folder: str, sizes: dict[str, int], kwargs: dict[str, Any]
) -> None:
    for errors in ranks(_curves, str(tmp_path), folder, sizes, kwargs):
        check(errors)


def _dora(path: str) -> float:
    _save("olmoe", path)
    base, reference = _model("olmoe", path), _alone("olmoe", path)
    torch.manual_seed(0)
    model = get_peft_model(base, config(parameters=[], use_dora=True))
    torch.manual_seed(0)
    single = get_peft_model(reference, config(parameters=[], use_dora=True))
    ours, theirs = mean(steps(model, _own(base), 3)), torch.stack(steps(single, tiny_batch(base), 3))
    return relative_error(ours, theirs)


def test_dora_starts_from_norms_of_whole_weights(ranks: Ranks, tmp_path: Path) -> None:
    assert max(ranks(_dora, str(tmp_path))) <= BOUND


def _moved(path: str, sizes: dict[str, int]) -> tuple[float, float, bool]:
    """Adapters, with what the optimizer keeps of them, go with their experts; states stay in logical
    order."""
    _save("olmoe", path)
    found = []
    for moves in (False, True):
        torch.manual_seed(0)
        base = _model("olmoe", path, sizes=sizes)
        model = get_peft_model(base, config())
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.02, foreach=False)
        losses, ranks = [], next(iter(rides(base).values())).num_ranks
        for step in range(3):
            for _ in range(2):
                loss = model(**_own(base)).loss
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
            if moves and step == 0:
                assert set_layout(base, ExpertLayout.permuted([3, 0, 6, 1, 7, 2, 5, 4], ranks), optimizer).experts > 0
            if moves and step == 1:
                set_layout(base, ExpertLayout.permuted([5, 1, 2, 3, 4, 7, 0, 6], ranks), optimizer)
        found.append((torch.stack(losses), adapter(model)))
    (losses, plain), (others, after) = found
    different = max(relative_error(after[name], tensor) for name, tensor in plain.items())
    named = list(rides(base)) == [f"model.layers.{i}.mlp.experts" for i in (0, 1)]
    return relative_error(others, losses), different, named


@pytest.mark.parametrize("sizes", [{}, pytest.param(EP2, marks=pytest.mark.slow)], ids=str)
def test_adapters_move_with_their_experts(ranks: Ranks, tmp_path: Path, sizes: dict[str, int]) -> None:
    for losses, adapters, named in ranks(_moved, str(tmp_path), sizes):
        assert losses <= BOUND and adapters <= 10 * BOUND and named


def test_one_process_without_a_mesh() -> None:
    """Two adapters are active at a time, they merge, and frozen weights get no gradient."""
    architecture = discover()["gpt_oss"]
    model, reference = (tiny_model(architecture) for _ in range(2))
    carpool.hf.install(model)
    pair = []
    for one in (model, reference):
        torch.manual_seed(0)
        adapted = get_peft_model(one, config())
        adapted.add_adapter("second", config(lora_alpha=3))
        adapted.base_model.set_adapter(["default", "second"])
        pair.append(adapted)
    ours, theirs = (one(**tiny_batch(model)) for one in pair)
    assert relative_error(ours.logits, theirs.logits) <= BOUND
    ours.loss.backward()
    assert all((p.grad is not None) == p.requires_grad for p in model.parameters())
    merged = [one.merge_and_unload() for one in pair]
    assert merged[0] is model and relative_error(merged[0](**tiny_batch(model)).logits, theirs.logits) <= BOUND
    assert not any("lora" in name for name in model.state_dict())


def test_pefts_layout() -> None:
    """Row e * Q + q of lora_A is row q of expert e's a; column q * E + e of lora_B is column q of its b."""
    carpool.hf.install(model := tiny_model(discover()["olmoe"]))
    own = next(iter(rides(model).values()))
    a, b = torch.randn(8 * 3, 5), torch.randn(6, 3 * 8)
    for stack, whole in ((Stack(own, False, None), a), (Stack(own, True, None), b)):
        assert torch.equal(stack.to_peft(stack.from_peft(whole)), whole)
    assert torch.equal(Stack(own, False, None).from_peft(a)[5, 2], a[5 * 3 + 2])
    assert torch.equal(Stack(own, True, None).from_peft(b)[5, :, 2], b[:, 2 * 8 + 5])


def _refused(path: str) -> list[str]:
    _save("gpt_oss", path)
    messages = []
    for parameters in (["experts.gate_up_proj_bias"],):
        with pytest.raises(ValueError) as refusal:
            get_peft_model(_model("gpt_oss", path), config(parameters=parameters))
        messages.append(str(refusal.value))
    model = get_peft_model(_model("gpt_oss", path), config())
    for own in rides(model).values():
        own.compute = nn.Identity()  # experts of a plug-in that knows nothing of adapters
    with pytest.raises(ValueError) as refusal:
        model(**_own(model))
    return [*messages, str(refusal.value)]


def test_what_cannot_be_adapted_is_refused(ranks: Ranks, tmp_path: Path) -> None:
    for bias, plug_in in ranks(_refused, str(tmp_path)):
        assert "gate_up_proj_bias is a bias" in bias
        assert "cannot compute adapters" in plug_in


class Model(nn.Module):
    def __init__(self, dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__()
        self.proj = nn.Linear(48, 40, dtype=dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.proj(x)
        return out


def adapted(ours: bool, dtype: torch.dtype = torch.bfloat16, **settings: Any) -> Any:
    torch.manual_seed(0)
    model = inject_adapter_in_model(LoraConfig(r=8, lora_alpha=12, target_modules=["proj"], **settings), Model(dtype))
    for name, parameter in model.named_parameters():
        if "lora" in name:
            nn.init.normal_(parameter, std=0.2)
    if ours:
        multiply_in_16_bits(model, "default")
    return model


def results(model: Any, x: torch.Tensor, dy: torch.Tensor) -> dict[str, torch.Tensor]:
    x = x.clone().requires_grad_()
    y = model(x)
    y.backward(dy)
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None and "lora" in name}
    return {"y": y.detach(), "dx": x.grad, **gradients}


@pytest.fixture
def inputs() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    x, dy = (torch.randn(2, 50, width, generator=generator).bfloat16() for width in (48, 40))
    return x, dy


def test_outputs_and_gradients_are_those_of_float64(inputs: tuple[torch.Tensor, torch.Tensor]) -> None:
    ours, theirs = adapted(True), adapted(False)
    got = results(ours, *inputs)
    exact = results(adapted(False).double(), *(one.double() for one in inputs))
    plain = results(theirs, *inputs)
    assert set(got) == set(exact) == set(plain) and len(got) == 4
    for name, want in exact.items():
        assert got[name].dtype == plain[name].dtype
        error, allowed = ((one[name].double() - want).norm() / want.norm() for one in (got, plain))
        # Of factors, gradients are float32 sums of products of values that were rounded once.
        assert error < (4e-3 if "lora" in name else max(6e-3, 1.5 * allowed)), name


@pytest.mark.parametrize(
    "settings", [{"use_dora": True}, {"lora_dropout": 0.5}, {"lora_bias": True}, {"dtype": torch.float32}], ids=str
)
def test_all_else_is_pefts(settings: dict[str, Any], inputs: tuple[torch.Tensor, torch.Tensor]) -> None:
    found = []
    for ours in (True, False):
        model = adapted(ours, **settings)
        torch.manual_seed(2)
        found.append(results(model, *(one.to(settings.get("dtype", torch.bfloat16)) for one in inputs)))
    assert found[0].keys() == found[1].keys()
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[1])


def test_disabled_and_merged_adapters_add_nothing(inputs: tuple[torch.Tensor, torch.Tensor]) -> None:
    model, x = adapted(True), inputs[0]
    merged, base = model.proj(x), nn.functional.linear(x, model.proj.base_layer.weight, model.proj.base_layer.bias)
    model.proj.enable_adapters(False)
    assert torch.equal(model.proj(x), base) and not torch.equal(merged, base)
    model.proj.enable_adapters(True)
    model.proj.merge()
    torch.testing.assert_close(model.proj(x), merged, atol=0.06, rtol=0.06)
