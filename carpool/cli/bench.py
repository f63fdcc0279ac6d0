"""`carpool bench`: transport, experts, layer, model, generate."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated, Any

import typer

from carpool.cli.common import (
    BENCH_PACKAGES,
    TRAIN_PACKAGES,
    Debug,
    Device,
    Dtype,
    JsonOnly,
    Ranks,
    RanksDebug,
    Repetitions,
    Seed,
    Transports,
    ZipfExponent,
    check_output,
    command,
    errors,
    require,
)

bench = typer.Typer(help="Measure on this machine.", no_args_is_help=True)


def fill(settings: type[Any], given: dict[str, Any], **parsed: Any) -> Any:
    """Settings from a command's arguments of the same names; where a list is wanted, a text has it with commas."""
    from carpool.bench.options import split

    check_output("--out", given["out"])
    values = {**given, **parsed}
    fields = [field for field in dataclasses.fields(settings) if field.name in values]
    for field in fields:
        value = values[field.name]
        if str(field.type).startswith("tuple"):
            values[field.name] = split(value) if isinstance(value, str) else tuple(value or ())
    values["out"] = str(given["out"])
    return settings(**{field.name: values[field.name] for field in fields})


@bench.command("transport")
def bench_transport(
    ranks: Ranks = None,
    shape: Annotated[
        list[str] | None,
        typer.Option(
            "--shape",
            metavar="T,H,E,K",
            help="Tokens per rank, hidden size, experts, experts per token; may be repeated. Default on GPUs: "
            "4096,7168,256,8 and 8192,2048,64,8 and 8192,4096,128,8; on CPU 1024,256,32,4.",
        ),
    ] = None,
    transports: Transports = None,
    routings: Annotated[str, typer.Option("--routing", help="uniform, zipf, skewed, or all.")] = "uniform",
    zipf_exponent: ZipfExponent = 1.0,
    dtype: Dtype = "bfloat16",
    ctas: Annotated[
        list[int] | None,
        typer.Option("--ctas", help="Thread blocks of the nvlink transport; may be repeated. Default: 8 and 16."),
    ] = None,
    fp8: Annotated[
        bool, typer.Option("--fp8", help="Also with rows as FP8 on the way out, where a transport can (lossy).")
    ] = False,
    backward: Annotated[bool, typer.Option("--backward", help="Also the rides of the backward.")] = False,
    decode: Annotated[
        bool, typer.Option("--decode", help="Also 128 tokens per rank, as a CUDA graph where that is possible.")
    ] = False,
    repetitions: Repetitions = 15,
    seed: Seed = 0,
    device: Device = "auto",
    out: Annotated[
        Path, typer.Option("--out", help="Folder for transport.json and transport.png, which are overwritten.")
    ] = Path("runs/bench/transport"),
    json_only: JsonOnly = False,
    debug: RanksDebug = False,
) -> None:
    """Time how rows travel: all transports side by side, checked, interleaved, beside the ceiling of plain copies.

    It starts the ranks itself, unless torchrun or Slurm started it.
    """
    given = locals()
    with errors(debug):
        from carpool.bench.ranks import start_ranks
        from carpool.bench.transport.settings import Settings, Shape

        settings = fill(Settings, given, shapes=tuple(Shape.parse(text) for text in shape or ()))
        start_ranks(settings, "carpool.bench.transport.benchmark:BENCHMARK", debug=debug, command=command())


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
    help="Carpool's experts: grouped, reference, fp8 (lossy), and, in bench experts, fp8-held. Default: all but the "
    "reference.",
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
    routings: Annotated[str, _EXPERT_ROUTING] = "uniform",
    zipf_exponent: ZipfExponent = 1.0,
    dtype: Dtype = "bfloat16",
    repetitions: Repetitions = 15,
    seed: Seed = 0,
    device: Device = "auto",
    out: Annotated[
        Path, typer.Option("--out", help="Folder for experts.json and experts.png, which are overwritten.")
    ] = Path("runs/bench/experts"),
    json_only: JsonOnly = False,
    debug: Debug = False,
) -> None:
    """Time what experts compute on one device, Carpool's beside transformers'; and see what they keep."""
    given = locals()
    with errors(debug):
        require(BENCH_PACKAGES)
        from carpool.bench.moe.experts import benchmark
        from carpool.bench.moe.settings import Settings, list_shapes

        settings = fill(Settings, given, shapes=list_shapes(shape or (), model or (), tokens, activation))
        benchmark(settings, command=command())


@bench.command("layer")
def bench_layer(
    ranks: Ranks = None,
    shape: Annotated[list[str] | None, _SHAPE] = None,
    model: Annotated[list[str] | None, _MODEL] = None,
    tokens: Annotated[int, _TOKENS] = 8192,
    activation: Annotated[str | None, _ACTIVATION] = None,
    transports: Transports = None,
    experts: Annotated[str | None, _EXPERTS] = None,
    routings: Annotated[str, _EXPERT_ROUTING] = "uniform",
    zipf_exponent: ZipfExponent = 1.0,
    dtype: Dtype = "bfloat16",
    repetitions: Repetitions = 15,
    iterations: Annotated[int, typer.Option("--iterations", help="Layers back to back in one repetition.")] = 5,
    seed: Seed = 0,
    device: Device = "auto",
    out: Annotated[
        Path, typer.Option("--out", help="Folder for layer.json and layer.png, which are overwritten.")
    ] = Path("runs/bench/layer"),
    json_only: JsonOnly = False,
    debug: RanksDebug = False,
) -> None:
    """Time whole MoE layers over ranks: transports and experts of Carpool against transformers' expert parallelism.

    It starts the ranks itself, unless torchrun or Slurm started it.
    """
    given = locals()
    with errors(debug):
        require(BENCH_PACKAGES)
        from carpool.bench.moe.settings import LayerSettings, list_shapes
        from carpool.bench.ranks import start_ranks

        settings = fill(LayerSettings, given, shapes=list_shapes(shape or (), model or (), tokens, activation))
        start_ranks(settings, "carpool.bench.moe.layer:BENCHMARK", debug=debug, command=command())


@bench.command("model")
def bench_model(
    model: Annotated[
        str,
        typer.Option(
            "--model",
            help="qwen3-30b-a3b, olmoe-1b-7b, gpt-oss-20b, deepseek-v3-cut or another published configuration, or a "
            "config.json.",
        ),
    ],
    layers: Annotated[int | None, typer.Option("--layers", help="Only the first of its layers.")] = None,
    ranks: Ranks = None,
    sequence: Annotated[int, typer.Option("--sequence", help="Tokens in one sequence.")] = 4096,
    batch: Annotated[int, typer.Option("--batch", help="Sequences of a rank in a micro-batch.")] = 2,
    accumulation: Annotated[int, typer.Option("--accumulation", help="Micro-batches in a step.")] = 1,
    routing: Annotated[
        str,
        typer.Option(
            "--routing",
            help="balanced (choices are forced, equally many for each expert), learned (the routers choose), or the "
            ".npz file of a trace.",
        ),
    ] = "balanced",
    contenders: Annotated[
        str,
        typer.Option(
            "--contenders",
            metavar="NAME,...",
            help="Some of carpool, carpool-compiled, transformers, transformers-compiled. Carpool's may have "
            "settings of their own: carpool-compiled+moe.schedule=two-batch.",
        ),
    ] = "carpool,carpool-compiled,transformers,transformers-compiled",
    steps: Annotated[int, typer.Option("--steps", help="Steps back to back in a round.")] = 5,
    rounds: Annotated[int, typer.Option("--rounds", help="Rounds, in which contenders take turns.")] = 3,
    overrides: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="SECTION.KEY=VALUE",
            help="Any setting of `carpool train`, such as moe.schedule=chunks or model.dtype=float32; may be repeated.",
        ),
    ] = None,
    seed: Seed = 0,
    device: Device = "auto",
    out: Annotated[
        Path, typer.Option("--out", help="Folder for model.json and model.png, which are overwritten.")
    ] = Path("runs/bench/model"),
    json_only: JsonOnly = False,
    debug: RanksDebug = False,
) -> None:
    """Time whole training steps of a real configuration with random weights, and see where their time goes.

    It starts the ranks itself, unless torchrun or Slurm started it.
    """
    given = locals()
    with errors(debug):
        require(TRAIN_PACKAGES)
        from carpool.bench.model.settings import Settings
        from carpool.bench.ranks import start_ranks

        settings = fill(Settings, given)
        start_ranks(settings, "carpool.bench.model.run:BENCHMARK", debug=debug, command=command())


@bench.command("generate")
def bench_generate(
    model: Annotated[
        str, typer.Option("--model", help="qwen3-30b-a3b, olmoe-1b-7b or another published one, or a config.json.")
    ],
    layers: Annotated[int | None, typer.Option("--layers", help="Only the first of its layers.")] = None,
    ranks: Ranks = None,
    batch: Annotated[
        int | None, typer.Option("--batch", min=1, help="Prompts of a rank. Default: 64 on GPUs, 4 on a CPU.")
    ] = None,
    prompt: Annotated[
        int | None, typer.Option("--prompt", min=1, help="Tokens of a prompt. Default: 256 on GPUs, 32 on a CPU.")
    ] = None,
    new_tokens: Annotated[int, typer.Option("--new-tokens", help="Tokens to add to each prompt.")] = 32,
    routing: Annotated[
        str,
        typer.Option("--routing", help="balanced (choices are forced) or learned (routers of random weights choose)."),
    ] = "balanced",
    contenders: Annotated[
        str, typer.Option("--contenders", metavar="NAME,...", help="Some of carpool, carpool-eager, transformers.")
    ] = "carpool,carpool-eager,transformers",
    dtype: Annotated[str | None, typer.Option("--dtype", help="Default: bfloat16 on GPUs, float32 on a CPU.")] = None,
    rounds: Annotated[int, typer.Option("--rounds", min=1, help="Rounds, in which contenders take turns.")] = 3,
    seed: Seed = 0,
    device: Device = "auto",
    out: Annotated[Path, typer.Option("--out", help="Folder for generate.json, which is overwritten.")] = Path(
        "runs/bench/generate"
    ),
    json_only: JsonOnly = False,
    debug: RanksDebug = False,
) -> None:
    """Time prefill and decoding of a real configuration with random weights, beside Transformers' generate.

    It starts the ranks itself, unless torchrun or Slurm started it.
    """
    given = locals()
    with errors(debug):
        require(TRAIN_PACKAGES)
        from carpool.bench.generate import Settings
        from carpool.bench.ranks import start_ranks

        settings = fill(Settings, given)
        start_ranks(settings, "carpool.bench.generate:BENCHMARK", debug=debug, command=command())
