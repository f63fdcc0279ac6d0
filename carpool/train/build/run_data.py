"""What a run reads: its text as tokens, and this rank's share of the batches."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from dataclasses import dataclass

import torch

from carpool.train.data import corpus as corpora
from carpool.train.data.corpus import Corpus
from carpool.train.data.loader import EvalLoader, Prefetch, train_loader
from carpool.train.data.sequences import Sequences, eval_sequences, train_sequences
from carpool.train.data.tokenizer import Tokenizer
from carpool.train.launch.ranks import patiently, together
from carpool.train.plan.resolve import Plan
from carpool.train.plan.start_checks import check_sequences

MakeCorpus = Callable[[Plan, Tokenizer], Corpus]


@dataclass
class RunData:
    """The tokens, the sequences that are trained on, and what makes batches of them; steps that read all once."""

    corpus: Corpus
    sequences: Sequences
    train: Prefetch
    held_out: EvalLoader
    steps_per_epoch: float


def read_data(plan: Plan, tokenizer: Tokenizer, device: torch.device, make_corpus: MakeCorpus | None = None) -> RunData:
    """Read text, or the tokens that an earlier run has made of it. All ranks together.

    Args:
        make_corpus: instead of reading what `[data]` names.

    Raises:
        ValueError: text that cannot be used, or not by this model."""
    config = plan.config
    corpus = (make_corpus or read_corpus)(plan, tokenizer)
    check_vocabulary(corpus, plan.blueprint.vocab_size)
    # Ranks that share a sequence cut it into 2 * cp equal parts at most.
    multiple = math.lcm(8, 2 * plan.degrees.cp)
    sequences = train_sequences(corpus, config.data, multiple)
    held_out = eval_sequences(corpus, config.data, multiple)
    check_sequences(plan, sequences.packed)
    dp_rank = plan.degrees.dp_rank(plan.machine.rank)
    share = {"dp_size": plan.degrees.dp, "dp_rank": dp_rank, "pad_id": tokenizer.eos_id}
    train = train_loader(config, sequences, shares=plan.batch_sizes, alike=plan.degrees.pp > 1, **share)
    evaluation = EvalLoader(
        held_out,
        batch_size=config.training.eval_batch_size,
        max_sequences=config.data.eval_max_sequences,
        **share,
    )
    steps_per_epoch = train.num_sequences / train.global_batch_size
    return RunData(corpus, sequences, Prefetch(train, device), evaluation, steps_per_epoch)


def read_corpus(plan: Plan, tokenizer: Tokenizer) -> Corpus:
    """The text that `[data]` names, as tokens. All ranks together."""
    corpus = None
    # Only these, of all ranks, may have to tokenize, which can take hours.
    with together(ValueError, ""), patiently():
        if int(os.environ.get("LOCAL_RANK", "0")) == 0:
            corpus = corpora.corpus_of(plan.config, tokenizer)
    with together(ValueError, ""):
        if corpus is None:
            corpus = corpora.corpus_of(plan.config, tokenizer, build=False)
    assert corpus is not None
    return corpus


def check_vocabulary(corpus: Corpus, vocabulary: int) -> None:
    """Raise ValueError for tokens that the model does not have: chat templates may write some that were added to a
    tokenizer, and not to the model."""
    if corpus.train_marks is None:
        return
    largest = max(int(tokens.max()) for tokens in (corpus.train, corpus.eval) if len(tokens))
    if largest >= vocabulary:
        raise ValueError(
            f"the tokenizer makes token {largest} of data.train, but the model has {vocabulary} tokens; take the "
            "model's own tokenizer and chat template"
        )
