"""What a run is, before there is a model: where it runs, what it trains, over which ranks, and what it keeps in memory.

place -> checkpoint to go on from -> model's blueprint (a plan, if one was asked for) -> degrees, meshes and what each
rank has -> memory policies, dense parameters -> or an error that says what does not fit, with nothing loaded
"""

from __future__ import annotations

from abc import abstractmethod
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import PreTrainedConfig, PreTrainedModel

from carpool.hf.compiled import check_backend
from carpool.hf.narrow import row_size
from carpool.hf.packed import why_not_packed
from carpool.parallel.meshes import Meshes
from carpool.planner.chosen import Chosen
from carpool.train.checkpoints.manager import CheckpointManager
from carpool.train.checkpoints.ranks import from_rank_0, gather
from carpool.train.checkpoints.resume import checkpoint_to_resume, read_run_state
from carpool.train.data.tokenizer import load_tokenizer
from carpool.train.moving.layouts import check_layout_file
from carpool.train.run.adapter import check_base
from carpool.train.run.dense import choose_dense, rank_memory
from carpool.train.run.environment import peak_memory
from carpool.train.run.estimate import MemoryEstimate
from carpool.train.run.files import decisions_of, why_not_writable
from carpool.train.run.fit import check_fits
from carpool.train.run.flops import model_size
from carpool.train.run.kept_times import Times
from carpool.train.run.memory import choose_memory, with_policies
from carpool.train.run.model import (
    SEQUENCE_KIND,
    attention_of,
    context_cut,
    divides_tokens,
    expert_counts,
    meta_model,
    model_source,
    top_k_of,
)
from carpool.train.run.pipeline import cut_into_stages
from carpool.train.run.plan import choose_plan, with_settings
from carpool.train.run.record import check_trackers
from carpool.train.run.speeds import with_speeds
from carpool.train.run.state import RunState
from carpool.train.run.tiers import check_tiers
from carpool.train.run.topology import find_machine
from carpool.train.run.transports import likely_transport
from carpool.transport import check_transport


class Prepared(RunState):
    """A run's state so far. `carpool.train.run.setup.Setup` goes on.

    Attributes:
        fixed: settings that the user has said, by SECTION.KEY; a plan leaves them.
    """

    fixed: frozenset[str] = frozenset()

    def _prepare(self, resumes: bool = True) -> tuple[Path | None, dict[str, Any]]:
        """(the checkpoint to go on from, what it says beside weights). `resumes`: it may go on from one. All ranks
        together."""
        self._find_place()
        resume, saved = from_rank_0(self._find_checkpoint) if resumes else (None, {})
        blueprint = self._find_model(resume)
        self._divide(blueprint)
        self._choose_memory(blueprint)
        return resume, saved

    @abstractmethod
    def _measure_policies(self) -> Times:
        """What each policy of what is kept costs."""

    def _find_place(self) -> None:
        """Devices and folders; what one rank can tell alone of what the run cannot have."""
        training, moe = self.config.training, self.config.moe
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.main = self.rank == 0
        cuda = dist.get_backend() == "nccl"
        self.bf16 = cuda if training.bf16 is None else training.bf16
        self.device = torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")
        self.memory_before = peak_memory(self.device)
        self.folder = Path(training.output_dir)
        if why := gather(why_not_writable(self.folder) if self.main else None)[0]:
            raise ValueError(f"training.output_dir = {self.folder}: {why}; choose another folder")
        self.checkpoints = CheckpointManager(self.folder, training.save_total_limit)
        check_trackers(training.report_to)
        if training.torch_compile:
            check_backend(training.torch_compile_backend)
        # As far as one rank can tell alone; together they look again when the model is there.
        for name in (moe.transport, self.compare_with or "auto"):
            check_transport(name, None)
        self.topology, self.hardware = find_machine(self.config.parallelism, self.device)

    def _find_checkpoint(self) -> tuple[Path | None, dict[str, Any]]:
        """The checkpoint to go on from, and what it says beside weights."""
        found = checkpoint_to_resume(self.config.training.resume_from_checkpoint, self.folder, self.checkpoints)
        return found, read_run_state(found) if found is not None else {}

    def _find_model(self, resume: Path | None) -> PreTrainedModel:
        """The model without values; and the settings, if a plan makes them."""
        self.decisions = decisions_of([resume.parent.parent, self.folder] if resume is not None else [])
        config = self.config
        self.tokenizer = load_tokenizer(config.data.tokenizer, config.model.path, config.data.eos_token)
        self.source = self._find_source()
        blueprint = meta_model(self.source)
        # Not the sharded model's class, which FSDP renames.
        self.architecture = type(blueprint).__name__
        self.expert_counts = expert_counts(blueprint)
        self.why_not_packed = why_not_packed(blueprint)
        self.vocab_size = blueprint.config.get_text_config().vocab_size
        self.top_k = top_k_of(blueprint)
        self.size = model_size(blueprint, self.expert_counts, self.top_k)
        self.plan = choose_plan(self, blueprint, self.fixed, self._rank_memory())
        if self.plan is not None:
            self.config = with_settings(config, self.plan.answer.taken.settings)
        return blueprint

    def _find_source(self) -> PreTrainedConfig | Path:
        return model_source(self.config, self.tokenizer)

    def _rank_memory(self) -> int:
        return rank_memory(self.device.type == "cuda", self.topology.ranks_beside(self.rank))

    def _divide(self, blueprint: PreTrainedModel) -> None:
        """Over how many ranks each dimension of the work goes, and which part of it this rank has."""
        config = self.config
        self.degrees = config.parallelism.resolve(self.world, min(self.expert_counts.values()))
        config.check_supported(self.degrees.sizes)
        check_layout_file(config, blueprint.config.model_type, self.expert_counts, self.degrees)
        self._check_whole_experts()
        self.meshes = Meshes(self.degrees, self.device.type)
        device = torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else "cpu"
        config = self.config = with_speeds(config, self.device, gather(device), self.decisions)
        self.batch_sizes = config.parallelism.batch_sizes(config.training.per_device_train_batch_size, self.degrees)
        self._check_halves()
        self.dp_rank = self.degrees.dp_rank(self.rank)
        self.divides_tokens, self.why_divided = divides_tokens(config, self.degrees, blueprint)
        if self.degrees.tp > 1:
            how = "default" if config.parallelism.sequence_parallel == "auto" else "given"
            self.decisions.add(SEQUENCE_KIND, Chosen(self.divides_tokens, {}, how, self.why_divided))
        self.cut = context_cut(config, self.degrees, blueprint, self.rank)
        self.pipeline = cut_into_stages(config, self.degrees, blueprint, self.rank)
        self.attention = attention_of(config, self.degrees, blueprint, self.device.type == "cuda")

    def _check_whole_experts(self) -> None:
        uneven = any(number % self.degrees.ep for number in self.expert_counts.values())
        if uneven and (self.config.adapter.kind is not None or self.config.memory.experts != "device"):
            raise ValueError(
                f"parallelism.ep_size = {self.degrees.ep} does not divide the experts, which neither adapters nor "
                "memory.experts = 'host' or 'disk' know: choose an ep_size that does"
            )

    def _check_halves(self) -> None:
        halves = self.config.moe.schedule == "two-batch" and self.config.training.gradient_accumulation_steps == 1
        if halves and min(self.batch_sizes) == 1 < max(self.batch_sizes):
            raise ValueError(
                "two batches at a time cut each rank's only micro-batch in two, and by parallelism.rank_speeds a rank "
                "has one sequence: set training.gradient_accumulation_steps=2, or a larger "
                "training.per_device_train_batch_size"
            )

    def _choose_memory(self, blueprint: PreTrainedModel) -> None:
        """What layers keep, and how dense parameters lie on the ranks."""
        config, cuda, memory = self.config, self.device.type == "cuda", self._rank_memory()
        hidden = row_size(blueprint.config)
        transport, _ = likely_transport(
            config, self.degrees, hidden, self.top_k, cuda=cuda, topology=self.topology, hardware=self.hardware
        )
        self.estimate = MemoryEstimate(config, self.degrees, blueprint, self.bf16, cuda)
        self.kept = choose_memory(self.estimate, transport, self.hardware, self.decisions, self._measure_policies)
        if (budget := config.memory.budget_bytes) is not None:
            # All that follows reads one configuration.
            config = self.config = with_policies(config, self.kept.answer)
            self.estimate = self.estimate.changed(config)
            memory = min(memory, budget)
        check_tiers(self, self.estimate.host_bytes(transport), self.estimate.disk_bytes())
        self.dense = choose_dense(
            config,
            self.degrees,
            lambda dense: self.estimate(transport, dense)["total"],
            memory,
            self.decisions,
        )
        check_base(config, self.degrees, self.dense.answer, self.bf16)
        # Advice takes a while, and the answer is the same.
        from_rank_0(lambda: check_fits(self.estimate, transport, self.dense.answer, memory))
