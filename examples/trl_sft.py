"""TRL's SFTTrainer on conversations, with the experts spread over ranks by one string.

    torchrun --nproc-per-node 2 examples/trl_sft.py

Put the folder of your own checkpoint where `on_rank_0(write)` stands. Needs trl: pip install 'carpool[rl]'.
"""

import os

import torch.distributed as dist
from datasets import Dataset
from tiny_chat_model import write
from tiny_model import on_rank_0
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.distributed import DistributedConfig
from trl import SFTConfig, SFTTrainer

import carpool.hf  # registers ep_implementation="carpool"

STEPS = int(os.environ.get("STEPS", "10"))


def main() -> None:
    dist.init_process_group("gloo")  # with GPUs: "nccl"
    ranks, folder = dist.get_world_size(), on_rank_0(write)
    model = AutoModelForCausalLM.from_pretrained(
        folder, distributed_config=DistributedConfig(fsdp_size=ranks, ep_size=ranks, ep_implementation="carpool")
    )
    said = [f"count from {n}" for n in range(8)] * 16
    answers = [" ".join(str((n + i) % 10) for i in range(6)) for n in range(8)] * 16
    conversations = [
        [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        for question, answer in zip(said, answers, strict=True)
    ]
    arguments = SFTConfig(
        output_dir=f"{folder}/out", max_steps=STEPS, per_device_train_batch_size=4, learning_rate=1e-2,
        logging_steps=max(1, STEPS // 2), save_strategy="no", report_to=[], use_cpu=True, bf16=False,
        disable_tqdm=True, gradient_checkpointing=False,
    )  # fmt: skip
    trainer = SFTTrainer(
        model,
        arguments,
        train_dataset=Dataset.from_dict({"messages": conversations}),
        processing_class=AutoTokenizer.from_pretrained(folder),
    )
    carpool.hf.CarpoolCallback.add_to(trainer)  # adds carpool/... to every line of the log
    trainer.train()
    if dist.get_rank() == 0:
        for line in (entry for entry in trainer.state.log_history if "loss" in entry):
            copies = line["carpool/copies_per_token"]
            print(f"step {line['step']:3d}  loss {line['loss']:.3f}  ranks per token {copies:.2f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
