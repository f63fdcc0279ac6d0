"""`carpool merge` layer by layer: the bits of peft's own merge of a whole model, and memory for a layer."""

from __future__ import annotations

import copy
import gc
import json
import os
import re
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM
from typer.testing import CliRunner

from benchmarks.peaks import growth
from carpool.cli import app
from carpool.experts.quantised import quantise
from carpool.hf import install, quantised_while_loading
from carpool.hf.weights import original_layout
from carpool.hf.weights.mxfp4_files import check_blocks, pack, unpack
from carpool.hf.weights.original_layout import OriginalLayout
from carpool.hf.weights.weight_files import stored_weights
from carpool.serve.served_model import Source
from carpool.train.checkpoints import adapter_files as merging
from carpool.train.checkpoints import adapter_files as unmerged
from carpool.train.checkpoints import trained_base
from carpool.train.checkpoints.adapter_files import merge_adapter
from carpool.train.checkpoints.checkpoint_files import CheckpointWriteError
from carpool.train.checkpoints.export import export_checkpoint, find_checkpoint
from carpool.train.checkpoints.manager import CheckpointManager
from carpool.train.checkpoints.run_source import keep_source
from carpool.train.config import load_config
from carpool.train.config.fine_tuning import other_base
from tests.hf.tiny_models import discover, tiny_model
from tests.shards import CUTS, reshard

EXPERTS = ["experts.gate_up_proj", "experts.down_proj"]
KINDS = {
    "olmoe": {"target_modules": ["q_proj", "o_proj"], "target_parameters": EXPERTS},
    "qwen3_moe": {"target_modules": ["v_proj"], "target_parameters": [*EXPERTS, "mlp.gate.weight"], "use_rslora": True},
    "mixtral": {"target_modules": ["k_proj"], "target_parameters": EXPERTS},
    "deepseek_v3": {"target_modules": ["q_b_proj", "kv_b_proj"], "use_dora": True},
    "gpt_oss": {"target_modules": ["q_proj"], "target_parameters": EXPERTS, "modules_to_save": ["lm_head"]},
    "glm4_moe": {"target_modules": ["o_proj"], "target_parameters": EXPERTS},
}


def make_run(
    folder: Path, model: Any, kind: dict[str, Any], cut: str | None = None, base_dtype: str | None = None
) -> Path:
    """A run directory with an adapter of random values, beside a base model, whose files are cut so. `base_dtype`: how
    it says that it has stored the experts."""
    base, run = folder / "base", folder / "run"
    model.save_pretrained(base, max_shard_size="500KB")
    if cut is not None:
        assert reshard(base, cut) > 1
    adapted = get_peft_model(copy.deepcopy(model), LoraConfig(r=3, lora_alpha=5, task_type="CAUSAL_LM", **kind))
    torch.manual_seed(1)
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name or "modules_to_save" in name or "magnitude" in name:
            parameter.data += 0.1 * torch.randn_like(parameter)
    adapted.peft_config["default"].base_model_name_or_path = str(base)
    adapted.save_pretrained(run / "adapter", save_embedding_layers=False)
    keep_source(run, base, None)
    if base_dtype is not None:
        dtype = str(model.dtype).removeprefix("torch.")
        (run / "config.toml").write_text(
            f'[model]\npath = "{base}"\ndtype = "{dtype}"\n[adapter]\nkind = "lora"\nbase_dtype = "{base_dtype}"\n'
            '[data]\ntrain = "none.jsonl"\n'
        )
    return run


def all_weights(folder: Path) -> dict[str, torch.Tensor]:
    return {name: value for file in folder.glob("*.safetensors") for name, value in load_file(file).items()}


@pytest.mark.parametrize("family", KINDS)
@pytest.mark.parametrize(
    ("cut", "dtype"),
    [
        (None, torch.bfloat16),
        ("turns", torch.bfloat16),
        *((cut, torch.float32) for cut in CUTS),
        *(pytest.param(cut, torch.bfloat16, marks=pytest.mark.slow) for cut in CUTS if cut != "turns"),
        pytest.param(None, torch.float32, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_bits_of_pefts_merge(cut: str | None, family: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """However the base's files cut layers, experts, and gate from up."""
    model: Any = tiny_model(discover()[family]).to(dtype)
    run = make_run(tmp_path, model, KINDS[family], cut)
    merged = merge_adapter(run, tmp_path / "merged", logits=True)
    assert "tensors differ from base plus adapter by at most" in merged.checked, merged.checked
    assert "of 64 random tokens by" in merged.checked, merged.checked
    if cut is not None:
        indices = [tmp_path / folder / "model.safetensors.index.json" for folder in ("base", "merged")]
        assert json.loads(indices[0].read_text()) == json.loads(indices[1].read_text())
    whole: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=dtype)
    whole = PeftModel.from_pretrained(whole, str(run / "adapter")).merge_and_unload()
    whole.save_pretrained(tmp_path / "expected")
    ours, theirs, before = (all_weights(tmp_path / name) for name in ("merged", "expected", "base"))
    assert ours.keys() == theirs.keys() == before.keys()
    assert [name for name in ours if not torch.equal(ours[name], theirs[name])] == []
    assert any(not torch.equal(ours[name], before[name]) for name in ours)


def bits(value: torch.Tensor) -> torch.Tensor:
    return value.view(torch.int16 if value.dtype == torch.bfloat16 else torch.int32)


# The end of a weight's name, what is done to it (given the merged weight and the base's), and what is said then.
BREAKS: dict[str, tuple[str, Callable[[torch.Tensor, torch.Tensor], Any], str]] = {
    "drops an expert": ("layers.1.mlp.experts.down_proj", lambda m, b: m[5].copy_(b[5]), ", expert 5 is wrong in"),
    "swaps gate and up": (
        "layers.0.mlp.experts.gate_up_proj", lambda m, b: m.copy_(b + (m - b).roll(m.shape[1] // 2, 1)),
        ", expert 0, gate is wrong in",
    ),
    "transposes": ("layers.0.self_attn.o_proj.weight", lambda m, _: m.copy_(m.T.clone()), " is wrong in"),
    "scales": ("layers.0.self_attn.q_proj.weight", lambda m, b: m.copy_(b + 0.9 * (m - b)), " is wrong in"),
    "touches another": ("model.norm.weight", lambda m, _: bits(m)[3].add_(1), " is wrong in 1 of 32 values"),
    "is not a number": (
        "layers.1.mlp.experts.gate_up_proj", lambda m, _: m[2, 0, 0].fill_(torch.nan),
        ", expert 2, gate is wrong in 1 of",
    ),
}  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("wrong", BREAKS)
def test_a_wrong_merge_is_found_and_leaves_no_folder(
    wrong: str, dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(tmp_path, tiny_model(discover()["olmoe"]).to(dtype), KINDS["olmoe"], "turns")
    read = merging._merged
    changed, change, said = BREAKS[wrong]

    def broken(modules: Any, weights: Any, name: str) -> torch.Tensor:
        merged = read(modules, weights, name).clone()
        if name.endswith(changed):
            change(merged, weights.read(name))
        return merged

    monkeypatch.setattr(merging, "_merged", broken)
    with pytest.raises(CheckpointWriteError, match=f"merged was not written: .*{changed}{said}"):
        merge_adapter(run, tmp_path / "merged")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["base", "run"]


@pytest.mark.parametrize("damage", ["delta", "config", "lacks", "nothing"])
def test_the_whole_model_is_compared(damage: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What each tensor by itself does not show."""
    run = make_run(tmp_path, tiny_model(discover()["qwen3_moe"]), KINDS["qwen3_moe"], "kinds")
    expected = {
        "delta": "more than by rounding",
        "config": "logits of the median random token differ by",
        "lacks": "lm_head.weight",
        "nothing": "peft merged nothing into",
    }
    if damage == "delta":  # values are not looked at
        monkeypatch.setattr(unmerged, "check_values", lambda *_: 0.0)
        wrong = partial(torch.Tensor.mul, other=1.5)
        monkeypatch.setattr(
            peft.tuners.lora.layer.ParamWrapper,
            "get_delta_weight",
            lambda *args, real=peft.tuners.lora.layer.ParamWrapper.get_delta_weight: wrong(real(*args)),
        )
    elif damage == "config":
        path = run / "source" / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"rms_norm_eps": 0.5}))
    elif damage == "lacks":
        path = run / "source" / "source.json"
        record = json.loads(path.read_text())
        del record["weights"]["lm_head.weight"]
        path.write_text(json.dumps(record))
        monkeypatch.setattr(merging, "OriginalLayout", without_head)
    else:
        monkeypatch.setattr(peft.tuners.lora.layer, "check_adapters_to_merge", lambda *_: [])
    with pytest.raises(CheckpointWriteError, match=expected[damage]):
        merge_adapter(run, tmp_path / "merged", logits=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["base", "run"]


def without_head(model: Any, tensors: Any, source: Any, **options: Any) -> Any:
    layout = OriginalLayout(model, tensors, source, **options)
    layout.groups = [group for group in layout.groups if "lm_head.weight" not in group.inputs]
    for entries in layout.files.values():
        entries.pop("lm_head.weight", None)
    return layout


def test_tied_embeddings(tmp_path: Path) -> None:
    """They are merged beside adapters of others; an adapter of one of the two is refused."""
    model = tiny_model(discover()["qwen3_moe"], tie_word_embeddings=True)
    run = make_run(tmp_path / "a", model, KINDS["qwen3_moe"], "turns")
    assert "lm_head.weight" not in all_weights(tmp_path / "a" / "base")
    assert "logits of 64" in merge_adapter(run, tmp_path / "merged", logits=True).checked
    run = make_run(tmp_path / "b", model, {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]})
    with pytest.raises(ValueError, match=r"changes one of .*embed_tokens.weight, which are one tensor"):
        merge_adapter(run, tmp_path / "again")


def wide(family: str, dtype: torch.dtype) -> Any:
    """With rows that nf4 can divide into blocks."""
    return tiny_model(discover()[family], hidden_size=64, intermediate_size=64, moe_intermediate_size=64).to(dtype)


def logits_of(model: Any) -> torch.Tensor:
    ids = torch.randint(90, (3, 17), generator=torch.Generator().manual_seed(5))
    with torch.no_grad():
        logits: torch.Tensor = model.eval()(input_ids=ids, use_cache=False).logits
    return logits


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("family", "kind"), [("qwen3_moe", "nf4"), ("gpt_oss", "nf4"), ("olmoe", "int8")])
def test_what_is_merged_is_what_was_trained(family: str, kind: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """Beside a quantised base, and the files' own weights are as far away as quantising has moved them."""
    run = make_run(tmp_path, wide(family, dtype), KINDS[family], "turns", kind)
    exact = merge_adapter(run, tmp_path / "exact", logits=True)
    assert f"differ from base in {kind} plus adapter" in exact.checked and "LOSSY" not in exact.checked
    original = merge_adapter(run, tmp_path / "original", logits=True, into="original")
    assert re.search(
        r"LOSSY: from what was trained, logits differ by .* \(median token; .* at most\), KL", original.checked
    )
    load: Any = AutoModelForCausalLM.from_pretrained
    with quantised_while_loading(kind, KINDS[family].get("modules_to_save", ())):
        model = load(tmp_path / "base", dtype=torch.float32)
    install(model)
    trained = logits_of(PeftModel.from_pretrained(model, str(run / "adapter")))
    # Of the median token: rounding makes some choose another expert.
    found = {name: logits_of(load(tmp_path / name, dtype=torch.float32)) for name in ("exact", "original")}
    far = {name: ((one - trained).norm(dim=-1) / trained.norm(dim=-1)).median().item() for name, one in found.items()}
    assert far["exact"] < (1e-5 if dtype == torch.float32 else 0.035) and far["original"] > 1.5 * far["exact"], far
    assert stored_weights(tmp_path / "exact") == stored_weights(tmp_path / "base")


@pytest.mark.parametrize("wrong", ["other", "none", "adapter"])
def test_a_merge_into_other_weights_than_the_trained_ones_is_found(
    wrong: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(tmp_path, wide("olmoe", torch.float32), KINDS["olmoe"], None, "nf4")
    if wrong == "adapter":  # the code that trains reads columns in another order

        def mixed(base: Path, adapter: Path, trained: Any, real: Any = merging.load_trained) -> Any:
            model = real(base, adapter, trained)
            for name, module in model.named_modules():
                if name.endswith("experts.lora_B.default"):
                    module.weight.data = module.weight.data.roll(1, 0)
            return model

        monkeypatch.setattr(merging, "load_trained", mixed)
    else:
        read = {"other": lambda value, _: quantise(value, "int8"), "none": lambda value, _: (value, value)}[wrong]
        monkeypatch.setattr(trained_base, "quantise", read)
        if wrong == "none":
            monkeypatch.setattr(trained_base, "dequantise", lambda value, *_: value)
    with pytest.raises(CheckpointWriteError, match="the base in nf4 plus the adapter is not what was trained"):
        merge_adapter(run, tmp_path / "merged", logits=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["base", "run"]


def test_an_adapter_beside_another_base_than_its_own_is_said(tmp_path: Path) -> None:
    """Of a quantised base, by its run, by its folder, with weights, and beside the base as its files have it."""
    model = wide("olmoe", torch.float32)
    run, base = make_run(tmp_path, model, KINDS["olmoe"], None, "nf4"), tmp_path / "base"
    said = f"{run}/adapter was trained beside {base} in nf4, and is used beside {base} as its files have it"

    def merged(*words: str) -> str:
        done = CliRunner().invoke(app, ["merge", *words, "--out", str(tmp_path / "merged")])
        shutil.rmtree(tmp_path / "merged", ignore_errors=True)
        return " ".join(done.output.split())

    for words in ([str(run), "--weights", "1"], [str(run / "adapter")]):
        text = merged(*words)
        assert "was trained beside a base in nf4, and adapters with --weights" in text and "--into original" in text
        assert f"`carpool merge {run} --out {tmp_path}/merged` merges it into the base in nf4" in text
    assert f"warning: {said}" in merged(str(run / "adapter"), "--into", "original")
    assert "warning" not in merged(str(run))
    assert other_base(str(run / "adapter"), str(base), None) == said
    assert other_base(str(run), str(base), "nf4") is None
    # Asked unmerged: the folder alone is beside the files' weights, and the run beside its own.
    served = Source(run, base, None, None, None, {"adapter": run / "adapter"})  # type: ignore[arg-type]
    assert served.warnings == [said]
    config = load_config(run / "config.toml")
    assert Source(run, base, None, config, None, {"run": run / "adapter"}).warnings == []  # type: ignore[arg-type]


def test_experts_are_packed_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In MXFP4, which Transformers reads; what it cannot represent is said, and what is wrong leaves no folder."""
    run = make_run(tmp_path, tiny_model(discover()["gpt_oss"]).bfloat16(), KINDS["gpt_oss"])
    merged = merge_adapter(run, tmp_path / "merged", logits=True, dtype="mxfp4")
    assert "LOSSY: from what was trained" in merged.checked
    stored = stored_weights(tmp_path / "merged")
    assert stored["model.layers.1.mlp.experts.down_proj_blocks"].shape == (8, 32, 1, 16)
    assert "model.layers.1.mlp.experts.down_proj" not in stored
    assert json.loads((merged.folder / "config.json").read_text())["quantization_config"]["quant_method"] == "mxfp4"
    loaded: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)
    whole: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float32)
    whole = PeftModel.from_pretrained(whole, str(run / "adapter")).merge_and_unload()
    for name, value in whole.named_parameters():
        most = 0.25 * value.abs().max() if "experts." in name and "bias" not in name else 2**-7 * value.abs().max()
        assert (loaded.get_parameter(name) - value).abs().max() <= most, name
    with pytest.raises(ValueError, match="in MXFP4 of gpt-oss alone"):
        merge_adapter(
            make_run(tmp_path / "b", tiny_model(discover()["olmoe"]), KINDS["olmoe"]), tmp_path / "c", dtype="mxfp4"
        )
    real = original_layout.pack
    monkeypatch.setattr(original_layout, "pack", lambda value: (real(value)[0].roll(1, 3), real(value)[1]))
    with pytest.raises(CheckpointWriteError, match="more than by packing to MXFP4"):
        merge_adapter(run, tmp_path / "wrong", dtype="mxfp4")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["b", "base", "merged", "run"]


def test_what_comes_from_mxfp4_goes_back_without_loss() -> None:
    generator = torch.Generator().manual_seed(0)
    blocks = torch.randint(256, (2, 40, 3, 16), dtype=torch.uint8, generator=generator)
    scales = torch.randint(1, 250, (2, 40, 3), dtype=torch.uint8, generator=generator)
    blocks[0, 0], blocks[1, 7, 1] = 0, 0x11  # zeros, and small values alone
    weight = unpack(blocks, scales)
    assert torch.equal(unpack(*pack(weight)), weight)
    rough = torch.randn(2, 64, 5, generator=generator)
    found = unpack(*pack(rough), torch.float32)
    assert check_blocks("", found.transpose(1, 2), rough.transpose(1, 2)) < 0.13
    with pytest.raises(ValueError, match="have 48"):
        pack(torch.zeros(1, 48, 2))


def deep_model() -> Any:
    """12 layers of 384 KiB of experts."""
    config = AutoConfig.for_model(
        "qwen3_moe", hidden_size=64, moe_intermediate_size=64, num_hidden_layers=12, num_attention_heads=2,
        num_key_value_heads=2, head_dim=16, num_experts=8, num_experts_per_tok=2, vocab_size=64, bos_token_id=None,
        eos_token_id=None,
    )  # fmt: skip
    return AutoModelForCausalLM.from_config(config)


LAYER = 4 * 8 * 3 * 64 * 64


def test_an_export_needs_memory_for_one_layer(tmp_path: Path) -> None:
    model = deep_model()
    whole = sum(parameter.nbytes for parameter in model.parameters())
    model.save_pretrained(tmp_path / "base", max_shard_size="500KB")
    keep_source(tmp_path / "run", tmp_path / "base", None)
    CheckpointManager(tmp_path / "run").save(1, model, torch.optim.SGD(model.parameters()), {})
    del model
    gc.collect()
    run = tmp_path / "run"
    taken = growth(lambda: export_checkpoint(run, find_checkpoint(run, None), tmp_path / "out"))
    # The checkpoint is one file, which is mapped.
    assert LAYER < taken < whole + 2 * LAYER


def test_a_merge_needs_memory_for_one_layer(tmp_path: Path) -> None:
    model = deep_model()
    run = make_run(tmp_path, model, KINDS["olmoe"])
    whole, config = sum(parameter.nbytes for parameter in model.parameters()), model.config
    del model
    gc.collect()
    taken = growth(lambda: merge_adapter(run, tmp_path / "merged"))
    mapped = (run / "adapter" / "adapter_model.safetensors").stat().st_size + 500_000
    assert LAYER < taken < mapped + 4 * LAYER < whole / 2
    with pytest.raises(ValueError, match=r"is not an adapter of this model: base_model\.model\.model\.layers\.11"):
        config.num_hidden_layers = 11
        AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "other")
        merge_adapter(run, tmp_path / "again", base=tmp_path / "other")
    config.num_hidden_layers, config.num_experts = 12, 2 * config.num_experts
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "wider")
    with pytest.raises(ValueError, match=r"is \(.*\) there, and beside .*wider it would be \("):
        merge_adapter(run, tmp_path / "again", base=tmp_path / "wider")
    os.truncate(run / "adapter" / "adapter_model.safetensors", 3000)
    with pytest.raises(ValueError, match=r"\(3,000 bytes\) is not a whole safetensors file: .*; copy or download it"):
        merge_adapter(run, tmp_path / "again")
