"""A run before its first step: all that it is made of; or an error that says what cannot be, with nothing written.

prepare/prepare.py -> prepare/data.py -> assembly/assemble.py -> the checkpoint that is resumed -> records
"""

from __future__ import annotations

import math
from collections.abc import Collection
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist

from carpool.hf.seam.layouts import is_logical, logical_like, physical_order
from carpool.hf.seam.rides import buffers_of_rides
from carpool.train.blueprint import Blueprint
from carpool.train.build.policy_times import measure_on_small_model
from carpool.train.build.run_data import MakeCorpus, read_data
from carpool.train.checkpoints.files import CheckpointError
from carpool.train.checkpoints.manager import CheckpointManager
from carpool.train.checkpoints.reading import load
from carpool.train.checkpoints.resume import check_steps_left
from carpool.train.config.schema import Config
from carpool.train.data.tokenizer import load_tokenizer
from carpool.train.flops import flops_per_token, peak_flops
from carpool.train.launch.machine import find_machine, rank_device, ranks_of
from carpool.train.launch.ranks import from_rank_0, gather, together
from carpool.train.launch.stopping import StopRequest
from carpool.train.launch.watchdog import Watchdog
from carpool.train.moving.cost import Facts
from carpool.train.moving.runtime import Placement
from carpool.train.plan.memory_fit import check_fits
from carpool.train.plan.resolve import Prepared, prepare
from carpool.train.plan.start_checks import (
    check_choices,
    check_same_data,
    check_same_settings,
    decisions_from,
    find_checkpoint,
)
from carpool.train.records.display import Display
from carpool.train.records.environment import peak_memory
from carpool.train.records.files import why_not_writable
from carpool.train.records.record import Recorder
from carpool.train.run.about import record_graphs, say_hello, write_files, write_run
from carpool.train.run.state import RunState
from carpool.transport import check_codecs, check_transport


class Setup(RunState):
    """Makes a run's state. All ranks construct it alike.

    Args:
        compare_with: a transport whose step times are compared at the end.
        command: what the user typed, for the record.
        fixed: settings that the user has said, by SECTION.KEY; a plan leaves them.
        make_corpus: instead of reading the text that `[data]` names.

    Raises:
        ValueError: a configuration, data or checkpoint that cannot be used.
    """

    def __init__(
        self,
        config: Config,
        compare_with: str | None,
        command: str,
        fixed: Collection[str] = frozenset(),
        make_corpus: MakeCorpus | None = None,
    ) -> None:
        prepared, resume, saved = self._prepare(config, compare_with, fixed)
        self._read(prepared, make_corpus)
        super().__init__(prepared, saved)
        if compare_with is not None:
            check_transport(compare_with, self.rides[0].group)
            if compare_with != "auto":
                check_codecs(compare_with, self.options.codecs)
        self._resume(resume)
        self.placement = Placement(
            self.config,
            self.model,
            self.optimizer,
            self._facts(),
            self.folder,
            lambda text: self.display.say(text),
            lambda *args, **fields: self.recorder.write(*args, **fields),
            saved,
            resume,
        )
        self._open_records(command, resume)

    def _prepare(
        self, config: Config, compare_with: str | None, fixed: Collection[str] = (), resumes: bool = True
    ) -> tuple[Prepared, Path | None, dict[str, Any]]:
        """(what is decided before there is a model, the checkpoint to go on from, what that says beside weights).

        Args:
            resumes: it may go on from a checkpoint."""
        device, training = rank_device(), config.training
        self.memory_before, self.compare_with = peak_memory(device), compare_with
        check_same_settings(config, compare_with)
        self.folder = Path(training.output_dir)
        if why := gather(why_not_writable(self.folder) if dist.get_rank() == 0 else None)[0]:
            raise ValueError(f"training.output_dir = {self.folder}: {why}; choose another folder")
        self.checkpoints = CheckpointManager(self.folder, training.save_total_limit)
        # Together they look again when the model is there.
        check_choices(config, compare_with)
        machine = find_machine(config.parallelism, device)
        resume, saved = from_rank_0(lambda: find_checkpoint(config)) if resumes else (None, {})
        decisions = decisions_from(config, resume)
        self.tokenizer = load_tokenizer(config.data.tokenizer, config.model.path, config.data.eos_token)
        blueprint = Blueprint.of_config(config, self.tokenizer)
        found = prepare(config, machine, blueprint, decisions, fixed, measure_on_small_model)
        # Advice takes a while, and the answer is the same.
        from_rank_0(lambda: check_fits(found.estimate, found.likely_transport, found.dense.answer, found.rank_memory))
        return found, resume, saved

    def _read(self, prepared: Prepared, make_corpus: MakeCorpus | None) -> None:
        """The data, which says how many steps an epoch has."""
        self.data = read_data(prepared, self.tokenizer, rank_device(), make_corpus)
        check_same_data(self.data.corpus)
        training = prepared.config.training.in_steps(self.data.steps_per_epoch)
        prepared.config = prepared.config.model_copy(update={"training": training})

    def _resume(self, resume: Path | None) -> None:
        """What changes from step to step: from the start, or as the checkpoint has it."""
        training = self.config.training
        self.step = 0
        # Both go into checkpoints: a resumed run's summary is of the whole run.
        self.totals = {"tokens": 0, "bytes_remote": 0, "bytes_remote_alltoall": 0}
        self.losses = {"final_loss": None, "first_eval_loss": None, "final_eval_loss": None}
        if resume is not None:
            hooks: dict[str, Any] = {}
            if not is_logical(self.model):
                hooks = {
                    "from_logical": partial(physical_order, self.model),
                    "logical_like": partial(logical_like, self.model),
                }
            try:
                state = load(resume, self.model, self.optimizer, **hooks)
            except CheckpointError as error:
                raise CheckpointError(f"{error}{self._older(resume)}") from error
            self.step, self.totals, self.losses = state["step"], state["totals"], state["losses"]
            self.data.train.load_state_dict(state["loader"])
            if self.consumed is not None and state.get("norm") is not None:
                self.consumed.norm.fill_(state["norm"])
        self.start = self.saved_at = self.step
        self.last_step = min(training.steps, training.stop_at_step or training.steps)
        if resume is not None:
            # Now with the steps of an epoch.
            check_steps_left(resume, self.step, training)

    def _older(self, checkpoint: Path) -> str:
        """How to go on from the checkpoint before a damaged one, if there is one. The same on all ranks."""
        saved = from_rank_0(lambda: [str(path.absolute()) for path in self.checkpoints.list()])
        path = str(checkpoint.absolute())
        before = saved[: saved.index(path)] if path in saved else []
        return f". The one before is training.resume_from_checkpoint={before[-1]}" if before else ""

    def _facts(self) -> Facts:
        """What the cost of a layout depends on in this run."""
        layer, training = self.rides[0], self.config.training
        speeds = self.config.parallelism.rank_speeds
        tokens = training.per_device_train_batch_size * self.config.data.sequence_length
        return Facts(
            transport=self.transport_choice.answer,
            topology=self.ep_topology,
            tokens=self.degrees.tokens_per_rank(tokens),
            micro_batches=training.gradient_accumulation_steps,
            top_k=self.blueprint.top_k,
            hidden=self.blueprint.row_size,
            element_size=self.element_size,
            codecs=self.options.codecs,
            expert_elements=layer.layout.slices
            * sum(math.prod(parameter.shape[1:]) for parameter in layer.experts.parameters()),
            hardware=self.machine.hardware,
            speeds=tuple(speeds[rank] for rank in ranks_of(layer.group)) if isinstance(speeds, tuple) else (),
        )

    def _open_records(self, command: str, resume: Path | None) -> None:
        """From here on, files are written."""
        config, training = self.config, self.config.training
        self.flops = flops_per_token(self.blueprint.size, config.data.sequence_length)
        self.peak, self.peak_source = peak_flops(self.device, training.peak_flops)
        self.step_records = []
        self.stop = StopRequest()
        # What could not be written so far and may be yet, by name.
        self.unwritten = {}

        if self.main:
            self.folder.mkdir(parents=True, exist_ok=True)
        dist.barrier()
        settings = config.model_dump(mode="json")
        with together(ValueError, ""):
            self.recorder = Recorder(
                self.folder,
                self.main,
                training.report_to,
                settings,
                training.steps,
                say=lambda text: self.display.say(text),
                begins=resume is None,
                restore=lambda: write_files(self, self.info),
            )
        self.display = Display(self.main, self.last_step, self.step)
        self.info = write_run(self, command, resume)
        self.recorder.write("layout", self.step, **self.layouts().to_dict())
        say_hello(self, resume)
        self.watchdog = Watchdog(lambda: buffers_of_rides(self.rides))
        self.watchdog.start()

    def note_graphs(self, why_not: str | None) -> None:
        record_graphs(self, why_not)
