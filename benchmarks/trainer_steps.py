"""Steps of transformers' Trainer, or TRL's SFTTrainer, as scripts have them and with `FastSteps`: LoRA on attention and
all experts, on one GPU.

    python -m benchmarks.trainer_steps --layers 8 --tokens 4096 --out trainer.json
    python -m benchmarks.trainer_steps --layers 8 --trainer trl --ways fast
    python -m benchmarks.trainer_steps --layers 2 --tokens 64 --steps 6 --logging 2 --keys '{"hidden_size": 64,
        "num_experts": 8, "moe_intermediate_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2,
        "head_dim": 16}'                                                                             # on a CPU

Both ways train the same random weights on the same random tokens. A step is the Trainer's own: forward, backward,
clipping, AdamW, logs. It is timed from one step's end to the next, where the host waits for the device.

    ms        median of the last half of the steps
    first     seconds of the first five steps: compilation and capture
    reserved  GiB that PyTorch's allocator has of the GPU
    loss      of the last step
"""

from __future__ import annotations

import gc
import json
import statistics
import tempfile
import time
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast, Trainer, TrainerCallback, TrainingArguments

from benchmarks.script import make_parser, show, write_results
from carpool.hf import FastSteps, install
from carpool.hf.build_model import build_model
from carpool.train.blueprint import model_config

WAYS = ("eager", "captured", "fast")


class Timer(TrainerCallback):
    """Notes when each step has ended on the device."""

    def __init__(self, cuda: bool) -> None:
        self.cuda, self.ends = cuda, [time.perf_counter()]

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self.cuda:
            torch.cuda.synchronize()
        self.ends.append(time.perf_counter())

    def milliseconds(self) -> list[float]:
        return [1e3 * (end - begin) for begin, end in zip(self.ends, self.ends[1:], strict=False)]


def measure(way: str, args: Any, device: torch.device) -> dict[str, Any]:
    """Train for some steps."""
    cuda = device.type == "cuda"
    config = model_config({"from": args.model, "num_hidden_layers": args.layers, **json.loads(args.keys)})
    dtype = torch.bfloat16 if cuda else torch.float32
    model = build_model(config, distributed_config=None, dtype=dtype, seed=0, experts_implementation=None)
    install(model)
    torch.manual_seed(0)
    experts = ["experts.gate_up_proj", "experts.down_proj"]
    attention = ["q_proj", "k_proj", "v_proj", "o_proj"]
    lora = LoraConfig(r=args.rank, target_modules=attention, target_parameters=experts, task_type="CAUSAL_LM")
    adapted: Any = get_peft_model(model, lora)
    generator, shape = torch.Generator().manual_seed(0), (args.steps * args.accumulation, args.tokens)
    ids = torch.randint(0, config.get_text_config().vocab_size, shape, generator=generator)
    rows = [{"input_ids": one.tolist(), "labels": one.tolist()} for one in ids]
    timer = Timer(cuda)
    with tempfile.TemporaryDirectory() as folder:
        settings: dict[str, Any] = dict(
            output_dir=folder, max_steps=args.steps, per_device_train_batch_size=1, logging_steps=args.logging,
            report_to=[], save_strategy="no", disable_tqdm=True, use_cpu=not cuda, bf16=False, learning_rate=1e-4,
            gradient_checkpointing=args.checkpointing,
            gradient_accumulation_steps=args.accumulation,
        )  # fmt: skip
        if args.trainer == "trl":
            from datasets import Dataset
            from trl import SFTConfig, SFTTrainer

            settings |= {"max_length": None, "dataset_kwargs": {"skip_prepare_dataset": True}}
            trainer: Any = SFTTrainer(
                adapted, SFTConfig(**settings), train_dataset=Dataset.from_list(rows), callbacks=[timer],
                processing_class=_tokenizer(),
            )  # fmt: skip
        else:
            trainer = Trainer(adapted, TrainingArguments(**settings), train_dataset=_tensors(rows), callbacks=[timer])
        if way != "eager":
            FastSteps.add_to(trainer, compiled=way == "fast")
        if cuda:
            torch.cuda.reset_peak_memory_stats()
        trainer.train()
    taken = timer.milliseconds()
    losses = [log["loss"] for log in trainer.state.log_history if "loss" in log]
    return {
        "way": way,
        "ms": statistics.median(taken[len(taken) // 2 :]),
        "first_seconds": sum(taken[:5]) / 1e3,
        "reserved_gib": torch.cuda.max_memory_reserved() / 2**30 if cuda else float("nan"),
        "loss": losses[-1],
        "losses": losses,
    }


def _tokenizer() -> PreTrainedTokenizerFast:
    """TRL wants one, for padding."""
    own = Tokenizer(WordLevel({"<pad>": 0, "</s>": 1}, unk_token="<pad>"))
    return PreTrainedTokenizerFast(tokenizer_object=own, pad_token="<pad>", eos_token="</s>")


def _tensors(rows: list[dict[str, Any]]) -> Any:
    return [{name: torch.tensor(value) for name, value in row.items()} for row in rows]


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--model", default="qwen3-30b-a3b", help="a published configuration")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--keys", default="{}", help="keys of the configuration, as JSON")
    parser.add_argument("--tokens", type=int, default=4096, help="in a step, one sequence")
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--accumulation", type=int, default=1, help="micro-batches of a step")
    parser.add_argument("--logging", type=int, default=10, help="steps between lines of the log")
    parser.add_argument("--checkpointing", action="store_true")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--trainer", choices=("transformers", "trl"), default="transformers")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=("eager", "fast"))
    args = parser.parse_args()
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    results = []
    for way in args.ways:
        results.append(measure(way, args, device))
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
    names = ("ms", "first_seconds", "reserved_gib", "loss")
    title = f"{args.trainer}, {args.layers} layers of {args.model}, {args.tokens:,} tokens"
    show(
        title,
        ["", "ms", "first s", "reserved", "loss"],
        [[r["way"], *(f"{r[n]:,.4g}" for n in names)] for r in results],
    )
    write_results(args, device, results=results)


if __name__ == "__main__":
    main()
