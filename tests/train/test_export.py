"""`carpool export`: a checkpoint of a run as the folder that its run began from, with other values; and what other
programs expect of it."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import gguf
import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.numpy import load_file as load_numpy
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedConfig

from carpool.hf.build_model import build_model
from carpool.hf.weights.initial import set_tensor
from carpool.hf.weights.weight_files import Entry, split_by_size, write_tensor_file
from carpool.train.checkpoints.checkpoint_files import CheckpointError, CheckpointWriteError
from carpool.train.checkpoints.export import export_checkpoint, find_checkpoint
from carpool.train.checkpoints.manager import CheckpointManager
from carpool.train.checkpoints.run_source import keep_source
from carpool.train.data.tokenizer import BytesTokenizer
from tests.hf.tiny_models import discover, tiny_model
from tests.train.test_cli import carpool_command, error_of

IDS = torch.arange(3, 27).reshape(2, 12)
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def _stored(folder: Path) -> dict[str, tuple[str, str, list[int]]]:
    """File, dtype and shape of every weight."""
    found = {}
    for path in folder.glob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118
                part = file.get_slice(name)
                found[name] = (path.name, part.get_dtype(), part.get_shape())
    return found


def trained_run(folder: Path, family: str, dtype: torch.dtype = torch.float32, step: int = 3) -> tuple[Path, Path, Any]:
    """A published checkpoint, the run directory of a fine-tuning of it with one checkpoint, and the trained model."""
    source, run = folder / "published", folder / "run"
    published = tiny_model(discover()[family]).to(dtype)
    for name, buffer in published.named_buffers():
        if name.endswith("correction_bias"):  # in float32, as in published checkpoints of DeepSeek-V3
            set_tensor(published, name, buffer.float())
    published.save_pretrained(source, max_shard_size="60KB")
    (source / "tokenizer.json").write_text("{}")
    (source / "chat_template.jinja").write_text("{{ messages }}")
    (source / "modeling_own.py").write_text("raise SystemExit")
    model: Any = build_model(source, distributed_config=None, dtype=dtype, seed=0)
    keep_source(run, source, str(source))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += (0.1 * torch.randn(parameter.shape, generator=generator)).to(dtype)
    CheckpointManager(run).save(step, model, torch.optim.SGD(model.parameters()), {})
    return source, run, model.eval()


def _logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        logits: torch.Tensor = model(input_ids=IDS).logits
    return logits


# mixtral's and minimax_m2's names are changed as well; kimi_linear's convolutions are joined; phimoe has biases.
@pytest.mark.parametrize(
    "family",
    ["olmoe", "qwen3_moe", "mixtral", "deepseek_v3", "gpt_oss", "glm4_moe", "minimax_m2", "kimi_linear", "phimoe"],
)
def test_plain_transformers_gives_the_trained_models_logits(family: str, tmp_path: Path) -> None:
    source, run, model = trained_run(tmp_path, family)
    source = source.rename(tmp_path / "elsewhere")  # the run does not need it again
    exported = export_checkpoint(run, find_checkpoint(run, None), tmp_path / "out")
    loaded: Any = AutoModelForCausalLM.from_pretrained(exported.folder, output_loading_info=True)
    again, info = loaded
    assert not info["missing_keys"] and not info["unexpected_keys"] and exported.left_out == []
    assert torch.equal(_logits(again), _logits(model))
    assert not torch.equal(_logits(AutoModelForCausalLM.from_pretrained(source)), _logits(model))
    assert _stored(exported.folder) == _stored(source) and len({file for file, _, _ in _stored(source).values()}) > 1
    index = "model.safetensors.index.json"
    weight_maps = [json.loads((folder / index).read_text())["weight_map"] for folder in (source, exported.folder)]
    assert weight_maps[0] == weight_maps[1]
    for name in ("config.json", "generation_config.json", "tokenizer.json", "chat_template.jinja"):
        assert (exported.folder / name).read_bytes() == (source / name).read_bytes()
    assert not (exported.folder / "modeling_own.py").exists()


def test_each_weight_has_the_sources_dtype(tmp_path: Path) -> None:
    """What was trained in float32 is rounded once; what the source keeps in float32 stays so."""
    source, run, model = trained_run(tmp_path, "deepseek_v3", torch.bfloat16)
    kept = {name for name, (_, dtype, _) in _stored(source).items() if dtype == "F32"}
    assert 0 < len(kept) < len(_stored(source))
    model.float()
    for parameter in model.parameters():
        parameter.data += 1e-4
    CheckpointManager(run).save(4, model, torch.optim.SGD(model.parameters()), {})
    out = export_checkpoint(run, find_checkpoint(run, 4), tmp_path / "out").folder
    assert _stored(out) == _stored(source)
    rounded = model.state_dict()
    for name, tensor in AutoModelForCausalLM.from_pretrained(out, dtype="auto").state_dict().items():
        assert torch.equal(tensor, rounded[name].to(tensor.dtype)), name


def test_weights_that_transformers_does_not_load_are_left_out(tmp_path: Path) -> None:
    """Such as the layers for multi-token prediction behind the last layer of published models."""
    source, run, model = trained_run(tmp_path, "deepseek_v3")
    extra = {"model.layers.2.eh_proj.weight": torch.zeros(2, 2)}
    save_file(extra, source / "model-extra.safetensors")
    keep_source(run, source, str(source))
    exported = export_checkpoint(run, find_checkpoint(run, 3), tmp_path / "out")
    assert exported.left_out == [*extra] and "1 weights of the source are not in it" in str(exported)
    assert not _stored(exported.folder).keys() & extra.keys()
    assert torch.equal(_logits(AutoModelForCausalLM.from_pretrained(exported.folder)), _logits(model))


def test_an_export_ends_texts_where_the_run_did(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    save_file({"a": torch.zeros(2)}, tmp_path / "model" / "model.safetensors")
    (tmp_path / "model" / "config.json").write_text('{"eos_token_id": 2}')
    path = tmp_path / "source" / "generation_config.json"
    keep_source(tmp_path, tmp_path / "model", None)
    assert not path.exists()
    keep_source(tmp_path, tmp_path / "model", None, end=2)
    assert not path.exists(), "it is the model's own"
    keep_source(tmp_path, tmp_path / "model", None, end=5)
    assert json.loads(path.read_text())["eos_token_id"] == [2, 5]
    (tmp_path / "model" / "generation_config.json").write_text('{"top_k": 3, "eos_token_id": [4, 2]}')
    keep_source(tmp_path, tmp_path / "model", None, end=5)
    assert json.loads(path.read_text()) == {"top_k": 3, "eos_token_id": [4, 2, 5]}


def test_a_model_from_scratch_gets_its_tokenizer(tmp_path: Path) -> None:
    model: Any = tiny_model(discover()["qwen3_moe"], tie_word_embeddings=True)
    CheckpointManager(tmp_path).save(1, model, torch.optim.SGD(model.parameters()), {})
    keep_source(tmp_path, None, "bytes")
    out = export_checkpoint(tmp_path, find_checkpoint(tmp_path, None), tmp_path / "model").folder
    assert [path.name for path in out.glob("*.safetensors")] == ["model.safetensors"]
    assert torch.equal(_logits(AutoModelForCausalLM.from_pretrained(out)), _logits(model.eval()))
    tokenizer, ours = AutoTokenizer.from_pretrained(out), BytesTokenizer()
    text = "hello world\n\x00 k\u00e9 \u4e16 <|im_end|>"
    assert (
        tokenizer(text).input_ids == ours.encode(text).tolist() and tokenizer.decode(tokenizer(text).input_ids) == text
    )
    assert (tokenizer.eos_token_id, tokenizer.bos_token_id) == (ours.eos_id, ours.bos_id)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained_run(tmp_path_factory.mktemp("finished"), "olmoe")[1]


def test_a_step_that_is_not_there(finished: Path, tmp_path: Path) -> None:
    assert find_checkpoint(finished, None) == find_checkpoint(finished, 3)
    with pytest.raises(ValueError, match="has no checkpoint of step 4: it has 3"):
        find_checkpoint(finished, 4)
    with pytest.raises(ValueError, match="has no whole checkpoint"):
        find_checkpoint(tmp_path, None)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        ("truncated", r"\.safetensors is truncated"),
        ("no source", "has no source/source.json"),
        ("bad source", "source.json is damaged"),
        ("lacks", "lacks 1 of the weights of OlmoeForCausalLM: lm_head.weight"),
    ],
)
def test_what_is_not_whole_is_refused(damage: str, message: str, finished: Path, tmp_path: Path) -> None:
    run = Path(shutil.copytree(finished, tmp_path / "run"))
    checkpoint = find_checkpoint(run, 3)
    if damage == "truncated":
        shard = next((checkpoint / "model").glob("*.safetensors"))
        shard.write_bytes(shard.read_bytes()[:-1])
    elif damage == "no source":
        shutil.rmtree(run / "source")
    elif damage == "bad source":
        (run / "source" / "source.json").write_text('{"weights": {"lm_head.weight": 1}}')
    else:
        model = tiny_model(discover()["olmoe"])
        del model.lm_head.weight
        CheckpointManager(run).save(3, model, torch.optim.SGD(model.parameters()), {})
    with pytest.raises(CheckpointError, match=message):
        export_checkpoint(run, checkpoint, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_a_target_that_cannot_be_used(finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = find_checkpoint(finished, 3)
    used = tmp_path / "used"
    used.mkdir()
    (used / "thesis.tex").write_text("years of work")
    with pytest.raises(CheckpointWriteError, match="not empty"):
        export_checkpoint(finished, checkpoint, used)
    with pytest.raises(CheckpointWriteError, match="something else"):
        export_checkpoint(finished, checkpoint, used, replace=True)
    assert [path.name for path in used.iterdir()] == ["thesis.tex"]
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=100_000))
    with pytest.raises(CheckpointWriteError, match=r"needs .* kB, and 100.0 kB are free"):
        export_checkpoint(finished, checkpoint, tmp_path / "deep" / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["used"]


@pytest.mark.parametrize("family", ["mixtral", "deepseek_v3"])
def test_an_average_is_the_mean_of_checkpoints(family: str, tmp_path: Path) -> None:
    _, run, model = trained_run(tmp_path, family)
    first = {name: value.clone() for name, value in model.state_dict().items()}
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.5).add_(0.01)
    CheckpointManager(run).save(5, model, torch.optim.SGD(model.parameters()), {})
    with torch.no_grad():
        for name, value in model.state_dict().items():
            value.copy_((first[name] + value) / 2)
    steps = [str(run / "checkpoints" / f"step-0000000{step}") for step in (3, 5)]
    result = carpool_command("average", *steps, "--out", str(tmp_path / "out"))
    assert result.exit_code == 0, result.output
    assert "mean of 2 checkpoints" in result.stdout and "read back: " in result.stdout
    assert torch.equal(_logits(AutoModelForCausalLM.from_pretrained(tmp_path / "out")), _logits(model))
    assert "two checkpoints at least" in error_of("average", steps[0], steps[0], "--out", str(tmp_path / "no"))
    other = trained_run(tmp_path / "other", "olmoe")[1]
    assert "is of another model than" in error_of("average", steps[0], str(other), "--out", str(tmp_path / "no"))
    model.config.attention_dropout, model.config.rms_norm_eps = 0.5, 0.25
    CheckpointManager(run).save(7, model, torch.optim.SGD(model.parameters()), {})
    refused = error_of("average", steps[0], str(run), "--out", str(tmp_path / "no"))
    assert "its configuration has rms_norm_eps = 0.25, and not" in refused
    assert not (tmp_path / "no").exists()


def test_tensor_files_are_written_in_order_and_cut_by_size(tmp_path: Path) -> None:
    one, two = torch.randn(3, 5), torch.arange(7, dtype=torch.int64)
    entries = {
        "one": Entry(torch.bfloat16, (3, 5)),
        "two": Entry(torch.int64, (7,)),
        "none": Entry(torch.float32, (0, 2)),
    }
    values = [("one", one), ("two", two), ("none", torch.empty(0, 2))]
    path, sizes = tmp_path / "a.safetensors", []
    write_tensor_file(path, entries, values, sizes.append)
    read = load_file(path)
    assert torch.equal(read["one"], one.bfloat16()) and torch.equal(read["two"], two) and read["none"].shape == (0, 2)
    assert sizes == [30, 56, 0]
    for wrong in (values[:2], values[::-1], [("one", one.T), *values[1:]], [*values, ("four", one)]):
        with pytest.raises(ValueError, match=r"is next|no values came"):
            write_tensor_file(path, entries, wrong)
    entries = {name: Entry(torch.uint8, (size,)) for name, size in zip("abcdef", (4, 4, 20, 3, 3, 4), strict=True)}
    files = [list(file) for file in split_by_size(entries, 10).values()]
    assert files == [["a", "b"], ["c"], ["d", "e", "f"]]
    assert [*split_by_size(entries, 38)] == ["model.safetensors"]


def test_a_copy_beside_the_checkpoints_is_none_of_them(tmp_path: Path) -> None:
    """It is not the latest one, not a step, and not removed as an old one."""
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters())
    manager = CheckpointManager(tmp_path, save_total_limit=1)
    first = manager.save(3, model, optimizer, {}).path
    copied = Path(shutil.copytree(first, first.with_name("step-00000100.bak")))
    assert find_checkpoint(tmp_path, 3) == find_checkpoint(tmp_path, None) == first
    with pytest.raises(ValueError, match=r"no checkpoint of step 100: it has 3$"):
        find_checkpoint(tmp_path, 100)
    second = manager.save(4, model, optimizer, {}).path
    assert copied.is_dir() and not first.is_dir() and manager.list() == [second]


# What other programs expect of an exported model: vLLM's loaders, and gguf's names.
#
# vLLM reads a checkpoint tensor by tensor and looks for a place of each by its name
# (vllm/model_executor/models/qwen3_moe.py, olmoe.py and mixtral.py, `load_weights`; commit 2e0831b). q, k and v go into
# `qkv_proj`; what contains `experts.5.gate_proj.` (`w1` of Mixtral) goes into expert 5 of `w13_weight`, and so on
# (`FusedMoE.make_expert_params_mapping`); everything else must be the name of a parameter. A name without a place is a
# KeyError; a place without a name stays random without an error. So names must be exactly these:


class Family(NamedTuple):
    """Names in one family's files. `norm`: what q_norm and k_norm are of; gguf: the architecture there."""

    architecture: str
    experts: str
    gate: str
    up: str
    down: str
    norm: str | None
    gguf: str


FAMILIES = {
    "qwen3_moe": Family("Qwen3MoeForCausalLM", "mlp", "gate_proj", "up_proj", "down_proj", "head", "QWEN3MOE"),
    "olmoe": Family("OlmoeForCausalLM", "mlp", "gate_proj", "up_proj", "down_proj", "heads", "OLMOE"),
    "mixtral": Family("MixtralForCausalLM", "block_sparse_moe", "w1", "w3", "w2", None, "LLAMA"),
}


def expected_shapes(family: Family, config: PreTrainedConfig) -> dict[str, tuple[int, ...]]:
    """Names and shapes that vLLM's loader has places for."""
    text: Any = config
    hidden, heads, kv_heads = text.hidden_size, text.num_attention_heads, text.num_key_value_heads
    head = getattr(text, "head_dim", None) or hidden // heads
    inner = getattr(text, "moe_intermediate_size", None) or text.intermediate_size
    experts = getattr(text, "num_experts", None) or text.num_local_experts
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (text.vocab_size, hidden),
        "model.norm.weight": (hidden,),
        "lm_head.weight": (text.vocab_size, hidden),
    }
    for layer in range(text.num_hidden_layers):
        at = f"model.layers.{layer}"
        shapes |= {f"{at}.{norm}.weight": (hidden,) for norm in ("input_layernorm", "post_attention_layernorm")}
        shapes[f"{at}.self_attn.q_proj.weight"] = (heads * head, hidden)
        shapes |= {f"{at}.self_attn.{one}_proj.weight": (kv_heads * head, hidden) for one in "kv"}
        shapes[f"{at}.self_attn.o_proj.weight"] = (hidden, heads * head)
        if family.norm is not None:
            sizes = (head, head) if family.norm == "head" else (heads * head, kv_heads * head)
            shapes |= {f"{at}.self_attn.{one}_norm.weight": (size,) for one, size in zip("qk", sizes, strict=True)}
        shapes[f"{at}.{family.experts}.gate.weight"] = (experts, hidden)
        for expert in range(experts):
            names = f"{at}.{family.experts}.experts.{expert}"
            shapes |= {f"{names}.{one}.weight": (inner, hidden) for one in (family.gate, family.up)}
            shapes[f"{names}.{family.down}.weight"] = (hidden, inner)
    return shapes


@pytest.mark.parametrize("family", FAMILIES)
def test_every_weight_has_a_place_in_vllm_and_a_name_in_gguf(family: str, tmp_path: Path) -> None:
    _, run, model = trained_run(tmp_path, family)
    config, out = model.config, export_checkpoint(run, find_checkpoint(run, None), tmp_path / "out").folder
    values: dict[str, np.ndarray[Any, Any]] = {}
    for path in out.glob("*.safetensors"):
        values |= load_numpy(path)
    assert {name: value.shape for name, value in values.items()} == expected_shapes(FAMILIES[family], config)
    # By which vLLM finds its class.
    assert json.loads((out / "config.json").read_text())["architectures"] == [FAMILIES[family].architecture]
    # As llama.cpp's convert_hf_to_gguf.py does it: one tensor for the experts of a layer, names through gguf's map.
    architecture = gguf.MODEL_ARCH[FAMILIES[family].gguf]
    names = gguf.get_tensor_name_map(architecture, config.num_hidden_layers)
    experts: dict[str, dict[int, np.ndarray[Any, Any]]] = {}
    tensors: dict[str, np.ndarray[Any, Any]] = {}
    for name, value in values.items():
        if of_expert := re.search(r"\.experts\.(\d+)\.", name):
            experts.setdefault(name.replace(of_expert[0], ".experts."), {})[int(of_expert[1])] = value
        else:
            tensors[name] = value
    tensors |= {name: np.stack([rows[expert] for expert in range(len(rows))]) for name, rows in experts.items()}
    converted = {names.get_name(name, try_suffixes=(".weight",)): value for name, value in tensors.items()}
    assert None not in converted and len(converted) == len(tensors)
    # Every tensor of an MoE layer that the architecture has, with values that come back.
    assert {"blk.0.ffn_gate_inp.weight", "blk.0.ffn_gate_exps.weight", "blk.0.ffn_up_exps.weight"} <= converted.keys()
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", gguf.MODEL_ARCH_NAMES[architecture])
    for name, value in converted.items():
        writer.add_tensor(name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    read = {tensor.name: tensor.data for tensor in gguf.GGUFReader(tmp_path / "model.gguf").tensors}
    assert read.keys() == converted.keys()
    assert all(np.array_equal(read[name], value) for name, value in converted.items())
