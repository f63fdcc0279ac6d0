"""Now and then: the loss on held-out text, and a sample of what the model writes."""

from __future__ import annotations

from functools import partial

import torch
import torch.distributed as dist

from carpool.hf.compiled import eagerly
from carpool.train.data.loader import TokenMean, count_targets
from carpool.train.run.sample import sample
from carpool.train.run.state import RunState


def evaluate(run: RunState) -> None:
    """Held-out loss, if text is held out, and a sample, if there is a prompt; said and recorded. Collective."""
    if len(run.eval_loader):
        loss, tokens = _held_out(run)
        run.recorder.write("eval", run.step, loss=loss, tokens=tokens)
        if run.losses["first_eval_loss"] is None:
            run.losses["first_eval_loss"] = loss
        run.losses["final_eval_loss"] = loss
        run.display.say(f"step {run.step}: held-out loss {loss:.4f} over {tokens:,} tokens")
    training = run.config.training
    if training.sample_prompt is not None:
        with eagerly(), run.objective.cast(run.device):
            text = sample(
                run.model,
                run.tokenizer,
                training.sample_prompt,
                max_new_tokens=training.sample_tokens,
                seed=training.seed,
                context=run.config.data.sequence_length,
            )
        run.recorder.write("sample", run.step, prompt=training.sample_prompt, text=text)


def _held_out(run: RunState) -> tuple[float, int]:
    """The mean loss over all held-out tokens, and their number."""
    mean = TokenMean()
    run.model.eval()
    with torch.no_grad(), run.slots_kept():
        for batch in run.eval_loader:
            batch = run.to_device(batch)
            targets = count_targets(batch["labels"])
            ce, _ = run.with_room(partial(run.objective.forward, batch))
            mean.add(ce / max(1, targets), targets)
    run.model.train()
    run.check_rides()

    def sum_over_ranks(sums: torch.Tensor) -> None:
        total = sums.to(run.device)
        dist.all_reduce(total)
        sums.copy_(total.cpu())

    loss, tokens = mean.value(sum_over_ranks)
    return loss, tokens // run.degrees.tp
