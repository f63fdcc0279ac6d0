"""What a run reads: its text as tokens, and this rank's share of the batches."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from carpool.parallel.ranks import gather, patiently, rank, together, world
from carpool.train.config.schema import Config
from carpool.train.data.corpus import Corpora, Corpus, corpus_of
from carpool.train.data.formats import are_packed
from carpool.train.data.loader import EvalLoader, Prefetch, TrainLoader, step_size
from carpool.train.data.mixture import eval_sequences, train_sequences
from carpool.train.data.sequences import Sequences
from carpool.train.data.streaming import StreamLoader, Streams
from carpool.train.data.teacher_logits import TeacherLogits, check_teacher
from carpool.train.data.tokenizer import Tokenizer
from carpool.train.plan.resolve import Plan
from carpool.train.plan.start_checks import check_sequences

MakeCorpus = Callable[[Plan, Tokenizer], Corpus]


@dataclass
class RunData:
    """The tokens, the sequences that are trained on, and what makes batches of them; held-out sets by name; steps of an
    epoch."""

    corpora: Corpora
    sequences: Sequences | Streams
    train: Prefetch
    held_out: dict[str, EvalLoader]
    steps_per_epoch: float


def read_data(plan: Plan, tokenizer: Tokenizer, device: torch.device, make_corpus: MakeCorpus | None = None) -> RunData:
    """Read text, or the tokens that an earlier run has made of it. All ranks together.

    Args:
        make_corpus: instead of reading what `[data]` names.

    Raises:
        ValueError: text that cannot be used, or not by this model."""
    config = plan.config
    corpora = read_corpora(config, tokenizer) if make_corpus is None else Corpora((make_corpus(plan, tokenizer),))
    check_vocabulary(corpora, plan.blueprint.vocab_size)
    # Ranks that share a sequence cut it into 2 * cp equal parts at most.
    multiple = math.lcm(8, 2 * plan.degrees.cp)
    check_sequences(plan, are_packed(config.data))
    dp_rank = plan.degrees.dp_rank(plan.machine.rank)
    share = {"dp_size": plan.degrees.dp, "dp_rank": dp_rank, "pad_id": tokenizer.eos_id}
    how: dict[str, Any] = {"shares": plan.batch_sizes, "alike": plan.degrees.pp > 1, **share}
    sequences: Sequences | Streams
    if (teacher := config.distillation.teacher) is not None:
        read = None if config.data.streaming else train_sequences(corpora, config.data, multiple)
        check_teacher(Path(teacher), tokenizer, read, plan.blueprint.vocab_size)
    if config.data.streaming:
        sequences = Streams(config.data, tokenizer, config.model.path, multiple)
        train: TrainLoader = StreamLoader(sequences, **step_size(config), **how)
        # What cannot be used of the first rows ends the run before a model is loaded.
        with together(ValueError, ""):
            StreamLoader(sequences, **step_size(config), **how).check()
    else:
        sequences = train_sequences(corpora, config.data, multiple)
        if config.distillation.logits is not None:
            with together(ValueError, ""):
                how["logits"] = logits = TeacherLogits(config.distillation, plan.blueprint.vocab_size)
                if missing := logits.check(sequences, rank(), world()):
                    raise ValueError(
                        f"distillation.logits = {logits.folder} has no row for {len(missing):,} sequences, such as "
                        f"{missing[0]}: write them with `carpool teach TEACHER` and the settings of this run"
                    )
        train = TrainLoader(sequences, **step_size(config), **how)
    held_out = {
        name: EvalLoader(
            found,
            batch_size=config.training.eval_batch_size,
            max_sequences=config.data.eval_max_sequences,
            **share,
        )
        for name, found in eval_sequences(corpora, config.data, multiple).items()
    }
    steps_per_epoch = train.num_sequences / train.global_batch_size
    return RunData(corpora, sequences, Prefetch(train, device), held_out, steps_per_epoch)


def loader_state(train: Prefetch) -> dict[str, Any]:
    """The position in the data, for a checkpoint. Collective: of a stream each rank knows those lanes that it reads."""
    state = train.state_dict()
    if "lanes" in state:
        found = [pair for lanes in gather(state["lanes"]) for pair in lanes.items()]
        # Of a lane that it does not read, a rank has at most where it was at the last resume.
        state["lanes"] = dict(sorted(found, key=lambda pair: pair[1]["count"]))
    return state


def read_corpora(config: Config, tokenizer: Tokenizer) -> Corpora:
    """The text that `[data]` names, as tokens. All ranks together."""
    found = None
    # Only these, of all ranks, may have to tokenize, which can take hours.
    with together(ValueError, ""), patiently():
        if int(os.environ.get("LOCAL_RANK", "0")) == 0:
            found = corpus_of(config, tokenizer)
    with together(ValueError, ""):
        if found is None:
            found = corpus_of(config, tokenizer, build=False)
    assert found is not None
    return found


def check_vocabulary(corpora: Corpora, vocabulary: int) -> None:
    """Raise ValueError for tokens that the model does not have: chat templates may write some that were added to a
    tokenizer, and not to the model."""
    largest = max(
        (int(tokens.max()) for tokens, marks in corpora.tokens if marks is not None and len(tokens)), default=0
    )
    if largest >= vocabulary:
        raise ValueError(
            f"the tokenizer makes token {largest} of the data, but the model has {vocabulary} tokens; take the "
            "model's own tokenizer and chat template"
        )
