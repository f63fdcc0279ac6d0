"""What you type: `carpool train`, `report`, `generate`, `doctor`, `bench`.

Each command imports what it needs when it runs, so that a report can be written where there is no transformers, and
each says on one line what is wrong when the input is: `error: ...`, exit code 1. A failed rank's traceback is shown
once; for an error of the input it is shown with `--debug`. Ctrl-C and other signals exit with 128 + their number.
"""

from __future__ import annotations

import contextlib
import enum
import os
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape

if TYPE_CHECKING:
    from carpool.train.config import Config


class _Transport(enum.StrEnum):
    """What a run's transport can be compared with."""

    GATHER = "gather"
    ALLTOALL = "alltoall"
    DEDUP = "dedup"
    NVLINK = "nvlink"


# Distribution names of what `carpool train` and `carpool generate` cannot do without.
_TRAIN_PACKAGES = ("transformers", "tokenizers", "safetensors")
# And what `carpool bench experts` and `carpool bench layer` compare with.
_BENCH_PACKAGES = ("transformers",)

app = typer.Typer(
    name="carpool",
    help="Trains Mixture-of-Experts models on many accelerators: tokens that go the same way share one ride.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


bench = typer.Typer(help="Measure on this machine.", no_args_is_help=True)
app.add_typer(bench, name="bench")


def main() -> None:
    """The command `carpool`."""
    app()


def _version(wanted: bool) -> None:
    if wanted:
        import carpool

        typer.echo(f"carpool {carpool.__version__}")
        raise typer.Exit


# Options of several commands.
_ZipfExponent = Annotated[float, typer.Option("--zipf-exponent", help="How unequal zipf is.")]
_Repetitions = Annotated[int, typer.Option("--repetitions", help="Timed repetitions of everything.")]
_Dtype = Annotated[str, typer.Option("--dtype", help="bfloat16, float16 or float32.")]
_Seed = Annotated[int, typer.Option("--seed", min=0, help="Of weights, rows and routing.")]
_Transports = Annotated[
    str | None, typer.Option("--transports", metavar="NAME,...", help="Default: all that can run here.")
]
_Ranks = Annotated[
    int | None, typer.Option("--ranks", help="Ranks on this machine. Default: one per GPU, or 4 on CPU.")
]
_Device = Annotated[str, typer.Option("--device", help="auto (cuda if there is a GPU, otherwise cpu), cpu or cuda.")]
_JsonOnly = Annotated[bool, typer.Option("--json-only", help="Write the JSON file; no table, no figure.")]
_RanksDebug = Annotated[bool, typer.Option("--debug", help="Tracebacks, and the output of all ranks.")]


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


@app.command()
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
        Path | None, typer.Option("--config", help="TOML file of settings. Without it: the demo's.")
    ] = None,
    compare: Annotated[
        _Transport | None,
        typer.Option("--compare", help="At the end, time this run's steps against this transport, interleaved."),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the resolved settings and the memory per rank; train nothing.")
    ] = False,
    help_config: Annotated[bool, typer.Option("--help-config", help="Explain every setting.")] = False,
    debug: _RanksDebug = False,
) -> None:
    """Train a model. It starts one rank per GPU (or 4 processes on CPU), unless torchrun or Slurm started it.

    Without arguments: a small model on the source code of Python's standard library; nothing is downloaded.
    """
    if help_config:
        _explain_config()
        return
    with _errors(debug):
        from carpool.train.config import load_config

        settings = load_config(config, overrides or [])
        _require(_TRAIN_PACKAGES)
        _check_paths(settings)
        if dry_run:
            from carpool.train.estimate import dry_run as estimate

            typer.echo(estimate(settings))
            return
        from carpool.train.launch import run

        command = shlex.join(["carpool", *sys.argv[1:]])
        against = compare.value if compare else None
        run(settings, "carpool.train.loop:train", debug=debug, compare=against, command=command)


@app.command()
def report(
    run: Annotated[Path, typer.Argument(help="The run's folder (training.output_dir).")],
    open_: Annotated[bool, typer.Option("--open", help="Open it in the browser.")] = False,
    output: Annotated[Path | None, typer.Option("--output", help="File to write. Default: RUN/report.html.")] = None,
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks.")] = False,
) -> None:
    """Write what happened in a run as one HTML file, which needs no network."""
    with _errors(debug):
        from carpool.report import write_report

        written = write_report(run, output)
        typer.echo(f"wrote {written}")
        if open_:
            import webbrowser

            if not webbrowser.open(written.absolute().as_uri()):
                typer.echo(f"no browser found here; open {written.absolute().as_uri()} yourself", err=True)


@app.command()
def generate(
    run: Annotated[Path, typer.Argument(help="The run's folder (training.output_dir).")],
    prompt: Annotated[str, typer.Option("--prompt", help="Text to continue.")],
    max_new_tokens: Annotated[int, typer.Option("--max-new-tokens", min=1, help="Tokens to add at most.")] = 200,
    temperature: Annotated[float, typer.Option("--temperature", min=0.0, help="0: always the likeliest.")] = 0.8,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Seed of the choice.")] = 0,
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks.")] = False,
) -> None:
    """Continue a text with the newest checkpoint of a run."""
    with _errors(debug):
        _require(_TRAIN_PACKAGES)
        from carpool.train.generate import generate as continue_text

        text = continue_text(run, prompt=prompt, max_new_tokens=max_new_tokens, temperature=temperature, seed=seed)
        typer.echo(text)


@app.command()
def doctor() -> None:
    """Check this machine: versions, devices, memory, data, and an exchange between two ranks."""
    from carpool.doctor import RED, check_all

    console = Console()
    worst = "green"
    for check in check_all():
        mark = {"green": "ok  ", "yellow": "note", "red": "FAIL"}[check.color]
        console.print(f"[{check.color}]{mark}[/] {escape(check.name):<14} {escape(check.text)}", highlight=False)
        worst = RED if check.color == RED else worst
    if worst == RED:
        raise typer.Exit(1)


@bench.command("transport")
def bench_transport(
    ranks: _Ranks = None,
    shape: Annotated[
        list[str] | None,
        typer.Option(
            "--shape",
            metavar="T,H,E,K",
            help="Tokens per rank, hidden size, experts, experts per token; may be repeated. Default on GPUs: "
            "4096,7168,256,8 and 8192,2048,64,8 and 8192,4096,128,8; on CPU 1024,256,32,4.",
        ),
    ] = None,
    transports: _Transports = None,
    routing: Annotated[str, typer.Option("--routing", help="uniform, zipf, skewed, or all.")] = "uniform",
    zipf_exponent: _ZipfExponent = 1.0,
    dtype: _Dtype = "bfloat16",
    ctas: Annotated[
        list[int] | None,
        typer.Option("--ctas", help="Thread blocks of the nvlink transport; may be repeated. Default: 8 and 16."),
    ] = None,
    fp8: Annotated[bool, typer.Option("--fp8", help="Also nvlink with rows as FP8 on the way out (lossy).")] = False,
    backward: Annotated[bool, typer.Option("--backward", help="Also the rides of the backward.")] = False,
    decode: Annotated[
        bool, typer.Option("--decode", help="Also 128 tokens per rank, as a CUDA graph where that is possible.")
    ] = False,
    repetitions: _Repetitions = 15,
    seed: _Seed = 0,
    device: _Device = "auto",
    out: Annotated[
        Path, typer.Option("--out", help="Folder for transport.json and transport.png, which are overwritten.")
    ] = Path("runs/bench/transport"),
    json_only: _JsonOnly = False,
    debug: _RanksDebug = False,
) -> None:
    """Time how rows travel: all transports side by side, checked, interleaved, beside the ceiling of plain copies.

    It starts the ranks itself, unless torchrun or Slurm started it.
    """
    with _errors(debug):
        from carpool.bench.options import split
        from carpool.bench.transport.benchmark import benchmark
        from carpool.bench.transport.settings import Settings, Shape

        settings = Settings(
            ranks=ranks,
            device=device,
            shapes=tuple(Shape.parse(text) for text in shape or ()),
            transports=split(transports),
            dtype=dtype,
            routings=split(routing),
            zipf_exponent=zipf_exponent,
            ctas=tuple(ctas or ()),
            repetitions=repetitions,
            seed=seed,
            backward=backward,
            decode=decode,
            fp8=fp8,
            out=str(out),
            json_only=json_only,
        )
        benchmark(settings, debug=debug, command=shlex.join(["carpool", *sys.argv[1:]]))


_SHAPE = typer.Option(
    "--shape",
    metavar="T,H,F,E,K",
    help="Tokens per rank, hidden size, expert hidden size, experts, experts per token; may be repeated. Default on "
    "CPU: 128,64,48,16,4; on GPUs 8192,2048,1024,64,8 and others.",
)
_MODEL = typer.Option(
    "--model",
    help="A model's sizes and experts: olmoe, qwen3-30b-a3b, mixtral-8x7b, deepseek-v3, gpt-oss-120b; may be repeated.",
)
_TOKENS = typer.Option("--tokens", help="Tokens per rank of --model.")
_ACTIVATION = typer.Option(
    "--activation",
    help="What experts of --shape compute: swiglu (default), gpt-oss (clamped, biases), relu2 (no gate).",
)
_EXPERTS = typer.Option(
    "--experts",
    metavar="NAME,...",
    help="Carpool's experts: grouped, reference, fp8 (lossy). Default: all but reference.",
)
_EXPERT_ROUTING = typer.Option(
    "--routing", help="uniform, zipf, hot (one expert is everybody's choice), several with commas, or all."
)


@bench.command("experts")
def bench_experts(
    shape: Annotated[list[str] | None, _SHAPE] = None,
    model: Annotated[list[str] | None, _MODEL] = None,
    tokens: Annotated[int, _TOKENS] = 8192,
    activation: Annotated[str | None, _ACTIVATION] = None,
    experts: Annotated[str | None, _EXPERTS] = None,
    against: Annotated[
        str | None,
        typer.Option("--against", metavar="NAME,...", help="Of transformers: grouped_mm, eager. Default: both."),
    ] = None,
    routing: Annotated[str, _EXPERT_ROUTING] = "uniform",
    zipf_exponent: _ZipfExponent = 1.0,
    dtype: _Dtype = "bfloat16",
    repetitions: _Repetitions = 15,
    seed: _Seed = 0,
    device: _Device = "auto",
    out: Annotated[
        Path, typer.Option("--out", help="Folder for experts.json and experts.png, which are overwritten.")
    ] = Path("runs/bench/experts"),
    json_only: _JsonOnly = False,
    debug: Annotated[bool, typer.Option("--debug", help="Tracebacks.")] = False,
) -> None:
    """Time what experts compute on one device, Carpool's beside transformers'; and see what they keep."""
    with _errors(debug):
        _require(_BENCH_PACKAGES)
        from carpool.bench.moe.experts import benchmark
        from carpool.bench.moe.settings import Settings, list_shapes
        from carpool.bench.options import split

        settings = Settings(
            device=device,
            shapes=list_shapes(shape or (), model or (), tokens, activation),
            experts=split(experts),
            against=split(against),
            dtype=dtype,
            routings=split(routing),
            zipf_exponent=zipf_exponent,
            repetitions=repetitions,
            seed=seed,
            out=str(out),
            json_only=json_only,
        )
        benchmark(settings, command=shlex.join(["carpool", *sys.argv[1:]]))


@bench.command("layer")
def bench_layer(
    ranks: _Ranks = None,
    shape: Annotated[list[str] | None, _SHAPE] = None,
    model: Annotated[list[str] | None, _MODEL] = None,
    tokens: Annotated[int, _TOKENS] = 8192,
    activation: Annotated[str | None, _ACTIVATION] = None,
    transports: _Transports = None,
    experts: Annotated[str | None, _EXPERTS] = None,
    routing: Annotated[str, _EXPERT_ROUTING] = "uniform",
    zipf_exponent: _ZipfExponent = 1.0,
    dtype: _Dtype = "bfloat16",
    repetitions: _Repetitions = 15,
    iterations: Annotated[int, typer.Option("--iterations", help="Layers back to back in one repetition.")] = 5,
    seed: _Seed = 0,
    device: _Device = "auto",
    out: Annotated[
        Path, typer.Option("--out", help="Folder for layer.json and layer.png, which are overwritten.")
    ] = Path("runs/bench/layer"),
    json_only: _JsonOnly = False,
    debug: _RanksDebug = False,
) -> None:
    """Time whole MoE layers over ranks: transports and experts of Carpool against transformers' expert parallelism.

    It starts the ranks itself, unless torchrun or Slurm started it.
    """
    with _errors(debug):
        _require(_BENCH_PACKAGES)
        from carpool.bench.moe.layer import benchmark
        from carpool.bench.moe.settings import LayerSettings, list_shapes
        from carpool.bench.options import split

        settings = LayerSettings(
            ranks=ranks,
            device=device,
            shapes=list_shapes(shape or (), model or (), tokens, activation),
            transports=split(transports),
            experts=split(experts),
            dtype=dtype,
            routings=split(routing),
            zipf_exponent=zipf_exponent,
            repetitions=repetitions,
            iterations=iterations,
            seed=seed,
            out=str(out),
            json_only=json_only,
        )
        benchmark(settings, debug=debug, command=shlex.join(["carpool", *sys.argv[1:]]))


def _explain_config() -> None:
    from carpool.train.config import describe

    console = Console()
    section = ""
    for name, kind, default, description in describe():
        if name.split(".")[0] != section:
            section = name.split(".")[0]
            console.print(f"\n[bold]{escape(f'[{section}]')}[/]")
        console.print(f"  [bold]{name}[/] = {escape(default)}  [dim]({escape(kind)})[/]", highlight=False)
        console.print(f"      {escape(description)}", highlight=False)


def _check_paths(config: Config) -> None:
    """Refuses paths where nothing is, before any rank is started."""
    from carpool.train.data import check_sources
    from carpool.train.tokenizer import load_tokenizer

    if config.model.path is not None and not (Path(config.model.path) / "config.json").is_file():
        raise ValueError(f"model.path: {config.model.path} is no checkpoint folder (it has no config.json)")
    if config.moe.layout != "contiguous" and not Path(config.moe.layout).is_file():
        raise ValueError(f'moe.layout: the file {config.moe.layout} does not exist; give "contiguous" or a JSON file')
    resume = config.training.resume_from_checkpoint
    if resume not in (None, "last") and not Path(str(resume)).is_dir():
        raise ValueError(
            f'training.resume_from_checkpoint: {resume} is no folder; give "last" or a folder such as '
            f"{Path(config.training.output_dir) / 'checkpoints' / 'step-00000100'}"
        )
    check_sources(config.data)
    load_tokenizer(config.data.tokenizer, config.model.path, config.data.eos_token)


def _require(packages: tuple[str, ...]) -> None:
    import importlib.util

    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    if missing:
        raise ValueError(f"this needs {', '.join(missing)}: pip install 'carpool[train]'")


@contextlib.contextmanager
def _errors(debug: bool) -> Iterator[None]:
    """Turns what a user can put right into one line, and a failed rank into its traceback and one message."""
    from carpool.train.failure import Interrupted, RankFailure
    from carpool.train.worker import is_user_error

    try:
        yield
    except RankFailure as failure:
        if failure.traceback and (debug or not failure.user_error):
            typer.echo(failure.traceback, err=True)
        _fail(str(failure))
    except Interrupted as stopped:
        _fail(str(stopped), 128 + stopped.signum)
    except KeyboardInterrupt:
        _fail("stopped by Ctrl-C", 130)
    except Exception as error:
        if debug or not (is_user_error(error) or isinstance(error, ImportError)):
            raise
        _fail(str(error))


def _fail(text: str, code: int = 1) -> None:
    # Under torchrun and Slurm every rank is a command of its own.
    rank = f" (rank {os.environ['RANK']})" if "RANK" in os.environ else ""
    Console(stderr=True, soft_wrap=True).print(f"[bold red]error{rank}:[/] {escape(text)}", highlight=False)
    raise typer.Exit(code)


if __name__ == "__main__":
    main()
