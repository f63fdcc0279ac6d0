"""`[adapter]` end to end on four ranks: what is trained, kept, resumed, written for peft, and merged."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
import transformers
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from carpool.cli import app
from carpool.hf import install
from carpool.hf.adapters import names_of_former_experts
from carpool.hf.build_model import build_model
from carpool.hf.seam.experts_module import expert_function
from carpool.hf.seam.find_modules import experts_modules, find_router
from carpool.parallel.degrees import Degrees
from carpool.serve.served_model import find_source, open_model
from carpool.train.checkpoints.trained_base import recorded_base
from carpool.train.config import load_config
from carpool.train.config.fine_tuning import of_adapter, other_base
from carpool.train.config.schema_adapter import adapts_experts
from carpool.train.lora import add_adapter, attach_adapter, check_adapter, resolve_saved, resolve_targets
from carpool.train.plan.start_checks import check_run
from carpool.train.run.run import train
from tests.hf.parity import EXCEPTIONS
from tests.hf.tiny_models import discover, tiny_model
from tests.ranks import Ranks
from tests.train.test_loop import goes_on, losses, run, weights

LORA = ["adapter.kind=lora", "adapter.rank=4", "adapter.targets=all-linear"]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("base")
    tiny_model(discover()["deepseek_v3"], vocab_size=259).save_pretrained(folder)
    weights = load_file(folder / "model.safetensors")
    weights["model.norm.weight"] = weights["model.norm.weight"].bfloat16()  # each weight keeps its own dtype
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


EMA = "training.ema_decay=0.9"


# On two ranks a step has as many tokens as on four without it.
TWO = ["training.per_device_train_batch_size=2"]
# Of another training, which changes next to nothing.
ONE_STEP = ["training.max_steps=1", "training.learning_rate=1e-30", "training.gradient_accumulation_steps=1"]


def run_settings(base: Path, text: Sequence[str], kind: Sequence[str] = LORA) -> list[str]:
    return [
        f"model.path={base}", "data.tokenizer=bytes", "data.sequence_length=24", "data.max_bytes=4000",
        "training.per_device_train_batch_size=1", "training.gradient_accumulation_steps=2", "training.max_steps=4",
        "training.learning_rate=1e-2", "training.save_steps=2", "model.dtype=float32", "training.sample_prompt=none",
        *text, *kind,
    ]  # fmt: skip


def start(ranks: Ranks, base: Path, output: Path, text: list[str], overrides: Sequence[str] = ()) -> list[str]:
    return ranks(run, str(output), [*run_settings(base, text), *overrides])


def adapter(output: Path) -> dict[str, torch.Tensor]:
    return load_file(output / "adapter" / "adapter_model.safetensors")


def errors(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> float:
    assert ours.keys() == theirs.keys()
    return max(float((ours[name] - value).abs().max()) for name, value in theirs.items())


@pytest.fixture(scope="module")
def reference(two_ranks: Ranks, base: Path, text: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("adapter") / "run"
    assert start(two_ranks, base, output, text, TWO) == [""] * 2
    return output


def test_only_the_adapter_is_trained_and_kept(reference: Path) -> None:
    found = adapter(reference)
    assert any("experts.lora_B" in name and value.abs().max() > 1e-3 for name, value in found.items())
    assert {value.dtype for value in found.values()} == {torch.float32}
    for part in ("model", "optimizer"):
        for file in (reference / "checkpoints" / "step-00000004" / part).glob("*.safetensors"):
            kept = load_file(file)
            assert kept and all(".lora_" in name or "e_score_correction_bias" in name for name in kept)
    config = json.loads((reference / "adapter" / "adapter_config.json").read_text())
    assert sorted(config["target_parameters"]) == [
        "mlp.experts.down_proj",
        "mlp.experts.gate_up_proj",
        "mlp.gate.weight",
    ]
    # Of DeepSeek's, peft takes gate_proj of shared experts for a part of gate_up_proj.
    assert set(config["target_modules"]) == {"q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"}
    assert config["rank_pattern"] == {}


def test_resumes_as_if_nothing_had_happened(
    two_ranks: Ranks, base: Path, reference: Path, text: list[str], tmp_path: Path
) -> None:
    goes_on(two_ranks, reference, tmp_path / "run", [*run_settings(base, text), *TWO], 2)
    assert errors(adapter(tmp_path / "run"), adapter(reference)) == 0


def test_an_adapter_is_averaged_and_the_average_is_written(
    two_ranks: Ranks, base: Path, reference: Path, text: list[str], tmp_path: Path
) -> None:
    assert start(two_ranks, base, tmp_path / "run", text, [EMA, *TWO]) == [""] * 2
    assert losses(tmp_path / "run") == losses(reference), "it is trained as without"
    found, kept = adapter(tmp_path / "run"), weights(tmp_path / "run", 4)
    averaged = {name.removeprefix("ema/"): one for name, one in kept.items() if name.startswith("ema/")}
    assert averaged and all(".lora_" in name for name in averaged)
    alike = [
        torch.equal(found[f"base_model.model.{name}".replace(".default", "")], one)
        for name, one in averaged.items()
        if "self_attn" in name
    ]
    assert alike and all(alike) and errors(found, adapter(reference)) > 1e-4
    (failed := tmp_path / "failed").mkdir()
    (failed / ".tmp-adapter").touch()  # where the folder would be
    with pytest.raises(Exception, match="adapter was not written"):
        start(two_ranks, base, failed, text, [EMA, *TWO])
    assert losses(failed) == losses(reference), "it trains on with its own weights, not with averages"


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [["parallelism.data_parallel=fsdp"], ["parallelism.ep_size=2"],
     ["parallelism.ep_size=2", "parallelism.data_parallel=fsdp"],
     ["parallelism.ep_size=1"], ["parallelism.dp_replicate_size=2", "parallelism.ep_size=2"],
     ["parallelism.cp_size=2", "training.per_device_train_batch_size=2"],
     ["parallelism.cp_size=2", "training.per_device_train_batch_size=2", "parallelism.data_parallel=fsdp"],
     ["moe.transport=alltoall", "memory.layer_activations=recompute"], ["moe.schedule=chunks", "moe.chunks=2"],
     ["memory.expert_activations=recompute", "memory.experts=disk"], ["moe.experts=reference"]],
    ids=str,
)  # fmt: skip
def test_the_same_adapter_on_other_meshes(
    ranks: Ranks, base: Path, reference: Path, text: list[str], tmp_path: Path, changes: list[str]
) -> None:
    assert start(ranks, base, tmp_path / "run", text, changes) == [""] * 4
    assert errors(adapter(tmp_path / "run"), adapter(reference)) < 2e-5


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [["adapter.kind=dora", "adapter.targets=attention"],
     ["adapter.kind=rslora", "adapter.targets=['experts','router']"],
     ["adapter.modules_to_save=lm_head", "adapter.targets=q_b_proj"],
     ["adapter.targets=attention", "adapter.dropout=0.1"]],
    ids=str,
)  # fmt: skip
def test_other_adapters_merge(ranks: Ranks, base: Path, text: list[str], tmp_path: Path, changes: list[str]) -> None:
    assert start(ranks, base, tmp_path / "run", text, changes) == [""] * 4
    check_merged(base, tmp_path / "run", tmp_path / "merged")


def check_merged(base: Path, output: Path, merged: Path, *options: str) -> None:
    """The merged model is that of plain transformers and peft, with the base's names and dtypes."""
    result = CliRunner().invoke(app, ["merge", str(output), "--out", str(merged), *options])
    assert result.exit_code == 0, result.output
    ours, theirs = (load_file(folder / "model.safetensors") for folder in (merged, base))
    assert {name: t.dtype for name, t in ours.items()} == {name: t.dtype for name, t in theirs.items()}
    assert (merged / "tokenizer.json").is_file() and (merged / "config.json").is_file()
    ids = torch.arange(34).view(2, 17) * 7 % 256
    load = transformers.AutoModelForCausalLM.from_pretrained
    with torch.no_grad():
        adapted = PeftModel.from_pretrained(load(base, dtype=torch.float32), output / "adapter")
        logits, plain = adapted(ids).logits, load(base, dtype=torch.float32)(ids).logits
        found = load(merged, dtype=torch.float32)(ids).logits
    torch.testing.assert_close(found, logits, rtol=1e-4, atol=1e-4)
    assert (plain - logits).abs().max() > 0.1


def test_merges_into_a_model_for_plain_transformers(base: Path, reference: Path, tmp_path: Path) -> None:
    check_merged(base, reference, tmp_path / "merged")
    again = CliRunner().invoke(app, ["merge", str(reference), "--out", str(tmp_path / "merged")])
    assert again.exit_code == 1 and "not empty" in again.output
    gone = CliRunner().invoke(app, ["merge", str(tmp_path), "--out", str(tmp_path / "other")])
    assert gone.exit_code == 1 and "has no checkpoints" in gone.output
    export = CliRunner().invoke(app, ["export", str(reference), "--out", str(tmp_path / "other")])
    assert export.exit_code == 1 and "carpool merge" in export.output


def test_modules_that_are_trained_themselves_are_whole_and_get_rows_of_their_dtype() -> None:
    trained = ["model.path=base", "adapter.kind=lora", "adapter.modules_to_save=lm_head"]
    config, narrow = load_config(None, trained), load_config(None, [*trained, "model.dtype=bfloat16"])
    check_adapter(config, Degrees(fsdp=2), "zero1", bf16=False)
    check_adapter(narrow, Degrees(), "fsdp", bf16=True)
    with pytest.raises(ValueError, match=r"set parallelism\.data_parallel=zero1"):
        check_adapter(config, Degrees(fsdp=2), "fsdp", bf16=False)
    with pytest.raises(ValueError, match=r"set training\.bf16=true, or model\.dtype=float32"):
        check_adapter(narrow, Degrees(), "fsdp", bf16=False)


@pytest.mark.slow
def test_rows_of_new_tokens_beside_shards(two_ranks: Ranks, base: Path, text: list[str], tmp_path: Path) -> None:
    settings = ["adapter.trainable_token_indices=[101, 32]", "training.max_steps=2", "adapter.targets=experts"]
    for dense in ("zero1", "fsdp"):
        more = [*settings, f"parallelism.data_parallel={dense}"]
        assert start(two_ranks, base, tmp_path / dense, text, more) == [""] * 2
    assert errors(adapter(tmp_path / "fsdp"), adapter(tmp_path / "zero1")) < 2e-5


def test_a_quantised_base_has_each_expert_on_one_rank(
    ranks: Ranks, base: Path, text: list[str], tmp_path: Path
) -> None:
    for error in start(ranks, base, tmp_path / "run", text, ["adapter.base_dtype=int8", "parallelism.ep_size=2"]):
        assert "set parallelism.ep_size=4" in error
    assert not (tmp_path / "run" / "run.json").exists()


def test_what_an_adapter_needs(tmp_path: Path, base: Path, text: list[str]) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "olmoe"}')
    with pytest.raises(ValueError, match="has no weights"):
        load_config(None, ["adapter.kind=lora", f"model.path={tmp_path}"])
    load_config(None, ["adapter.kind=lora", "model.config=olmoe-1b-7b"])  # to see speed and memory
    (tmp_path / "adapter_config.json").write_text('{"base_model_name_or_path": null}')
    with pytest.raises(ValueError, match="trained beside random weights"):
        recorded_base(tmp_path)
    settings = ["adapter.kind=lora", "training.max_grad_norm=0", "training.optimizer_in_backward=true"]
    settings += [f"model.path={base}", "data.tokenizer=bytes", "training.gradient_accumulation_steps=1", *text]
    with pytest.raises(ValueError, match="with adapters needs one rank"):
        check_run(load_config(None, [*settings, "parallelism.num_ranks=2"]), [])


def test_an_adapter_goes_on_beside_the_base_that_it_was_trained_beside(base: Path, tmp_path: Path) -> None:
    """Another one is refused beside a run's folder; plain peft's folder says nothing of it."""
    (tmp_path / "adapter").mkdir()
    keys = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"]}
    (tmp_path / "adapter" / "adapter_config.json").write_text(json.dumps(keys))
    given = [f"model.path={base}", "data.train=a.txt", f"adapter.path={tmp_path}"]
    assert load_config(None, given).adapter.base_dtype is None
    for written, kind in (("none", None), ("int8", "int8")):
        (tmp_path / "config.toml").write_text(f'[adapter]\nbase_dtype = "{written}"\n')
        for more in ([], [f"adapter.base_dtype={written}"]):
            config = load_config(None, [*given, *more])
            assert config.adapter.base_dtype == kind
            assert of_adapter(str(tmp_path), config.adapter.model_dump())["adapter", "base_dtype"][0] == kind
        for other in {"none", "int8", "nf4"} - {written}:
            with pytest.raises(ValueError, match=rf"base_dtype = .* has {kind!r}: leave it out, or name .*adapter to"):
                load_config(None, [*given, f"adapter.base_dtype={other}"])
    alone = [*given[:2], f"adapter.path={tmp_path}/adapter", "adapter.base_dtype=none"]
    assert load_config(None, alone).adapter.base_dtype is None


def test_a_base_whose_weights_have_changed_is_noticed(
    reference: Path, base: Path, text: list[str], tmp_path: Path
) -> None:
    """Its name, names and shapes are as they were. A base that was moved is the same."""
    output, moved = shutil.copytree(reference, tmp_path / "run"), shutil.copytree(base, tmp_path / "moved")
    peft = output / "adapter" / "adapter_config.json"
    peft.write_text(json.dumps(json.loads(peft.read_text()) | {"base_model_name_or_path": str(moved)}))
    assert other_base(str(output / "adapter"), str(moved), None) is None
    tensors = load_file(moved / "model.safetensors")
    tensors["model.layers.1.self_attn.o_proj.weight"] += 1e-3
    save_file(tensors, moved / "model.safetensors", metadata={"format": "pt"})
    goes_on = [f"training.output_dir={output}", "training.resume_from_checkpoint=last", "training.max_steps=6"]
    for change in ("kind=rslora", "alpha=64", "alpha_pattern={'o_proj'=8}", "base_dtype=int8"):
        with pytest.raises(ValueError, match=f"was trained with adapter.{change.split('=')[0]} = .*, and now it is"):
            check_run(load_config(None, [*run_settings(base, text), *TWO, *goes_on, f"adapter.{change}"]), ())
    with pytest.raises(ValueError, match=f"was trained with other weights than those in {moved} now: put that back"):
        check_run(load_config(None, [*run_settings(moved, text), *TWO, *goes_on]), ())

    def merged(*words: str) -> str:
        done = CliRunner().invoke(app, ["merge", *words, "--out", str(tmp_path / "merged")])
        return " ".join(done.output.split())

    for words in ([str(output)], [str(output / "adapter")]):
        assert f"{output}/adapter was trained with other weights than those in {moved} now" in merged(*words)
        assert not (tmp_path / "merged").exists()
    assert (
        "read back: " in (said := merged(str(output), "--base", str(moved))) and "where the weights are others" in said
    )


def test_targets_that_the_model_does_not_have() -> None:
    model = tiny_model(discover()["olmoe"])
    with pytest.raises(ValueError, match="no linear layer 'q_prj'; give the end of a name, such as"):
        resolve_targets(model, ("q_prj",))
    assert resolve_targets(model, ("q_proj", "attention"))[0] == ["k_proj", "o_proj", "q_proj", "v_proj"]
    with pytest.raises(ValueError, match="nothing of that to adapt"):
        resolve_targets(model, ("shared",))
    model = tiny_model(discover()["nemotron_h"])
    assert "out_proj" not in resolve_targets(model, ("attention",))[0]
    with pytest.raises(ValueError, match="peft does not adapt 'out_proj' of models with Mamba"):
        resolve_targets(model, ("out_proj",))
    model = tiny_model(discover()["deepseek_v3"])
    with pytest.raises(ValueError, match="peft takes 'gate_proj' for a part of the routed experts"):
        resolve_targets(model, ("gate_proj",))
    with pytest.raises(ValueError, match=r"\(peft takes .*down_proj.* for parts of the routed experts\)"):
        resolve_targets(model, ("shared",))


# Parts of names of what mixes tokens, and of what does not.
MIXES = re.compile(r"attn|attention|mamba|conv\.|mixer\.(in|out|q|k|v|o)_proj|SelfAttention|EncDecAttention")
FEEDS_FORWARD = re.compile(r"mlp|feed_forward|ffn|experts|moe|mixer\.(up|down)_proj|lm_head|router")


def families() -> list[str]:
    """Of models that Transformers spreads over ranks, whose layers can ride."""
    return sorted(discover().keys() - EXCEPTIONS.keys())


@pytest.mark.parametrize("name", families())
def test_each_group_of_targets_is_what_it_is_called(name: str) -> None:
    model = tiny_model(discover()[name])
    layers = experts_modules(model)
    head = model.get_output_embeddings()

    def adapted(group: str) -> set[str]:
        try:
            ends, parameters = resolve_targets(model, (group,))
        except ValueError as error:
            assert "nothing of that to adapt" in str(error)
            return set()
        names = [name for name, _ in model.named_modules()]
        everything = [name for name, _ in model.named_parameters()]
        found = {one for one in names for end in ends if one == end or one.endswith(f".{end}")}
        return found | {one for one in everything for end in parameters if one == end or one.endswith(f".{end}")}

    attention, shared, router = map(adapted, ("attention", "shared", "router"))
    assert attention and all(MIXES.search(one) for one in attention), attention
    # Norms and connections between layers may have products of their own.
    assert not [one for one in attention if FEEDS_FORWARD.search(MIXES.sub("", one))]
    assert not attention & shared and not (attention | shared) & router
    assert not [one for one in shared if re.search(r"self_attn\.|mamba\.", one)], shared
    assert not [one for one in shared if model.get_submodule(one) is head]
    routers = [found for layer in layers if (found := find_router(model, layer)) is not None]
    assert bool(router) == bool(routers) or names_of_former_experts(model), router
    of_routers = {id(one) for found in routers for one in (*found.modules(), *found.parameters())}
    for one in router:
        owner, _, last = one.rpartition(".")
        assert id(getattr(model.get_submodule(owner), last)) in of_routers, one
    for prepare in (lambda _: None, install):  # as a dry run sees it, and as a run
        prepare(model)
        if any(expert_function(model.get_submodule(layer)) is None for layer in layers):
            with pytest.raises(ValueError, match="runs the model's own forward, whose experts cannot be adapted"):
                resolve_targets(model, ("experts",))
            continue
        experts = adapted("experts")
        assert {one.rpartition(".")[0] for one in experts} == set(layers) and len(experts) == 2 * len(layers)
        ends = resolve_targets(model, ("experts",))[1]
        assert adapts_experts(ends)
    assert not adapts_experts(("attention", *resolve_targets(model, ("attention",))[0]))


def test_modules_to_save_must_be_there(base: Path, text: list[str]) -> None:
    model = tiny_model(discover()["olmoe"])
    assert resolve_saved(model, ["lm_head", "model.norm", "mlp.gate"]) == ["lm_head", "model.norm", "mlp.gate"]
    # To peft, these letters are the end of q_norm and post_attention_layernorm, too.
    assert resolve_saved(model, ["norm"]) == ["model.norm"]
    for name, why in (
        ("lm_haed", r"no module 'lm_haed'; did you mean lm_head\?"),
        ("head", "no module 'head'; .*lm_head"),
        ("layers.1.mlp", r"'layers.1.mlp' has routed experts in it \(model.layers.1.mlp.experts\)"),
        ("mlp.experts", "'mlp.experts' has routed experts in it"),
        ("rotary_emb", "'rotary_emb' has no parameters"),
    ):
        with pytest.raises(ValueError, match=why):
            resolve_saved(model, [name])
    tied = tiny_model(discover()["olmoe"], tie_word_embeddings=True)
    assert resolve_saved(tied, ["norm"]) == ["model.norm"]
    for name in ("lm_head", "embed_tokens"):
        with pytest.raises(ValueError, match=rf"'{name}' has one of .*lm_head.weight.* could not be merged"):
            resolve_saved(tied, [name])
    section = load_config(None, ["adapter.kind=lora", "adapter.modules_to_save=norm", "model.path=x", "data.train=x"])
    install(model)
    add_adapter(model, section.adapter, seed=0, replicate=False)
    trained = {name for name, one in model.named_parameters() if one.requires_grad and "lora_" not in name}
    assert trained == {"model.norm.modules_to_save.default.weight"}
    settings = [f"model.path={base}", "data.tokenizer=bytes", "adapter.kind=lora", "adapter.modules_to_save=lm_haed"]
    settings += text
    ran = CliRunner().invoke(app, ["train", "--dry-run", *settings])
    assert ran.exit_code == 1 and "adapter.modules_to_save: this model has no module 'lm_haed'" in ran.stderr


@pytest.mark.parametrize(
    "name", ["deepseek_v3", "gpt_oss", "mixtral", "qwen3_moe", "phimoe", "qwen2_moe", "hunyuan_v1_moe"]
)
def test_an_adapter_of_pefts_is_attached_and_trained_value_by_value(name: str, tmp_path: Path) -> None:
    """Experts as they lie in each family, linear layers, routers, and modules that were saved whole."""
    torch.manual_seed(0)
    model = tiny_model(discover()[name])
    model.save_pretrained(tmp_path / "base")
    modules, parameters = resolve_targets(model, ("attention", "router"))
    experts = [f"mlp.experts.{one}" for one in ("gate_up_proj", "down_proj")]
    settings = dict(target_modules=modules, target_parameters=experts + parameters, modules_to_save=["lm_head"])
    settings |= dict(
        rank_pattern={"experts.down_proj": 5, r"layers\.1\.self_attn\.o_proj": 2}, trainable_token_indices=[70, 4, 11],
        alpha_pattern={"down_proj": 9}, layers_to_transform=[1],
    )  # fmt: skip
    adapted = get_peft_model(model, LoraConfig(r=3, lora_alpha=7, **settings))
    with torch.no_grad():
        for one in adapted.parameters():
            if one.requires_grad:
                one.normal_(std=0.2)
    adapted.save_pretrained(tmp_path / "adapter")
    ids = torch.randint(3, 90, (2, 9))
    ids[0, 2:5] = torch.tensor([4, 70, 4])
    expected = adapted(input_ids=ids).logits
    expected.square().mean().backward()
    ours = build_model(tmp_path / "base", distributed_config=None, dtype=torch.float32, seed=0)
    install(ours)
    plain = ours(input_ids=ids).logits
    attach_adapter(ours, tmp_path / "adapter")
    found = ours(input_ids=ids).logits
    assert (found - plain).abs().max() > 0.05
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    found.square().mean().backward()
    trained = {name: one for name, one in adapted.base_model.model.named_parameters() if one.requires_grad}
    assert any(name.endswith("trainable_tokens_delta.default") for name in trained)
    assert not [name for name in trained if ".layers.0.self_attn." in name]
    for prefix, module in ours.named_modules():
        for key, one in module._parameters.items():
            if one is not None and one.requires_grad:
                stack, theirs = getattr(module, "_carpool_stack", None), trained.pop(f"{prefix}.{key}").grad
                gradient = one.grad if stack is None else stack.to_peft(one.grad)
                torch.testing.assert_close(gradient, theirs, rtol=1e-4, atol=1e-5)
    assert not trained
    other = tiny_model(discover()["olmoe"], num_hidden_layers=1)
    install(other)
    with pytest.raises(ValueError, match=r"not (an adapter of|found in the base|contain)|[Tt]arget"):
        attach_adapter(other, tmp_path / "adapter")


def test_a_run_starts_from_an_adapter_and_is_asked_unmerged(
    two_ranks: Ranks, ranks: Ranks, base: Path, reference: Path, text: list[str], tmp_path: Path
) -> None:
    settings = [*run_settings(base, text, ONE_STEP), f"adapter.path={reference}"]
    for pool, dense in ((ranks, "zero1"), (two_ranks, "fsdp")):
        output = tmp_path / dense
        assert set(pool(run, str(output), [*settings, f"parallelism.data_parallel={dense}"])) == {""}
        assert errors(adapter(output), adapter(reference)) < 1e-20
    found = load_config(tmp_path / "fsdp" / "config.toml").adapter
    assert (found.kind, found.rank, found.alpha) == ("lora", 4, 32)
    assert {"mlp.experts.gate_up_proj", "q_a_proj", "mlp.gate.weight"} <= set(found.targets)

    ids = torch.randint(3, 90, (2, 9), generator=torch.Generator().manual_seed(0))
    plain = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    expected = PeftModel.from_pretrained(plain, reference / "adapter")(input_ids=ids).logits
    source = find_source(reference)
    assert source.adapters == {reference.name: reference / "adapter"}
    torch.testing.assert_close(open_model(source, max_tokens=64)(input_ids=ids).logits, expected, rtol=1e-4, atol=1e-4)
    for logits in two_ranks(_asked, str(reference), ids):
        torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)
    ran = CliRunner().invoke(app, ["generate", str(reference), "--prompt", "def ", "--max-new-tokens", "3"])
    assert ran.exit_code == 0, ran.stderr
    ran = CliRunner().invoke(app, ["generate", str(reference), "--prompt", "def ", "--experts", "host"])
    assert ran.exit_code == 1 and "has an adapter, whose experts stay on the device" in ran.stderr

    with pytest.raises(ValueError, match=r"adapter\.rank = 8, but the adapter in adapter.path has 4: leave it out"):
        load_config(None, [*settings, "adapter.rank=8"])
    with pytest.raises(ValueError, match="holds no adapter as peft writes it"):
        load_config(None, [*settings, f"adapter.path={base}"])
    with pytest.raises(ValueError, match=r"that has trained one; if that .* hf download somebody/adapter --local"):
        load_config(None, [*settings, "adapter.path=somebody/adapter"])
    other = tmp_path / "other"
    tiny_model(discover()["deepseek_v3"], vocab_size=259, q_lora_rank=24).save_pretrained(other)
    with pytest.raises(ValueError, match=r"is not an adapter of this model: .*q_.*_proj.* and beside .*other it would"):
        check_run(load_config(None, [*settings, f"model.path={other}"]), ())
    for change, says in (
        ({"r": 3}, r"is \(32, 32\) there, and beside .*it would be \(24, 32\)"), ({"bias": "all"}, "has bias = 'all'"),
        ({"trainable_token_indices": {"lm_head": [1]}}, "only those of the input embedding alone"),
    ):  # fmt: skip
        changed = shutil.copytree(reference / "adapter", tmp_path / "changed", dirs_exist_ok=True)
        written = json.loads((reference / "adapter" / "adapter_config.json").read_text()) | change
        (changed / "adapter_config.json").write_text(json.dumps(written))
        with pytest.raises(ValueError, match=says):
            check_run(load_config(None, [*settings, f"adapter.path={changed}"]), ())
    written |= {"trainable_token_indices": None, "lora_alpha": 32.0, "rank_pattern": {"nothing": 3}}
    (changed / "adapter_config.json").write_text(json.dumps(written))
    check_run(load_config(None, [*settings, f"adapter.path={changed}"]), ())
    damaged = shutil.copytree(reference / "adapter", tmp_path / "damaged")
    os.truncate(damaged / "adapter_model.safetensors", 3000)
    config = load_config(None, [*settings, f"adapter.path={damaged}"])
    with pytest.raises(ValueError, match=r"\(3,000 bytes\) is not a whole safetensors file"):
        check_run(config, ())
    with pytest.raises(ValueError, match=r"\(3,000 bytes\) is not a whole safetensors file"):
        attach_adapter(tiny_model(discover()["olmoe"]), damaged)


def test_a_run_outlives_the_adapter_that_it_started_from(
    two_ranks: Ranks, base: Path, reference: Path, text: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its settings say all of that adapter, and it goes on from its own."""
    first, output = tmp_path / "first", tmp_path / "run"
    shutil.copytree(reference / "adapter", first)
    settings = run_settings(base, text, [f"adapter.path={first}"])
    assert set(two_ranks(run, str(output), settings)) == {""}
    whole = adapter(output)
    shutil.rmtree(first)
    monkeypatch.chdir(tmp_path)
    assert find_source(output).build == base
    with pytest.raises(ValueError, match=r"adapter\.path: .*first holds no adapter as peft writes it"):
        load_config(None, settings)
    beside = f"{output} was trained beside {base} as its files have it, and is used beside"
    others = f"{beside} {tmp_path} as its files have it, where the weights are others"
    assert other_base(str(output), str(tmp_path), None) == others
    assert other_base(str(output), str(base), "nf4") == f"{beside} {base} in nf4"
    assert other_base(str(output), str(base), None) is None
    recorded = load_config(output / "config.toml", ["training.output_dir=other"])
    with pytest.raises(ValueError, match=r"adapter\.path: .*first holds no adapter as peft writes it"):
        check_run(recorded, ())
    shutil.rmtree(output / "checkpoints" / "step-00000004")
    (output / "summary.json").unlink()
    assert set(two_ranks(_resumed, str(output))) == {""}
    assert errors(adapter(output), whole) == 0


def test_patterns_and_weights_as_targets_of_an_adapter(reference: Path, base: Path, tmp_path: Path) -> None:
    """peft's target_modules may be one pattern; its target_parameters are weights of experts."""
    model = tiny_model(discover()["olmoe"])
    assert resolve_targets(model, (r".*self_attn\.(q|k)_proj",))[0] == ["k_proj", "q_proj"]
    with pytest.raises(ValueError, match=r"no linear layer '\(q_proj'"):
        resolve_targets(model, ("(q_proj",))
    for setting in ("moe.experts=fp8", "moe.schedule=tiles"):
        with pytest.raises(ValueError, match=r"have no adapters: name other adapter\.targets"):
            load_config(None, [f"adapter.path={reference}", f"model.path={base}", "data.train=x", setting])


def _resumed(output: str) -> str:
    """On a rank: a run goes on by its own settings; the error's text if it ends in one."""
    try:
        config = load_config(Path(output, "config.toml"), ["training.resume_from_checkpoint=last"])
        train(config, command="test")
    except ValueError as error:
        return str(error)
    return ""


def _asked(folder: str, ids: torch.Tensor) -> torch.Tensor:
    """On a rank: logits of a run's adapter beside its model."""
    logits: torch.Tensor = open_model(find_source(Path(folder)), max_tokens=64)(input_ids=ids).logits
    return logits


CHOICES = {
    "patterns": [
        "adapter.rank_pattern={'experts.down_proj' = 2, 'layers\\.1\\.self_attn\\..*' = 6}",
        "adapter.alpha_pattern={'experts.gate_up_proj' = 5, 'o_proj' = 64}", "adapter.targets=['attention', 'experts']",
    ],
    "layers": ["adapter.layers_to_transform=[1]"],
    "tokens": [
        "adapter.trainable_token_indices=[101, 32, 200]", "adapter.targets=['q_b_proj', 'experts']",
        "adapter.modules_to_save=lm_head",
    ],
}  # fmt: skip


@pytest.mark.parametrize(
    "kind", [kind if kind == "patterns" else pytest.param(kind, marks=pytest.mark.slow) for kind in CHOICES]
)
def test_chosen_layers_ranks_and_tokens(
    one_rank: Ranks, two_ranks: Ranks, base: Path, text: list[str], tmp_path: Path, kind: str
) -> None:
    """One rank trains the adapter that two do; peft and a merged model compute with it what was trained, and a run
    that starts from it has all that it says."""
    settings = [*CHOICES[kind], "training.max_steps=2", "training.gradient_accumulation_steps=1"]
    output = tmp_path / "two"
    assert start(two_ranks, base, output, text, settings) == [""] * 2
    alone = [*settings, "training.per_device_train_batch_size=2"]
    assert start(one_rank, base, tmp_path / "one", text, alone) == [""]
    found, plain = adapter(output), json.loads((output / "adapter" / "adapter_config.json").read_text())
    assert errors(adapter(tmp_path / "one"), found) < 2e-5
    if kind == "patterns":
        ranks = {name: value.shape[0 if "lora_A" in name else 1] for name, value in found.items()}
        assert {size for name, size in ranks.items() if "experts.base_layer" not in name and "experts" in name} == {16}
        assert {size for name, size in ranks.items() if "layers.1.self_attn" in name} == {6}
        assert {size for name, size in ranks.items() if "experts.base_layer" in name} == {32}
        assert plain["rank_pattern"] and plain["alpha_pattern"]["o_proj"] == 64
    elif kind == "layers":
        assert all("layers.1." in name for name in found) and any("experts" in name for name in found)
        assert plain["layers_to_transform"] == [1] and "o_proj" in plain["target_modules"]
    else:
        rows = found["base_model.model.model.embed_tokens.token_adapter.trainable_tokens_delta"]
        assert not torch.equal(rows[1], load_file(base / "model.safetensors")["model.embed_tokens.weight"][32])
    check_merged(base, output, tmp_path / "merged")
    ids = torch.arange(34).view(2, 17) * 7 % 256
    ids[0, :3] = torch.tensor([32, 101, 200])
    with torch.no_grad():
        load = transformers.AutoModelForCausalLM.from_pretrained
        expected = load(tmp_path / "merged", dtype=torch.float32)(ids).logits
        asked = open_model(find_source(output), max_tokens=64)(input_ids=ids).logits
    torch.testing.assert_close(asked, expected, rtol=1e-4, atol=1e-4)
    again = run_settings(base, text, [*ONE_STEP, f"adapter.path={output}"])
    assert set(two_ranks(run, str(tmp_path / "again"), again)) == {""}
    assert errors(adapter(tmp_path / "again"), found) < 1e-20
    recorded = load_config(tmp_path / "again" / "config.toml").adapter
    assert (recorded.rank_pattern, recorded.layers_to_transform) == (
        plain["rank_pattern"], tuple(plain["layers_to_transform"] or ()),
    )  # fmt: skip


def test_choices_that_the_model_does_not_have(base: Path, text: list[str]) -> None:
    for setting, says in {
        "adapter.rank_pattern={'q_prj' = 2}": r"rank_pattern: 'q_prj' fits nothing that is adapted",
        "adapter.alpha_pattern={'.*' = 2, 'o_proj' = 3}": r"alpha_pattern: 'o_proj' fits nothing .* no pattern before",
        "adapter.rank_pattern={'(' = 2}": r"rank_pattern: '\(' is no regular expression",
        "adapter.layers_to_transform=[0, 7]": r"no layer 7; its layers are 0 to 1",
        "adapter.trainable_token_indices=[7, 5, 7]": "7 is named twice",
        "adapter.trainable_token_indices=[300]": r"300 is no token .* 259 rows: .*resize the checkpoint first",
    }.items():
        with pytest.raises(ValueError, match=says):
            check_run(load_config(None, [*run_settings(base, text), setting]), ())
    tied = tiny_model(discover()["olmoe"], tie_word_embeddings=True)
    section = load_config(None, [*run_settings(base, text), "adapter.trainable_token_indices=3"]).adapter
    assert section.trainable_token_indices == (3,)
    with pytest.raises(ValueError, match="are one tensor, which rows that are trained"):
        add_adapter(tied, section.model_copy(update={"targets": ("attention",)}), seed=0, replicate=False)
