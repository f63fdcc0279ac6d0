"""TRL's DPOTrainer on preferred answers, with the experts of the model and of its reference spread over ranks.

    torchrun --nproc-per-node 2 examples/trl_dpo.py

Put the folder of your own checkpoint where `on_rank_0(write)` stands. Needs trl: pip install 'carpool[rl]'.
"""

import os

import torch.distributed as dist
from datasets import Dataset
from tiny_chat_model import write
from tiny_model import on_rank_0
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.distributed import DistributedConfig
from trl import DPOConfig, DPOTrainer

import carpool.hf  # noqa: F401, registers ep_implementation="carpool"

STEPS = int(os.environ.get("STEPS", "10"))

dist.init_process_group("gloo")  # with GPUs: "nccl"
ranks, folder = dist.get_world_size(), on_rank_0(write)


def load() -> AutoModelForCausalLM:
    spread = DistributedConfig(fsdp_size=ranks, ep_size=ranks, ep_implementation="carpool")
    return AutoModelForCausalLM.from_pretrained(folder, distributed_config=spread)


pairs = {
    "prompt": [[{"role": "user", "content": f"count from {n % 8}"}] for n in range(128)],
    "chosen": [[{"role": "assistant", "content": f"{n % 8} {n % 8 + 1}"}] for n in range(128)],
    "rejected": [[{"role": "assistant", "content": f"{n % 8} {n % 8 - 1}"}] for n in range(128)],
}
arguments = DPOConfig(
    output_dir=f"{folder}/out", max_steps=STEPS, per_device_train_batch_size=4, learning_rate=1e-2,
    router_aux_loss_coef=0.01, logging_first_step=True, logging_steps=max(1, STEPS // 2), save_strategy="no",
    report_to=[], use_cpu=True, bf16=False, disable_tqdm=True,
)  # fmt: skip
tokenizer = AutoTokenizer.from_pretrained(folder)
# Without one of ours, the trainer would load a reference that is whole on every rank. It routes by its own router:
# its likelihoods are those of the model that it is. There is no rollout here whose choices could be replayed.
trainer = DPOTrainer(load(), load(), arguments, train_dataset=Dataset.from_dict(pairs), processing_class=tokenizer)
trainer.train()
if dist.get_rank() == 0:
    for line in (entry for entry in trainer.state.log_history if "loss" in entry):
        print(f"step {line['step']:3d}  loss {line['loss']:.3f}  margin {line['rewards/margins']:.3f}", end="  ")
        print(f"balance {line['aux_loss']:.3f}")
dist.destroy_process_group()
