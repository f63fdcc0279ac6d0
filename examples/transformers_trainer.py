"""A transformers model under the Trainer, with its experts spread over ranks by one string.

    torchrun --nproc-per-node 2 examples/transformers_trainer.py

Put the folder of your own checkpoint where `write_tiny_olmoe` stands.
"""

import os

import torch
import torch.distributed as dist
from tiny_model import write_tiny_olmoe
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments
from transformers.distributed import DistributedConfig

import carpool.hf  # registers ep_implementation="carpool"

STEPS = int(os.environ.get("STEPS", "10"))


class Counting(torch.utils.data.Dataset):
    """Sequences of consecutive numbers."""

    def __len__(self) -> int:
        return 256

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids = (torch.arange(32) + index) % 64
        return {"input_ids": ids, "labels": ids}


def main() -> None:
    dist.init_process_group("gloo")  # with GPUs: "nccl"
    ranks, folder = dist.get_world_size(), write_tiny_olmoe()
    model = AutoModelForCausalLM.from_pretrained(
        folder, distributed_config=DistributedConfig(fsdp_size=ranks, ep_size=ranks, ep_implementation="carpool")
    )
    arguments = TrainingArguments(
        output_dir=f"{folder}/out", max_steps=STEPS, per_device_train_batch_size=4, learning_rate=1e-2,
        logging_steps=max(1, STEPS // 2), save_strategy="no", report_to=[], use_cpu=True, disable_tqdm=True,
    )  # fmt: skip
    trainer = Trainer(model, arguments, train_dataset=Counting())
    carpool.hf.CarpoolCallback.add_to(trainer)  # adds carpool/... to every line of the log
    trainer.train()
    if dist.get_rank() == 0:
        for line in (entry for entry in trainer.state.log_history if "loss" in entry):
            copies = line["carpool/copies_per_token"]
            print(f"step {line['step']:3d}  loss {line['loss']:.3f}  ranks per token {copies:.2f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
