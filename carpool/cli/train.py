"""`carpool train` and `doctor`."""

from __future__ import annotations

import os
import re
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

from carpool.cli.common import (
    TRAIN_PACKAGES,
    Overrides,
    Ranks,
    RanksDebug,
    check_output,
    check_writable,
    command,
    errors,
    require,
)
from carpool.train.launch.start import look_ahead, said_if_slow
from carpool.train.launch.stopping import leaves_setup
from carpool.train.launch.worker import collector_paused, lasting_output

if TYPE_CHECKING:
    from carpool.train.config import Config
    from carpool.train.config.load import Resolved


def train(
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="KEY=VALUE",
            help="Settings over those of the file: training.max_steps=200 parallelism.ep_size=4 "
            "model.config.num_experts=16.",
        ),
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option("--config", help="TOML file of settings, or the name of a recipe. Without it: the demo's."),
    ] = None,
    compare: Annotated[
        str | None,
        typer.Option(
            "--compare",
            metavar="TRANSPORT",
            help="At the end, time this run's steps against this transport, interleaved.",
        ),
    ] = None,
    elastic: Annotated[
        str | None,
        typer.Option(
            "--elastic",
            metavar="MIN:MAX",
            help="Be one of MIN to MAX agents of a run that goes on without a dead rank or node: start the same "
            "command on each node. Settings, parallelism.num_ranks too, are of MAX agents.",
        ),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the resolved settings and the memory per rank; train nothing.")
    ] = False,
    gpu: Annotated[
        str | None,
        typer.Option("--gpu", help="With --dry-run: the GPU that the run is meant for (h100, h200, a100, b200, ...)."),
    ] = None,
    show_examples: Annotated[
        int,
        typer.Option(
            "--show-examples",
            metavar="N",
            min=0,
            help="Print the tokens of N training examples, those that are learned in green, and train nothing.",
        ),
    ] = 0,
    help_config: Annotated[
        bool, typer.Option("--help-config", help="Explain every setting, or those that mention the words that follow.")
    ] = False,
    debug: RanksDebug = False,
) -> None:
    """Train a model. It starts one rank per GPU (or 4 processes on CPU), unless torchrun or Slurm started it.

    Without arguments: a small model on the source code of Python's standard library; nothing is downloaded.
    """
    if help_config:
        with errors(debug):
            _explain_config(overrides or [])
        return
    with lasting_output(), errors(debug), leaves_setup():
        from carpool.train.config import resolve_config

        if config is not None and not config.suffix and not config.exists():
            config = _recipe(str(config))
        resolved = resolve_config(config, overrides or [])
        agents = None
        if elastic is not None:
            # PyTorch would show stacks of C++ where a peer is lost, which is nothing to look for here.
            os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
            from carpool.train.launch.elastic import parse_agents

            agents = parse_agents(elastic)
            # A group that forms while a run goes on cannot begin another one.
            resume = resolved.config.training.resume_from_checkpoint or "auto"
            resolved = replace(resolved, config=resolved.config.changed("training", resume_from_checkpoint=resume))
        settings = resolved.config
        require(TRAIN_PACKAGES)
        if compare is not None and (dry_run or show_examples):
            raise ValueError("--compare times steps, and nothing is trained here; leave it out")
        if dry_run and show_examples:
            raise ValueError("--dry-run and --show-examples print different things: give one of them")
        if not dry_run and not show_examples:
            _check_output(settings)  # before reading data and starting ranks, which take a while
        check_paths(resolved, compare)
        if dry_run:
            with collector_paused(), said_if_slow():
                from carpool.train.plan.dry_run import dry_run_with_fit

                text, misfit = dry_run_with_fit(settings, resolved.sources, gpu)
            typer.echo(text)
            if misfit is not None:
                raise ValueError(f"this run {misfit} (what to change stands above)")
            return
        if gpu is not None:
            raise ValueError("--gpu says for which GPUs --dry-run predicts; give both, or neither")
        if show_examples:
            from carpool.train.data.show import show

            show(settings, show_examples, Console())
            return
        from carpool.train.launch.start import run

        if agents is None:  # else the ranks alone know their number
            check_ahead(resolved, "carpool.train.plan.start_checks:check_run", debug, compare=compare)
        entry, fixed = "carpool.train.run.run:train", resolved.fixed
        run(settings, entry, debug=debug, elastic=agents, compare=compare, command=command(), fixed=fixed)


def teach(
    teacher: Annotated[
        Path, typer.Argument(help="The teacher: a checkpoint's folder with the tokenizer of the data, any causal LM's.")
    ],
    overrides: Overrides = None,
    config: Annotated[
        Path | None, typer.Option("--config", help="TOML file of settings: those of the run that will learn.")
    ] = None,
    debug: RanksDebug = False,
) -> None:
    """Write what a teacher says of the data of a run, for distillation: the distillation.top_k most likely next tokens
    of each position, as Parquet in the folder distillation.logits. What is there stays, and the next call goes on.
    """
    with lasting_output(), errors(debug):
        from carpool.train.config import resolve_config
        from carpool.train.config.published import check_checkpoint
        from carpool.train.launch.start import run
        from carpool.train.launch.stopping import Stopped

        require(TRAIN_PACKAGES)
        settings = resolve_config(config, overrides or []).config
        if settings.distillation.logits is None:
            raise ValueError("distillation.logits is not set: name the folder for the files, as the run will")
        check_checkpoint("TEACHER", str(teacher))
        check_output("distillation.logits", Path(settings.distillation.logits))
        settings.model.check_path()
        try:
            run(settings, "carpool.train.build.teacher:write_logits", debug=debug, teacher=str(teacher))
        except Stopped as stopped:
            raise Stopped(f"stopped by {stopped.signal}: the same command goes on with what is missing") from None


def doctor(
    measure: Annotated[
        bool,
        typer.Option(
            "--measure",
            help="Measure instead: links between ranks, copies, disk, and rates of computation, in less than a minute. "
            "Under torchrun or Slurm over all nodes, else on this machine.",
        ),
    ] = False,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            help="With --measure: the file, for parallelism.hardware and --hardware. Default: hardware.json.",
        ),
    ] = None,
    ranks: Ranks = None,
    ranks_per_node: Annotated[
        int | None, typer.Option("--ranks-per-node", min=1, help="As parallelism.ranks_per_node.")
    ] = None,
    debug: RanksDebug = False,
) -> None:
    """Check this machine: versions, devices, memory, data, and an exchange between two ranks."""
    if measure:
        with errors(debug):
            out = out or Path("hardware.json")
            check_writable("--out", out)
            from carpool.bench.hardware.measure_machine import measure_machine

            measure_machine(out, ranks=ranks, ranks_per_node=ranks_per_node, debug=debug)
        return
    with errors(debug):
        for option, given in (("--out", out), ("--ranks", ranks), ("--ranks-per-node", ranks_per_node)):
            if given is not None:
                raise ValueError(f"{option} changes nothing without --measure; give both, or neither")
    from carpool.cli.doctor_checks import RED, check_all

    console = Console()
    worst = "green"
    for check in check_all():
        mark = {"green": "ok  ", "yellow": "note", "red": "FAIL"}[check.color]
        console.print(f"[{check.color}]{mark}[/] {escape(check.name):<14} {escape(check.text)}", highlight=False)
        worst = RED if check.color == RED else worst
    if worst == RED:
        raise typer.Exit(1)


def _explain_config(words: list[str]) -> None:
    """Print settings; with words, those in which all of them occur, and what stands for names of Transformers."""
    from carpool.train.config import describe
    from carpool.train.config.load import names_of_transformers, searched_words

    # From the beginning of a word of the text on, whatever is between its letters: zloss, z-loss, z_loss.
    wanted = [r"(?<![^\W_])" + "[-_ ]?".join(map(re.escape, re.sub(r"[-_ ]", "", word))) for word in words]

    def mentions(*texts: str) -> bool:
        return all(re.search(one, " ".join(texts), re.IGNORECASE) for one in wanted)

    console = Console()
    section, found = "", [one for one in describe() if mentions(one[0], one[1], one[3])]
    theirs = {f"TrainingArguments.{name}": said for name, said in names_of_transformers().items() if mentions(name)}
    answers = [said for names, said in searched_words().items() if any(map(mentions, names.split(" | ")))]
    theirs = (theirs | ({" ".join(words): "; or ".join(answers)} if answers else {})) if words else {}
    if not found and not theirs:
        raise ValueError(f"no setting mentions {' '.join(words)}; --help-config without a word explains all of them")
    for name, kind, default, description in found:
        if name.split(".")[0] != section:
            section = name.split(".")[0]
            console.print(f"\n[bold]{escape(f'[{section}]')}[/]")
        console.print(f"  [bold]{name}[/] = {escape(default)}  [dim]({escape(kind)})[/]", highlight=False)
        console.print(f"      {escape(description)}", highlight=False)
    for name, said in theirs.items():
        console.print(f"\n{name}: {escape(said)}", highlight=False)


def _recipe(name: str) -> Path:
    """The file of a recipe, for --config."""
    from carpool.plugins.nearest import nearest
    from carpool.recipes import names, path_of

    if name in (known := names()):
        return path_of(name)
    close = nearest(name, known)
    hint = f" (did you mean {close}?)" if close else ""
    raise ValueError(f"--config {name}: there is no such file, and no such recipe{hint}; see `carpool recipes list`")


def _check_output(config: Config) -> None:
    """Refuses a folder that cannot be written, or in which another run is."""
    from carpool.parallel.world import find_world
    from carpool.train.records.run_folder import check_no_run, why_not_writable

    folder = config.training.folder
    if config.training.resume_from_checkpoint is None:
        check_no_run(folder)
    # Ranks that are there already try together.
    if find_world(os.environ) is None and (why := why_not_writable(folder)):
        raise ValueError(f"training.output_dir = {folder}: {why}; choose another folder")


def check_ahead(resolved: Resolved, entry: str, debug: bool, **kwargs: Any) -> None:
    """Refuses what ranks would refuse, by `entry`, and data that cannot be used, while there are no ranks. Those of
    torchrun and Slurm find it themselves."""
    from carpool.parallel.world import find_world
    from carpool.train.launch.start import startable_ranks

    if find_world(os.environ) is not None:
        return
    settings = resolved.config
    with Console(stderr=True).status("checking the settings") as status:
        with said_if_slow(), look_ahead(settings, entry, debug=debug, fixed=resolved.fixed, **kwargs):
            startable_ranks(settings)
        status.update("reading data")
        read_data(settings)


def read_data(config: Config) -> None:
    """Tokenizes the data of a run, unless that has been done, and refuses what cannot be used, and other data than the
    checkpoint's that the run goes on from."""
    from carpool.train.data.corpus import corpus_of
    from carpool.train.data.mixture import eval_sequences, train_sequences
    from carpool.train.data.streaming import Streams
    from carpool.train.data.tokenizer import tokenizer_of

    tokenizer = tokenizer_of(config)
    corpora = corpus_of(config, tokenizer)
    data = config.data
    train = Streams(data, tokenizer, config.model.path) if data.streaming else train_sequences(corpora, data)
    eval_sequences(corpora, data)
    if config.training.resume_from_checkpoint is not None:  # the agent of any other run need not import Transformers
        from carpool.train.checkpoints.manager import CheckpointManager
        from carpool.train.checkpoints.resume import checkpoint_to_resume, read_run_state
        from carpool.train.data.loader import check_same_data

        folder = config.training.folder
        if resume := checkpoint_to_resume(config.training.resume_from_checkpoint, folder, CheckpointManager(folder)):
            check_same_data(read_run_state(resume)["loader"], train.fingerprint)


def check_paths(resolved: Resolved, compare: str | None = None) -> None:
    """Refuses paths where nothing is, and settings that change nothing, before any rank is started."""
    from carpool.train.config.declarations import check_effects
    from carpool.train.config.published import check_checkpoint

    config = resolved.config
    check_effects(resolved, compare=compare)

    config.model.check_path()
    if config.distillation.teacher is not None:
        check_checkpoint("distillation.teacher", config.distillation.teacher)
    if config.moe.layout != "contiguous" and not Path(config.moe.layout).is_file():
        raise ValueError(f'moe.layout: the file {config.moe.layout} does not exist; give "contiguous" or a JSON file')
    resume = config.training.resume_from_checkpoint
    if resume not in (None, "last", "auto") and not Path(str(resume)).is_dir():
        raise ValueError(
            f'training.resume_from_checkpoint: {resume} is no folder; give "last", "auto", or a folder such as '
            f"{config.training.folder / 'checkpoints' / 'step-00000100'}"
        )
    from carpool.planner.machine.hardware import find_hardware
    from carpool.train.data.chat import read_template
    from carpool.train.data.corpus import check_sources
    from carpool.train.data.formats import source_formats
    from carpool.train.data.tokenizer import tokenizer_of

    if config.parallelism.hardware is not None:
        find_hardware(config.parallelism.hardware)
    read_template(config.data)
    # Now with the format of the data, which is in the first row.
    check_sources(config.data)
    forms = set(source_formats(config.data))
    check_effects(resolved, forms.pop() if len(forms) == 1 else None, compare)
    tokenizer_of(config)
