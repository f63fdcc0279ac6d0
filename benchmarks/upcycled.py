"""A dense model continued, beside MoE models that `carpool upcycle` makes of it: losses and tokens/s.

    python -m benchmarks.upcycled --pretrain 600 --steps 300 --work work --out upcycled.json

Trains a tiny Qwen3 (2 layers of 64, an MLP of 256) on the demo's data, bytes of Python's standard library, for
`--pretrain` steps; then continues it for `--steps`, and each MoE that is made of it, with the same batches, AdamW and
learning rate. All run in one process and in the same loop, because `carpool train` trains no dense models. MoE models
have Transformers' balance loss, which is not in the losses that are shown. The dense model is continued a second time
with other batches, which says what a difference means.

    start        held-out loss before the first step
    loss         mean over the last 50 steps
    held out     after the last step
    mixed        tokens of a layer, of the new MoE in bfloat16, whose experts are not whole copies of the MLP
    active       parameters that a token meets, without embeddings, in millions
"""

from __future__ import annotations

import shutil
import time
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from transformers import AutoModelForCausalLM, Qwen3Config

from benchmarks.script import make_parser, show, write_results
from carpool.train.checkpoints.upcycle import Upcycling, upcycle
from carpool.train.config.schema import DataSection
from carpool.train.data.corpus import prepare
from carpool.train.data.tokenizer import BytesTokenizer

SPAN, LENGTH, BATCH, RATE = 50, 64, 8, 1e-3
OTHER = "dense, other batches"
# By name: method, experts, top-k, parts and noise.
CONTENDERS = {
    "copy, 8 experts, top-2": ("copy", 8, 2, None, 0.0),
    "copy, noise 0.1": ("copy", 8, 2, None, 0.1),
    "split, 32 experts, top-4": ("split", 32, 4, None, 0.0),
    "split, top-8 of 4 parts": ("split", 32, 8, 4, 0.0),
}


def batches(tokens: torch.Tensor, count: int, seed: int) -> torch.Tensor:
    """Random sequences (steps, B, S), the same for each contender."""
    generator = torch.Generator().manual_seed(seed)
    starts = torch.randint(len(tokens) - LENGTH, (count, BATCH, 1), generator=generator)
    return tokens[starts + torch.arange(LENGTH)]


@torch.no_grad()
def held_out(model: Any, data: torch.Tensor) -> float:
    model.eval()
    return sum(float(model(batch, labels=batch).loss) for batch in data) / len(data)


def continued(model: Any, data: torch.Tensor, coefficient: float) -> tuple[list[float], float]:
    """Losses of the steps, and tokens/s without the first five."""
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.1)
    losses, begun = [], 0.0
    for step, batch in enumerate(data):
        if step == 5:
            begun = time.perf_counter()
        output = model(batch, labels=batch, **({"output_router_logits": True} if coefficient else {}))
        # With router logits the loss of Transformers has the balance loss in it.
        balance = coefficient * output.aux_loss if coefficient else torch.zeros(())
        output.loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float((output.loss - balance).detach()))
    return losses, (len(data) - 5) * BATCH * LENGTH / (time.perf_counter() - begun)


@torch.no_grad()
def mixed(folder: Path, parts: int, data: torch.Tensor) -> float:
    """Share of tokens and layers whose chosen experts are not whole copies of the MLP, in bfloat16."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
    found = []
    for batch in data:
        for logits in model(batch, output_router_logits=True).router_logits:
            chosen = logits.float().softmax(-1).topk(model.config.num_experts_per_tok, dim=-1).indices
            counts = torch.nn.functional.one_hot(chosen // parts).sum(1)
            found.append(((counts != 0) & (counts != parts)).any(-1).float())
    return float(torch.cat(found).mean())


def active(model: Any) -> float:
    """In millions."""
    config = model.config
    share = getattr(config, "num_experts_per_tok", 1) / getattr(config, "num_local_experts", 1)
    found = 0.0
    for name, parameter in model.named_parameters():
        if "embed" not in name and "lm_head" not in name:
            found += parameter.numel() * (share if ".experts." in name else 1)
    return found / 1e6


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--pretrain", type=int, default=600)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--work", type=Path, required=True, help="folder for the models; what it holds is replaced")
    args = parser.parse_args()
    tokenizer = BytesTokenizer()
    corpus = prepare(DataSection(train=("stdlib",), cache_dir=str(args.work / "tokens")), tokenizer)
    train, rest = (torch.from_numpy(tokens.astype("int64")) for tokens in (corpus.train, corpus.eval))
    further, test = batches(train, args.steps, 1), batches(rest, 20, 2)
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=tokenizer.vocab_size, hidden_size=64, intermediate_size=256, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=16, max_position_embeddings=LENGTH,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config)
    continued(model, batches(train, args.pretrain, 0), 0.0)
    dense = args.work / "dense"
    model.save_pretrained(dense)
    results: list[dict[str, Any]] = []
    for name, how in {"dense": None, OTHER: None, **CONTENDERS}.items():
        folder, difference, share = dense, 0.0, 0.0
        if how is not None:
            shutil.rmtree(folder := args.work / "moe", ignore_errors=True)
            method, experts, top_k, parts, noise = how
            made = Upcycling.of(method, experts, top_k, parts, noise, 0)
            difference, share = upcycle(dense, folder, made).difference, mixed(folder, made.parts, test)
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        start = held_out(model, test)
        data = batches(train, args.steps, 3) if name == OTHER else further
        losses, rate = continued(model, data, 0.0 if how is None else model.config.router_aux_loss_coef)
        row = {"name": name, "difference": difference, "mixed": share, "start": start, "loss": mean(losses[-SPAN:])}
        row |= {"held_out": held_out(model, test), "tokens_per_s": rate, "losses": losses, "active": active(model)}
        results.append(row | {"parameters": sum(one.numel() for one in model.parameters()) / 1e6})
    show(
        f"{args.steps} steps after {args.pretrain} dense ones",
        ["", "parameters, M", "active, M", "logits off", "mixed", "start", "loss", "held out", "tokens/s"],
        [
            [
                r["name"],
                f"{r['parameters']:.2f}",
                f"{r['active']:.2f}",
                f"{r['difference']:.1e}",
                f"{r['mixed']:.2%}",
                f"{r['start']:.4f}",
                f"{r['loss']:.4f}",
                f"{r['held_out']:.4f}",
                f"{r['tokens_per_s']:,.0f}",
            ]
            for r in results
        ],
    )
    write_results(args, torch.device("cpu"), results=results)


if __name__ == "__main__":
    main()
