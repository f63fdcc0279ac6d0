"""What `carpool plan` found: the table and sentences of the terminal, a file for the trainer of each plan, and a page.

The page (plan.html.j2) has the best configurations, why, and pictures of the first one's step and memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import tomli_w
from rich.console import Console

from carpool.bench.result_files import print_table
from carpool.planner.machine.hardware import Hardware
from carpool.planner.model.routes import Routes
from carpool.planner.model.shape import ModelShape
from carpool.planner.search.plan import USABLE, Found, Plan
from carpool.planner.search.space import PLANNERS
from carpool.planner.search.why import NAMES, bounded_by, changes, in_words, next_best, with_all_memory, without_limit
from carpool.plugins.counted import counted
from carpool.report.charts import Chart, Line, draw_lines
from carpool.report.units import MISSING
from carpool.report.write import fill, write_page
from carpool.train.config import load_config

GiB = 2**30
COLUMNS = ("", "configuration", "step, s", "interval", "MFU", "tokens/s per GPU", "GiB", "exposed")
_COMPONENTS = {
    "optimizer": "state of the optimizer",
    "activations": "activations, and what a layer works with",
    "transport": "buffers of rides",
    "context": "CUDA's context and kernels",
    "nccl": "NCCL",
    "fragments": "what the allocator cannot use",
    "graphs": "an evaluation beside the graphs",
}


def why_none(found: Found) -> str:
    """Why a search found no plan, and what to do."""
    if found.least_memory < float("inf"):
        return (
            f"no configuration fits: the least that one needs is {found.least_memory / GiB:.1f} GiB a rank, more than "
            "--memory (92 % of the device by default); use more GPUs, shorter sequences, or fewer bits for --moments"
        )
    refused = "; ".join(f"{why} ({number:,})" for why, number in found.refused.items())
    refused = refused or "the GPUs cannot be divided so"
    return f"no configuration is allowed: {refused}; change --gpus, --tokens-per-batch or --only"


def _row(number: int, one: Plan) -> list[str]:
    """Of `COLUMNS`."""
    seconds, mfu = one.prediction.seconds, one.prediction.mfu
    return [
        str(number), one.candidate.label, f"{seconds.middle:.3g}", f"{seconds.low:.3g} to {seconds.high:.3g}",
        MISSING if mfu is None else f"{100 * mfu.middle:.1f} %", f"{one.prediction.tokens_per_second():,.0f}",
        f"{one.memory.total / GiB:.1f}", f"{one.prediction.communication:.3g}",
    ]  # fmt: skip


def print_policies(best: Plan, found: Mapping[str, Found], console: Console) -> None:
    """What published planners would have chosen, beside the plan."""
    rows = []
    for name, one in found.items():
        if not one.plans:
            rows.append([name, why_none(one), *[MISSING] * 5])
            continue
        longer = one.plans[0].prediction.seconds.middle / best.prediction.seconds.middle - 1
        row = _row(0, one.plans[0])
        rows.append([name, *row[1:4], f"{100 * longer:+.1f} %", *row[6:]])
    columns = ["", "configuration", "step, s", "interval", "beside the plan", "GiB", "exposed"]
    print_table(console, "published planners, by the same model of costs", columns, rows, long=1)
    for name in found:
        console.print(f"{name}: {PLANNERS[name].chooses} ({PLANNERS[name].source})", highlight=False)


@dataclass(frozen=True)
class Shown:
    """Plans that were found, at least one, with what was asked.

    Attributes:
        model: a published name, or the path of a config.json.
        usable: bytes of a rank that may be used; None: the device's, but for what is held back.
        command: what the user typed.
    """

    found: Found
    shape: ModelShape
    rates: Hardware
    routes: Routes
    per_node: int
    model: str
    usable: float | None
    command: str

    @property
    def first(self) -> Plan:
        return self.found.plans[0]

    @property
    def title(self) -> str:
        """The model and the machine."""
        one, name = self.first.candidate, self.model if "/" not in self.model else Path(self.model).stem
        return f"{name} on {one.degrees.world_size} x {self.rates.name}, {one.tokens:,} tokens a step"

    @property
    def rows(self) -> list[list[str]]:
        """Of `COLUMNS`."""
        return [_row(i + 1, one) for i, one in enumerate(self.found.plans)]

    def why(self) -> list[tuple[str, str]]:
        """(question, answer)."""
        found, first = self.found, self.first
        tight = with_all_memory(found, self.rates.capacity or 0)
        usable = self.usable or USABLE * (self.rates.capacity or 0)
        # The best of those that spread experts, and of those that do not.
        others = (one for one in found.plans if (one.candidate.degrees.ep == 1) != (first.candidate.degrees.ep == 1))
        shown = [("", first), *((f", {one.candidate.label}", one) for one in list(others)[:1])]
        free = [
            (f"If memory were no limit{name}", text)
            for name, one in shown
            if (text := without_limit(one, self.shape, self.rates, self.per_node, self.routes, usable))
        ]
        return [
            ("The step goes to", bounded_by(first)),
            ("Its memory is highest", f"{first.memory.at}, stage {first.memory.stage}"),
            ("Next best of another kind", next_best(found.plans)),
            *([("With all of the memory", tight)] if tight else []),
            *free,
            *(
                (f"With {what}", text)
                for what, text in changes(found.plans, self.shape, self.rates, self.per_node, self.routes)
            ),
        ]

    def print(self, console: Console, why: Sequence[tuple[str, str]]) -> None:
        """The table and the sentences."""
        found = self.found
        counts = ", ".join(f"{number:,} {what}" for what, number in found.counts.items())
        print_table(console, self.title, list(COLUMNS), self.rows, long=1)
        for line in (
            " ".join(in_words(self.first, self.per_node)),
            *(f"{question}: {answer}" for question, answer in why),
            f"searched in {found.seconds:.1f} s: {counts}",
            *(f"not allowed, {number:,}: {reason}" for reason, number in found.refused.items()),
            "; ".join(f"{what}: {source}" for what, source in self.first.inputs.items()),
        ):
            console.print(line, highlight=False)

    def write_files(self, out: Path) -> list[str]:
        """Write plan-1.toml, ..., which the trainer takes; returns their texts. ValueError: it does not take one."""
        out.mkdir(parents=True, exist_ok=True)
        texts = []
        for i, one in enumerate(self.found.plans):
            settings = one.candidate.settings()
            settings["model"]["config"] = self.model
            settings["parallelism"]["ranks_per_node"] = self.per_node
            texts.append(tomli_w.dumps(settings))
            (out / f"plan-{i + 1}.toml").write_text(texts[-1])
            load_config(out / f"plan-{i + 1}.toml")
        return texts

    def write_page(self, output: Path, why: Sequence[tuple[str, str]], toml: str) -> Path:
        """Write the page and return its path. `toml`: the first plan's file.

        Raises:
            ValueError: it cannot be written there.
            ImportError: jinja2 is missing."""
        return write_page(output, "page", lambda: self._render(why, toml))

    def _render(self, why: Sequence[tuple[str, str]], toml: str) -> str:
        first, plans = self.first, self.found.plans
        prediction, memory = first.prediction, first.memory
        capacity = USABLE * (self.rates.capacity or memory.total) if self.usable is None else self.usable
        seconds, mfu, rate = prediction.seconds, prediction.mfu, prediction.tokens_per_second()
        step, longest = sum(prediction.exposed.values()), max(one.prediction.seconds.high for one in plans)
        share = [(NAMES.get(k, k), 100 * v / step) for k, v in prediction.exposed.items() if v > 0.0005 * step]
        parts = sorted(memory.parts.items(), key=lambda one: -one[1])
        node = f"{self.per_node * memory.host / GiB:,.0f} GiB", f"of a node of {self.per_node}"
        interval = f"{seconds.low:.3g} to {seconds.high:.3g} s"
        return fill(
            "plan.html.j2",
            title=self.title,
            verdict=(
                f"The best of {counted(len(plans), 'configuration')} takes {seconds.middle:.3g} s for a step "
                f"({interval}): {rate:,.0f} tokens per second of a GPU, with {memory.total / GiB:.1f} of "
                f"{capacity / GiB:.1f} GiB."
            ),
            words=in_words(first, self.per_node),
            facts=[
                ("Step", f"{seconds.middle:.3g} s", interval),
                ("MFU", MISSING, "") if mfu is None else
                ("MFU", f"{100 * mfu.middle:.1f} %", f"{100 * mfu.low:.0f} to {100 * mfu.high:.0f} %"),
                ("Tokens per second", f"{rate:,.0f}", "of one GPU"),
                ("GPU hours", f"{1e12 / rate / 3600:,.0f}", "for 10¹² tokens"),
                ("Memory", f"{memory.total / GiB:.1f} GiB", f"of a rank, {memory.at}"),
                *([("Host memory", *node)] if memory.host else []),
                ("Exposed communication", f"{prediction.communication:.3g} s", "a step"),
            ],
            columns=COLUMNS,
            rows=self.rows,
            steps=[
                (one.candidate.label, *(100 * s / longest for s in one.prediction.seconds),
                 f"{one.prediction.seconds.middle:.3g} s")
                for one in plans
            ],
            share=sorted(share, key=lambda one: -one[1]),
            memory=[
                (_COMPONENTS.get(name, name), f"{size / GiB:.1f} GiB", 100 * size / parts[0][1]) for name, size in parts
            ],
            timeline=_timeline(memory.timeline, capacity),
            why=why,
            inputs=first.inputs,
            toml=toml,
            command=self.command,
        )  # fmt: skip


def _timeline(timeline: Sequence[tuple[str, float]], capacity: float) -> str | None:
    """(moment, bytes) of a micro-batch, beside the bytes that may be used."""
    size_N = np.array([size / GiB for _, size in timeline])
    step_N = np.arange(1, len(size_N) + 1, dtype=float)
    chart = Chart(
        alt="Memory of a rank through forward, loss and backward",
        unit="GiB of tensors",
        text=lambda value: f"{value:.1f} GiB",
        across="moments of a micro-batch: forward, loss, backward",
    )
    limit = np.full_like(size_N, capacity / GiB)
    lines = [
        Line("predicted", "predicted", step_N, size_N, "dash"),
        Line("limit: what may be used", "limit", step_N, limit),
    ]
    return draw_lines(chart, lines)
