"""Models from a configuration or a folder: the same values for any number of ranks, and clear refusals."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, LlamaConfig, PreTrainedConfig, PreTrainedModel
from transformers.distributed import DistributedConfig
from transformers.models.olmoe.modeling_olmoe import OlmoePreTrainedModel

from carpool.hf.build_model import build_model, check_shardable, check_tied
from carpool.hf.pipeline_stages import cut_model, keep_parts
from carpool.hf.seam.find_modules import experts_modules
from carpool.hf.weights.model_config import check_sizes, make_config
from carpool.hf.weights.original_layout import check_weights
from carpool.serve.served_model import find_source
from carpool.train.blueprint import meta_model
from tests.hf.meshes import reuse_meshes
from tests.hf.tiny_models import discover, tiny_model
from tests.ranks import Ranks

EP_IMPLEMENTATION = "all_to_all"
Layout = dict[str, int]

COMMON: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 1,
}  # fmt: skip
TINY: dict[str, dict[str, Any]] = {
    "olmoe": COMMON | {"num_experts": 8, "num_experts_per_tok": 2},
    # Keeps its router in float32 beside bfloat16 weights, and a correction bias.
    "ernie4_5_moe": COMMON
    | {"moe_num_experts": 8, "moe_k": 2, "moe_intermediate_size": 16, "moe_layer_start_index": 1},
    # Its router writes the weights of a child that has written them already; latent attention; a float32 buffer.
    "afmoe": COMMON
    | {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "num_dense_layers": 1, "head_dim": 8},
}
LAYOUTS: list[Layout] = [
    {"fsdp_size": 4, "ep_size": 4},
    {"fsdp_size": 4, "ep_size": 2},
    {"dp_replicate_size": 2, "fsdp_size": 2, "ep_size": 2},
    {"tp_size": 2, "fsdp_size": 2, "ep_size": 4},
    {"fsdp_size": 4},
]


def _distributed(layout: Layout | None) -> DistributedConfig | None:
    reuse_meshes()
    return None if layout is None else DistributedConfig.from_dict({"ep_implementation": EP_IMPLEMENTATION, **layout})


def _build(
    model_type: str = "olmoe",
    layout: Layout | None = None,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    **overrides: Any,
) -> PreTrainedModel:
    config = make_config(model_type, TINY[model_type] | overrides)
    return build_model(config, distributed_config=_distributed(layout), dtype=dtype, seed=seed)


def _tensors(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """All parameters and buffers in full, tied ones under each of their names."""
    named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers()]
    return {name: (t.full_tensor() if isinstance(t, DTensor) else t).detach().clone() for name, t in named}


# ------------------------------------------------------------------------------------------------- random weights


def _differences(model_type: str, layouts: list[Layout], dtype: torch.dtype, tied: bool) -> list[str]:
    """What is not exactly as in the model of one process."""
    expected = _tensors(_build(model_type, dtype=dtype, tie_word_embeddings=tied))
    wrong = []
    for layout in layouts:
        model = _build(model_type, layout, dtype=dtype, tie_word_embeddings=tied)
        ours = _tensors(model)
        assert ours.keys() == expected.keys()
        for name, tensor in ours.items():
            if tensor.dtype != expected[name].dtype or not tensor.equal(expected[name]):
                wrong.append(f"{layout} {name}")
        if tied:
            assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
        shards = [p for p in model.parameters() if isinstance(p, DTensor)]
        assert len(shards) == len(list(model.parameters()))
        # A rank keeps its part and not a view into the whole.
        assert all(p.to_local().untyped_storage().nbytes() == p.to_local().nbytes for p in shards)
        assert all(getattr(t, "_is_hf_initialized", False) for t in [*model.parameters(), *model.buffers()])
        assert model.training and all(getattr(m, "_is_hf_initialized", False) for m in model.modules())
    return wrong


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_values_do_not_depend_on_the_mesh(ranks: Ranks, tied: bool) -> None:
    assert ranks(_differences, "olmoe", LAYOUTS, torch.float32, tied) == [[]] * 4


@pytest.mark.parametrize("model_type", ["ernie4_5_moe", "afmoe"])
def test_unusual_modules(ranks: Ranks, model_type: str) -> None:
    assert ranks(_differences, model_type, LAYOUTS[1:2], torch.bfloat16, False) == [[]] * 4


def test_the_recipe_is_the_model_s_own() -> None:
    """Standard deviations, ones, zeros; no two modules alike; nothing left over from uninitialised memory."""
    tensors = _tensors(_build("olmoe", hidden_size=64, vocab_size=512, initializer_range=0.05))
    for name, tensor in tensors.items():
        if "norm" in name:
            assert tensor.equal(torch.ones_like(tensor)), name
        elif "inv_freq" not in name:
            assert tensor.std().item() == pytest.approx(0.05, rel=0.05), name
            assert abs(tensor.mean().item()) < 0.005, name
    padding = _tensors(_build("olmoe", pad_token_id=3))["model.embed_tokens.weight"][3]
    assert padding.equal(torch.zeros_like(padding))
    first, second = (tensors[f"model.layers.{layer}.mlp.experts.down_proj"] for layer in (0, 1))
    assert not first.equal(second)


def test_rotary_frequencies_are_computed() -> None:
    from transformers import AutoModelForCausalLM

    config = make_config("olmoe", TINY["olmoe"])
    expected = dict(AutoModelForCausalLM.from_config(config).named_buffers())
    ours = dict(_build("olmoe", dtype=torch.bfloat16).named_buffers())
    assert ours.keys() == expected.keys() and len(ours) > 0
    assert all(ours[name].dtype == torch.float32 and ours[name].equal(expected[name]) for name in ours)


def test_the_seed_and_nothing_else_decides() -> None:
    torch.manual_seed(1)
    first = _tensors(_build(seed=1))
    state = torch.get_rng_state()
    torch.manual_seed(2)
    again = _tensors(_build(seed=1))
    other = _tensors(_build(seed=2))
    assert all(first[name].equal(again[name]) for name in first)
    weight = "model.layers.0.self_attn.q_proj.weight"
    assert not first[weight].equal(other[weight])
    torch.manual_seed(1)
    assert torch.get_rng_state().equal(state), "building a model must not draw from the caller's generator"


def test_a_module_that_writes_into_its_child_has_the_last_word() -> None:
    """AFMoE's router sets the weights of its gate to zero after the gate drew them."""
    gate = _tensors(_build("afmoe"))["model.layers.1.mlp.router.gate.weight"]
    assert gate.equal(torch.zeros_like(gate))


def test_what_is_kept_in_float32() -> None:
    dtypes = {name: tensor.dtype for name, tensor in _tensors(_build("ernie4_5_moe", dtype=torch.bfloat16)).items()}
    assert dtypes["model.layers.1.mlp.gate.weight"] == torch.float32
    assert dtypes["model.layers.1.mlp.experts.down_proj"] == torch.bfloat16


def test_one_module_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """While a module is filled, no other module of the whole model is in memory."""
    original: Any = OlmoePreTrainedModel._init_weights
    real: list[int] = []

    def watched(self: PreTrainedModel, module: torch.nn.Module) -> None:
        real.append(sum(p.numel() for p in self.parameters() if not p.is_meta))
        original(self, module)

    monkeypatch.setattr(OlmoePreTrainedModel, "_init_weights", watched)
    model = _build()
    largest = max(sum(p.numel() for p in module.parameters(recurse=False)) for module in model.modules())
    assert max(real) == largest


def test_a_parameter_that_the_recipe_forgets_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    original: Any = OlmoePreTrainedModel._init_weights

    def forgetful(self: PreTrainedModel, module: torch.nn.Module) -> None:
        if "Experts" not in type(module).__name__:
            original(self, module)

    monkeypatch.setattr(OlmoePreTrainedModel, "_init_weights", forgetful)
    with pytest.raises(ValueError, match=r"gives no initial value to model\.layers\.0\.mlp\.experts\.down_proj"):
        _build()


# ----------------------------------------------------------------------------------------------------- from a folder


def _load(path: str, layout: Layout | None, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    model = build_model(path, distributed_config=_distributed(layout), dtype=dtype, seed=0)
    assert model.training
    if layout is not None:
        assert experts_modules(model) == {f"model.layers.{n}.mlp.experts": 8 // layout["ep_size"] for n in (0, 1)}
    return _tensors(model)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("folder")
    _build(seed=4).save_pretrained(path)
    return path


def test_a_folder_is_loaded_sharded(ranks: Ranks, folder: Path) -> None:
    expected = _tensors(_build(seed=4))
    for ours in [*ranks(_load, str(folder), LAYOUTS[0]), _load(str(folder), None)]:
        assert ours.keys() == expected.keys()
        assert all(ours[name].equal(expected[name]) for name in expected)
    ours = _load(str(folder), None, torch.bfloat16)
    assert ours["lm_head.weight"].equal(expected["lm_head.weight"].bfloat16())


def _refusal(path: Path | PreTrainedConfig, layout: Layout | None = None) -> str:
    with pytest.raises(ValueError) as caught:
        build_model(path, distributed_config=_distributed(layout), dtype=torch.float32, seed=0)
    return str(caught.value)


def _copy(folder: Path, to: Path, **config: Any) -> Path:
    to.mkdir()
    for file in folder.iterdir():
        (to / file.name).write_bytes(file.read_bytes())
    _set(**config)(to)
    return to


Change = Callable[[Path], Any]
INDEX = "model.safetensors.index.json"


def _write(name: str, text: str) -> Change:
    return lambda folder: (folder / name).write_text(text)


def _remove(name: str) -> Change:
    return lambda folder: (folder / name).unlink()


def _set(**keys: Any) -> Change:
    """Of its config.json."""
    return lambda folder: (folder / "config.json").write_text(
        json.dumps(json.loads((folder / "config.json").read_text()) | keys)
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ([_remove("config.json")], "has no config.json"),
        ([_remove("config.json"), _write("adapter_config.json", "{}")], "it holds an adapter"),
        # With peft installed, Transformers would load adapter_model.bin.
        ([_write("adapter_config.json", "{}")], "holds an adapter beside the model; merge it"),
        ([_set(transformers_weights="other.safetensors")], "names its weights itself"),
        ([_write("config.json", "{")], "is not a JSON object"),
        ([_write("config.json", "[]")], "is not a JSON object"),
        ([_write("config.json", '{"model_type": "olmoee", "auto_map": {"AutoConfig": "evil.Config"}}')],
         "did you mean 'olmoe' ... It brings its own code (auto_map), which Carpool never runs"),
        ([lambda folder: (folder / "model.safetensors").rename(folder / "pytorch_model.bin")],
         "are pickles (pytorch_model.bin), which can run code when they are loaded, and Carpool never"),
        ([_remove("model.safetensors")], "holds no weights"),
        ([lambda folder: (folder / "model.safetensors").rename(folder / "model-1.safetensors")],
         "has no model.safetensors.index.json for model-1.safetensors: copy it here"),
        ([_write(INDEX, '{"weight_map": {"lm_head.weight": "model-2.safetensors"}}')],
         "its index names model-2.safetensors"),
        ([_set(quantization_config={"quant_method": "mxfp4"})], "quantised (mxfp4)"),
        *(([_write(INDEX, content)], "model.safetensors.index.json is no index of weights")
          for content in ("[]", "{", '{"weight_map": []}', "{}")),
    ],
)  # fmt: skip
def test_folders_that_are_refused(folder: Path, tmp_path: Path, changes: list[Change], message: str) -> None:
    other = _copy(folder, tmp_path / "other")
    for change in changes:
        change(other)
    refusal = _refusal(other)
    assert all(part in refusal for part in message.split(" ... ")), refusal
    assert f"there is no checkpoint folder {tmp_path / 'nowhere'}" in _refusal(tmp_path / "nowhere")


@pytest.mark.parametrize("name", ["w.dat", "pytorch_model.bin", "../outside.dat", "../outside.safetensors", 7])
def test_an_index_leads_to_no_pickle_and_out_of_no_folder(folder: Path, tmp_path: Path, name: Any) -> None:
    """Transformers would follow it, and unpickle what does not end in .safetensors."""
    indexed = _copy(folder, tmp_path / "indexed")
    shard = indexed / "model-00001-of-00001.safetensors"
    (indexed / "model.safetensors").rename(shard)
    torch.save({"lm_head.weight": torch.ones(2)}, indexed / str(name))
    index = {"metadata": {}, "weight_map": {"model.norm.weight": shard.name, "lm_head.weight": name}}
    (indexed / "model.safetensors.index.json").write_text(json.dumps(index))
    message = _refusal(indexed)
    assert f"index.json names {name}, and only *.safetensors files in the same folder" in message
    assert "never unpickles" in message


def test_a_link_into_a_cache_is_followed(folder: Path, tmp_path: Path) -> None:
    """As the hub's cache has it: names that are links to blobs in another folder."""
    cached = _copy(folder, tmp_path / "cached")
    (cached / "model.safetensors").rename(tmp_path / "blob")
    (cached / "model.safetensors").symlink_to(tmp_path / "blob")
    assert _load(str(cached), None)


def test_files_that_were_cut_off(folder: Path, tmp_path: Path) -> None:
    damaged = _copy(folder, tmp_path / "damaged")
    content = (damaged / "model.safetensors").read_bytes()
    for wrong in (b"", content[:5], content[:-5], b"\xff" * 9 + content[9:]):
        (damaged / "model.safetensors").write_bytes(wrong)
        assert f"({len(wrong):,} bytes) is not a whole safetensors file" in _refusal(damaged)


def _refusals(path: str) -> str:
    return _refusal(Path(path), LAYOUTS[1])


def _foreseen(folder: Path) -> str:
    """What is said of weights without loading them."""
    with pytest.raises(ValueError, match=r"do not fit its config\.json") as refused:
        check_weights(folder, meta_model(folder))
    return str(refused.value)


@pytest.mark.parametrize(
    ("change", "shapes"),
    [
        ({"num_experts": 16}, "gate.weight in model.safetensors has shape (8, 32), and the configuration asks for (16"),
        ({"hidden_size": 64}, "(64"),
        ({"vocab_size": 32}, "head.weight in model.safetensors has shape (64, 32), and the configuration asks for (32"),
    ],
)  # fmt: skip
def test_weights_of_other_shapes_are_refused(
    ranks: Ranks, folder: Path, tmp_path: Path, change: dict[str, int], shapes: str
) -> None:
    other = _copy(folder, tmp_path / "other", **change)
    for message in [_refusal(other), *(ranks(_refusals, str(other)) if "num_experts" in change else [])]:
        assert "do not fit its config.json" in message and shapes in message
    assert shapes in _foreseen(other)


def test_missing_weights_are_refused_and_not_made_up(folder: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    lacking = _copy(folder, tmp_path / "lacking")
    tensors = load_file(lacking / "model.safetensors")
    del tensors["model.norm.weight"]
    save_file(tensors, lacking / "model.safetensors", metadata={"format": "pt"})
    assert "lacks 1 of the weights of OlmoeForCausalLM: model.norm.weight" in _refusal(lacking)


@pytest.mark.parametrize("change", ["cut", "lacking", "lacking, tied", "float8"])
def test_one_expert_that_does_not_fit_is_named(folder: Path, tmp_path: Path, change: str) -> None:
    from safetensors.torch import load_file, save_file

    other = _copy(folder, tmp_path / "other", **({"tie_word_embeddings": True} if change == "lacking, tied" else {}))
    tensors = load_file(other / "model.safetensors")
    name = "model.layers.1.mlp.experts.3.up_proj.weight"
    tensor = tensors.pop(name)
    if change == "cut":
        tensors[name] = tensor[:-1].contiguous()
    elif change == "float8":
        tensors[name] = tensor.to(torch.float8_e4m3fn)
    elif change == "lacking, tied":
        del tensors["lm_head.weight"]
    save_file(tensors, other / "model.safetensors", metadata={"format": "pt"})
    expected = {
        "cut": f"{name} in model.safetensors has shape (15, 32), and the configuration asks for (16, 32)",
        "lacking": f"{name} is in none of the files",
        "lacking, tied": f"config.json: {name} is in none of the files",
        "float8": f"{name} in model.safetensors is float8_e4m3fn, of which config.json says nothing",
    }
    if change != "float8":  # seen at the start, not by who loads
        assert expected[change] in _refusal(other)
    assert expected[change] in _foreseen(other)
    with pytest.raises(ValueError, match=re.escape(expected[change])):  # of `carpool generate`, `chat` and `eval`
        find_source(other)
    check_weights(folder, meta_model(folder))


# --------------------------------------------------------------------------------------------------------- refusals


def test_a_model_without_experts_is_refused() -> None:
    message = _refusal(LlamaConfig(**COMMON))
    assert "LlamaForCausalLM (llama) is not a mixture of experts" in message
    assert "no module with an expert-parallel plan" in message


def _wrong_parallelism() -> list[str]:
    config = make_config("olmoe", TINY["olmoe"] | {"num_experts": 6})
    layouts = [LAYOUTS[0], {"fsdp_size": 8, "ep_size": 8}, {"fsdp_size": 2}, {"fsdp_size": 1}]
    return [_refusal(config, layout) for layout in layouts]


def test_parallelism_that_does_not_fit_is_refused(ranks: Ranks) -> None:
    for experts, too_many, too_few, none in ranks(_wrong_parallelism):
        assert "ep_size 4 does not divide the 6 experts of OlmoeForCausalLM's model.layers.0.mlp.experts" in experts
        assert "one of 1, 2, 3, 6" in experts
        assert "ep_size is 8, but only 4 ranks run" in too_many
        assert "for 2 ranks" in too_few and "fsdp_size 2" in too_few and "but 4 run" in too_few
        assert "for 1 ranks" in none
    assert "for 2 ranks" in _refusal(make_config("olmoe", TINY["olmoe"]), {"fsdp_size": 2})


def _wrong_tensor_parallelism() -> tuple[str, str]:
    glm = COMMON | {"n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "head_dim": 8}
    layout: Layout = {"tp_size": 2, "fsdp_size": 2, "ep_size": 4}
    norms = CONFIG_MAPPING["glm4_moe"](**glm, first_k_dense_replace=1, use_qk_norm=True)
    clip = make_config("olmoe", TINY["olmoe"] | {"clip_qkv": 8.0})
    return _refusal(norms, layout), _refusal(clip, layout)


def test_tensor_parallelism_that_gives_wrong_gradients_is_refused(ranks: Ranks) -> None:
    for norms, clip in ranks(_wrong_tensor_parallelism):
        assert "model.layers.0.self_attn.q_norm" in norms and "would be wrong; use tp_size=1" in norms
        assert "clip_qkv=8 of OlmoeForCausalLM" in clip and "use tp_size=1" in clip


@pytest.mark.parametrize(
    ("family", "tp", "refused"), [("gpt_oss", 2, True), ("gpt_oss", 1, False), ("olmoe", 2, False)]
)
def test_a_tied_weight_is_divided_in_both_places(family: str, tp: int, refused: bool) -> None:
    model = tiny_model(discover()[family], tie_word_embeddings=True)
    with pytest.raises(ValueError, match="in one of these places only") if refused else nullcontext():
        check_tied(model, DistributedConfig(fsdp_size=2, tp_size=tp, ep_size=tp))


@pytest.mark.parametrize(("experts", "ep", "refused"), [(6, 1, True), (6, 2, False), (5, 1, True), (7, 1, False)])
def test_a_rank_without_experts_cannot_read_a_checkpoint(tmp_path: Path, experts: int, ep: int, refused: bool) -> None:
    """FSDP gives four ranks 2, 2, 2 and 0 of 6."""
    config = make_config("olmoe", TINY["olmoe"] | {"num_experts": experts})
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    with pytest.raises(ValueError, match=r"raise parallelism\.ep_size") if refused else nullcontext():
        check_shardable(tmp_path, model, DistributedConfig(fsdp_size=4, ep_size=ep))


def test_sizes_of_one_are_one_process() -> None:
    expected = _tensors(_build())
    ours = _tensors(_build(layout={"fsdp_size": 1, "ep_size": 1}))
    assert all(ours[name].equal(expected[name]) for name in expected)


def test_make_config() -> None:
    config = make_config("olmoe", {"num_experts": 12, "num_local_experts": 12, "rope_theta": 5000.0})
    assert config.num_experts == 12 and config.rope_parameters["rope_theta"] == 5000.0
    with pytest.raises(ValueError, match="no causal language model of type 'vit'"):
        make_config("vit", {})


# --------------------------------------------------------------------------------------------------------------------
# The stages of a pipeline that a rank keeps of a model.


def test_what_other_stages_have_of_a_checkpoint_is_ignored() -> None:
    whole = tiny_model(discover()["qwen3_moe"])
    names, kept = set(whole.state_dict()), set()
    for part in cut_model(whole, 2):
        model = copy.deepcopy(whole).to("meta")
        keep_parts(model, [part])
        own = set(model.state_dict())
        # Transformers adds others to this set.
        ignored = model._keys_to_ignore_on_load_unexpected
        assert isinstance(ignored, set)
        assert {name for name in names if any(re.search(one, name) for one in ignored)} == names - own
        assert not kept & own
        kept |= own
    assert kept == names


# --------------------------------------------------------------------------------------------------------------------
# Sizes that cannot be meant are refused by name; those of published models are not.


PUBLISHED = (
    "olmoe", "qwen2_moe", "qwen3_moe", "mixtral", "deepseek_v2", "deepseek_v3", "gpt_oss", "granitemoe",
    "jamba", "phimoe", "nemotron_h", "hunyuan_v1_moe", "minimax", "ernie4_5_moe", "aria_text", "doge", "lfm2_moe",
)  # fmt: skip


@pytest.mark.parametrize("model_type", PUBLISHED)
def test_published_sizes_are_taken(model_type: str) -> None:
    check_sizes(CONFIG_MAPPING[model_type]())


@pytest.mark.parametrize(
    ("model_type", "sizes", "says"),
    [
        ("olmoe", {"num_experts_per_tok": 0}, "num_experts_per_tok = 0 in the olmoe configuration must be at least 1"),
        ("olmoe", {"num_experts_per_tok": 17, "num_experts": 16}, "= 17 .* is more than its num_experts = 16"),
        ("olmoe", {"num_experts": 2, "num_experts_per_tok": 4}, "= 4 .* is more than its num_experts = 2"),
        ("olmoe", {"num_experts": -4}, "num_experts = -4 .* must be at least 1"),
        ("olmoe", {"hidden_size": 33, "num_attention_heads": 4}, "hidden_size = 33 .* no multiple of its num_attent"),
        ("olmoe", {"num_attention_heads": 4, "num_key_value_heads": 3}, "= 4 .* multiple of its num_key_value_heads"),
        ("mixtral", {"num_local_experts": 1}, "num_experts_per_tok = 2 .* more than its num_(local_)?experts = 1"),
        ("deepseek_v3", {"n_routed_experts": 4}, "num_experts_per_tok = 8 .* more than its n\\w+ = 4"),
    ],
)  # fmt: skip
def test_sizes_that_cannot_be_meant(model_type: str, sizes: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        make_config(model_type, sizes)


def test_a_head_may_have_a_size_of_its_own() -> None:
    """As Glm-4.5 has them; the key is in its config.json, not in the class."""
    check_sizes(CONFIG_MAPPING["glm4_moe"](head_dim=128))
    with pytest.raises(ValueError, match="hidden_size = 4096"):
        check_sizes(CONFIG_MAPPING["glm4_moe"]())
