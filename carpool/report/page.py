"""From a `Run` to the report: one HTML file that needs nothing else.

The page is a template (page.html.j2), a style sheet (page.css) and a script that shows values under the pointer
(page.js), all beside this file.
"""

from __future__ import annotations

import os
import shlex
from pathlib import Path
from typing import Any
from urllib.parse import quote

from carpool.report import figures, homes
from carpool.report.headline import as_text, facts, summarise, title, verdict
from carpool.report.health import Check, headline, judge
from carpool.report.profile_page import profile_summary
from carpool.report.read import Run, read_run
from carpool.report.record_types import PARTS, STEP_TIME, Outlook, Placement, Summary
from carpool.report.units import bytes_text, count_text, ms_text, percent_text, plain_text
from carpool.report.write import fill, write_page


def write_report(run_dir: Path, output: Path | None = None) -> Path:
    """Writes the report of the run in `run_dir` to `output` (default: run_dir/report.html) and returns that path.

    Works on a run that is still going, too: it then tells the steps so far. An existing report is replaced at once and
    never left half written.

    Errors: ValueError if the folder is no run, has no step yet, is damaged (the message names file and line), or if the
    output cannot be written; ImportError if jinja2 is missing.
    """
    run_dir = Path(run_dir)
    output = Path(output) if output is not None else run_dir / "report.html"
    run = read_run(run_dir)
    return write_page(output, "report", lambda: render(run))


def render(run: Run) -> str:
    """The page as HTML text."""
    summary = run.summary or summarise(run)
    checks = checks_of(run, summary)
    state, how, rest = headline(checks, summary, run.info)
    word, why = verdict(summary, run.info)
    return fill(
        "page.html.j2",
        run=run,
        info=run.info,
        name=run.path.resolve().name,
        title=title(summary, run.info),
        summary=summary,
        state=state,
        how=how,
        rest=rest,
        checks=checks,
        marks={"good": "✓", "look": "!", "bad": "✗", "unknown": "?"},
        facts=[(fact.label, fact.value, fact.detail) for fact in facts(summary, run.info)],
        verdict=word,
        why=why,
        text=as_text(summary, run.info, checks),
        share=_share(summary.share, summary.step_ms_median),
        last_step=_last_step(run),
        tables=_tables(run),
        decisions=decision_rows(run),
        plan=plan_rows(run),
        profile=profile_summary(run.path),
        has_profile_page=(run.path / "profile.html").is_file(),
        solved=_solved(run),
        placement_columns=PLACEMENT_COLUMNS,
        placements=placement_rows(run),
        again=shlex.join(
            ["carpool", "train", "--config", str(run.path / "config.toml"), f"training.output_dir={run.path}-again"]
        ),
        step_time=STEP_TIME,
        layouts=homes.pictures(run),
        figures=figures,
    )


def checks_of(run: Run, summary: Summary) -> list[Check]:
    """What `carpool.report.health` says of a run that was read from its folder."""
    return judge(
        summary,
        run.info,
        run.train,
        run.evals,
        finished=run.summary is not None,
        planned=run.asked("max_steps"),
        stop_at=run.asked("stop_at_step"),
        stopped=run.stopped,
    )


def _solved(run: Run) -> list[tuple[str, str]]:
    """(text, link) to what `carpool place` wrote beside the layout that the run began with, as far as it is there."""
    source = str(run.info.layout.get("source") or "")
    folder = Path(source).parent
    if source in ("", "contiguous", "checkpoint"):
        return []
    files = [("experts chosen together, before and after", "place.png"), ("every solver's numbers", "place.json")]
    here = run.path.resolve()
    found = [(text, (folder / name).resolve()) for text, name in files if (folder / name).is_file()]
    return [(text, quote(os.path.relpath(path, here))) for text, path in found]


def _share(share: dict[str, float], step_ms: float | None) -> list[dict[str, Any]]:
    """The pieces of the bar: widths add up to 100 even where the shares, each a median of its own, do not quite."""
    pieces = [(part, share[part]) for part in PARTS if share.get(part, 0) > 0]
    whole = sum(value for _, value in pieces)
    if whole <= 0:
        return []
    return [
        {"part": part, "share": value, "width": 100 * value / whole, "ms": None if step_ms is None else value * step_ms}
        for part, value in pieces
    ]


def _last_step(run: Run) -> list[tuple[str, str]]:
    """What a step records besides the figures, at the last step."""
    last = run.train[-1]
    sources, sets = last.source_tokens, run.evals[-1].sets if run.evals else {}
    rows = [
        ("Step", str(last.step)),
        ("Loss", plain_text(last.loss, 4)),
        ("Auxiliary loss", plain_text(last.aux_loss, 4)),
        *([("Router z-loss", plain_text(last.z_loss, 4))] if last.z_loss is not None else []),
        *([("Sequence loss", plain_text(last.sequence_aux_loss, 4))] if last.sequence_aux_loss is not None else []),
        *([("Distillation loss", plain_text(last.distillation_loss, 4))] if last.distillation_loss is not None else []),
        *((f"Loss of MTP layer {k}", plain_text(loss, 4)) for k, loss in enumerate(last.mtp_losses or (), 1)),
        ("Learning rate", "–" if last.learning_rate is None else f"{last.learning_rate:.3g}"),
        ("Tokens, this step", count_text(last.tokens)),
        ("Tokens, so far", count_text(last.tokens_seen)),
        ("Step time", ms_text(last.step_ms)),
        ("Tokens sent between ranks", count_text(last.rows_remote)),
        ("Bytes between ranks", bytes_text(last.bytes_remote)),
        ("Bytes between nodes, of rides", bytes_text(last.bytes_network)),
        ("Sent once per expert, it would be", bytes_text(last.bytes_remote_alltoall)),
        ("Max/mean expert load, worst layer", plain_text(last.load_max_over_mean)),
        ("Experts without a token", count_text(last.dead_experts)),
        ("Router entropy (nats)", plain_text(last.router_entropy)),
        ("Tokens dropped", count_text(last.dropped_tokens)),
        *(
            (
                f"Tokens of {name}, so far",
                f"{count_text(tokens)} ({percent_text(tokens / max(1, sum(sources.values())))})",
            )
            for name, tokens in sources.items()
        ),
        *((f"Held-out loss of {name}", plain_text(loss, 4)) for name, loss in sets.items()),
    ]
    return [(label, value) for label, value in rows if value != plain_text(None)]


def _tables(run: Run) -> list[tuple[str, list[tuple[str, str]]]]:
    """What the run was: the facts of run.json under their own names."""
    info = run.info
    predicted = info.predicted
    forecast = [
        ("copies_per_token_uniform", plain_text(predicted.copies_per_token_uniform)),
        ("flops_per_token", count_text(predicted.flops_per_token)),
        *((f"memory_per_rank.{k}", bytes_text(v)) for k, v in predicted.memory_per_rank_bytes.items()),
    ]
    model = info.model.model_dump()
    names = info.model.moe_layers
    model["moe_layers"] = f"{len(names)}: {names[0]} … {names[-1]}" if len(names) > 2 else names
    transport = info.transport.model_dump()
    transport["buffer_bytes"] = bytes_text(info.transport.buffer_bytes) if info.transport.buffer_bytes else None
    peak = {"peak_flops": count_text(info.peak_flops), "peak_flops_source": info.peak_flops_source}
    tables = [
        ("Model", _rows(model)),
        ("Environment", _rows({"carpool": info.carpool_version, **info.environment, **peak})),
        ("Parallelism", _rows(info.parallelism)),
        ("Transport", _rows(transport)),
        ("Layout", _rows(info.layout)),
        ("Data", _rows({**info.data, "seed": info.seed})),
        ("Predicted before the run, not measured", forecast),
    ]
    return [(heading, rows) for heading, rows in tables if any(value != plain_text(None) for _, value in rows)]


def plan_rows(run: Run) -> list[tuple[str, str, str, str]]:
    """How right the plan was: (what, predicted, measured, measured over predicted)."""
    if run.info.plan is None:
        return []
    predicted, measured = run.info.plan.predicted, run.info.plan.measured
    low, likely, high = predicted.step_ms or (None, None, None)
    step = measured.step_ms[0] if measured.step_ms else None
    told, found = predicted.memory_bytes, measured.memory_bytes
    rows = [
        ("Step time", f"{ms_text(likely)} ({ms_text(low)} to {ms_text(high)})", ms_text(step), _over(step, likely)),
        ("Memory of a rank", bytes_text(told), bytes_text(found), _over(found, told)),
        ("Exposed rides", percent_text(predicted.exposed_share), percent_text(measured.exposed_share), None),
    ]
    for kind, own in predicted.kinds_ms.items():
        factor = measured.factors.get(kind)
        rows.append((f"Of the step: {kind}", ms_text(own), ms_text(None if factor is None else factor * own), factor))
    return [(what, before, after, plain_text(factor)) for what, before, after, factor in rows]


def _over(one: float | None, other: float | None) -> float | None:
    return one / other if one is not None and other else None


def decision_rows(run: Run) -> list[tuple[str, str, str, str]]:
    """What the run chose for itself: (of what, the answer, how, why)."""
    rows = []
    for name, one in run.info.decisions.items():
        answer = {key: value for key, value in one.answer.items() if value is not None}
        told = _value(answer["name"] if list(answer) == ["name"] else answer)
        rows.append((name.replace("_", " "), told, one.how, one.why))
    return rows


def _rows(table: dict[str, Any]) -> list[tuple[str, str]]:
    return [(key, _value(value)) for key, value in table.items()]


def _value(value: Any) -> str:
    if value is None or value == "":
        return plain_text(None)
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        # Thin spaces between thousands: readable, and not mistaken for a decimal point anywhere.
        return f"{value:,}".replace(",", "\u2009")
    if isinstance(value, list):
        return ", ".join(_value(v) for v in value)
    if isinstance(value, dict):
        return ", ".join(f"{k}: {_value(v)}" for k, v in value.items())
    return str(value)


PLACEMENT_COLUMNS = (
    "Step",
    "What, and why",
    "Layers",
    "Experts",
    "Bytes moved",
    "Moved in",
    "Solved in",
    "Remote ranks per token: before → predicted, measured",
    "Remote bytes per token: before → predicted, measured",
    "Max/mean rank load: before → predicted, measured",
)


def placement_rows(run: Run) -> list[list[str]]:
    """One row of texts for each look; empty if the run had none."""
    measured = {p.since: p.measured for p in run.placements if p.event == "measured"}
    looks = [p for p in run.placements if p.event in ("moved", "kept")]
    return [_row(look, measured.get(look.step, Outlook())) for look in looks]


def _row(look: Placement, measured: Outlook) -> list[str]:
    foretold = []
    for key, text in (("rows", plain_text), ("bytes", bytes_text), ("load", plain_text)):
        before, after, then = (text(getattr(outlook, key)) for outlook in (look.before, look.predicted, measured))
        foretold.append(f"{before} → {after}, {then}" if look.event == "moved" else before)
    return [
        str(look.step),
        f"{look.event}: {look.why}" if look.why else look.event,
        count_text(look.layers),
        count_text(look.experts),
        bytes_text(look.bytes),
        *(ms_text(None if s is None else 1000 * s) for s in (look.seconds, look.solve_seconds)),
        *foretold,
    ]
