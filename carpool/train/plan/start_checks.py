"""What would stop a run, found before there are ranks: by `carpool train` before it starts them, and by its dry run.

settings that no rank accepts -> the checkpoint to go on from -> the first row of the data -> the model -> `resolve`

The ranks look again (`carpool.train.run.run`): they alone know their machine, and under torchrun or Slurm nobody
looks before them. They also compare what must be the same on all of them, settings and data: whoever starts ranks by
hand, or by a script for each node, may start them with different ones. Most differences would not show, and train a
model that nobody asked for; others would end in a collective that nobody understands.
"""

from __future__ import annotations

import hashlib
import json
import tempfile
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from carpool.hf.decoder_layers import check_backend
from carpool.hf.documents import why_not_packed
from carpool.hf.weights.original_layout import check_weights
from carpool.hf.weights.weight_files import check_whole
from carpool.parallel.ranks import from_rank_0, gather
from carpool.planner.decisions.chosen import Decisions
from carpool.plugins.flat import flat
from carpool.train.blueprint import Blueprint
from carpool.train.checkpoints.adapter_files import AdapterModules
from carpool.train.checkpoints.hub import check_hub
from carpool.train.checkpoints.manager import CheckpointManager
from carpool.train.checkpoints.reading import check_model
from carpool.train.checkpoints.resume import check_base, check_goes_on, checkpoint_to_resume, read_run_state
from carpool.train.config.fine_tuning import adapter_folder, of_adapter
from carpool.train.config.schema import Config
from carpool.train.data.corpus import Corpora, check_encoder, check_sources, prepare_all
from carpool.train.data.formats import are_packed
from carpool.train.data.loader import TrainLoader, step_size
from carpool.train.data.mixture import train_sequences
from carpool.train.data.tokenizer import Tokenizer, tokenizer_of
from carpool.train.extensions import extensions_in_use
from carpool.train.launch.machine import Machine, imagine_machine
from carpool.train.plan.compile_and_capture import check_graphs
from carpool.train.plan.memory_fit import CLEARLY, GiB, describe_fit
from carpool.train.plan.resolve import Plan, resolve
from carpool.train.records.metrics_writer import check_trackers
from carpool.train.records.run_folder import DECISIONS, check_idle, read_record
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
    if config.training.push_to_hub:
        check_hub(config.training)
    check_start(config, fixed, checkpoint, compare)


def check_start(config: Config, fixed: Collection[str], checkpoint: Path | None, compare: str | None = None) -> None:
    """The same, of a run that goes on from a checkpoint that was looked at, or from none."""
    check_choices(config, compare)
    check_fits(foresee(config, fixed, imagine_machine(config, None), checkpoint))


def foresee(config: Config, fixed: Collection[str], machine: Machine, checkpoint: Path | None = None) -> Plan:
    """What a run will be, as far as this process can tell without its ranks.

    Args:
        checkpoint: to go on from.

    Raises:
        ValueError: it cannot be."""
    if checkpoint is None and config.adapter.path is not None:
        of_adapter(config.adapter.path, config.adapter.model_dump())
        check_whole(adapter_folder(config.adapter.path) / "adapter_model.safetensors")
    tokenizer = tokenizer_of(config)
    check_encoder(config, tokenizer)
    blueprint = Blueprint.of_config(config, tokenizer)
    if isinstance(blueprint.source, Path):
        check_weights(blueprint.source, blueprint.model)
        if checkpoint is None and config.adapter.path is not None:
            AdapterModules(blueprint.source, adapter_folder(config.adapter.path))
    plan = resolve(config, machine, blueprint, decisions_from(config, checkpoint), fixed)
    if checkpoint is not None:
        check_base(checkpoint, config, plan.degrees.world_size)
    # Adapters are not in the blueprint, and stages name what they have.
    if checkpoint is not None and not config.adapter.is_used and plan.degrees.pp == 1:
        check_model(checkpoint, blueprint.model)
    check_sequences(plan, are_packed(config.data))
    check_amount(plan, tokenizer)
    if config.training.cuda_graphs == "on":
        # By its transport and its non-expert parameters only the ranks can tell.
        check_graphs(plan.candidate.eager or plan.candidate.why_eager_by_plan)
    return plan


def check_fits(plan: Plan) -> None:
    """Refuse a run that clearly does not fit into memory. Before anything is loaded.

    Raises:
        ValueError: unless `training.check_memory` is false."""
    if not plan.config.training.check_memory or plan.needs["total"] <= CLEARLY * plan.memory:
        return
    first, *lines = describe_fit(plan, f"the {plan.memory / GiB:,.1f} GiB of a rank")
    raise ValueError("\n".join([f"this run {first}", *lines, "to try it all the same: training.check_memory=false"]))


def check_amount(plan: Plan, tokenizer: Tokenizer) -> None:
    """Raise ValueError if one step takes more sequences than there are. Of little data alone: it is read for that, as
    the run will read it, and nothing is kept."""
    config = plan.config
    sources = check_sources(config.data)
    if config.data.streaming or sum(size for source in sources for _, size, _ in source.signature()) > LITTLE:
        return
    with tempfile.TemporaryDirectory() as folder:
        data = config.data.model_copy(update={"cache_dir": folder})
        sequences = train_sequences(prepare_all(data, tokenizer, config.model.path), data)
        TrainLoader(sequences, dp_size=plan.degrees.dp, **step_size(config))


def check_sequences(plan: Plan, packed: bool) -> None:
    """Raise ValueError for a model, or an extension, that cannot be given examples so."""
    if packed and (why := why_not_packed(plan.blueprint.model)) is not None:
        raise ValueError(f'{why}, so examples cannot be packed: set data.packing="off" (one in a sequence)')
    for extension in extensions_in_use(plan.config):
        extension.check_data(plan, packed)


def check_choices(config: Config, compare_with: str | None) -> None:
    """Refuse trackers, compilers and transports that this machine does not have, as far as one process can tell."""
    check_trackers(config.training.report_to)
    if config.training.torch_compile != "off":
        check_backend(config.training.torch_compile_backend)
    for name in (config.moe.transport, compare_with or "auto"):
        check_transport(name, None)


def find_checkpoint(config: Config) -> tuple[Path | None, dict[str, Any]]:
    """The checkpoint that a run goes on from, and what it says beside weights; (None, {}) for one that starts.

    Raises:
        ValueError: none is there, it is damaged, these settings do not go on from it, a run is in the folder now, or a
            start where one was."""
    training = config.training
    folder = training.folder
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
    return decisions_of([] if checkpoint is None else [checkpoint.parent.parent, config.training.folder])


LITTLE = 1 << 20  # bytes of files that are read before a run
# Nodes may have copies of the same files in places of their own.
_PLACES = (
    "data.train", "data.eval", "data.tokenizer", "data.chat_template", "data.cache_dir",
    "model.path", "memory.disk_folder", "parallelism.hardware",
)  # fmt: skip


def check_same_settings(config: Config, compare_with: str | None) -> None:
    """Collective.

    Raises:
        ValueError: on all ranks, if one has other settings than rank 0; names them."""
    own = {"--compare": str(compare_with)}
    for name, value in flat(config.model_dump(mode="json")).items():
        if not any(f"{name}.".startswith(f"{place}.") for place in _PLACES):
            own[name] = json.dumps(value, sort_keys=True)
    # Thousands of ranks send a digest each. Who differs is asked for more.
    if len(set(gather(hashlib.sha256(json.dumps(own, sort_keys=True).encode()).hexdigest()))) == 1:
        return
    found = gather(own)
    for rank, other in enumerate(found):
        if differ := [f"{key} = {other.get(key)}, not {found[0].get(key)}" for key in _differing(found[0], other)]:
            raise ValueError(
                f"rank {rank} was started with other settings than rank 0: {'; '.join(differ)}. Start all ranks with "
                "the same command and the same configuration"
            )


def check_same_data(corpora: Corpora) -> None:
    """Collective.

    Raises:
        ValueError: on all ranks, if one has read other data than rank 0."""
    found = gather({"data.train": corpora.fingerprint, "data.eval": str(corpora.held_tokens), "source": corpora.source})
    for rank, other in enumerate(found):
        differ = [key for key in _differing(found[0], other) if key != "source"]
        if differ:
            raise ValueError(
                f"rank {rank} has read another {' and '.join(differ)} than rank 0: {other['source']} there, and "
                f"{found[0]['source']} on rank 0. Give all nodes the same files"
            )


def _differing(first: Mapping[str, str], other: Mapping[str, str]) -> list[str]:
    return [key for key in {**first, **other} if other.get(key) != first.get(key)]


def decisions_of(folders: Sequence[Path]) -> Decisions:
    """What a run chooses that goes on from these run directories, of which the first with a run.json counts."""
    return Decisions(lambda: read_record(folders, DECISIONS), from_rank_0)
