"""A sample of what a model in training writes: all ranks continue the same text together
(`carpool.hf.generation.generate`)."""

from __future__ import annotations

from transformers import PreTrainedModel

from carpool.hf.compute.attention import attention_of_any_length
from carpool.hf.generation.generate import Sampling, generate
from carpool.train.data.tokenizer import Tokenizer


def sample(
    model: PreTrainedModel,
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
        context: tokens of the prompt that the model sees at most, the last ones; None: all.

    Returns:
        The prompt with its continuation, up to the first end-of-text token.

    Raises:
        ValueError: a negative temperature or no new tokens.
    """
    tokens = tokenizer.encode(prompt).tolist() or [tokenizer.eos_id]
    with attention_of_any_length(model):
        made = generate(
            model,
            [tokens if context is None else tokens[-context:]],
            Sampling(max_new_tokens=max_new_tokens, temperature=temperature, seed=seed),
            end=[tokenizer.eos_id],
            pad=tokenizer.eos_id,
            # A vocabulary padded to a round size has places that mean nothing.
            vocabulary=tokenizer.vocab_size,
        )
    return prompt + tokenizer.decode(made.tokens[0])
