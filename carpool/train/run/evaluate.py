"""Now and then: the loss on held-out text, and a sample of what the model writes."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial

import torch
import torch.distributed as dist
from transformers import PreTrainedModel

from carpool.hf.compute.attention import attention_of_any_length
from carpool.hf.compute.compiled import eagerly
from carpool.hf.generation.generate import Sampling, generate
from carpool.hf.seam.rides import rooms_of_rides
from carpool.train.data.loader import count_targets
from carpool.train.data.tokenizer import Tokenizer, framed
from carpool.train.run.run import Run
from carpool.train.steps.room import room_for_all


def evaluate(run: Run) -> None:
    """Held-out loss, if text is held out, and a sample, if there is a prompt; said and recorded. Collective."""
    with room_for_all(rooms_of_rides(run.built.rides)):
        _evaluate(run)


def _evaluate(run: Run) -> None:
    if len(run.data.held_out):
        loss, tokens = _held_out(run)
        run.records.write("eval", run.step, loss=loss, tokens=tokens)
        if run.losses["first_eval_loss"] is None:
            run.losses["first_eval_loss"] = loss
        run.losses["final_eval_loss"] = loss
        run.records.say(f"step {run.step}: held-out loss {loss:.4f} over {tokens:,} tokens")
    training = run.config.training
    # The stages of a pipeline do not generate.
    if training.sample_prompt is not None and run.plan.pipeline is None:
        context = run.built.objective.context
        with eagerly(), run.built.objective.cast(run.built.device), nullcontext() if context is None else context.off():
            text = sample(
                run.built.model,
                run.tokenizer,
                training.sample_prompt,
                max_new_tokens=training.sample_tokens,
                seed=training.seed,
                context=run.config.data.sequence_length,
            )
        run.records.write("sample", run.step, prompt=training.sample_prompt, text=text)


def _held_out(run: Run) -> tuple[float, int]:
    """The mean loss over all held-out tokens, and their number."""
    sums = torch.zeros(2, dtype=torch.float64, device=run.built.device)
    run.built.model.eval()
    with torch.no_grad(), run.slots_kept():
        for batch in run.data.held_out:
            # Counted before it goes to the device, for which nobody waits until the end.
            sums[1] += count_targets(batch["labels"])
            ce, _ = run.with_room(partial(run.built.objective.forward, run.to_device(batch)))
            sums[0] += ce
    run.built.model.train()
    dist.all_reduce(sums)
    total, tokens = sums.tolist()
    run.check_rides()
    # Ranks that share sequences have each counted all of their tokens, and compute the loss of all or of some.
    tokens /= run.built.objective.ranks_per_sequence
    return total / run.built.objective.cross_entropy.copies / tokens, int(tokens)


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
    """What the model writes after `prompt`: all ranks continue the same text together. Greedy at temperature 0; leaves
    the global random state alone.

    Args:
        context: tokens of the prompt that the model sees at most, the last ones; None: all.

    Returns:
        The prompt with its continuation, up to the first end-of-text token.

    Raises:
        ValueError: a negative temperature or no new tokens.
    """
    # As documents begin, and as `carpool generate` begins.
    tokens = framed(tokenizer.encode(prompt), tokenizer.frame[0], ()).tolist() or [tokenizer.eos_id]
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
