"""Where experts live while a run goes on: look at the routing, solve beside training, move between two steps.

    after step 100     the choices of the newest tokens are gathered; a process beside the main rank starts to solve
    steps 101 ... 105  training goes on
    after step 105     (placement.lag = 5) the answer is broadcast, waited for if it is late; layers for which moving
                       pays are moved: parameters and moments
    from step 106 on   rows, bytes and load are measured, and recorded beside what was foretold

Nothing here depends on how long anything takes: not when an answer is used, and not what it says, which follows from
the choices, the loads and the seed. So two runs are bitwise equal, with the solver beside training or inside it. A
checkpoint holds experts in logical order as always, the layouts of the moment, and what the next look needs (the tokens
seen so far, the loads, an answer that is under way), so that a resumed run goes on as the other would have.

Statistics: the load is counted and summed over ranks in each step anyway (carpool/hf/ride_metrics.py); the choices
are sampled on the device by `carpool.hf.trace_recorder.TraceRecorder`, and gathered when they are looked at. The host
says which tokens are sampled, which a CUDA graph cannot ask, so only the steps whose tokens are looked at are sampled,
and computed eagerly (`records`). A move ends the graphs, which hold the old layouts; new ones come after two steps.

The other policies (carpool/placement/policies.py) look at the predicted load alone, on every rank alike, and what they
say is used before the next step.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from carpool.hf.ride_metrics import RideRecord
from carpool.hf.seam.expert_rides import rides
from carpool.hf.seam.moved_experts import current_layouts, set_layout
from carpool.hf.trace_recorder import Mark, TraceRecorder
from carpool.layout import ExpertLayout
from carpool.layout.layouts import Layouts
from carpool.parallel.ranks import from_rank_0
from carpool.placement.adopt import aligned
from carpool.placement.policies import POLICIES, forecast
from carpool.placement.trace import Trace, concatenate
from carpool.planner.candidate import recorded_steps
from carpool.replicas.migrate import Moved
from carpool.report.units import bytes_text
from carpool.train.config.schema import Config
from carpool.train.config.schema_placement import PlacementSection
from carpool.train.moving.solve import Array, Facts, Question, Solving
from carpool.train.records.run_folder import LAYOUT, replace_text

TRACE_FILE, LOADS_FILE = "placement-trace.npz", "placement-loads.npz"
# Steps whose loads a predictor may look at.
HISTORY = 64


class Placement:
    """The placement of one run. All ranks construct and call it alike.

    Args:
        model, optimizer, average: what is moved; the average of the weights, if there is one.
        folder: of the run; the main rank puts questions for the solver below it.
        say, record: a line for the terminal; one for metrics.jsonl.
        saved, files: of the checkpoint that is resumed: its state, and its folder.
        forwards: of a step;  ranks: with tokens of their own.
        before_move: is called before experts move.
    """

    def __init__(
        self,
        config: Config,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        facts: Facts,
        folder: Path,
        say: Callable[[str], None],
        record: Callable[..., None],
        saved: dict[str, Any],
        files: Path | None,
        average: torch.optim.Optimizer | None = None,
        forwards: int = 1,
        ranks: int = 1,
        before_move: Callable[[], None] = lambda: None,
    ) -> None:
        self.forwards, self.ranks, self.before_move = forwards, ranks, before_move
        self.section: PlacementSection = config.placement
        # The other ranks wait for the answer in a collective.
        self.patience = 0.9 * config.parallelism.timeout_seconds
        self.moe_layout, self.seed = config.moe.layout, config.training.seed
        self.model, self.optimizer, self.average, self.facts = model, optimizer, average, facts
        self.folder, self.say, self.record = folder / "placement", say, record
        # Also of a run that leaves off before: it will go on.
        self.last_step = config.training.steps
        self.main = dist.get_rank() == 0
        # With one rank there is nowhere to go.
        self.on = self.section.every is not None and next(iter(rides(model).values())).num_ranks > 1
        self.recorder: TraceRecorder | None = None
        if self.on and self.section.policy == "migrate":
            self.recorder = TraceRecorder(model, self.section.tokens)
            self.recorder.pause()
        self.fresh = True  # nothing was recorded since it was reset
        self.step = self.reset_at = 0
        self.earlier: Trace | None = None
        self.loads: deque[Array] = deque(maxlen=HISTORY)
        self.solving: Solving | None = None
        self.pending: dict[str, Any] | None = None
        self.measured: dict[str, float] = {}
        self.since: int | None = None
        self.moved = False
        self._restore(saved.get("placement") or {}, files)

    def records(self, step: int) -> bool:
        """Before the forwards of a step: whether their choices are recorded, which no CUDA graph can do. It is the same
        where steps are no graphs."""
        if self.recorder is None or self.section.every is None:
            return False
        if not self.step:
            self.reset_at = step - 1
        self.step = step
        look = -(-step // self.section.every) * self.section.every
        number = recorded_steps(self.section.tokens, self.ranks, self.forwards)
        if look - number >= step or look + self.section.lag >= self.last_step:
            self.recorder.pause()
            return False
        if self.recorder.paused:
            # The stretches are those that a recording of all steps would have.
            self.recorder.resume((step - 1 - self.reset_at) * self.forwards)
        self.fresh = False
        return True

    def count(self, rode: RideRecord) -> None:
        """The rides of a step, once they are known: before `after_step` of the same step if that `decides`, else at any
        time before the next that does."""
        if self.on:
            widest = max(map(len, rode.load_LE))
            self.loads.append(np.array([load + [0] * (widest - len(load)) for load in rode.load_LE], dtype=np.float64))
            self._measure(rode)

    def decides(self, step: int) -> bool:
        """Whether `after_step` looks at the rides of all steps up to this one."""
        if not self.on or self.section.every is None:
            return False
        due = self.pending is not None and step >= self.pending["asked"] + self.section.lag
        return due or step % self.section.every == 0

    def after_step(self, step: int) -> None:
        """After the optimizer's step, gradients gone: use an answer that is due, ask when it is time."""
        if not self.on or self.section.every is None:
            return
        if self.section.policy != "migrate":
            if step % self.section.every == 0 and step < self.last_step:
                self._react(step)
            return
        if self.pending is not None and step >= self.pending["asked"] + self.section.lag:
            self._use(step, self.pending)
            self.pending = None
        if step % self.section.every == 0 and self.pending is None and step + self.section.lag < self.last_step:
            self._ask(step)

    def mark(self) -> Mark | None:
        """Before what may have to be repeated."""
        return self.recorder.mark() if self.recorder is not None else None

    def rewind(self, mark: Mark | None) -> None:
        """What ran since `mark` is void, and is repeated."""
        if self.recorder is not None and mark is not None:
            self.recorder.rewind(mark)

    def state(self) -> dict[str, Any]:
        """For a checkpoint: the same on all ranks. An answer that is under way is waited for, and used when it is
        due."""
        if self.pending is not None and "answer" not in self.pending:
            self.pending["answer"] = self._answer()
        self._gather()
        return {
            "moe_layout": self.moe_layout,
            "layouts": current_layouts(self.model).to_dict() if self.moved else None,
            "pending": self.pending,
            "since": self.since,
            "measured": self.measured,
        }

    def write_files(self, folder: Path) -> None:
        """The larger part of the state, on the main rank; `state` comes first."""
        if self.earlier is not None:
            self.earlier.save(folder / TRACE_FILE)
        if self.loads:
            np.savez_compressed(folder / LOADS_FILE, loads=np.stack(self.loads))

    def finish(self, step: int) -> None:
        """The last measurement."""
        self._report_measured(step)

    def close(self) -> None:
        if self.solving is not None:
            self.solving.stop()

    # -- asking and answering ---------------------------------------------------------------------------------

    def _ask(self, step: int) -> None:
        self._gather()
        trace, self.earlier = self.earlier, None
        assert trace is not None, "every step is recorded"
        self.pending = {"asked": step}
        if not self.main:
            return
        question = Question(
            layouts=current_layouts(self.model), loads_SLE=np.stack(self.loads), trace=trace, section=self.section,
            facts=self.facts, remaining=self.last_step - step - self.section.lag, seed=self.seed + step,
        )  # fmt: skip
        self.solving = Solving(question, self.folder / f"step-{step:08d}" if self.section.background else None)

    def _answer(self) -> dict[str, Any]:
        """Of the question that is under way, on all ranks. Waits."""

        def answer() -> dict[str, Any]:
            assert self.solving is not None
            return self.solving.answer(self.patience)

        try:
            found = from_rank_0(answer)
        except ValueError as error:
            raise ValueError(f"placement could not be solved: {error}") from error
        self.solving = None
        return found

    def _use(self, step: int, pending: dict[str, Any]) -> None:
        answer = pending["answer"] if "answer" in pending else self._answer()
        adopted = {name: Layouts.from_dict(one)[name] for name, one in answer["layouts"].items()}
        moved = Moved()
        if adopted:
            # What was measured so far was so under the old layouts.
            self._report_measured(step)
            moved = self._move(step, adopted)
        self._tell(step, answer, moved, asked=pending["asked"])

    def _react(self, step: int) -> None:
        """A policy that knows loads alone: every rank finds the same."""
        section, layouts = self.section, current_layouts(self.model)
        policy, model = POLICIES[section.policy], self.facts.load_model
        changed: dict[str, ExpertLayout] = {}
        before, after = [], []
        for number, (name, layout) in enumerate(layouts.items()):
            history_SE = np.stack([load_LE[number, : layout.num_experts] for load_LE in self.loads])
            load_E = forecast(section.predictor, history_SE)
            found = aligned(policy(load_E, layout, model, history_SE), layout, self.facts.topology)
            before.append(load_ratio(load_E, layout))
            after.append(load_ratio(load_E, found))
            if found != layout:
                changed[name] = found
        if not changed:
            return
        self._report_measured(step)
        about = {"why": f"{section.policy}, by the predicted load", "solver": section.policy, "solve_seconds": None}
        looks = {
            key: {"rows": None, "bytes": None, "load": float(np.mean(load))}
            for key, load in (("before", before), ("predicted", after))
        }
        self._tell(step, {**about, **looks}, self._move(step, changed))

    def _move(self, step: int, changed: dict[str, ExpertLayout]) -> Moved:
        self.before_move()
        moved = set_layout(self.model, current_layouts(self.model).with_layers(changed), self.optimizer, self.average)
        for own in rides(self.model).values():
            # Before the next forward, whose rows the run must find room for.
            own.prepare(self.facts.top_k, self.facts.cost.hidden)
        self.moved, self.since, self.measured = True, step, {}
        self.record("layout", step, **current_layouts(self.model).to_dict())
        if self.main:
            try:
                layouts = json.dumps(current_layouts(self.model).to_dict())
                replace_text(self.folder.parent / LAYOUT, f"{layouts}\n")
            except OSError as error:  # checkpoints have it, too
                self.say(f"warning: {self.folder.parent / LAYOUT} is not of this step: {error.strerror}")
        return moved

    def _tell(self, step: int, answer: dict[str, Any], moved: Moved, **fields: Any) -> None:
        event = "moved" if moved.layers else "kept"
        about = {key: answer[key] for key in ("why", "solver", "solve_seconds", "before", "predicted")}
        self.record("placement", step, event=event, **asdict(moved), **about, **fields)
        if self.section.policy != "migrate":
            return  # it may be every step
        if event == "kept":
            self.say(f"step {step}: experts stay where they are: {answer['why']}")
            return
        before, then = answer["before"], answer["predicted"]
        rows = "" if before["rows"] is None else f"remote rows per token {before['rows']:.2f} -> {then['rows']:.2f}, "
        self.say(
            f"step {step}: {moved.experts} experts of {moved.layers} layers moved ({bytes_text(moved.bytes)}, "
            f"{moved.seconds:.2f} s): {answer['why']}; predicted: {rows}"
            f"largest load of a rank {before['load']:.2f} -> {then['load']:.2f} of the mean"
        )

    # -- statistics -------------------------------------------------------------------------------------------

    def _gather(self) -> None:
        """All ranks' newest choices into `earlier`. So a checkpoint divides what is looked at in the same way whether
        the run goes on or is resumed from there."""
        self.reset_at = self.step
        if self.recorder is not None and not self.fresh:
            parts = [self.recorder.trace()] if self.earlier is None else [self.earlier, self.recorder.trace()]
            self.earlier = newest(concatenate(parts), self.section.tokens)
            self.recorder.reset()
            self.fresh = True

    def _measure(self, rode: RideRecord) -> None:
        rows, copies = sum(map(sum, rode.traffic_WW)), sum(rode.copies_L)
        tokens = rows / copies if copies else 0.0  # of a layer
        for key, value in (
            ("steps", 1.0),
            ("rows", rode.record["rows_remote_per_token"]),
            ("bytes", rode.record["bytes_remote"] / max(1.0, tokens)),
            ("load", rode.record["rank_load_max_over_mean"]),
        ):
            self.measured[key] = self.measured.get(key, 0.0) + value

    def _report_measured(self, step: int) -> None:
        if self.since is not None and (steps := self.measured.get("steps")):
            mean = {key: self.measured[key] / steps for key in ("rows", "bytes", "load")}
            self.record("placement", step, event="measured", since=self.since, steps=int(steps), measured=mean)

    def _restore(self, state: dict[str, Any], files: Path | None) -> None:
        if not state or state["moe_layout"] != self.moe_layout:
            return
        if state["layouts"] is not None:
            self.moved = Layouts.from_dict(state["layouts"]) == current_layouts(self.model)
            if not self.moved:  # they are for other ranks
                return
        if not self.on:
            return
        self.pending, self.since = state["pending"], state["since"]
        self.measured = dict(state["measured"])
        if files is None:
            return
        if (files / TRACE_FILE).is_file():
            self.earlier = Trace.load(files / TRACE_FILE)
        if (files / LOADS_FILE).is_file():
            with np.load(files / LOADS_FILE, allow_pickle=False) as data:
                self.loads.extend(data["loads"])


def newest(trace: Trace, tokens: int) -> Trace:
    """The last whole sequences of a trace that hold at least so many tokens."""
    if trace.num_tokens <= tokens:
        return trace
    starts = np.flatnonzero(np.diff(trace.sequence_T, prepend=trace.sequence_T[0] - 1))
    first = starts[np.searchsorted(starts, trace.num_tokens - tokens, side="right") - 1]
    return trace.subset(np.arange(first, trace.num_tokens))


def load_ratio(load_E: Array, layout: ExpertLayout) -> float:
    """Load of the fullest rank by the mean."""
    load_W = np.array([load_E[list(rank)].sum() for rank in layout.homes])
    return float(load_W.max() / max(1e-9, load_W.mean()))
