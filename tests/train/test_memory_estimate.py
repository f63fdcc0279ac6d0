"""The predicted peak of a step against the bytes that PyTorch's allocator really gave out, on four ranks; and what a
run that does not fit is told."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from transformers import AutoConfig, AutoModelForCausalLM
from typer.testing import CliRunner

from benchmarks import one_gpu_memory
from benchmarks.peaks import live_bytes, peaks_on_cpu
from carpool.cli import app
from carpool.hf import rides
from carpool.hf.routing.router_answers import balanced_choices, force_choices
from carpool.layout import ExpertLayout
from carpool.parallel.degrees import Degrees
from carpool.planner.decisions.configured import candidate_of
from carpool.planner.machine.hardware import hardware_of
from carpool.planner.model.shape import ModelShape
from carpool.planner.step.lengths import break_even_tokens
from carpool.planner.step.prediction import predict
from carpool.train.blueprint import meta_model, model_source
from carpool.train.config import load_config
from carpool.train.config.published import read_keys
from carpool.train.data.tokenizer import load_tokenizer
from carpool.train.launch.machine import find_gpu
from carpool.train.plan import memory_fit as fit
from carpool.train.plan.dry_run import dry_run
from carpool.train.plan.estimate import MemoryEstimate, tensors_of
from carpool.train.run.run import start_run
from tests.environment import ROOT
from tests.ranks import Ranks

SHAPE = [
    "model.config.hidden_size=128", "model.config.intermediate_size=128", "model.config.num_hidden_layers=3",
    "model.config.max_position_embeddings=256", "data.sequence_length=256", "data.max_bytes=200000",
    "training.per_device_train_batch_size=6", "training.eval_on_start=false", "training.save_steps=none",
    "training.max_steps=9",
]  # fmt: skip
WORDS = "model.config.vocab_size=12000"
SETTINGS = {
    "zero1": [],
    "fsdp and checkpointing": ["parallelism.data_parallel=fsdp", "memory.layer_activations=recompute"],
}
MORE = {
    "fsdp": ["parallelism.data_parallel=fsdp"],
    "rides repeated": ["memory.layer_activations=recompute", "memory.moe_outputs=recompute"],
    "many words, logits whole": [WORDS, "training.loss_chunk_size=0"],
    "many words, pieces": [WORDS, "training.loss_chunk_size=256"],
    "bfloat16, moments of 8 bits": ["model.dtype=bfloat16", "training.optimizer_state_dtype=int8"],
    "computed in bfloat16": [
        "training.bf16=true",
        "parallelism.data_parallel=fsdp",
        "memory.expert_activations=recompute",
    ],
    "gather": ["moe.transport=gather"],
    "alltoall, two micro-batches": ["moe.transport=alltoall", "training.gradient_accumulation_steps=2"],
    "two groups of experts": ["parallelism.ep_size=2"],
    "experts alone are trained": ["training.freeze=non_expert"],
    "rows sent again": ["memory.expert_inputs=resend"],
}
PLAIN = ExpertLayout.contiguous(16, 4)


def peak(output: str, overrides: list[str], alone: bool = False) -> tuple[int, int]:
    """On a rank: (bytes of tensors at the peak of a step with balanced routing, the same predicted). alone: without the
    settings of `SHAPE`."""
    before = live_bytes()
    shape = [] if alone else SHAPE
    run = start_run(load_config(None, [f"training.output_dir={output}", *shape, *overrides]), None, "test")
    try:
        tokens = run.config.training.per_device_train_batch_size * run.config.data.sequence_length
        experts = run.built.rides[0].num_experts
        choices = {
            name: balanced_choices(tokens, experts, run.plan.blueprint.top_k, n)
            for n, name in enumerate(rides(run.built.model))
        }
        force_choices(run.built.model, choices, experts)
        measured = int(peaks_on_cpu(run)["tensors"]) - before
        return measured, tensors_of(run.records.info["predicted"]["memory_per_rank_bytes"])
    finally:
        run.close()


def check(ranks: Ranks, output: Path, overrides: list[str]) -> None:
    for measured, predicted in ranks(peak, str(output / "run"), overrides):
        assert predicted == pytest.approx(measured, rel=0.1)


@pytest.mark.parametrize("overrides", SETTINGS.values(), ids=SETTINGS.keys())
def test_a_step_takes_what_is_predicted(two_ranks: Ranks, tmp_path: Path, overrides: list[str]) -> None:
    check(two_ranks, tmp_path, overrides)


@pytest.mark.slow
@pytest.mark.parametrize("overrides", MORE.values(), ids=MORE.keys())
def test_a_step_takes_what_is_predicted_with_other_settings(ranks: Ranks, tmp_path: Path, overrides: list[str]) -> None:
    check(ranks, tmp_path, overrides)


@pytest.mark.slow
def test_a_step_with_adapters_takes_what_is_predicted(ranks: Ranks, tmp_path: Path) -> None:
    config = AutoConfig.for_model(
        "qwen3_moe", hidden_size=128, moe_intermediate_size=128, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, num_experts=16, num_experts_per_tok=4, vocab_size=257, bos_token_id=None,
        eos_token_id=256,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "base")
    changed = [one for one in SHAPE if not one.startswith("model.")]
    given = [
        f"model.path={tmp_path}/base",
        "data.train=stdlib",
        "data.tokenizer=bytes",
        "training.gradient_accumulation_steps=1",
    ]
    for targets, base in (("attention,experts", "none"), ("experts", "none"), ("experts", "nf4"), ("experts", "int8")):
        chosen = [
            f"adapter.targets=[{','.join(repr(one) for one in targets.split(','))}]",
            f"adapter.base_dtype={base}",
        ]
        found = ranks(peak, str(tmp_path / f"{targets} {base}"), [*changed, *given, "adapter.kind=lora", *chosen], True)
        for measured, predicted in found:
            assert predicted == pytest.approx(measured, rel=0.1), (targets, base)


QWEN = [
    "model.config=qwen3-30b-a3b", "model.dtype=bfloat16", "data.sequence_length=4096",
    "training.per_device_train_batch_size=2", "data.tokenizer=bytes", "training.torch_compile=off",
]  # fmt: skip


def test_a_known_measurement() -> None:
    """112 GB were measured on each of 4 H200, with logits as a whole and an AdamW without masters."""
    then = [
        "training.optimizer=torch",
        "training.loss_chunk_size=0",
        "parallelism.data_parallel=fsdp",
        "parallelism.num_ranks=4",
    ]
    text = dry_run(load_config(None, [*QWEN, *then]), gpu="h200")
    sizes = {
        line.split()[1]: float(line.split()[2].replace(",", "")) for line in text.splitlines() if line.endswith(" MiB")
    }
    beside = sizes["context"] + sizes["nccl"] + sizes["fragments"]
    assert (sizes["total"] - beside) * 2**20 == pytest.approx(112e9, rel=0.1)
    assert "in host memory would cost" not in text, "this optimizer's state cannot be there"


def test_a_dry_run_for_a_cluster_that_is_not_here() -> None:
    text = dry_run(load_config(None, [*QWEN, "parallelism.num_ranks=64"]), gpu="h100")
    assert "# 64 ranks on H100: fsdp 64 x tp 1, experts ep 64 x efsdp 1, replicas 1" in text
    assert "# transport hierarchical: a ride takes" in text and "in two hops" in text
    (verdict,) = (line for line in text.splitlines() if " in 79 GiB" in line)
    assert verdict.startswith("# fits in 79 GiB (") and verdict.endswith(" GiB at the peak)")
    state = 30_532_122_624 / 64 * 10
    tokens = break_even_tokens(state, 23_083_044_864, find_gpu("h100"))
    assert f"would cost no time from {tokens:,.0f} tokens" in text
    config = load_config(None, [*QWEN, "moe.transport=hierarchical"]).model_dump()
    shape, h100 = ModelShape.read(read_keys("qwen3-30b-a3b")), find_gpu("h100")
    config["parallelism"]["data_parallel"] = text.partition("# data parallelism: ")[2].partition(":")[0]
    candidate, _ = candidate_of(config, Degrees(fsdp=64, ep=64), shape, h100, per_node=8)
    seconds = predict(shape, h100, candidate, per_node=8).seconds
    assert f"# time of a step: {1e3 * seconds.middle:,.0f} ms ({1e3 * seconds.low:,.0f} to" in text


def test_what_does_not_fit_is_told_what_to_change_cheapest_first() -> None:
    settings = [*QWEN, "parallelism.num_ranks=4"]
    told = dry_run(load_config(None, settings), gpu="h100")
    advice = told.partition("# does not fit in 79 GiB: ")[2].splitlines()[1:]
    changes = [line.removeprefix("#").split()[0] for line in advice]
    assert changes[0] == "training.optimizer_state_dtype=bfloat16" and "memory.layer_activations=recompute" in changes
    assert all("not enough" in line for line in advice[:-1]) and " fits: " in advice[-1]
    # Whoever follows the advice fits.
    kept = [one for one in changes if not one.startswith("training.optimizer_state_dtype=bf")]
    assert "# fits in 79 GiB" in dry_run(load_config(None, [*settings, *kept]), gpu="h100")


def estimate_of(*overrides: str, ranks: int = 2, experts: int = 128) -> MemoryEstimate:
    config = load_config(None, [*QWEN, *overrides])
    model = meta_model(model_source(config, load_tokenizer("bytes")))
    return MemoryEstimate(config, config.parallelism.resolve(ranks, experts), model, cuda=True)


def test_what_attention_keeps() -> None:
    shape = ["model.config.num_hidden_layers=2", "data.sequence_length=1024"]
    plain = estimate_of(*shape)
    masked = estimate_of(*shape, "data.packing=examples", "model.attn_implementation=sdpa")
    # Of 2 sequences, in bfloat16: the mask, and keys and values of 4 heads repeated for 32, as masked attention wants.
    assert masked.kept.layers[1] - plain.kept.layers[1] == 2 * 2 * (1024**2 + 2 * 1024 * (32 - 4) * 128)
    for more in ([], ["model.attn_implementation=flash_attention_2"]):
        assert estimate_of(*shape, "data.packing=examples", *more).kept == plain.kept
    shape = ["model.config=gpt-oss-20b", "model.config.num_hidden_layers=2", "data.sequence_length=1024"]
    fused, written = (estimate_of(*shape, *more, experts=32).kept for more in ([], ["model.attn_implementation=eager"]))
    # In bfloat16, of 2 sequences and 64 heads: what softmax makes of the scores.
    assert written.layers[0] - fused.layers[0] > 0.95 * 2 * 64 * 1024**2 * 2


def test_captured_steps_leave_nothing_for_an_evaluation() -> None:
    shape = ["model.config.num_hidden_layers=2", "training.per_device_eval_batch_size=2"]
    captured, eager = (estimate_of(*shape, *more)("nvlink", "zero1") for more in ([], ["training.cuda_graphs=off"]))
    logits = 2 * 2**29  # a piece, 2**29 numbers
    assert captured["graphs"] >= logits * 0.9 and "graphs" not in eager
    # A graph's gradients stay where they are.
    gradients = captured["gradients"] - eager["gradients"]
    assert gradients > 0
    assert captured["total"] - captured["graphs"] == pytest.approx(eager["total"] + 1.03 * gradients, rel=1e-6)
    assert "graphs" not in estimate_of(*shape)("dedup", "zero1")
    assert "graphs" in estimate_of(*shape, "memory.layer_activations=offload")("nvlink", "zero1")
    assert "graphs" not in estimate_of(*shape, "memory.experts=host", "training.freeze=experts")("nvlink", "zero1")


def test_experts_that_go_to_host_memory_are_on_the_device_first() -> None:
    away = ["memory.experts=host", "training.optimizer_in_backward=true", "training.max_grad_norm=0"]
    away += ["training.optimizer_offload=host", "training.per_device_train_batch_size=1", "data.sequence_length=256"]
    found = estimate_of(*away)("nvlink", "zero1")
    # 28.99 of 30.53 B parameters are experts, half of them on each rank.
    assert found["loading"] > 8.5e9
    assert tensors_of(found) == pytest.approx(2 * (28.99e9 / 2 + 1.54e9 / 2), rel=0.01)
    # On disk, host memory holds no more of them than there are: a rank's 27 GiB, and layers that are read ahead.
    settings = ["memory.experts=disk", *away[1:3], "model.dtype=bfloat16", "memory.expert_host_memory"]
    few, many, more = (estimate_of(f"{settings[-1]}={size}", *settings[:-1]) for size in ("1GiB", "40GiB", "4000GiB"))
    assert many.host_bytes("nvlink") == more.host_bytes("nvlink") < 31 * 2**30
    assert many.host_bytes("nvlink") - few.host_bytes("nvlink") == pytest.approx(28.99e9 - 2**30, rel=0.01)
    assert few.disk_bytes() > 0 == many.disk_bytes()


def test_advice_is_of_what_the_run_may_do() -> None:
    prices = [
        {settings: price for settings, _, price in fit._changes(load_config(None, [*QWEN[:1], *more]), 4)}
        for more in ([], ["training.optimizer=torch"], ["placement.policy=migrate", "placement.every=10"])
    ]
    assert prices[0]["model.dtype=bfloat16"] == "gradients are rounded; masters stay float32"
    assert prices[1]["model.dtype=bfloat16"] == "gradients, parameters and moments are rounded, without masters"
    alone = ["training.per_device_train_batch_size=1", "training.gradient_accumulation_steps=1"]
    for norm, found in (
        (1.0, "training.optimizer_in_backward=true training.grad_clipping=delayed"),
        (0, "training.optimizer_in_backward=true"),
    ):
        changes = fit._changes(load_config(None, [*QWEN[:1], *alone, f"training.max_grad_norm={norm}"]), 4)
        assert found in [settings for settings, _, _ in changes]
    assert not any("optimizer_in_backward" in one for one in prices[0])
    host = "training.optimizer_offload=host"
    assert [host in one for one in prices] == [True, False, False]


def test_names_of_gpus() -> None:
    assert find_gpu("H100").capacity == 79 * 2**30 and find_gpu("b200").name == "B200"
    assert find_gpu("rtx4090") is find_gpu("RTX 4090") is hardware_of("NVIDIA GeForce RTX 4090")
    assert hardware_of("NVIDIA A100-SXM4-40GB").name == "A100 40GB" and find_gpu("a100").capacity == 79 * 2**30
    with pytest.raises(ValueError, match=r"--gpu h101 is not known; did you mean h10.*; known are h200"):
        find_gpu("h101")
    refused = CliRunner().invoke(app, ["train", "--gpu", "h100"])
    assert refused.exit_code == 1 and "--gpu says for which GPUs --dry-run predicts" in refused.output


# GB without CUDA's context, as docs/fine-tuning-one-gpu.md says them.
ONE_GPU = {
    "qwen-experts": ("rtx4090", 21.9), "qwen-attention": ("rtx4090", 18.0), "oss-experts": ("rtx4090", 14.3),
    "oss-attention": ("rtx4090", 13.2), "qwen-48": ("l40s", 25.4), "qwen-80": ("h100", 70.2),
}  # fmt: skip


@pytest.mark.parametrize(
    "row", [pytest.param(row, marks=pytest.mark.slow if row.endswith(("attention", "80")) else []) for row in ONE_GPU]
)
def test_examples_for_one_gpu(row: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a 4-bit base some experts, and some words of the output layer, are dequantised at a time."""
    monkeypatch.setattr("carpool.train.plan.start_checks.check_weights", lambda *_: None)
    one_gpu_memory._published(one_gpu_memory.ROWS[row][0], tmp_path / "base", False)
    settings = [f"model.path={tmp_path}/base", *one_gpu_memory.settings_of(row, tmp_path, 6)]
    gpu, want = ONE_GPU[row]
    command = ["train", "--config", str(one_gpu_memory.file_of(row)), *settings, "--gpu", gpu, "--dry-run"]
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 0 and "# fits in" in done.output, done.output
    total, context = (
        float(re.search(rf"{name} +([\d,.]+) MiB", done.output)[1].replace(",", "")) for name in ("total", "context")
    )
    assert (total - context) * 2**20 / 1e9 == pytest.approx(want, abs=0.06)
    assert f" {want}" in (ROOT / "docs" / "fine-tuning-one-gpu.md").read_text(encoding="utf-8")


def start(output: str, overrides: list[str]) -> str:
    try:
        start_run(load_config(None, [f"training.output_dir={output}", *overrides]), None, "test").close()
    except ValueError as error:
        return str(error)
    return ""


def test_a_run_that_clearly_does_not_fit_is_refused(two_ranks: Ranks, tmp_path: Path) -> None:
    huge = ["model.config=qwen3-30b-a3b", "model.config.num_hidden_layers=12", "data.max_bytes=100000"]
    errors = two_ranks(start, str(tmp_path / "run"), huge)
    assert all("does not fit in the" in error and "training.check_memory=false" in error for error in errors), errors
    assert not (tmp_path / "run").exists()
