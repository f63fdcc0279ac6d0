"""Settings that must not change what is learned, together: any two values of them meet in some run, and each run has
the losses and the gradient norms of the plainest run of its model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.pairwise import all_pairs
from tests.ranks import Ranks
from tests.train.test_loop import losses, run

SEQUENCES = 16  # of a step
SIZES = {
    "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 4, "num_experts_per_tok": 3,
}  # fmt: skip
OF_MODEL: dict[str, dict[str, int]] = {
    "olmoe": {"num_experts": 8},
    "qwen3_moe": {"num_experts": 8, "moe_intermediate_size": 16, "head_dim": 8},
    "deepseek_v3": {
        "n_routed_experts": 8, "moe_intermediate_size": 16, "n_group": 4, "topk_group": 2, "first_k_dense_replace": 1,
        "n_shared_experts": 1, "q_lora_rank": 16, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4,
        "v_head_dim": 8,
    },
}  # fmt: skip
# Rounding must not decide the size of an update, nor what routers choose next.
COMMON = [
    "data.sequence_length=32", "training.max_steps=3", "training.save_strategy=no", "training.eval_steps=none",
    "training.eval_on_start=false", "training.warmup_steps=1", "training.sample_prompt=none",
    "training.save_pretrained=false", "training.learning_rate=0.02", "training.adam_epsilon=0.01",
    "training.max_grad_norm=0", "moe.router_aux_loss_coef=0", "moe.router_z_loss_coef=0.01",
]  # fmt: skip
PLAIN = ["moe.transport=alltoall", "parallelism.data_parallel=fsdp", "training.optimizer=torch"]
_PAIRED = ("Interleaved1F1B", "DualPipeV")  # whose micro-batches run in pairs
STAGES = ("GPipe", "1F1B", "Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")
FACTORS: dict[str, list[str]] = {
    "mesh": [
        "ep_size=4", "ep_size=2", "ep_size=1", "ep_size=2 dp_replicate_size=2", "tp_size=2 ep_size=4",
        "cp_size=2 ep_size=4 cp_attention=ring", "cp_size=2 ep_size=2 cp_attention=ulysses", "etp_size=2 ep_size=2",
        *(f"pp_size=2 ep_size=2 pp_schedule={name}" for name in STAGES),
    ],
    "training.optimizer": ["torch", "one-pass", "in_backward", "offload", "host experts"],
    "model.model_type": list(OF_MODEL),
    "parallelism.data_parallel": ["auto", "fsdp", "zero1"],
    "moe.transport": ["alltoall", "dedup", "gather", "hierarchical"],
    "moe.schedule": ["none", "two-batch", "chunks"],
    "training.gradient_accumulation_steps": ["4", "1", "2"],
    "memory.layer_activations": ["none", "recompute", "offload"],
    "memory.expert_inputs": ["none", "resend", "offload"],
    "memory.expert_activations": ["none", "recompute", "offload"],
    "moe.spare_slots": ["0", "1"],
    "moe.experts": ["auto", "reference"],
}  # fmt: skip
# What is refused, value by value.
_PIPES = [mesh for mesh in FACTORS["mesh"] if mesh.startswith("pp")]
FORBIDDEN: list[dict[str, str]] = [
    {"moe.experts": "reference", "memory.expert_activations": "recompute"},
    {"moe.transport": "hierarchical", "mesh": "ep_size=1"},
    {"parallelism.data_parallel": "zero1", "mesh": "tp_size=2 ep_size=4"},
    {"moe.spare_slots": "1", "mesh": "etp_size=2 ep_size=2"},
    *({"moe.schedule": "two-batch", "mesh": mesh} for mesh in _PIPES if mesh.split("=")[-1] not in _PAIRED),
    {"training.gradient_accumulation_steps": "2", "mesh": _PIPES[-1]},
    *({"training.gradient_accumulation_steps": "1", "mesh": mesh} for mesh in _PIPES),
    *(
        {"training.optimizer": optimizer, name: value}
        for optimizer in ("in_backward", "host experts")
        for name, value in [
            *(("training.gradient_accumulation_steps", number) for number in ("2", "4")), ("moe.schedule", "two-batch"),
            *(("mesh", mesh) for mesh in _PIPES),
        ]
    ),
    *({"training.optimizer": "offload", "mesh": mesh} for mesh in (*_PIPES, "etp_size=2 ep_size=2")),
    {"training.optimizer": "host experts", "moe.spare_slots": "1"},
    {"training.optimizer": "host experts", "parallelism.data_parallel": "fsdp"},
    # Several groups would hold the same ones, or parts of them.
    *(
        {"training.optimizer": "host experts", "mesh": mesh}
        for mesh in FACTORS["mesh"]
        if "ep_size=4" not in mesh or "tp" in mesh
    ),
]  # fmt: skip
ALSO = {
    "in_backward": ["training.optimizer=one-pass", "training.optimizer_in_backward=true"],
    "offload": ["training.optimizer=one-pass", "training.optimizer_offload=host"],
    "host experts": ["training.optimizer=one-pass", "training.optimizer_in_backward=true", "memory.experts=host"],
}


def model(name: str) -> list[str]:
    return [f"model.model_type={name}", *(f"model.config.{k}={v}" for k, v in (SIZES | OF_MODEL[name]).items())]


def overrides(case: dict[str, Any]) -> list[str]:
    case = dict(case)
    mesh, name = [f"parallelism.{word}" for word in case.pop("mesh").split()], case.pop("model.model_type")
    shared = 2 if any(word.startswith(("parallelism.pp", "parallelism.tp", "parallelism.cp_s")) for word in mesh) else 1
    micro_batches = int(case["training.gradient_accumulation_steps"]) * 4 // shared
    optimizer = ALSO.get(case["training.optimizer"])
    if optimizer is not None:
        del case["training.optimizer"]
    if case["moe.transport"] == "hierarchical":
        mesh.append("parallelism.ranks_per_node=1")
    return [
        *COMMON, *model(name), *mesh, *(optimizer or []), *(f"{k}={v}" for k, v in case.items()),
        f"training.per_device_train_batch_size={SEQUENCES // micro_batches}",
    ]  # fmt: skip


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_settings_do_not_change_what_is_learned(ranks: Ranks, tmp_path: Path) -> None:
    expected, different = {}, []
    for name in OF_MODEL:
        plain = [*COMMON, *model(name), *PLAIN, f"training.per_device_train_batch_size={SEQUENCES // 4}"]
        assert ranks(run, str(tmp_path / name), plain) == [""] * 4
        expected[name] = losses(tmp_path / name)
    for number, case in enumerate(all_pairs(FACTORS, FORBIDDEN)):
        assert ranks(run, str(tmp_path / f"{number}"), overrides(case)) == [""] * 4, case
        found, wanted = losses(tmp_path / f"{number}"), expected[case["model.model_type"]]
        if not all(found[step] == pytest.approx(wanted[step], rel=3e-5) for step in wanted):
            different.append((case, found, wanted))
    assert not different
