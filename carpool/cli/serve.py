"""`carpool generate`, `chat` and `eval`."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, Any, get_args

import typer

from carpool.cli.common import TRAIN_PACKAGES, RanksDebug, check_writable, errors, require
from carpool.serve import check_folder
from carpool.train.launch.worker import collector_paused

_Model = Annotated[
    Path,
    typer.Argument(help="A checkpoint's folder (config.json, safetensors, a tokenizer), a run's, or an adapter's."),
]
_Adapters = Annotated[
    list[str] | None,
    typer.Option(
        "--adapter",
        metavar="[NAME=]DIR",
        help="An adapter of the model, unmerged: a folder as peft writes it, or a run's. May be repeated; the first "
        "counts.",
    ),
]
_Ranks = Annotated[
    int | None,
    typer.Option(
        "--ranks", min=1, help="Ranks on this machine, at most one per expert. Default: one per GPU; 1 on a CPU."
    ),
]
_Dtype = Annotated[
    str | None, typer.Option("--dtype", help="Of the weights: bfloat16, float16 or float32. Default: as stored.")
]
_MaxNewTokens = Annotated[
    int | None,
    typer.Option(
        "--max-new-tokens",
        min=1,
        help="Tokens to add at most. Default: 200, in a chat 1024, or fewer where the model's context ends.",
    ),
]
_Temperature = Annotated[
    float | None,
    typer.Option(
        "--temperature",
        min=0.0,
        help="0: always the likeliest token. Default: as generation_config.json says, otherwise 0.8.",
    ),
]
_TopK = Annotated[int | None, typer.Option("--top-k", min=1, help="Only the k likeliest tokens.")]
_TopP = Annotated[
    float | None, typer.Option("--top-p", min=0.0, max=1.0, help="Only the likeliest tokens that sum up to this share.")
]
_Seed = Annotated[int, typer.Option("--seed", min=0, help="Of the choice. The same text on any number of ranks.")]


def generate(
    model: _Model,
    prompt: Annotated[list[str] | None, typer.Option("--prompt", help="Text to continue; may be repeated.")] = None,
    prompts: Annotated[
        Path | None,
        typer.Option(
            "--prompts",
            help='JSON lines: {"prompt": "text"} or {"messages": [...]}, for the chat template; "adapter" names one of '
            "several.",
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", help="JSON lines to write: prompts with their texts. Default: the terminal."),
    ] = None,
    max_new_tokens: _MaxNewTokens = None,
    temperature: _Temperature = None,
    top_k: _TopK = None,
    top_p: _TopP = None,
    seed: _Seed = 0,
    batch_size: Annotated[int, typer.Option("--batch-size", min=1, help="Prompts of a rank at a time, at most.")] = 64,
    adapter: _Adapters = None,
    ranks: _Ranks = None,
    dtype: _Dtype = None,
    experts: Annotated[
        str,
        typer.Option(
            "--experts",
            help="Where they are: device; host memory or disk (the checkpoint's files), from where they come when they "
            "are chosen (one rank; slower).",
        ),
    ] = "device",
    experts_memory: Annotated[
        str | None,
        typer.Option("--experts-memory", help="Of the GPU, for experts that stay once they came, such as 20GiB."),
    ] = None,
    expert_host_memory: Annotated[
        str | None,
        typer.Option(
            "--experts-host-memory",
            help="Of the host, with --experts disk, for experts that were read. At least two layers' are taken.",
        ),
    ] = None,
    predictor: Annotated[
        str,
        typer.Option(
            "--predictor",
            help="What foretells the experts that the next layer chooses: pairs (which go together in two layers), or "
            "matrix (those of the most similar text so far, as MoE-Infinity).",
        ),
    ] = "pairs",
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say whether it fits, and what it takes; load nothing.")
    ] = False,
    gpu: Annotated[
        str | None, typer.Option("--gpu", help="With --dry-run: the GPU that it is meant for (h100, h200, ...).")
    ] = None,
    debug: RanksDebug = False,
) -> None:
    """Continue texts, or answer conversations, with a checkpoint or the newest checkpoint of a run.

    Each rank continues prompts of its own, and experts are spread over all ranks.
    """
    with errors(debug):
        require(TRAIN_PACKAGES)
        check_folder(model)
        if (prompt is None) == (prompts is None):
            raise ValueError("give --prompt TEXT, or --prompts FILE.jsonl")
        if prompts is not None and not prompts.is_file():
            raise ValueError(f"--prompts: there is no file {prompts}")
        if out is not None:
            check_writable("--out", out)
        with collector_paused():
            from carpool.bench.options import one_of
            from carpool.memory.next_experts import PREDICTORS
            from carpool.serve.prompts import read_prompts
            from carpool.serve.serve_memory import ExpertTier, Where
            from carpool.serve.serve_ranks import default_ranks, start
            from carpool.train.config.schema_base import size_of

        one_of("--experts", experts, get_args(Where))
        one_of("--predictor", predictor, tuple(PREDICTORS))
        tier: dict[str, Any] = {
            "where": experts,
            "memory": 0 if experts_memory is None else size_of(experts_memory, "--experts-memory"),
            "host_memory": 0 if expert_host_memory is None else size_of(expert_host_memory, "--experts-host-memory"),
            "predictor": predictor,
        }
        there = ExpertTier(**tier)  # before ranks start
        asked = [{"prompt": one} for one in prompt or ()] if prompts is None else read_prompts(prompts)
        options = _options(max_new_tokens, temperature, top_k, top_p, seed)
        if dry_run:
            with collector_paused():
                from carpool.serve.generate_dry_run import describe

            number = default_ranks(ranks)
            typer.echo(describe(str(model), asked, options, batch_size, _known(dtype), number, there, gpu))
            return
        if gpu is not None:
            raise ValueError("--gpu says for which GPU --dry-run predicts; give both, or neither")
        start(
            "carpool.serve.generate_answers:run_rank",
            ranks,
            debug=debug,
            model=str(model),
            prompts=asked,
            options=options,
            batch_size=batch_size,
            dtype=_known(dtype),
            out=None if out is None else str(out),
            as_json=prompts is not None,
            experts=tier,
            adapters=adapter or [],
        )


def _options(
    max_new_tokens: int | None, temperature: float | None, top_k: int | None, top_p: float | None, seed: int
) -> dict[str, float | None]:
    """Of `carpool.hf.generation.Sampling`; None: as the checkpoint says.

    Raises:
        ValueError: values that cannot be, or change nothing."""
    if temperature is not None and not math.isfinite(temperature):
        raise ValueError(f"--temperature {temperature:g} must be a finite number; 0 takes the likeliest token")
    if temperature == 0 and (top_k is not None or top_p is not None):
        raise ValueError("--top-k and --top-p change nothing with --temperature 0, which takes the likeliest token")
    return {
        "max_new_tokens": max_new_tokens,
        "temperature": temperature,
        "top_k": top_k,
        "top_p": top_p,
        "seed": seed,
    }


def _known(dtype: str | None) -> str | None:
    from carpool.bench.options import DTYPES, one_of

    if dtype is not None:
        one_of("--dtype", dtype, DTYPES)
    return dtype


def chat(
    model: _Model,
    system: Annotated[str | None, typer.Option("--system", help="The system prompt.")] = None,
    max_new_tokens: _MaxNewTokens = None,
    temperature: _Temperature = None,
    top_k: _TopK = None,
    top_p: _TopP = None,
    seed: _Seed = 0,
    adapter: _Adapters = None,
    ranks: _Ranks = None,
    dtype: _Dtype = None,
    debug: RanksDebug = False,
) -> None:
    """Talk with a model in the words of its chat template; /reset forgets, /exit ends. Works in a pipe, too.

    Of several adapters (--adapter sql=runs/sql --adapter runs/poems) the first answers; /adapter poems takes another.
    """
    with errors(debug):
        require(TRAIN_PACKAGES)
        check_folder(model)
        from carpool.serve.serve_ranks import start

        options = _options(max_new_tokens, temperature, top_k, top_p, seed)
        settings: dict[str, Any] = {"model": str(model), "system": system, "options": options, "dtype": _known(dtype)}
        settings["adapters"] = adapter or []
        start("carpool.serve.conversation:run_rank", ranks, debug=debug, **settings)


def evaluate(
    model: _Model,
    data: Annotated[
        list[Path] | None,
        typer.Option("--data", help="Text, or JSON lines (.jsonl), to measure perplexity on; may be repeated."),
    ] = None,
    text_field: Annotated[str, typer.Option("--text-field", help="Of JSON lines.")] = "text",
    tasks: Annotated[
        str | None,
        typer.Option("--tasks", metavar="NAME,...", help="Of lm-evaluation-harness, where lm_eval is installed."),
    ] = None,
    limit: Annotated[int | None, typer.Option("--limit", min=1, help="Examples of each task, at most.")] = None,
    window: Annotated[
        int | None,
        typer.Option(
            "--window",
            min=2,
            help="Tokens of a window. Default: a run's sequence length, or what a model sees, at most 2048.",
        ),
    ] = None,
    stride: Annotated[
        int | None,
        typer.Option("--stride", min=1, help="How much further the next window begins. Default: half a window."),
    ] = None,
    batch_size: Annotated[int, typer.Option("--batch-size", min=1, help="Windows of a rank at a time.")] = 8,
    adapter: _Adapters = None,
    ranks: _Ranks = None,
    dtype: _Dtype = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    debug: RanksDebug = False,
) -> None:
    """Measure a checkpoint, or the newest checkpoint of a run: perplexity on a text, tasks, or both."""
    with errors(debug):
        require(TRAIN_PACKAGES)
        check_folder(model)
        for file in data or ():
            if not file.is_file():
                raise ValueError(f"--data: there is no file {file}")
        if not data and tasks is None:
            raise ValueError("give --data FILE for perplexity, or --tasks NAME,...")
        if tasks is None and limit is not None:
            raise ValueError("--limit is of the examples of --tasks, and changes nothing without it; leave it out")
        if not data and (window is not None or stride is not None):
            raise ValueError("--window and --stride are of --data, and change nothing without it; leave them out")
        from carpool.bench.options import split
        from carpool.serve.serve_ranks import start

        if tasks is not None:
            from carpool.serve.eval_tasks import check_installed

            check_installed()
        start(
            "carpool.serve.evaluate:run_rank",
            ranks,
            debug=debug,
            model=str(model),
            files=[str(file) for file in data or ()],
            field=text_field,
            tasks=list(split(tasks)),
            limit=limit,
            window=window,
            stride=stride,
            batch_size=batch_size,
            dtype=_known(dtype),
            as_json=as_json,
            adapters=adapter or [],
        )
