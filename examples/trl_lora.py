"""LoRA with TRL's SFTTrainer on one device: `FastSteps` compiles layers and captures steps as CUDA graphs.

    python examples/trl_lora.py

Trains twice, without it and with it. On a CPU both are alike, and one line says why. Put the folder of your own
checkpoint where `write` makes one. Needs trl: pip install 'carpool[rl]'.
"""

import os
import tempfile
import time

import torch
from datasets import Dataset
from peft import LoraConfig
from tiny_chat_model import write
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import SFTConfig, SFTTrainer

import carpool.hf

STEPS = int(os.environ.get("STEPS", "20"))


def train(folder: str, fast: bool) -> tuple[list[float], float]:
    """Losses, and seconds of a step of the last half."""
    gpu = torch.cuda.is_available()
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="bfloat16" if gpu else "float32")
    carpool.hf.install(model)  # Carpool's experts, on one rank
    lora = LoraConfig(
        r=8, target_modules=["q_proj", "v_proj"], target_parameters=["experts.gate_up_proj", "experts.down_proj"]
    )
    said = [f"count from {n}" for n in range(8)] * 32
    counts = [" ".join(str((n + i) % 10) for i in range(6)) for n in range(8)] * 32
    examples = [
        [{"role": "user", "content": one}, {"role": "assistant", "content": other}]
        for one, other in zip(said, counts, strict=True)
    ]
    arguments = SFTConfig(
        output_dir=f"{folder}/out", max_steps=STEPS, per_device_train_batch_size=4, learning_rate=1e-2, logging_steps=1,
        save_strategy="no", report_to=[], use_cpu=not gpu, bf16=False, disable_tqdm=True, gradient_checkpointing=False,
        pad_to_multiple_of=128,  # all batches have one shape, which a CUDA graph needs
    )  # fmt: skip
    trainer = SFTTrainer(
        model, arguments, train_dataset=Dataset.from_dict({"messages": examples}), peft_config=lora,
        processing_class=AutoTokenizer.from_pretrained(folder),
    )  # fmt: skip
    if fast:
        carpool.hf.FastSteps.add_to(trainer)
    ends: list[float] = []
    step = trainer.training_step
    trainer.training_step = lambda *given: (ends.append(time.perf_counter()), step(*given))[1]
    trainer.train()
    half = len(ends) // 2
    losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
    return losses, (ends[-1] - ends[half]) / (len(ends) - 1 - half)


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        write(folder)
        for fast in (False, True):
            losses, seconds = train(folder, fast)
            name = "FastSteps" if fast else "eager"
            print(f"{name:10s} loss {losses[0]:.3f} -> loss {losses[-1]:.3f}, {1e3 * seconds:.1f} ms a step")


if __name__ == "__main__":
    main()
