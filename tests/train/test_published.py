"""Configurations as published: by name, file or keys, with every parameter that their authors count; and the operations
of a step by hand."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM, PreTrainedConfig

from carpool.hf.seam.find_modules import experts_modules
from carpool.hf.weights.config_keys import keys_read
from carpool.hf.weights.model_config import head_sizes, make_config
from carpool.train.blueprint import (
    Blueprint,
    ModelSize,
    flops_per_token,
    model_config,
    model_size,
    model_source,
    top_k_of,
)
from carpool.train.config import load_config
from carpool.train.config.published import published_models, read_keys
from carpool.train.data.tokenizer import BytesTokenizer, tokenizer_of
from carpool.train.lora import trained_of
from carpool.train.plan.dry_run import dry_run
from tools.models_table import DOCS, published_row

# Of the weights that were published; without multi-token prediction layers, which transformers leaves out.
PARAMETERS = {
    "deepseek-v2-lite": 15_706_484_224,
    "deepseek-v3": 671_026_404_352, "ernie-4.5-21b-a3b": 21_825_437_888, "glm-4.5-air": 106_852_245_504,
    "gpt-oss-20b": 20_914_757_184, "kimi-linear-48b-a3b": 49_122_675_072, "minimax-m2": 228_689_748_992,
    "mixtral-8x7b": 46_702_792_704, "olmoe-1b-7b": 6_919_161_856, "qwen3-235b-a22b": 235_093_634_560,
    "qwen3-30b-a3b": 30_532_122_624, "qwen3-next-80b-a3b": 79_674_391_296,
}  # fmt: skip


def _parameters(config: PreTrainedConfig) -> int:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize("name", published_models())
def test_all_parameters_are_there(name: str, caplog: pytest.LogCaptureFixture) -> None:
    full, cut = model_config(name), model_config({"from": name, "num_hidden_layers": 2})
    assert not caplog.messages
    assert _parameters(full) == PARAMETERS.get(name, 11_587_427_328)
    assert f"\n| {' | '.join(published_row(name))} |\n" in DOCS.read_text(encoding="utf-8")
    assert cut.num_hidden_layers == 2 and 0 < _parameters(cut) < _parameters(full) / 2


@pytest.mark.parametrize("name", published_models())
def test_the_configuration_is_the_one_that_transformers_reads(name: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(read_keys(name)))
    assert model_config(name).to_diff_dict() == AutoConfig.from_pretrained(tmp_path).to_diff_dict()


@pytest.mark.parametrize(
    ("model_type", "keys"),
    [
        (
            "deepseek_v3",
            {
                "architectures": ["DeepseekV3ForCausalLM"], "auto_map": {"AutoConfig": "configuration_deepseek.X"},
                "aux_loss_alpha": 0.001, "ep_size": 1, "moe_layer_freq": 1, "scoring_func": "sigmoid", "seq_aux": True,
                "topk_method": "noaux_tc", "quantization_config": {"quant_method": "fp8"}, "torch_dtype": "bfloat16",
                "transformers_version": "4.46.3",
            },
        ),
        ("qwen3_moe", {"max_window_layers": 48, "dtype": "bfloat16"}),
        ("gpt_oss", {"experts_per_token": 4, "initial_context_length": 4096}),
        ("minimax_m2", {"use_qk_norm": True, "use_mtp": True, "num_mtp_modules": 3, "shared_intermediate_size": 0}),
        ("kimi_linear", {"mla_use_nope": True, "rope_scaling": None, "head_dim": 72, "use_grouped_topk": True}),
    ],
)  # fmt: skip
def test_what_means_nothing_is_ignored_with_one_warning(
    model_type: str, keys: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    config = make_config(model_type, keys)
    (said,) = caplog.messages
    assert said.split("ignored: ")[1].split(";")[0].split(", ") == list(keys)
    assert ("the model is not quantised" in said) == ("quantization_config" in keys)
    plain = make_config(model_type, {}).to_dict()
    assert {key: value for key, value in config.to_dict().items() if key in plain} == plain | (
        {"head_dim": 72} if "head_dim" in keys else {}
    )
    # Other programs may read them from the config.json of the trained model, but for those about the published file.
    assert all(getattr(config, key) == keys[key] for key in keys.keys() & {"topk_method", "scoring_func", "use_mtp"})
    assert not {"quantization_config", "auto_map"} & config.to_dict().keys()
    assert config.dtype is None


@pytest.mark.parametrize(
    ("model_type", "keys", "attribute", "value"),
    [
        ("qwen3_moe", {"head_dim": 128}, "head_dim", 128),
        ("glm4_moe", {"head_dim": 128}, "head_dim", 128),
        ("exaone_moe", {"head_dim": 96}, "head_dim", 96),
        ("flex_olmo", {"head_dim": 96}, "head_dim", 96),
        ("qwen3_next", {"full_attention_interval": 2}, "layer_types", ["linear_attention", "full_attention"] * 24),
        ("minimax_m2", {"rotary_dim": 32}, "rope_parameters.partial_rotary_factor", 0.25),
        ("kimi_linear", {"linear_attn_config": {"head_dim": 64, "num_heads": 8}}, "linear_head_dim", 64),
    ],
)
def test_keys_that_only_the_code_reads(model_type: str, keys: dict[str, Any], attribute: str, value: Any) -> None:
    name, _, inner = attribute.partition(".")
    found = getattr(make_config(model_type, keys), name)
    assert (found[inner] if inner else found) == value


@pytest.mark.parametrize("model_type", ["qwen3_moe", "glm4_moe", "olmoe", "qwen3_next", "gpt_oss", "jamba", "zaya"])
def test_every_read_of_a_model_is_found_in_its_code(model_type: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Held against the reads of a model that is built, but for those of transformers' base classes."""
    config_class = CONFIG_MAPPING[model_type]
    config, reads = config_class(), set()
    ordinary = PreTrainedConfig.__getattribute__

    def recorded(self: PreTrainedConfig, key: str) -> Any:
        module = sys._getframe(1).f_globals["__name__"]
        if module == f"transformers.models.{model_type}.modeling_{model_type}":
            reads.add(key)
        return ordinary(self, key)

    monkeypatch.setattr(PreTrainedConfig, "__getattribute__", recorded)
    with torch.device("meta"):
        AutoModelForCausalLM.from_config(config)
    assert "hidden_size" in reads
    assert {key for key in reads if not key.startswith("_")} <= keys_read(config_class)


def test_the_keys_of_a_part_are_not_those_of_the_whole() -> None:
    part = {"hidden_size": 64, "full_attention_interval": 2, "head_dim": 32, "model_type": "qwen3_5_moe_text"}
    config = make_config("qwen3_5_moe", {"text_config": part})
    assert config.get_text_config().layer_types[:2] == ["linear_attention", "full_attention"]
    with pytest.raises(ValueError, match="qwen3_5_moe has no key 'hidden_size'"):
        make_config("qwen3_5_moe", part)
    with pytest.raises(ValueError, match=r"qwen3_5_moe\.text_config has no key 'patch_sizes'"):
        make_config("qwen3_5_moe", {"text_config": part | {"patch_sizes": 1}})
    keys = load_config(None, ["model.model_type=qwen3_5_moe", "model.config.text_config.hidden_size=64"])
    source = model_source(keys, BytesTokenizer())
    assert isinstance(source, PreTrainedConfig)
    assert (source.get_text_config().vocab_size, source.get_text_config().eos_token_id) == (320, 256)


def test_all_problems_are_told_together() -> None:
    keys = {"head_dimm": 128, "num_expert": 8, "hidden_size": "large", "num_attention_heads": 0}
    with pytest.raises(ValueError) as told:
        make_config("qwen3_moe", keys)
    lines = str(told.value).splitlines()
    assert len(lines) == 4
    assert "no key 'head_dimm'; did you mean 'head_dim'" in lines[0]
    assert "no key 'num_expert'; did you mean 'num_experts'" in lines[1]
    assert "refuses hidden_size = 'large'" in lines[2]
    assert "num_attention_heads = 0" in lines[3]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('{"model_type": "olmoe", ', "is not valid JSON"),
        ("[1, 2]", "holds no JSON object"),
        ('{"hidden_size": 8}', r"(not say|says) its model_type"),
    ],
)
def test_files_that_are_no_configuration(tmp_path: Path, text: str, says: str) -> None:
    (tmp_path / "config.json").write_text(text)
    for source in (f"config={tmp_path}", f"config={tmp_path}/config.json", f"path={tmp_path}"):
        with pytest.raises(ValueError, match=says) as told:
            _dry_run(f"model.{source}")
        assert "\n" not in str(told.value)
        assert str(tmp_path) in str(told.value) or source.startswith("config")


def _dry_run(*overrides: str) -> str:
    return dry_run(load_config(None, ["parallelism.device=cpu", "parallelism.num_ranks=1", *overrides]))


def test_models_that_cannot_be_trained(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text('{"model_type": "olmo3_moe"}')
    with pytest.raises(ValueError, match=r"no causal language model of type 'olmo3_moe'; did you mean .*'olmoe'"):
        _dry_run(f"model.config={file}")
    file.write_text('{"model_type": "llama", "num_hidden_layers": 1}')
    with pytest.raises(ValueError, match="LlamaForCausalLM has no experts"):
        _dry_run(f"model.config={file}")
    with pytest.raises(ValueError, match=r"neither a config.json, nor .*; did you mean qwen3-30b-a3b"):
        _dry_run("model.config=qwen3-30b")


def test_keys_over_a_published_configuration(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text('[model]\nconfig = {from = "gpt-oss-20b", num_hidden_layers = 4, rope_scaling = {factor = 8.0}}\n')
    model = load_config(path).model
    published = read_keys("gpt-oss-20b")
    assert model.model_type == "gpt_oss"
    assert model.config["layer_types"] == ["sliding_attention", "full_attention"] * 2
    assert model.config["rope_scaling"] == published["rope_scaling"] | {"factor": 8.0}
    assert model.config["num_local_experts"] == 32
    overrides = ["model.config=gpt-oss-20b", "model.config.num_hidden_layers=4", "model.config.rope_scaling.factor=8.0"]
    assert load_config(None, overrides).model == model
    # A run's own config.toml needs no other file.
    (tmp_path / "config.toml").write_text(load_config(path).to_toml())
    assert load_config(tmp_path / "config.toml").model == model
    with pytest.raises(ValueError, match=r"'olmoe' contradicts model.config, whose model_type is 'gpt_oss'"):
        load_config(path, ["model.model_type=olmoe"])
    keys = read_keys({"from": "kimi-linear-48b-a3b", "num_hidden_layers": 5})
    assert keys["linear_attn_config"]["full_attn_layers"] == [4]
    assert keys["linear_attn_config"]["kda_layers"] == [1, 2, 3, 5]
    config = model_config({"from": "kimi-linear-48b-a3b", "num_hidden_layers": 5})
    assert config.layer_types.index("full_attention") == 3


def test_a_folder_with_a_configuration_alone_is_a_model_from_scratch(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(read_keys("qwen3-30b-a3b")))
    config = load_config(None, [f"model.path={tmp_path}", "model.config.num_hidden_layers=2"])
    assert config.model.from_scratch
    source = model_source(config, BytesTokenizer())
    assert isinstance(source, PreTrainedConfig)
    assert (source.num_hidden_layers, source.head_dim, source.vocab_size) == (2, 128, 151_936)
    (tmp_path / "model.safetensors").touch()
    assert not config.model.from_scratch
    with pytest.raises(ValueError, match="names a checkpoint, which has a configuration"):
        model_source(config, BytesTokenizer())


def test_tokens_beyond_a_smaller_vocabulary_are_the_tokenizer_s() -> None:
    def tokens(*overrides: str) -> tuple[Any, Any, Any]:
        source = model_source(load_config(None, ["model.config=glm-4.5-air", *overrides]), BytesTokenizer())
        assert isinstance(source, PreTrainedConfig)
        return source.bos_token_id, source.eos_token_id, source.pad_token_id

    assert tokens() == (None, [151329, 151336, 151338], 151329)
    assert tokens("model.config.vocab_size=151337") == (None, 256, 151329)
    assert tokens("model.config.vocab_size=1000", "model.config.pad_token_id=7") == (None, 256, 7)


def _size(config: PreTrainedConfig) -> ModelSize:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    return model_size(model, experts_modules(model), top_k_of(model))


@pytest.mark.parametrize(
    ("name", "heads"),
    [
        ("qwen3-30b-a3b", (128, 128)),
        ("glm-4.5-air", (128, 128)),
        ("olmoe-1b-7b", (128, 128)),
        ("mixtral-8x7b", (128, 128)),
        ("gpt-oss-20b", (64, 64)),
        ("qwen3-next-80b-a3b", (256, 256)),
        ("deepseek-v3", (192, 128)),
        ("kimi-linear-48b-a3b", (192, 128)),
    ],
)
def test_sizes_of_heads(name: str, heads: tuple[int, int]) -> None:
    assert head_sizes(model_config(name)) == heads


def test_operations_by_hand() -> None:
    # By hand: 48 layers of 32 heads of 128; a token meets 8 of 128 experts of three matrices 2048 x 768.
    size = _size(model_config("qwen3-30b-a3b"))
    attention = 2048 * 128 * (32 + 2 * 4 + 32)
    layer = attention + 2048 * 128 + 8 * 3 * 2048 * 768 + 2 * 2048 + 2 * 128
    assert size.multiplied == 48 * layer + 2048 + 151_936 * 2048
    assert (size.attention, size.windowed) == (48 * 32 * 128, 0)
    assert flops_per_token(size, 4096) == 6 * size.multiplied + 6 * 4096 * 48 * 32 * 128
    assert _size(model_config("qwen3-next-80b-a3b")).attention == 12 * 16 * 256
    assert _size(model_config("kimi-linear-48b-a3b")).attention == 7 * 32 * (192 + 128) // 2


@pytest.mark.parametrize("length", [7, 128, 129, 4096])
def test_a_window_is_a_band_of_the_score_matrix(length: int) -> None:
    """gpt-oss: half of 24 layers see 128 tokens. Token i sees i of a sequence (its own half), at most the window."""
    size = _size(model_config("gpt-oss-20b"))
    assert size.attention == size.windowed == 12 * 64 * 64 and size.window == 128
    step = torch.arange(length * 4, dtype=torch.float64) / 4
    full, band = step.mean(), step.clamp(max=128).mean()
    expected = 6 * size.multiplied + 12 * 12 * 64 * 64 * (full + band)
    assert flops_per_token(size, length) == pytest.approx(expected.item(), rel=1e-3)


def test_what_is_frozen_has_no_gradient_of_its_own() -> None:
    """By hand. lm_head is trained itself; an embedding's rows are looked up, and multiply nothing."""
    for saved, multiplied, more in (((), 0, 0), (("lm_head",), 1, 1), (("embed_tokens",), 0, 1)):
        settings = ["model.config=qwen3-30b-a3b", "adapter.kind=lora", f"adapter.modules_to_save={list(saved)}"]
        config = load_config(None, settings)
        blueprint = Blueprint.of_config(config, tokenizer_of(config))
        words = 2048 * blueprint.vocab_size
        trained = trained_of(blueprint, config)
        attention = 48 * 16 * (2048 * 4 + 128 * (32 + 2 * 4 + 32))
        assert trained.adapters == attention and trained.expert_adapters == 48 * 8 * 16 * (2048 + 1536 + 768 + 2048)
        assert trained.frozen == blueprint.size.multiplied - blueprint.size.visited - multiplied * words
        assert trained.updated == attention + 16 * trained.expert_adapters + more * words
        assert trained.frozen_experts == blueprint.size.visited
