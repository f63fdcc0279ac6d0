"""One question to the solver, and its answer: which layers should be laid out otherwise, and why.

    python -m carpool.train.moving.solve FOLDER        question.pickle -> answer.json

A question is all that the answer depends on: `Solving` answers it in a process beside the main rank, which neither
holds its interpreter's lock nor sees its GPU, or at once in this one.

What layouts are predicted to do is of `carpool.placement.objective`, with the run's sizes and predicted loads. Rates
are those of a hardware profile, not of a measurement in this run: an answer that depended on the clock would make
two runs differ.
"""

from __future__ import annotations

import json
import os
import pickle
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from carpool.layout import ExpertLayout
from carpool.layout.layouts import Layouts
from carpool.layout.topology import Topology
from carpool.placement import solvers
from carpool.placement.adopt import Decision, aligned, decide
from carpool.placement.objective import Objective, evaluate, served_by
from carpool.placement.policies import LoadModel, forecast
from carpool.placement.trace import Array, LayerTrace, Trace
from carpool.planner.machine.cost import RIDES, CostModel
from carpool.train.config.schema_placement import PlacementSection
from carpool.transport import find_transport
from carpool.transport.base import CHOICE_BYTES, GRADIENT_BYTES


@dataclass(frozen=True)
class Facts:
    """What the cost of a layout depends on, beside the routing.

    Attributes:
        cost: of a layer and a micro-batch.
        topology: of the expert-parallel group.
        top_k: K.
    """

    cost: CostModel
    topology: Topology
    top_k: int
    micro_batches: int

    @property
    def load_model(self) -> LoadModel:
        """For policies that know loads alone."""
        return LoadModel(self.cost, self.top_k, self.topology)


def foretell(judge: LayerTrace, layout: ExpertLayout, load_E: Array, facts: Facts) -> Objective:
    """Rows as they are in a trace; loads as `load_E` foretells them, choices of each expert in the coming steps."""
    found = evaluate(judge, layout, topology=facts.topology, cost=facts.cost)
    # An expert that the sample lacks has no weight in it.
    weight_E = load_E[: judge.num_experts] * (judge.load_E.sum() / max(1.0, load_E.sum())) / np.maximum(1, judge.load_E)
    rank_TK = served_by(judge, layout)
    load_W = np.bincount(rank_TK.ravel(), weights=weight_E[judge.expert_TK].ravel(), minlength=layout.num_ranks)
    scale = facts.cost.tokens_per_rank * layout.num_ranks / judge.num_tokens
    return replace(found, load_W=load_W, compute_seconds=facts.cost.compute_seconds(load_W * scale))


def outlook(found: Sequence[Objective], facts: Facts) -> dict[str, float]:
    """What is foretold of all layers, as the metrics measure it: remote rows per token and the fullest rank's load,
    mean over layers; remote bytes per token, over all layers. Rows that fill up a fixed number, as of
    `hierarchical`, are not foretold."""
    cost, choices = facts.cost, find_transport(facts.cost.transport).choices_per_send(facts.top_k)
    near, far = (
        RIDES * cost.row_bytes_over(network) + choices * (CHOICE_BYTES + GRADIENT_BYTES) for network in (False, True)
    )
    sent = [(one.rows_remote - one.rows_nodes) * near + one.rows_nodes * far for one in found]
    return {
        "rows": float(np.mean([one.rows_remote / one.tokens for one in found])),
        "bytes": float(sum(size / one.tokens for size, one in zip(sent, found, strict=True))),
        "load": float(np.mean([one.load_ratio for one in found])),
    }


@dataclass(frozen=True)
class Question:
    """All that the answer depends on.

    Attributes:
        layouts: of the moment.
        loads_SLE: choices of each expert, per layer, in the last steps; the newest last.
        trace: choices of the newest tokens.
        section: solver and limits.
        remaining: steps of the run after the answer is used.
    """

    layouts: Layouts
    loads_SLE: Array
    trace: Trace
    section: PlacementSection
    facts: Facts
    remaining: int
    seed: int

    def save(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / QUESTION).write_bytes(pickle.dumps(self))

    @classmethod
    def load(cls, folder: Path) -> Question:
        question: Question = pickle.loads((folder / QUESTION).read_bytes())
        return question


QUESTION, ANSWER = "question.pickle", "answer.json"
# The solver's exit code if there is no room for its answer: who asked solves then.
NOT_WRITTEN = 74


class Solving:
    """A question that is being answered.

    Args:
        folder: where a process finds the question and leaves the answer; it goes away with that. None: `answer` solves.
    """

    def __init__(self, question: Question, folder: Path | None) -> None:
        self.question, self.folder = question, folder
        self._process: subprocess.Popen[bytes] | None = None
        if folder is None:
            return
        try:
            question.save(folder)
        except OSError:  # a full disk: `answer` solves
            self.folder = None
            shutil.rmtree(folder, ignore_errors=True)
            return
        environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        command = [sys.executable, "-m", "carpool.train.moving.solve", str(folder), str(os.getpid())]
        with (folder / "log.txt").open("wb") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment)

    def answer(self, timeout: float) -> dict[str, Any]:
        """The answer of `solve`; waits for it, at most `timeout` seconds. Raises ValueError if there is none, and says
        why."""
        if self._process is None or self.folder is None:
            return solve(self.question)
        try:
            code = self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            self.stop()
            raise ValueError(
                f"the solver had no answer after {timeout:.0f} s: look at fewer tokens (placement.tokens), give it "
                "more steps (placement.lag), choose another placement.solver, or raise parallelism.timeout_seconds"
            ) from None
        if code < 0:
            raise ValueError(
                f"the solver was killed by {signal.Signals(-code).name}, perhaps by the kernel for lack of memory: "
                "look at fewer tokens (placement.tokens), or choose another placement.solver (see "
                f"{self.folder}/log.txt)"
            )
        if code not in (0, NOT_WRITTEN):
            last = (self.folder / "log.txt").read_text(errors="replace").strip().splitlines()[-1:]
            raise ValueError(f"the solver ended with exit code {code}: {''.join(last)} (see {self.folder}/log.txt)")
        path = self.folder / ANSWER
        found: dict[str, Any] = solve(self.question) if code else json.loads(path.read_text())
        shutil.rmtree(self.folder, ignore_errors=True)
        return found

    def stop(self) -> None:
        """Nobody wants the answer any more."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()


def solve(question: Question) -> dict[str, Any]:
    """The answer: layouts of the layers that should move, what they are foretold to do, and why.

    One half of the trace's sequences is for the solver; the other, which it never sees, judges what it found. Each
    layer moves or stays for itself.
    """
    started = time.perf_counter()
    section, facts = question.section, question.facts
    halves = question.trace.split(2) if question.trace.num_sequences > 1 else (question.trace,) * 2
    adopted: dict[str, ExpertLayout] = {}
    before: list[Objective] = []
    after: list[Objective] = []
    decisions: list[Decision] = []
    for name in question.trace.layers:
        current = question.layouts[name]
        learn, judge = (half.layer(name) for half in halves)
        history_SE = question.loads_SLE[:, list(question.layouts).index(name), : learn.num_experts]
        load_E = forecast(section.predictor, history_SE)
        now = foretell(judge, current, load_E, facts)
        judged = [(foretell(judge, one, load_E, facts), one) for one in _candidates(question, learn, load_E)]
        then, found = min(judged, key=lambda one: one[0].seconds)
        decision = decide(
            {name: current}, {name: found}, facts.micro_batches * now.seconds, facts.micro_batches * then.seconds,
            steps_left=question.remaining, hysteresis=section.hysteresis, topology=facts.topology, cost=facts.cost,
        )  # fmt: skip
        decisions.append(decision)
        before.append(now)
        after.append(then if decision.adopt else now)
        if decision.adopt:
            adopted[name] = found
    return {
        "layouts": {name: layout.to_dict() for name, layout in adopted.items()},
        "why": explain(decisions),
        "solver": section.solver,
        "solve_seconds": time.perf_counter() - started,
        "before": outlook(before, facts),
        "predicted": outlook(after, facts),
    }


def explain(decisions: Sequence[Decision]) -> str:
    """Of all layers: what those that move save, or why the one that came nearest stays."""
    moving = [one for one in decisions if one.adopt]
    if not moving:
        nearest = max(decisions, key=lambda one: one.saved_seconds)
        return f"no layer pays for moving; of the nearest: {nearest.why.removeprefix('stay: ')}"
    now, new, saved, cost = (
        sum(getattr(one, key) for one in moving)
        for key in ("now_seconds", "new_seconds", "saved_seconds", "cost_seconds")
    )
    return (
        f"by the model saves {1e3 * (now - new):.3g} ms per step, {1 - new / now:.1%} of these layers' time, in "
        f"{moving[0].steps} steps {saved:.3g} s, and costs {cost:.2g} s"
    )


def _candidates(question: Question, learn: LayerTrace, load_E: Array) -> Iterator[ExpertLayout]:
    """What the solver finds for a layer; "search" also from where experts are now, which moves fewer of them."""
    section, facts, current = question.section, question.facts, question.layouts[learn.name]
    for start in (None, current) if section.solver == "search" else (None,):
        found = solvers.solve(
            section.solver, learn, facts.topology, seed=question.seed,
            experts_per_rank=[len(home) for home in current.homes],
            load_limit=section.load_limit, cost=facts.cost, load_E=load_E, start=start,
        )  # fmt: skip
        yield aligned(found, current, facts.topology)


def main() -> None:
    """A process of its own."""
    from carpool.train.launch.worker import die_with

    folder = Path(sys.argv[1])
    die_with(int(sys.argv[2]))
    found = solve(Question.load(folder))
    part = folder / "answer.part"
    try:
        part.write_text(json.dumps(found))
        part.rename(folder / ANSWER)
    except OSError:  # a full disk
        sys.exit(NOT_WRITTEN)


if __name__ == "__main__":
    main()
