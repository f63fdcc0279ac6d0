"""Steps of LoRA on attention and all experts: Carpool's experts beside peft on Transformers' own, on one device.

    python -m benchmarks.adapters --layers 8 --tokens 4096 --out adapters.json
    python -m benchmarks.adapters --layers 8 --tokens 4096 --contenders carpool captured nf4 int8
    python -m benchmarks.adapters --layers 1 --tokens 64 --repetitions 2 --keys '{"hidden_size": 64, "num_experts": 8,
        "moe_intermediate_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}'    # on a CPU

Both models have the same random weights, and both are peft models of the same configuration. A step is forward,
backward and AdamW of the adapters. peft's own forward adds b a to all weights of a layer's experts; Carpool multiplies
rows by a, then by b (`carpool.experts.gemm.adapter_kernels`). nf4 and int8 are Carpool on experts in 4 and 8 bits
(`carpool.experts.quantised`). "captured" is Carpool with forward and backward in one CUDA graph, as `carpool train`
runs steps, "compiled" the same with compiled layers (training.torch_compile); all others are eager. Carpool's loss,
attention and AdamW are those of `carpool train` (`HeadLoss`, `fastest_attention`, one pass over memory); peft's are the
model's own and PyTorch's fused AdamW. The contenders take turns.

    ms         median of a step
    tokens/s   of the layers that were built, embedding and output layer included
    GiB        peak of a step, beyond the models and the optimizers' state
    model      GiB of the model and its adapters
    reserved   GiB that PyTorch has taken from the device so far, for all contenders
"""

from __future__ import annotations

import gc
import json
import statistics
import time
from functools import partial
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from transformers import PreTrainedConfig

from benchmarks.script import make_parser, show, write_results
from carpool.bench.timing import in_turns
from carpool.hf import compile_layers, install, quantise_experts
from carpool.hf.build_model import build_model
from carpool.hf.documents import fastest_attention, unpacked
from carpool.hf.loss_head import HeadLoss, next_tokens
from carpool.kernels.capture import capturing
from carpool.optim import AdamW
from carpool.train.blueprint import model_config

# Before a capture, in which nothing may be compiled or made for the first time.
EAGER_STEPS = 2
CONTENDERS = ("carpool", "peft", "nf4", "int8", "captured", "compiled")
CAPTURED = ("captured", "compiled")


class Trained:
    """A model with adapters, and what trains them."""

    def __init__(self, name: str, config: PreTrainedConfig, args: Any, device: torch.device) -> None:
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        before = torch.cuda.memory_allocated() if device.type == "cuda" else 0
        own = args.experts_implementation if name == "peft" else None
        model = build_model(config, distributed_config=None, dtype=dtype, seed=0, experts_implementation=own)
        if name != "peft":
            install(model)
        if name in ("nf4", "int8"):
            quantise_experts(model, name)
        torch.manual_seed(0)
        lora = LoraConfig(
            r=args.rank,
            target_modules=["q_proj", "k_proj", "v_proj", "o_proj"],
            target_parameters=["experts.gate_up_proj", "experts.down_proj"],
        )
        self.model: Any = get_peft_model(model, lora)
        if args.checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        self.parameters = sum(parameter.numel() for parameter in trained)
        self.head: HeadLoss | None = None
        self.optimizer: torch.optim.Optimizer
        if name == "peft":
            self.optimizer = torch.optim.AdamW(trained, lr=1e-4, fused=True)
        else:
            self.optimizer, self.head = AdamW(trained, lr=1e-4), HeadLoss(model)
        if name == "compiled":
            compile_layers(model)
        self.device, self.graph, self.eager_steps = device, None, EAGER_STEPS if name in CAPTURED else -1
        self.gib = (torch.cuda.memory_allocated() - before) / 2**30 if device.type == "cuda" else float("nan")

    def step(self, ids: torch.Tensor) -> torch.Tensor:
        if self.eager_steps == 0:
            self._capture(ids)
        self.eager_steps -= 1
        if self.graph is None:
            loss = self._gradients(ids)
        else:
            self.ids.copy_(ids)
            self.graph.replay()
            loss = self.loss
            for parameter, gradient in self.captured:
                parameter.grad = gradient
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss

    def _gradients(self, ids: torch.Tensor) -> torch.Tensor:
        # Nobody looks for the seams of packed documents: that would wait for the device.
        with unpacked():
            if self.head is None:
                loss: torch.Tensor = self.model(input_ids=ids, labels=ids).loss
                loss.backward()
            else:
                with fastest_attention(self.device):
                    loss = self.head(ids, next_tokens(ids))[0] / (ids.shape[1] - 1)
                    loss.backward()
        return loss.detach()

    def _capture(self, ids: torch.Tensor) -> None:
        self.ids, self.graph = ids.clone(), torch.cuda.CUDAGraph()
        with capturing(self.graph):
            self.loss = self._gradients(self.ids)
        self.captured = [(p, p.grad) for p in self.model.parameters() if p.grad is not None]

    def measured(self, ids: torch.Tensor) -> tuple[float, float, float]:
        """Of a step: its milliseconds, GiB at its peak, and loss."""
        cuda = self.device.type == "cuda"
        if cuda:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated() if cuda else 0
        begin = time.perf_counter()
        loss = self.step(ids)
        if cuda:
            torch.cuda.synchronize()
        seconds = time.perf_counter() - begin
        peak = (torch.cuda.max_memory_allocated() - before) / 2**30 if cuda else float("nan")
        return 1e3 * seconds, peak, float(loss)


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--model", default="qwen3-30b-a3b", help="a published configuration")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--keys", default="{}", help="keys of the configuration, as JSON")
    parser.add_argument("--tokens", type=int, default=4096, help="in a step, one sequence")
    parser.add_argument("--contenders", nargs="+", choices=CONTENDERS, default=CONTENDERS[:2])
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--experts-implementation", default="grouped_mm", help="Transformers', for peft")
    parser.add_argument("--checkpointing", action="store_true")
    parser.add_argument("--repetitions", type=int, default=10)
    parser.add_argument("--warmup", type=int, default=4)
    args = parser.parse_args()
    if set(CAPTURED) & set(args.contenders) and not torch.cuda.is_available():
        parser.error("--contenders captured compiled: there is no GPU")
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    keys = {"from": args.model, "num_hidden_layers": args.layers, **json.loads(args.keys)}
    models = {name: Trained(name, model_config(keys), args, device) for name in args.contenders}
    gc.collect()
    vocabulary = models[args.contenders[0]].model.config.vocab_size
    ids = torch.randint(0, vocabulary, (1, args.tokens), device=device)
    ways = {name: partial(model.measured, ids) for name, model in models.items()}
    found = in_turns(ways, args.repetitions, args.warmup)
    results = [
        {
            "contender": name,
            "ms": statistics.median(ms for ms, _, _ in steps),
            "tokens_per_second": 1e3 * args.tokens / statistics.median(ms for ms, _, _ in steps),
            "peak_gib": max(peak for _, peak, _ in steps),
            "model_gib": models[name].gib,
            "reserved_gib": torch.cuda.memory_reserved() / 2**30 if device.type == "cuda" else float("nan"),
            "loss": steps[-1][2],
            "trained": models[name].parameters,
        }
        for name, steps in found.items()
    ]
    rows = [
        [
            str(r["contender"]),
            *(f"{r[key]:,.4g}" for key in ("ms", "tokens_per_second", "peak_gib", "model_gib", "reserved_gib", "loss")),
        ]
        for r in results
    ]
    title = f"LoRA of rank {args.rank}, {args.layers} layers of {args.model}, {args.tokens:,} tokens"
    show(title, ["", "ms", "tokens/s", "GiB", "model", "reserved", "loss"], rows)
    write_results(args, device, results=results)


if __name__ == "__main__":
    main()
