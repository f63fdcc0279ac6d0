"""TRL's GRPOTrainer, in which the choices of each rollout are replayed when its loss is computed.

    torchrun --nproc-per-node 2 examples/trl_grpo.py
    ROLLOUTS=arrays torchrun --nproc-per-node 2 examples/trl_grpo.py

Put the folder of your own checkpoint where `on_rank_0(write)` stands. Needs trl: pip install 'carpool[rl]'.

With `ROLLOUTS=arrays`, `rollout_func` returns the choices as vLLM does with `enable_return_routed_experts`. There is no
vLLM in this script: the model generates by itself, and its choices are brought into vLLM's form. Ask your server there.
"""

import os

import torch
import torch.distributed as dist
from datasets import Dataset
from tiny_chat_model import write
from tiny_model import on_rank_0
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.distributed import DistributedConfig
from trl import GRPOConfig, GRPOTrainer

from carpool.hf import ReplayedRollouts, record_rollout

STEPS = int(os.environ.get("STEPS", "16"))


class ReplayingGRPOTrainer(ReplayedRollouts, GRPOTrainer):
    """Logs the share of tokens for which routers would by now choose other experts."""


def rollout_func(prompts, trainer):
    """Texts, and the choices as vLLM's `CompletionOutput.routed_experts` has them: (all tokens but the last, layers, K)
    of each text."""
    prompt_ids, images, fields = trainer._tokenize_prompts(prompts)
    with record_rollout(trainer.model) as rollout:
        completion_ids, _ = trainer._generate_single_turn(prompt_ids, images, fields, trainer.num_generations)
    width = max(map(len, prompt_ids))  # prompts are padded on the left, without pad_to_multiple_of
    recordings = rollout.routings(width + max(map(len, completion_ids)))
    chosen = torch.stack([one.expert_TK.unflatten(0, (len(prompts), -1)) for one in recordings.values()], 2)
    routed_experts = [
        row[width - len(prompt) : width + len(completion) - 1].numpy().astype("uint8")
        for row, prompt, completion in zip(chosen, prompt_ids, completion_ids, strict=True)
    ]
    return dict(prompt_ids=prompt_ids, completion_ids=completion_ids, logprobs=None, routed_experts=routed_experts)


dist.init_process_group("gloo")  # with GPUs: "nccl"
ranks, folder = dist.get_world_size(), on_rank_0(write)
spread = DistributedConfig(fsdp_size=ranks, ep_size=ranks, ep_implementation="carpool")
arguments = GRPOConfig(
    output_dir=f"{folder}/out", max_steps=STEPS, per_device_train_batch_size=8, num_generations=8, beta=0.0,
    num_iterations=2, max_completion_length=12, learning_rate=3e-2, router_aux_loss_coef=0.01,
    logging_steps=max(1, STEPS // 2), save_strategy="no", report_to=[], use_cpu=True, bf16=False, disable_tqdm=True,
)  # fmt: skip
trainer = ReplayingGRPOTrainer(
    AutoModelForCausalLM.from_pretrained(folder, distributed_config=spread),
    # The share of characters that are letters.
    lambda completions, **_: [
        sum(c.isalpha() and c.isascii() for c in text) / max(len(text), 1) for text in completions
    ],
    arguments,
    train_dataset=Dataset.from_dict({"prompt": [f"count from {n % 8}: " for n in range(128)]}),
    processing_class=AutoTokenizer.from_pretrained(folder),
    rollout_func=rollout_func if os.environ.get("ROLLOUTS") == "arrays" else None,
)
trainer.train()
for line in (entry for entry in trainer.state.log_history if dist.get_rank() == 0 and "reward" in entry):
    moved = f"{line['routing/differing_routers']:.1%}, of {line['routing/differing_tokens']:.1%} of the tokens"
    print(f"step {line['step']:3d}  reward {line['reward']:.3f}  balance {line['aux_loss']:.3f}  moved choices {moved}")
dist.destroy_process_group()
