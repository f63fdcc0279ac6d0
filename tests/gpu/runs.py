"""Every run of `carpool train` that the tests here start, by name, with all of its settings.

A setting, or a combination of settings, that is refused today would else be noticed only where there is a GPU. So tests
start runs by `train`, which takes a name of RUNS, and name no settings themselves; tests/bench/test_gpu_settings.py
passes RUNS through the schema and all that a run is checked for before its first step, on a CPU.

Settings that are known only when a test runs, such as folders, are the test's own: their keys are in OF_THE_TEST, and
RUNS has an example of each where it matters.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from examples.tiny_chat_model import CONVERSATIONS
from tests.gpu.ranks import torchrun

OF_THE_TEST = ("training.output_dir", "training.resume_from_checkpoint", "memory.budget", "moe.chunks")
# Stands for the test's own folder in settings.
WORK = "{work}"


@dataclass(frozen=True)
class TrainRun:
    """Ranks and settings; a later setting of a key replaces an earlier one."""

    ranks: int
    settings: tuple[str, ...]

    def arguments(self, work: Path) -> list[str]:
        return [one.replace(WORK, str(work)) for one in self.settings] + [f"parallelism.num_ranks={self.ranks}"]


def train(name: str, output: Path, *of_the_test: str) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl of a run of RUNS; its folder of work is the one that `output` is in."""
    for one in of_the_test:
        if not one.startswith(tuple(f"{key}=" for key in OF_THE_TEST)):
            raise ValueError(f"{one} belongs to RUNS of {__name__}, where a test without a GPU sees it")
    run = RUNS[name]
    settings = [*run.arguments(output.parent), f"training.output_dir={output}", *of_the_test]
    torchrun(run.ranks, "carpool.cli", "train", *settings, seconds=240)
    return [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]


def losses(name: str, output: Path, *of_the_test: str) -> list[float]:
    """Of steps and evaluations."""
    return [line["loss"] for line in train(name, output, *of_the_test) if line["kind"] in ("train", "eval")]


RUNS: dict[str, TrainRun] = {}


def _add(name: str, ranks: int, *settings: str) -> None:
    assert name not in RUNS, name
    RUNS[name] = TrainRun(ranks, settings)


SHORT = (
    "training.max_steps=6", "training.logging_steps=1", "training.eval_steps=3", "training.save_pretrained=false",
    "training.sample_tokens=4",
)  # fmt: skip
EXACT = ("model.dtype=bfloat16", "training.full_determinism=true")

# test_compiled_gpu.py
for _schedule in ("none", "chunks"):
    _add(f"{_schedule} eager", 2, *SHORT, f"moe.schedule={_schedule}")
    _add(f"{_schedule} compiled", 2, *SHORT, f"moe.schedule={_schedule}", "training.torch_compile=true")
# FSDP shards experts by themselves, because it casts them. Before PyTorch 2.13 these layers are computed again eagerly.
for _way in ("eager", "compiled"):
    _add(
        f"sharded, recomputed {_way}", 2, *SHORT, "model.dtype=float32", "training.bf16=true",
        "parallelism.data_parallel=fsdp", "memory.layer_activations=recompute",
        f"training.torch_compile={str(_way == 'compiled').lower()}",
    )  # fmt: skip

# test_distillation_gpu.py
for _name, _how in {
    "files eager": ("distillation.logits={work}/logits", "training.cuda_graphs=off"),
    "files captured": ("distillation.logits={work}/logits", "training.cuda_graphs=on"),
    "online": ("distillation.teacher={work}/tiny",),
}.items():
    _add(
        f"distilled, {_name}", 2, *SHORT, *EXACT, "data.max_bytes=200000", "distillation.top_k=16",
        "distillation.temperature=2", "moe.transport=nvlink", *_how,
    )  # fmt: skip

# test_multi_token_gpu.py: by name, how many multi-token prediction layers, and what else the run has.
_STAGED = ("training.gradient_accumulation_steps=4", "parallelism.pp_size=2")
FURTHER: dict[str, tuple[int, tuple[str, ...]]] = {
    "one layer": (1, ()),
    "two layers": (2, ("training.gradient_accumulation_steps=2",)),
    "one layer, 1F1B": (1, (*_STAGED, "parallelism.pp_schedule=1F1B")),
    "two layers, ZBVZeroBubble": (2, (*_STAGED, "parallelism.pp_schedule=ZBVZeroBubble")),
}
_DEEPSEEK = (
    "model.model_type=deepseek_v3", "model.config.hidden_size=128", "model.config.intermediate_size=256",
    "model.config.moe_intermediate_size=64", "model.config.num_hidden_layers=4", "model.config.num_attention_heads=4",
    "model.config.num_key_value_heads=4", "model.config.n_routed_experts=8", "model.config.num_experts_per_tok=2",
    "model.config.n_shared_experts=1", "model.config.n_group=1", "model.config.topk_group=1",
    "model.config.first_k_dense_replace=1", "model.config.q_lora_rank=64", "model.config.kv_lora_rank=64",
    "model.config.qk_nope_head_dim=32", "model.config.qk_rope_head_dim=32", "model.config.v_head_dim=64",
    "model.config.initializer_range=0.1",
)  # fmt: skip
_FURTHER = (*SHORT, *EXACT, *_DEEPSEEK, "parallelism.data_parallel=zero1", "training.learning_rate=1e-3")
for _name, (_depth, _more) in FURTHER.items():
    _all = (*_FURTHER, f"mtp.depth={_depth}", *_more)
    _add(f"further: {_name} eager", 2, *_all, "training.cuda_graphs=off")
    _add(f"further: {_name} captured", 2, *_all, "training.cuda_graphs=on")
    _add(f"further: {_name} compiled", 2, *_all, "training.cuda_graphs=on", "training.torch_compile=true")
for _depth in (1, 2):
    _add(f"further: {_depth} in one stage", 1, *_FURTHER, f"mtp.depth={_depth}", _STAGED[0], "training.cuda_graphs=off")

# test_dense_gpu.py
DENSE = {
    "float32": ("model.dtype=float32",),
    "bfloat16": ("model.dtype=bfloat16",),
    "compiled recomputed": (
        "model.dtype=bfloat16",
        "training.torch_compile=true",
        "memory.layer_activations=recompute",
    ),
}
for _kind in ("fsdp", "zero1"):
    for _name, _more in DENSE.items():
        _add(
            f"{_kind} {_name}",
            2,
            *SHORT,
            "training.gradient_accumulation_steps=2",
            f"parallelism.data_parallel={_kind}",
            *_more,
        )

# test_expert_tensor_gpu.py
for _dtype in ("float32", "bfloat16"):
    _saved = (*SHORT, "training.max_steps=4", "training.eval_steps=2", "training.save_steps=2", f"model.dtype={_dtype}")
    _add(f"whole experts {_dtype}", 2, *_saved, "parallelism.ep_size=2")
    _add(f"slices of experts {_dtype}", 2, *_saved, "parallelism.ep_size=1", "parallelism.etp_size=2")

# test_context_gpu.py
_CONTEXT = (
    *SHORT, "training.save_steps=none", "data.eval_max_sequences=16", "parallelism.timeout_seconds=120",
)  # fmt: skip
_SHARED = (*_CONTEXT, "parallelism.cp_size=2")
for _kind in ("fsdp", "zero1"):
    for _bf16 in ("false", "true"):
        _both = (f"parallelism.data_parallel={_kind}", f"training.bf16={_bf16}")
        _add(f"whole sequences {_kind} {_bf16}", 2, *_CONTEXT, *_both, "training.per_device_train_batch_size=2")
        for _way in ("ulysses", "ring") if _bf16 == "true" else ("ulysses",):
            _add(
                f"shared {_way} {_kind} {_bf16}", 2, *_SHARED, *_both, "training.per_device_train_batch_size=4",
                f"parallelism.cp_attention={_way}",
            )  # fmt: skip
for _way in ("ulysses", "ring"):
    for _graphs in ("off", "on"):
        _add(
            f"shared {_way} graphs {_graphs}", 2, *_SHARED, *EXACT, f"parallelism.cp_attention={_way}",
            "parallelism.data_parallel=zero1", f"training.cuda_graphs={_graphs}",
        )  # fmt: skip
_LONG = ("data.sequence_length=16384", "training.max_steps=2", "training.eval_steps=none", "model.dtype=bfloat16")
_add("long whole", 2, *_CONTEXT, *_LONG, "training.per_device_train_batch_size=1")
_add("long shared", 2, *_SHARED, *_LONG, "training.per_device_train_batch_size=2")
_add("long shared, half", 2, *_SHARED, *_LONG, "training.per_device_train_batch_size=1")

# test_pipeline_gpu.py
_DROPOUT = "model.config.attention_dropout=0.1"
_PIPELINE = (
    "training.max_steps=6", "training.logging_steps=1", "training.eval_steps=3", "training.save_pretrained=false",
    "training.sample_prompt=none", "model.config.num_hidden_layers=4", "training.gradient_accumulation_steps=4",
    # 1F1B has embedding and head on two ranks.
    "model.config.tie_word_embeddings=false",
)  # fmt: skip
_STAGES = (*_PIPELINE, "parallelism.pp_size=2")
for _bf16 in ("false", "true"):
    _add(f"one stage {_bf16}", 1, *_PIPELINE, f"training.bf16={_bf16}")
    for _schedule in ("1F1B", "DualPipeV"):
        _add(
            f"stages {_schedule} {_bf16}", 2, *_STAGES, f"training.bf16={_bf16}", f"parallelism.pp_schedule={_schedule}"
        )
for _schedule in ("1F1B", "ZBVZeroBubble"):
    _of = f"parallelism.pp_schedule={_schedule}"
    for _transport in ("alltoall", "nvlink"):
        _add(
            f"stages {_schedule} {_transport}", 4, *_STAGES, "parallelism.ep_size=2", _of, f"moe.transport={_transport}"
        )
    for _graphs in ("off", "auto"):
        _add(
            f"stages {_schedule} 2 {_graphs}",
            2,
            *_STAGES,
            *EXACT,
            _of,
            "parallelism.ep_size=1",
            f"training.cuda_graphs={_graphs}",
        )
        _add(
            f"stages {_schedule} 4 {_graphs}", 4, *_STAGES, *EXACT, _of, "parallelism.ep_size=2",
            "parallelism.data_parallel=zero1", f"training.cuda_graphs={_graphs}",
        )  # fmt: skip
for _schedule in ("DualPipeV", "Interleaved1F1B"):
    for _transport in ("alltoall", "nvlink"):
        for _way in ("none", "two-batch"):
            _add(
                f"pairs {_schedule} {_transport} {_way}", 4, *_STAGES, *EXACT, f"parallelism.pp_schedule={_schedule}",
                "parallelism.ep_size=2", f"moe.transport={_transport}", f"moe.schedule={_way}",
            )  # fmt: skip
# Compiled layers in stages, and pairs, which are one graph: eager, and captured.
COMPILED_STAGES = {
    "1F1B": (2, ("parallelism.ep_size=1",)),
    "1F1B recomputed": (4, ("parallelism.ep_size=2", "memory.layer_activations=recompute")),
    "ZBVZeroBubble": (4, ("parallelism.ep_size=2",)),
    "Interleaved1F1B in pairs": (4, ("parallelism.ep_size=2", "moe.schedule=two-batch")),
    "DualPipeV in pairs": (4, ("parallelism.ep_size=2", "moe.schedule=two-batch")),
    # The forward of a pair draws what it draws alone; the backward draws nothing.
    "DualPipeV in pairs, drop-out": (4, ("parallelism.ep_size=2", "moe.schedule=two-batch", _DROPOUT)),
}
for _name, (_ranks, _more) in COMPILED_STAGES.items():
    _of = (f"parallelism.pp_schedule={_name.split()[0]}", *_more)
    _of += ("parallelism.data_parallel=zero1",) if _ranks == 4 else ()
    for _compiled in ("false", "true"):
        for _graphs in ("off", "auto"):
            _add(
                f"{_name} compiled {_compiled} graphs {_graphs}", _ranks, *_STAGES, *EXACT, *_of,
                f"training.torch_compile={_compiled}", f"training.cuda_graphs={_graphs}",
            )  # fmt: skip

# test_budget_gpu.py
_BUDGET = (
    "model.config=qwen3-30b-a3b", "model.config.num_hidden_layers=6", "model.config.num_experts=16",
    "model.config.hidden_size=1024", "model.dtype=bfloat16", "data.tokenizer=bytes", "data.sequence_length=2048",
    "training.per_device_train_batch_size=2", "training.max_steps=3", "training.eval_on_start=false",
    "training.save_pretrained=false", "training.save_steps=none", "training.sample_prompt=none",
    "data.eval_max_sequences=4", "training.per_device_eval_batch_size=2", "training.full_determinism=true",
    # By itself a run within a budget would divide non-expert parameters first, and have nothing left to choose.
    "parallelism.data_parallel=zero1",
)  # fmt: skip
_add("no budget", 2, *_BUDGET)
_add("budget", 2, *_BUDGET, "memory.budget=20GiB", "training.check_memory=false")

# test_waits_gpu.py, whose worker trains; as many steps as it takes.
WAITS_STEPS = 10
for _compiled in ("false", "true"):
    _add(
        f"waits compiled {_compiled}", 2, f"training.max_steps={WAITS_STEPS}", "training.eval_steps=none",
        "training.eval_on_start=false", "training.save_steps=none", "training.gradient_accumulation_steps=2",
        "moe.transport=nvlink", f"training.torch_compile={_compiled}",
    )  # fmt: skip

# test_resume_gpu.py: where it is stopped, and how long it is.
STOP, STEPS = 9, 16
_MOVING = (
    "training.full_determinism=true", f"training.max_steps={STEPS}", f"training.save_steps={STOP}",
    "training.eval_steps=none", "training.eval_on_start=false", "training.sample_prompt=none",
    "training.save_pretrained=false", "placement.every=5", "placement.lag=2",
    "placement.hysteresis=0", "placement.solver=search",
)  # fmt: skip
_add("moving, stopped", 2, *_MOVING, "moe.schedule=auto", f"training.stop_at_step={STOP}")
_add("moving, resumed", 2, *_MOVING, "moe.schedule=auto")
for _schedule in ("none", "chunks", "tiles", "two-batch"):
    _add(f"moving {_schedule}", 2, *_MOVING, f"moe.schedule={_schedule}")

# test_graphs_gpu.py and test_packed_gpu.py
STEPS_OF_GRAPHS = (
    "training.max_steps=9", "training.eval_steps=5", "training.save_pretrained=false", "training.save_steps=none",
    "parallelism.data_parallel=zero1", *EXACT, "parallelism.timeout_seconds=120", "data.eval_max_sequences=16",
)  # fmt: skip
_STREAMED = (
    "training.optimizer_offload=host",
    "training.optimizer_in_backward=true",
    "training.optimizer_state_dtype=int8",
)
_OFFLOADED = ("memory.layer_activations=offload", "memory.expert_activations=offload")
ALONE = {
    "offloaded": _OFFLOADED,
    "offloaded accumulated": (*_OFFLOADED, "training.gradient_accumulation_steps=3"),
    "two batches": ("moe.schedule=two-batch", "training.gradient_accumulation_steps=3"),
    # Drop-out draws from the graph's numbers, and once more what a layer that is computed again has drawn.
    "recomputed, drop-out": (_DROPOUT, "memory.layer_activations=recompute", "training.gradient_accumulation_steps=3"),
    "two batches, drop-out": (_DROPOUT, "moe.schedule=two-batch", "training.gradient_accumulation_steps=3"),
    "two batches, recomputed, drop-out": (
        _DROPOUT, "moe.schedule=two-batch", "training.gradient_accumulation_steps=4", "training.torch_compile=true",
        "memory.layer_activations=recompute",
    ),
    "streamed": (*_STREAMED, "training.max_grad_norm=0"),
    "streamed offloaded": (*_STREAMED, "training.grad_clipping=delayed", "memory.expert_activations=offload"),
    "streamed recomputed compiled": (
        *_STREAMED, "training.max_grad_norm=0", "memory.layer_activations=recompute", "training.torch_compile=true",
    ),
}  # fmt: skip
TOGETHER = {
    "plain": (),
    "muon": ("training.optimizer=muon", "training.learning_rate=1e-3"),
    "accumulated": ("training.gradient_accumulation_steps=3", "moe.router_aux_loss_coef=0.02"),
    "compiled": ("training.torch_compile=true", "training.gradient_accumulation_steps=2"),
    "chunks": ("moe.schedule=chunks", "moe.chunks=2"),
    # Two micro-batches at a time: halves of one, and a pair and one more.
    "two batches, halves": ("moe.schedule=two-batch", "moe.router_aux_loss_coef=0.02"),
    "two batches": ("moe.schedule=two-batch", "training.gradient_accumulation_steps=3"),
    "two batches, compiled": (
        "moe.schedule=two-batch", "training.gradient_accumulation_steps=2", "training.torch_compile=true",
    ),
    "two batches, recomputed": (
        "moe.schedule=two-batch", "training.gradient_accumulation_steps=4", "memory.layer_activations=recompute",
    ),
    "recomputed": ("memory.layer_activations=recompute", "memory.expert_activations=recompute"),
    "recomputed compiled": ("memory.layer_activations=recompute", "training.torch_compile=true"),
    "offloaded": (
        "memory.layer_activations=offload", "memory.expert_inputs=offload", "memory.expert_activations=offload",
    ),
    "consumed": (
        "training.optimizer_in_backward=true", "training.grad_clipping=delayed", "training.optimizer_state_dtype=int8",
    ),
    "consumed overflow": ("training.optimizer_in_backward=true", "training.max_grad_norm=0", "nvlink.capacity=0.125"),
    "streamed": (*_STREAMED, "training.grad_clipping=delayed"),
    "tensor parallel": ("parallelism.tp_size=2", "parallelism.data_parallel=fsdp"),
    "offloaded overflow": (
        "memory.expert_inputs=offload", "memory.expert_activations=offload", "nvlink.capacity=0.125",
        "training.learning_rate=0.02",
    ),
    # Experts in float32, and whole ones in bfloat16.
    "cast": ("model.dtype=float32", "training.bf16=true", "training.gradient_accumulation_steps=2"),
    # Replicas over peer memory, two sets of slots in use at a time.
    "spare slots": ("moe.spare_slots=2", "moe.balance_limit=1"),
    "spare slots, two batches": (
        "moe.spare_slots=2", "moe.balance_limit=1", "moe.schedule=two-batch",
        "memory.layer_activations=recompute",
    ),
    # After step 5, of which step 4 records choices; and by the loads after steps 4 and 8.
    "experts move": (
        "placement.every=4", "placement.lag=1", "placement.hysteresis=0", "placement.tokens=1024",
        "placement.background=false",
    ),
    "experts move by loads": ("placement.every=4", "placement.policy=pick"),
    # Slabs of an eighth: some step overflows, is repeated eagerly, and captured anew.
    "overflow": ("nvlink.capacity=0.125", "training.learning_rate=0.02"),
}  # fmt: skip
_TWO_HOPS = ("moe.transport=hierarchical", "parallelism.ranks_per_node=2", "parallelism.ep_size=4")
# Experts that two expert-parallel groups hold, whole on each rank; rides over two nodes.
FOUR = {
    "shared experts": ("parallelism.ep_size=2", "training.gradient_accumulation_steps=3"),
    "shared experts, compiled": (
        "parallelism.ep_size=2", "training.torch_compile=true", "memory.layer_activations=recompute",
        "training.optimizer_state_dtype=int8",
    ),
    "shared experts, replicas of the model": ("parallelism.dp_replicate_size=2", "parallelism.ep_size=2"),
    # Two nodes of two ranks. As many tokens go to the other node as steps need: graphs are forgotten as that changes.
    "two hops": (*_TWO_HOPS, "training.gradient_accumulation_steps=3", "moe.router_aux_loss_coef=0.02"),
    "two hops, compiled": (
        *_TWO_HOPS, "training.torch_compile=true", "memory.layer_activations=recompute",
        "memory.expert_activations=recompute",
    ),
    "two hops, chunks": (*_TWO_HOPS, "moe.schedule=chunks", "moe.chunks=2"),
    "two hops, two batches": (*_TWO_HOPS, "moe.schedule=two-batch", "training.gradient_accumulation_steps=2"),
    "two hops, adapters": (
        *_TWO_HOPS, "adapter.kind=lora", "adapter.rank=4", "training.gradient_accumulation_steps=2",
        "model.config=qwen3-30b-a3b", "model.config.num_hidden_layers=2", "model.config.num_experts=16",
        "model.config.hidden_size=256", "data.tokenizer=bytes", "data.sequence_length=256",
    ),
    # Some step needs more, is repeated eagerly, and captured anew.
    "two hops, overflow": (
        *_TWO_HOPS, "moe.transport_options.first_hop=fixed", "moe.transport_options.capacity=8",
        "training.learning_rate=0.02",
    ),
}  # fmt: skip
# A prompt after training on text; a model that is trained on conversations has none by default.
for _ranks, _table in ((1, ALONE), (2, TOGETHER), (4, FOUR)):
    for _name, _more in _table.items():
        _all = (*STEPS_OF_GRAPHS, "training.sample_tokens=4", *_more)
        _add(f"{_ranks} {_name} eager", _ranks, *_all, "training.cuda_graphs=off")
        _add(f"{_ranks} {_name} captured", _ranks, *_all)
_CHAT = (
    *STEPS_OF_GRAPHS, f"model.path={WORK}/tiny", f"data.train={CONVERSATIONS}", f"data.cache_dir={WORK}/cache",
    "data.sequence_length=512", "training.per_device_train_batch_size=1", "training.per_device_eval_batch_size=1",
    "training.gradient_accumulation_steps=2", "training.learning_rate=1e-3", "moe.router_aux_loss_coef=0.02",
)  # fmt: skip
_add("conversations eager", 2, *_CHAT, "training.cuda_graphs=off")
_add("conversations captured", 2, *_CHAT)

# Commands of `carpool bench`; their output folder is the test's.
BENCHES: dict[str, tuple[str, ...]] = {
    "kinds of kernels": (
        "model", "--model", "olmoe-1b-7b", "--layers", "2", "--sequence", "1024", "--batch", "2", "--steps", "2",
        "--rounds", "2",
    ),
}  # fmt: skip
