"""What people do with models beside training them: each works under expert parallelism, or is refused clearly.

Tests run on each of two ranks, in an empty folder that they share, `path`; `_model` loads a tiny model there the way a
user would (fsdp_size = ep_size = all ranks).
"""

from __future__ import annotations

import json
import re
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import transformers
from peft import LoraConfig, PeftModel, PrefixTuningConfig, PromptTuningConfig, get_peft_model
from safetensors.torch import load_file, save_file
from torch.distributed.tensor import DTensor
from torch.utils.data import Dataset
from transformers import PreTrainedModel
from transformers.distributed import DistributedConfig

import carpool.hf
from carpool.hf.routing.router_answers import balanced_choices, force_choices
from carpool.hf.seam.expert_rides import rides
from tests.hf.meshes import reuse_meshes
from tests.hf.parity import BOUND, IMPLEMENTATION, full_gradients, quiet, relative_error
from tests.hf.tiny_models import VOCAB_SIZE, discover, tiny_batch, tiny_model
from tests.ranks import Ranks, on_ranks

FOLDERS = ["olmoe", "gpt_oss", "deepseek_v3", "qwen3_moe"]


def two_of(folders: list[str], *quick: str) -> list[Any]:
    """All of them, the others slow."""
    return [pytest.param(folder, marks=[] if folder in quick else [pytest.mark.slow]) for folder in folders]


def _save(folder: str, path: str, **overrides: Any) -> None:
    quiet()
    if dist.get_rank() == 0:
        tiny_model(discover()[folder], **overrides).save_pretrained(path)
    dist.barrier()


def _model(folder: str, path: str, implementation: str = IMPLEMENTATION, **kwargs: Any) -> PreTrainedModel:
    world = dist.get_world_size()
    sizes = {"fsdp_size": world, "ep_size": world} | kwargs.pop("sizes", {})
    config = DistributedConfig(ep_implementation=implementation, **sizes)
    kwargs = {"dtype": torch.float32} | kwargs
    reuse_meshes()
    return discover()[folder].model_class.from_pretrained(path, distributed_config=config, **kwargs).train()


def _alone(folder: str, path: str, **kwargs: Any) -> PreTrainedModel:
    """The same model, unmodified, whole on each rank."""
    kwargs = {"dtype": torch.float32} | kwargs
    return discover()[folder].model_class.from_pretrained(path, **kwargs).train()


def _own(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """This rank's sequences of the batch."""
    rank, world = dist.get_rank(), dist.get_world_size()
    return {name: value.chunk(world)[rank] for name, value in tiny_batch(model).items()}


def _worst(model: Any, reference: Any) -> float:
    """The largest error of a gradient; infinite if one exists on one side only. Collective."""
    ours = full_gradients(model)
    worst = 0.0
    for name, parameter in reference.named_parameters():
        if (parameter.grad is None) != (ours[name] is None):
            return float("inf")
        if parameter.grad is not None:
            worst = max(worst, relative_error(ours[name], parameter.grad, 1e-6))
    return worst


def _train_both(model: Any, reference: Any, batch_of: PreTrainedModel) -> float:
    model(**_own(batch_of)).loss.backward()
    reference(**tiny_batch(batch_of)).loss.backward()
    return _worst(model, reference)


# ------------------------------------------------------------------------------------------------------- training


@pytest.mark.parametrize("folder", two_of(FOLDERS, "olmoe", "deepseek_v3"))
@on_ranks("two_ranks")
def test_gradient_checkpointing_changes_nothing(path: str, folder: str) -> None:
    _save(folder, path)
    plain = _model(folder, path)
    plain(**_own(plain)).loss.backward()
    theirs = full_gradients(plain)
    for how in ("with reentry", "without", "rides kept"):
        recomputing = _model(folder, path)
        keep = {"context_fn": carpool.keep_rides} if how == "rides kept" else {}
        recomputing.activation_checkpointing_enable({"use_reentrant": how == "with reentry", **keep})
        recomputing(**_own(recomputing)).loss.backward()
        ours = full_gradients(recomputing)
        for name, expected in theirs.items():
            gradient = ours[name]
            same = gradient is expected if gradient is None or expected is None else torch.equal(gradient, expected)
            assert same, (how, name)


@on_ranks("two_ranks")
def test_gradients_in_float64_are_divided_once(path: str) -> None:
    """Those of experts, which one rank has alone, also once rides are settled, as before compilation. FSDP does the
    same in float16."""
    _save("olmoe", path)
    reference = _alone("olmoe", path, dtype=torch.float64, experts_implementation="eager")
    model = _model("olmoe", path, dtype=torch.float64)
    for _ in range(2):
        assert _train_both(model, reference, model) <= BOUND
        for own in rides(model).values():
            own.settle()


@pytest.mark.parametrize("experts_train", [False, True])
@on_ranks("two_ranks")
def test_frozen_experts_or_frozen_rest(path: str, experts_train: bool) -> None:
    _save("olmoe", path)
    model, reference = _model("olmoe", path), _alone("olmoe", path)
    for part in (model, reference):
        for name, parameter in part.named_parameters():
            parameter.requires_grad_((".experts." in name) == experts_train)
    assert _train_both(model, reference, model) <= BOUND


@pytest.mark.parametrize("folder", ["olmoe", "gpt_oss"])
@on_ranks("two_ranks")
def test_tied_embeddings(path: str, folder: str) -> None:
    _save(folder, path, tie_word_embeddings=True)
    model, reference = _model(folder, path), _alone(folder, path)
    assert _train_both(model, reference, model) <= BOUND
    assert model.get_input_embeddings().weight is model.get_output_embeddings().weight
    model.save_pretrained(f"{path}/saved")
    dist.barrier()
    again = _alone(folder, f"{path}/saved")
    assert torch.equal(again(**_own(again)).logits, reference(**_own(again)).logits)


@pytest.mark.parametrize("folder", ["gpt_oss", "deepseek_v3"])
@on_ranks("two_ranks")
def test_ranks_that_no_token_visits(path: str, folder: str) -> None:
    quiet()
    if dist.get_rank() == 0:
        model = tiny_model(discover()[folder])
        for name, tensor in model.state_dict().items():
            if name.endswith(("router.bias", "e_score_correction_bias")):
                tensor[:2] += 100
        model.save_pretrained(path)
    dist.barrier()
    model, reference = _model(folder, path), _alone(folder, path)
    assert _train_both(model, reference, model) <= BOUND
    routings = [ride.routing for ride in carpool.hf.rides(model).values()]
    chosen = {int(e) for routing in routings if routing is not None for e in routing.expert_TK.unique()}
    assert chosen == {0, 1}  # of eight experts on two ranks: all of them are on rank 0


def _force(model: PreTrainedModel, layers: list[str], part: int, parts: int) -> None:
    """Routers choose the same experts in every model, whatever it rounds: of the batch's tokens this part."""
    config = model.config
    num_experts, top_k = getattr(config, "num_experts", None) or config.num_local_experts, config.num_experts_per_tok
    tokens = tiny_batch(model)["input_ids"].numel()
    choices = {
        name: balanced_choices(tokens, num_experts, top_k, seed).chunk(parts)[part] for seed, name in enumerate(layers)
    }
    force_choices(model, choices, num_experts)


@pytest.mark.parametrize("how", ["parameters", "mixed precision", "autocast"])
@pytest.mark.parametrize("folder", ["olmoe", pytest.param("gpt_oss", marks=pytest.mark.slow)])
@on_ranks("two_ranks")
def test_bf16_is_as_exact_as_without_carpool(path: str, folder: str, how: str) -> None:
    """bf16 keeps 8 bits, so its errors are about 2^-8 per operation; what counts is that Carpool adds none to those of
    transformers' own all-to-all.

    Choices are forced: where two experts are nearly equal, the kernels of another CPU would choose another in one of
    the models, and the error of one token would be that of a whole expert."""
    _save(folder, path)
    layers = list(carpool.hf.rides(_model(folder, path)))
    assert layers
    reference = _alone(folder, path)
    _force(reference, layers, 0, 1)
    reference(**tiny_batch(reference)).loss.backward()
    exact = torch.cat([p.grad.flatten() for p in reference.parameters() if p.grad is not None])
    results = {}
    for implementation in (IMPLEMENTATION, "all_to_all"):
        dtype = torch.bfloat16 if how == "parameters" else torch.float32
        sizes = {"fsdp_mixed_precision": how == "mixed precision"}
        model = _model(folder, path, implementation, dtype=dtype, sizes=sizes)
        _force(model, layers, dist.get_rank(), dist.get_world_size())
        with torch.autocast("cpu", torch.bfloat16, enabled=how == "autocast"):
            output = model(**_own(model))
        output.loss.backward()
        gradients = [g.float().flatten() for g in full_gradients(model).values() if g is not None]
        error = float((torch.cat(gradients) - exact).norm() / exact.norm())
        results[implementation] = (error, str(output.logits.dtype))
    (ours, dtype), (theirs, their_dtype) = results[IMPLEMENTATION], results["all_to_all"]
    assert 0 < ours <= 1.1 * theirs and theirs < 0.15 and dtype == their_dtype


@on_ranks("two_ranks")
def test_norms_of_heads_accumulate(path: str) -> None:
    """Under tensor parallelism each rank has the gradient of its own heads: the sum of a second micro-batch leaves the
    first one as it is."""
    _save("qwen3_moe", path)
    model, reference = _model("qwen3_moe", path, sizes={"fsdp_size": 1, "tp_size": 2}), _alone("qwen3_moe", path)
    for half in (0, 1):
        batch = {name: value.chunk(2)[half] for name, value in tiny_batch(reference).items()}
        for one in (model, reference):
            one(**batch).loss.backward()
    assert _worst(model, reference) <= BOUND


class Tokens(Dataset[dict[str, torch.Tensor]]):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids = torch.randint(3, VOCAB_SIZE, (11,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": ids, "labels": ids}


@on_ranks("two_ranks")
def test_trainer(path: str) -> None:
    """transformers' Trainer with gradient accumulation and clipping: only the name of the implementation differs."""
    _save("olmoe", path)
    curves = {}
    for implementation in (IMPLEMENTATION, "all_to_all"):
        transformers.set_seed(0)
        arguments = transformers.TrainingArguments(
            output_dir=f"{path}/{implementation}",
            max_steps=3,
            per_device_train_batch_size=2,
            gradient_accumulation_steps=2,
            learning_rate=1e-2,
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            use_cpu=True,
            disable_tqdm=True,
        )
        trainer = transformers.Trainer(_model("olmoe", path, implementation), arguments, train_dataset=Tokens())
        trainer.remove_callback(transformers.PrinterCallback)
        trainer.train()
        curves[implementation] = [(log["loss"], log["grad_norm"]) for log in trainer.state.log_history if "loss" in log]
    assert len(curves[IMPLEMENTATION]) == 3
    assert curves[IMPLEMENTATION] == [pytest.approx(step, rel=1e-5) for step in curves["all_to_all"]]


# ------------------------------------------------------------------------------------------------------- adapters


def _lora(targets: list[str]) -> LoraConfig:
    return LoraConfig(r=4, target_modules=targets, init_lora_weights=False)


@on_ranks("two_ranks")
def test_lora_on_attention(path: str) -> None:
    """Adapters of peft are synchronised by themselves: gradients are those of one process. What saves and loads is in
    test_expert_adapters.py."""
    _save("olmoe", path)
    base, reference = _model("olmoe", path), _alone("olmoe", path)
    torch.manual_seed(dist.get_rank())  # adapters start from other values on each rank, as they would by chance
    model = get_peft_model(base, _lora(["q_proj", "v_proj"]))
    torch.manual_seed(0)
    single = get_peft_model(reference, _lora(["q_proj", "v_proj"]))
    assert _train_both(model, single, base) <= BOUND
    for use_reentrant in (False, True):
        model.zero_grad()
        base.activation_checkpointing_enable({"use_reentrant": use_reentrant})
        base.enable_input_require_grads()
        model(**_own(base)).loss.backward()
        assert _worst(model, single) <= BOUND
    assert carpool.hf.synchronize_adapters(model) == []


@on_ranks("two_ranks")
def test_loaded_adapters_train_without_a_call(path: str) -> None:
    """For each way to load an adapter and train it on: its gradients are those of one process."""
    _save("olmoe", path)
    adapter, batch_of = f"{path}/adapter", _alone("olmoe", path)
    if dist.get_rank() == 0:
        get_peft_model(_alone("olmoe", path), _lora(["q_proj", "v_proj"])).save_pretrained(adapter)
    dist.barrier()

    def load_into(model: Any) -> Any:
        model.load_adapter(adapter, is_trainable=True)
        return model

    def second(model: Any) -> Any:
        both = PeftModel.from_pretrained(model, adapter, adapter_name="first")
        both(**_own(batch_of))  # the second one comes when training has begun
        both.load_adapter(adapter, adapter_name="second", is_trainable=True)
        both.set_adapter("second")
        return both

    ways: dict[str, Any] = {
        "load_adapter": load_into,
        "low_cpu_mem_usage": partial(
            PeftModel.from_pretrained, model_id=adapter, is_trainable=True, low_cpu_mem_usage=True
        ),
        "second adapter": second,
    }
    for name, load in ways.items():
        assert _train_both(load(_model("olmoe", path)), load(_alone("olmoe", path)), batch_of) <= BOUND, name


OUTSIDE = {
    "PROMPT_TUNING": PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2),
    "PREFIX_TUNING": PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2),
}


@on_ranks("two_ranks")
def test_adapters_outside_the_layers_are_refused(path: str) -> None:
    _save("olmoe", path)
    for name, config in OUTSIDE.items():
        with pytest.raises(ValueError, match=f"^{name}.*outside the .*LoRA of linear layers"):
            get_peft_model(_model("olmoe", path), config)


@on_ranks("two_ranks")
def test_parameters_added_by_hand_must_be_synchronised(path: str) -> None:
    _save("olmoe", path)
    model = _model("olmoe", path)
    scale = torch.nn.Parameter(torch.full((), 1.0 + dist.get_rank()))
    head = model.get_output_embeddings()
    head.register_parameter("scale", scale)
    head.register_forward_hook(lambda module, _, output: output * module.scale)
    with pytest.raises(ValueError, match=r"1 trainable parameters.*synchronize_adapters"):
        model(**_own(model))
    assert carpool.hf.synchronize_adapters(model) == ["lm_head.scale"]
    model(**_own(model)).loss.backward()
    assert scale.grad is not None
    everywhere = [torch.zeros(2) for _ in range(dist.get_world_size())]
    dist.all_gather(everywhere, torch.stack([scale.detach(), scale.grad]))
    assert all(torch.equal(one, everywhere[0]) for one in everywhere)


REFUSED: dict[str, dict[str, Any]] = {
    "init_lora_weights='pissa'": {"init_lora_weights": "pissa"},
    "modules_to_save=['lm_head']": {"modules_to_save": ["lm_head"]},
    "layer_replication=[[0, 1], [0, 1]]": {"layer_replication": [[0, 1], [0, 1]]},
}


@on_ranks("two_ranks")
def test_adapters_of_sharded_weights_are_refused(path: str) -> None:
    """What peft would compute from a whole weight ends in one sentence on all ranks, and none waits for another."""
    _save("olmoe", path)
    base = _model("olmoe", path)
    for name, arguments in REFUSED.items():
        for add in (get_peft_model, lambda model, config: model.add_adapter(config)):
            with pytest.raises(ValueError, match=rf"^{re.escape(name)} cannot be used.*init_lora_weights True"):
                add(base, LoraConfig(r=4, target_modules=["q_proj"], **arguments))
    base = _model("olmoe", path)
    model = get_peft_model(base, _lora(["q_proj"]))
    for merge in (model.merge_and_unload, model.merge_adapter):
        with pytest.raises(ValueError, match="merge them there"):
            merge()
    assert 0 < float(model(**_own(base)).loss) < 100


@on_ranks("two_ranks")
def test_an_added_adapter_is_saved(path: str) -> None:
    """`add_adapter`, training and `save_pretrained`: no rank waits, also where rank 0 cannot write."""
    _save("olmoe", path)
    model = _model("olmoe", path)
    torch.manual_seed(dist.get_rank())
    model.add_adapter(_lora(["q_proj", "v_proj"]))
    model(**_own(model)).loss.backward()
    model.save_pretrained(f"{path}/adapter")
    weights = load_file(f"{path}/adapter/adapter_model.safetensors")
    assert len(weights) == 8 and all("lora_" in name for name in weights)
    loaded = PeftModel.from_pretrained(_alone("olmoe", path), f"{path}/adapter")
    with torch.no_grad():
        assert float((loaded(**_own(model)).logits - model(**_own(model)).logits).abs().max()) <= BOUND
    single = _alone("olmoe", path)
    single.load_adapter(f"{path}/adapter", is_trainable=True)
    single(**tiny_batch(model)).loss.backward()
    assert _worst(model, single) <= BOUND
    Path(path, "file").touch()
    with pytest.raises((OSError, RuntimeError), match="Not a directory"):
        model.save_pretrained(f"{path}/file/below")


def test_synchronize_adapters_needs_a_sharded_model() -> None:
    with pytest.raises(ValueError, match="not sharded"):
        carpool.hf.synchronize_adapters(tiny_model(discover()["olmoe"]))


# ------------------------------------------------------------------------------------------ quantisation, devices


def _quantise(path: str) -> None:
    """Turn a saved checkpoint into one with FP8 weights and block scales, as published checkpoints are."""
    weights = {}
    for name, weight in load_file(f"{path}/model.safetensors").items():
        if weight.ndim == 2 and "proj" in name:
            scale = weight.abs().max() / 448
            weights[name], weights[f"{name}_scale_inv"] = (weight / scale).to(torch.float8_e4m3fn), scale.view(1, 1)
        else:
            weights[name] = weight
    save_file(weights, f"{path}/model.safetensors", metadata={"format": "pt"})
    config_file = Path(path, "config.json")
    quantisation = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
    config_file.write_text(json.dumps(json.loads(config_file.read_text()) | {"quantization_config": quantisation}))


@on_ranks("two_ranks")
def test_quantised_checkpoints_are_refused(path: str) -> None:
    """On all ranks, before anything is read: loading would fail on some ranks and leave the others waiting."""
    _save("olmoe", path)
    whole = _alone("olmoe", path)(**_own(_alone("olmoe", path))).logits
    dist.barrier()
    if dist.get_rank() == 0:
        _quantise(path)
    dist.barrier()
    alone = _alone("olmoe", path)  # the checkpoint itself is sound
    with pytest.raises(ValueError, match=r"(?s)quantised.*dequantize\(\)"):
        _model("olmoe", path)
    assert relative_error(alone(**_own(alone)).logits.detach(), whole.detach()) < 0.3


@on_ranks("two_ranks")
def test_device_map(path: str) -> None:
    """The mesh decides where a rank's shard lives: transformers ignores `device_map` with FSDP, refuses it with TP."""
    _save("olmoe", path)
    plain, mapped = _model("olmoe", path), _model("olmoe", path, device_map="auto")
    assert torch.equal(plain(**_own(plain)).logits, mapped(**_own(plain)).logits)
    assert {str(parameter.device) for parameter in mapped.parameters()} == {"cpu"}
    with pytest.raises(ValueError, match="mutually exclusive"):
        _model("olmoe", path, device_map="auto", sizes={"fsdp_size": 1, "tp_size": 2})


# ----------------------------------------------------------------------------------------------------- generation


@pytest.mark.parametrize("folder", two_of(FOLDERS, "qwen3_moe", "gpt_oss"))
@on_ranks("two_ranks")
def test_generate_with_other_lengths_on_each_rank(path: str, folder: str) -> None:
    """Prompts of 3 and 5 tokens, which end after 3 and 5 more."""
    _save(folder, path)
    model, reference = _model(folder, path).eval(), _alone(folder, path).eval()
    length = 3 + 2 * dist.get_rank()
    prompt = _own(model)["input_ids"][:, :length]
    options: dict[str, Any] = {"do_sample": False, "pad_token_id": 0, "eos_token_id": None, "use_cache": True}
    ours = model.generate(prompt, max_new_tokens=length, **options)
    assert torch.equal(ours, reference.generate(prompt, max_new_tokens=length, **options))


# ------------------------------------------------------------------------------------------------ loading, saving


@pytest.mark.parametrize("folder", FOLDERS)
@on_ranks("two_ranks")
def test_saved_model_loads_in_plain_transformers(path: str, folder: str) -> None:
    _save(folder, path)
    model = _model(folder, path)
    model(**_own(model)).loss.backward()
    torch.optim.SGD(model.parameters(), lr=0.1, foreach=False).step()
    model.save_pretrained(f"{path}/saved")
    dist.barrier()
    plain = _alone(folder, f"{path}/saved")
    ours = {name: p.full_tensor() if isinstance(p, DTensor) else p for name, p in model.named_parameters()}
    assert not [name for name, p in plain.named_parameters() if not torch.equal(p, ours[name])]
    with torch.no_grad():
        assert relative_error(model(**_own(model)).logits, plain(**_own(model)).logits) <= BOUND


@pytest.mark.parametrize("folder", ["olmoe", "gpt_oss"])
@on_ranks("two_ranks")
def test_sharded_checkpoint_loads_on_another_mesh(path: str, folder: str) -> None:
    _save(folder, path)
    model = _model(folder, path).eval()
    model.save_pretrained(f"{path}/shards", distributed_checkpoint=True)
    again = _model(folder, f"{path}/shards", sizes={"ep_size": 1}).eval()
    with torch.no_grad():
        assert relative_error(again(**_own(model)).logits, model(**_own(model)).logits) <= BOUND


class _CountingSlice:
    """Stands before a slice of a safetensors file and counts the elements that are read through it."""

    def __init__(self, name: str, source: Any, counts: Counter[str]) -> None:
        self._name, self._source, self._counts = name, source, counts

    def __getitem__(self, index: Any) -> torch.Tensor:
        tensor = self._source[index]
        self._counts[self._name] += tensor.numel()
        return tensor

    def __getattr__(self, name: str) -> Any:
        return getattr(self._source, name)


def _count_reads(path: str, folder: str) -> tuple[int, int, set[str]]:
    """Elements of expert weights that this rank reads, and that there are; the names of the tensors it touches."""
    _save(folder, path)
    counts: Counter[str] = Counter()
    safe_open = transformers.modeling_utils.safe_open

    class CountingFile:
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            self._file = safe_open(*args, **kwargs)

        def __enter__(self) -> CountingFile:
            self._file.__enter__()
            return self

        def __exit__(self, *args: Any) -> Any:
            return self._file.__exit__(*args)

        def get_slice(self, name: str) -> _CountingSlice:
            return _CountingSlice(name, self._file.get_slice(name), counts)

        def __getattr__(self, name: str) -> Any:
            return getattr(self._file, name)

    with mock.patch.object(transformers.modeling_utils, "safe_open", CountingFile):
        _model(folder, path)
    read = sum(elements for name, elements in counts.items() if ".experts." in name)
    whole = _alone(folder, path)
    stored = sum(p.numel() for name, p in whole.named_parameters() if ".experts." in name)
    return read, stored, {name for name in counts if ".experts." in name}


@pytest.mark.parametrize("folder", ["olmoe", "gpt_oss"])
def test_loading_reads_only_a_ranks_own_experts(two_ranks: Ranks, tmp_path: Path, folder: str) -> None:
    """olmoe's checkpoints hold one tensor per expert, gpt_oss's one for all experts of a layer."""
    results = two_ranks(_count_reads, str(tmp_path), folder)
    assert all(read * 2 == stored > 0 for read, stored, _ in results)
    touched = [names for _, _, names in results]
    if folder == "olmoe":
        assert sum(len(names) for names in touched) == len(set().union(*touched)) == 2 * 8 * 3
