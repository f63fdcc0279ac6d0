"""Text from a model, token by token.

Under expert parallelism every forward is a collective, so all ranks sample the same text together, in lockstep: the
same prompt, the same random numbers, and exactly as many tokens, whatever a rank makes of an end-of-text token.
"""

from __future__ import annotations

import torch
from torch import nn

from carpool.train.data.tokenizer import Tokenizer


@torch.no_grad()
def sample(
    model: nn.Module,
    tokenizer: Tokenizer,
    prompt: str,
    *,
    max_new_tokens: int,
    temperature: float = 0.8,
    seed: int = 0,
    context: int | None = None,
) -> str:
    """Continue `prompt`. Greedy at temperature 0; leaves the global random state alone.

    Args:
        context: tokens that the model sees at most; None: all.

    Returns:
        The prompt with its continuation, up to the first end-of-text token.

    Raises:
        ValueError: a negative temperature or no new tokens.
    """
    if temperature < 0 or max_new_tokens < 1:
        raise ValueError(f"cannot sample {max_new_tokens} tokens at temperature {temperature:g}: both must be positive")
    device = next(model.parameters()).device
    tokens = tokenizer.encode(prompt).tolist() or [tokenizer.eos_id]
    start = len(tokens)
    generator = torch.Generator().manual_seed(seed)
    training = model.training
    model.eval()
    for _ in range(max_new_tokens):
        window = tokens if context is None else tokens[-context:]
        logits = model(input_ids=torch.tensor([window], device=device), use_cache=False).logits[0, -1].float().cpu()
        # A vocabulary padded to a round size has places that mean nothing.
        logits = logits[: tokenizer.vocab_size]
        if temperature == 0:
            tokens.append(int(logits.argmax()))
        else:
            share = (logits / temperature).softmax(-1)
            tokens.append(int(torch.multinomial(share, 1, generator=generator)))
    model.train(training)
    new = tokens[start:]
    if tokenizer.eos_id in new:
        new = new[: new.index(tokenizer.eos_id)]
    return prompt + tokenizer.decode(new)
