"""What would stop a run, found before there are ranks: by `carpool train` before it starts them, and by its dry run.

settings that no rank accepts -> the checkpoint to go on from -> the first row of the data -> the model -> `prepare`

The ranks look again (`carpool.train.run.setup`): they alone know their machine, and under torchrun or Slurm nobody
looks before them.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any

from carpool.hf.compute.compiled import check_backend
from carpool.hf.weights.fit import check_weights
from carpool.planner.decisions.chosen import Decisions
from carpool.train.checkpoints.manager import CheckpointManager
from carpool.train.checkpoints.reading import check_model
from carpool.train.checkpoints.resume import check_goes_on, checkpoint_to_resume, read_run_state
from carpool.train.config.fine_tuning import of_adapter
from carpool.train.config.schema import Config
from carpool.train.data.corpus import check_encoder
from carpool.train.data.formats import are_packed
from carpool.train.data.tokenizer import load_tokenizer
from carpool.train.decisions.recorded import decisions_of
from carpool.train.estimate.fit import check_fits
from carpool.train.launch.machine import Machine, imagine_machine
from carpool.train.model.blueprint import Blueprint
from carpool.train.prepare.data import check_amount, check_sequences
from carpool.train.prepare.prepare import Prepared, prepare
from carpool.train.records.files import check_idle
from carpool.train.records.record import check_trackers
from carpool.train.steps.graphs import check_graphs
from carpool.transport import check_transport


def check_run(config: Config, fixed: Collection[str], compare: str | None = None) -> None:
    """Refuse what the ranks of this machine would refuse before their first step. Loads no weights, and data only if it
    is little.

    Args:
        fixed: settings that the user has said, by SECTION.KEY.
        compare: a transport whose step times are to be compared at the end.

    Raises:
        ValueError: that."""
    checkpoint, _ = find_checkpoint(config)
    check_start(config, fixed, checkpoint, compare)


def check_start(config: Config, fixed: Collection[str], checkpoint: Path | None, compare: str | None = None) -> None:
    """The same, of a run that goes on from a checkpoint that was looked at, or from none."""
    check_choices(config, compare)
    run = foresee(config, fixed, imagine_machine(config, None), checkpoint)
    check_fits(run.estimate, run.likely_transport, run.dense.answer, run.rank_memory)


def foresee(config: Config, fixed: Collection[str], machine: Machine, checkpoint: Path | None = None) -> Prepared:
    """What a run will be, as far as this process can tell without its ranks.

    Args:
        checkpoint: to go on from.

    Raises:
        ValueError: it cannot be."""
    if checkpoint is None and config.adapter.path is not None:
        of_adapter(config.adapter.path, config.adapter.model_dump())
    tokenizer = load_tokenizer(config.data.tokenizer, config.model.path, config.data.eos_token)
    check_encoder(config.data, tokenizer, config.model.path)
    blueprint = Blueprint.of_config(config, tokenizer)
    if isinstance(blueprint.source, Path):
        check_weights(blueprint.source, blueprint.model)
    run = prepare(config, machine, blueprint, decisions_from(config, checkpoint), fixed)
    # Adapters are not in the blueprint, and stages name what they have.
    if checkpoint is not None and config.adapter.kind is None and run.degrees.pp == 1:
        check_model(checkpoint, blueprint.model)
    check_sequences(run, are_packed(config.data))
    check_amount(run, tokenizer)
    if config.training.cuda_graphs == "on":
        # By its transport and its dense parameters only the ranks can tell.
        one = run.estimate.candidate(run.likely_transport, run.dense.answer)
        check_graphs(one.eager or one.why_eager_by_plan)
    return run


def check_choices(config: Config, compare_with: str | None) -> None:
    """Refuse trackers, compilers and transports that this machine does not have, as far as one process can tell."""
    check_trackers(config.training.report_to)
    if config.training.torch_compile:
        check_backend(config.training.torch_compile_backend)
    for name in (config.moe.transport, compare_with or "auto"):
        check_transport(name, None)


def find_checkpoint(config: Config) -> tuple[Path | None, dict[str, Any]]:
    """The checkpoint that a run goes on from, and what it says beside weights; (None, {}) for one that starts.

    Raises:
        ValueError: none is there, it is damaged, these settings do not go on from it, a run is in the folder now, or a
            start where one was."""
    training = config.training
    folder = Path(training.output_dir)
    check_idle(folder)
    checkpoints = CheckpointManager(folder, training.save_total_limit)
    found = checkpoint_to_resume(training.resume_from_checkpoint, folder, checkpoints)
    if found is None:
        return None, {}
    state = read_run_state(found)
    check_goes_on(found, state, config)
    return found, state


def decisions_from(config: Config, checkpoint: Path | None) -> Decisions:
    """What was chosen in the run that this checkpoint is of, to be taken again."""
    return decisions_of([] if checkpoint is None else [checkpoint.parent.parent, Path(config.training.output_dir)])
