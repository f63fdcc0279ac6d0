"""How far likelihoods of a rollout are from those of the training forward, with the rollout's choices and without.

    python -m benchmarks.rollouts

A tiny Qwen3-MoE with random weights (4 layers, 16 experts, 4 of them per token) generates token by token, and gives its
choices as vLLM does. A second one, the trainer, reads the whole texts in one forward: its router chooses, or replays.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

import carpool.hf
from carpool.routing import Routing

PROMPT, NEW, TEXTS = 16, 64, 16


def make_model(dtype: torch.dtype, moved: float) -> Any:
    """The model; `moved`: how much noise its routers have, by the standard deviation of their weights."""
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=512, hidden_size=64, moe_intermediate_size=64, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, num_experts=16, num_experts_per_tok=4, norm_topk_prob=True,
        initializer_range=0.2, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    model = Qwen3MoeForCausalLM(config).eval()
    for name, parameter in model.named_parameters():
        if name.endswith("gate.weight"):
            parameter.data += moved * parameter.data.std() * torch.randn(parameter.shape)
    model.to(dtype)
    carpool.hf.install(model)
    return model


@torch.no_grad()
def measure(sampler_dtype: torch.dtype, trainer_dtype: torch.dtype, moved: float) -> list[str]:
    """Shares of choices and tokens that differ; mean and largest |log ratio| of generated tokens, without and with."""
    sampler, trainer = make_model(sampler_dtype, 0.0), make_model(trainer_dtype, moved)
    prompts = torch.randint(1, 512, (TEXTS, PROMPT), generator=torch.Generator().manual_seed(1))
    with carpool.hf.record_rollout(sampler) as rollout:
        out = sampler.generate(
            prompts, attention_mask=torch.ones_like(prompts), max_new_tokens=NEW, do_sample=True, top_k=0,
            output_logits=True, return_dict_in_generate=True,
        )  # fmt: skip
    ids, mask = out.sequences, torch.ones_like(out.sequences)
    sampled = torch.stack(out.logits, 1).float().log_softmax(-1)
    layers = [one.expert_TK.view(*ids.shape, -1) for one in rollout.routings(ids.shape[1]).values()]
    arrays = [row[:-1].numpy() for row in torch.stack(layers, 2)]
    recordings = carpool.hf.routed_experts(trainer, arrays, mask)

    def log_ratio(choices: dict[str, Routing]) -> tuple[torch.Tensor, Any]:
        with carpool.hf.replay(trainer, choices) as replayed:
            logits = trainer(input_ids=ids, attention_mask=mask).logits[:, PROMPT - 1 : -1].float()
        token = ids[:, PROMPT:].unsqueeze(-1)
        return (logits.log_softmax(-1).gather(2, token) - sampled.gather(2, token)).abs(), replayed

    (own, _), (replay, replayed) = log_ratio({}), log_ratio(recordings)
    differing = replayed.differing()
    return [
        f"{differing.routers:.1%}",
        f"{differing.tokens:.1%}",
        *(f"{one.mean():.2g}, {one.max():.2g}" for one in (own, replay)),
    ]


def main() -> None:
    argparse.ArgumentParser(description=__doc__).parse_args()
    print("| sampler | trainer | routers moved | choices differ | tokens | log ratio: mean, largest | with replay |")
    print("|---|---|---|---|---|---|---|")
    bf16, f32 = torch.bfloat16, torch.float32
    for sampler, trainer, moved in (
        (f32, f32, 0.0),
        (bf16, bf16, 0.0),
        (bf16, f32, 0.0),
        (f32, f32, 0.02),
        (f32, f32, 0.1),
    ):
        names = [str(one).removeprefix("torch.") for one in (sampler, trainer)]
        print("|", " | ".join([*names, f"{moved:g}", *measure(sampler, trainer, moved)]), "|")


if __name__ == "__main__":
    main()
