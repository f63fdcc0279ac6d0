"""TRL's GRPOTrainer, in which the choices of each rollout are replayed when its loss is computed.

    torchrun --nproc-per-node 2 examples/trl_grpo.py

Put the folder of your own checkpoint where `on_rank_0(write)` stands. Needs trl: pip install 'carpool[rl]'.
"""

import os

import torch.distributed as dist
from datasets import Dataset
from tiny_chat_model import write
from tiny_model import on_rank_0
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.distributed import DistributedConfig
from trl import GRPOConfig, GRPOTrainer

from carpool.hf import record_rollout, replay, rides
from carpool.routing import Routing

STEPS = int(os.environ.get("STEPS", "10"))


class ReplayingGRPOTrainer(GRPOTrainer):
    """Choices travel with their batch, (B, tokens, K) for each layer, and are shuffled and split with it."""

    def _generate_and_score_completions(self, inputs):
        with record_rollout(self.model) as rollout:
            batch = super()._generate_and_score_completions(inputs)
        length = batch["prompt_ids"].shape[1] + batch["completion_ids"].shape[1]
        return batch | {f"choices {name}": rollout.choices(name, length) for name in rides(self.model)}

    def _compute_loss(self, model, inputs):
        choices = {name: Routing(inputs[f"choices {name}"].flatten(0, 1), None) for name in rides(self.model)}
        with replay(self.model, choices):
            return super()._compute_loss(model, inputs)


dist.init_process_group("gloo")  # with GPUs: "nccl"
ranks, folder = dist.get_world_size(), on_rank_0(write)
spread = DistributedConfig(fsdp_size=ranks, ep_size=ranks, ep_implementation="carpool")
arguments = GRPOConfig(
    output_dir=f"{folder}/out", max_steps=STEPS, per_device_train_batch_size=8, num_generations=8, beta=0.0,
    max_completion_length=12, learning_rate=3e-2, logging_steps=max(1, STEPS // 2), save_strategy="no",
    report_to=[], use_cpu=True, bf16=False, disable_tqdm=True, gradient_checkpointing=False,
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
)
trainer.train()
for line in (entry for entry in trainer.state.log_history if dist.get_rank() == 0 and "reward" in entry):
    print(f"step {line['step']:3d}  reward {line['reward']:.3f}")
dist.destroy_process_group()
