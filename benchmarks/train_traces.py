"""Real routing traces: trains small mixture-of-experts models on the text that a machine has, samples their routing.

    python benchmarks/train_traces.py prepare --work /tmp/work
    python benchmarks/train_traces.py train --work /tmp/work --name e64 --out traces          # and others, side by side
    python benchmarks/train_traces.py train --work /tmp/work --name e64-noaux --aux 0 --out traces
    python benchmarks/train_traces.py train --work /tmp/work --name e128 --experts 128 --out traces

`prepare` gathers text of three kinds (Python: the standard library and installed packages; C: header files; prose:
documentation, licences and manual pages), trains a byte-pair tokenizer of 4096 tokens on it and tokenises it.

`train` trains one model in one process on one GPU (or the CPU, slowly): OLMoE's architecture, by default with hidden
size 512, 64 experts of 256, top-8, 8 layers, sequences of 512, 32 768 tokens a step, AdamW, bf16, and a balance loss
for each layer (`--balance model`: transformers', of all layers together). It stops after `--steps`, or earlier if
`--seconds` would be exceeded. It writes into `--out`:

    NAME-STEP.npz         a trace (carpool.placement.trace) of the steps before STEP, 16384 tokens of training batches
    NAME-loads.npz        load_SLE: choices of each expert per step and layer, of consecutive steps early in training
                          and at its end; step_S: their steps. For comparing predictors of load
    NAME.json             losses (training, held out by kind of text), measures of specialisation, settings
    WORK/models/NAME      the model, for benchmarks/prune_finetune.py
"""

from __future__ import annotations

import argparse
import gzip
import json
import re
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from carpool.hf import install, rides
from carpool.hf.build import build_model, make_config
from carpool.hf.trace import TraceRecorder
from carpool.parallel.clip import clip_grad_norm
from carpool.train.config.schema import DataSection, TrainingSection
from carpool.train.data.corpus import Corpus, prepare
from carpool.train.data.loader import EvalLoader, TokenMean, TrainLoader, count_targets
from carpool.train.data.tokenizer import FileTokenizer
from carpool.train.run.environment import environment
from carpool.train.run.step import Batch, Objective, learning_rate, make_optimizer

EOS = "<|endoftext|>"
KINDS = ("python", "c", "prose")
PROSE = re.compile(
    r"\.(md|rst|txt)(\.gz)?$|\.[1-8](\.gz)?$|(licen[cs]e|copying|readme|notice|changelog|copyright)", re.I
)
# From which step on loads are kept, and how many steps each time.
LOAD_WINDOW = 256


# ------------------------------------------------------------------------------------------------------------- text


def find_files() -> Iterator[tuple[str, Path]]:
    """(kind, file) of what this machine has, in a fixed order."""
    paths = sysconfig.get_paths()
    packages = {Path(paths["purelib"]), Path(paths["platlib"]), Path(torch.__file__).parent.parent}
    roots = [Path(paths["stdlib"]), *sorted(packages), Path("/usr/include"), Path("/usr/local/include")]
    roots += [
        Path("/usr/share/doc"),
        Path("/usr/share/man"),
        Path("/usr/share/perl"),
        Path("/usr/share/common-licenses"),
    ]
    seen = set()
    for root in roots:
        for path in sorted(root.rglob("*")) if root.is_dir() else []:
            if path in seen or path.is_symlink() or not path.is_file():
                continue
            seen.add(path)
            if path.suffix == ".py":
                yield "python", path
            elif path.suffix in (".h", ".hpp", ".cuh", ".c", ".cpp"):
                yield "c", path
            elif PROSE.search(path.name):
                yield "prose", path


def read(path: Path) -> str | None:
    """A file's text if it is some, of readable length and plain UTF-8."""
    try:
        raw = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        text = raw.decode("utf-8")
    except (OSError, EOFError, ValueError):
        return None
    return text if 400 <= len(text) <= 400_000 and "\0" not in text else None


def gather(folder: Path, max_bytes: int) -> dict[str, int]:
    """Write each kind's text into `folder` as JSON lines, in a shuffled order, so that a prefix is a sample of all."""
    files: dict[str, list[Path]] = {kind: [] for kind in KINDS}
    for kind, path in find_files():
        files[kind].append(path)
    sizes = {}
    for kind, paths in files.items():
        seen: set[int] = set()
        total = 0
        with (folder / f"{kind}.jsonl").open("w") as out:
            for index in np.random.default_rng(0).permutation(len(paths)):
                text = read(paths[index])
                if text is None or hash(text) in seen:
                    continue
                seen.add(hash(text))
                out.write(json.dumps({"text": text}) + "\n")
                total += len(text)
                if total >= max_bytes:
                    break
        sizes[kind] = total
    return sizes


def train_tokenizer(folder: Path, vocab_size: int, sample_bytes: int) -> None:
    """A byte-level BPE tokenizer on an equal sample of each kind."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    def sample() -> Iterator[str]:
        for kind in KINDS:
            total = 0
            for line in (folder / f"{kind}.jsonl").open():
                text = json.loads(line)["text"]
                total += len(text)
                yield text
                if total >= sample_bytes:
                    break

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=[EOS], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(sample(), trainer)
    tokenizer.save(str(folder / "tokenizer.json"))


def corpora(work: Path) -> tuple[FileTokenizer, dict[str, Corpus]]:
    """The tokens of each kind of text, with a twentieth of its documents held out."""
    tokenizer = FileTokenizer(work / "tokenizer.json", EOS)
    return tokenizer, {
        kind: prepare(
            DataSection(train=(str(work / f"{kind}.jsonl"),), eval_fraction=0.05, cache_dir=str(work / "tokens")),
            tokenizer,
        )
        for kind in KINDS
    }


# --------------------------------------------------------------------------------------------------------- training


def held_out(corpus: Corpus, length: int, sequences: int, batch: int, **ranks: int) -> EvalLoader:
    return EvalLoader(corpus.eval, sequence_length=length, batch_size=batch, max_sequences=sequences, **ranks)


def to_device(batch: Batch, device: torch.device) -> Batch:
    return {name: value.to(device, non_blocking=True) for name, value in batch.items()}


def evaluate(
    objective: Objective, loader: EvalLoader, device: torch.device, reduce: Callable[[Any], Any] | None = None
) -> float:
    """Mean loss per held-out token."""
    mean, model = TokenMean(), objective.model
    model.eval()
    with torch.no_grad():
        for batch in loader:
            batch = to_device(batch, device)
            targets = count_targets(batch["labels"])
            mean.add(objective.forward(batch)[0] / max(1, targets), targets)
    model.train()
    return mean.value(reduce)[0]


def train(args: argparse.Namespace) -> None:
    began = time.monotonic()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    tokenizer, texts = corpora(args.work)
    tokens = np.concatenate([texts[kind].train for kind in KINDS])
    loader = TrainLoader(
        tokens, fingerprint="all kinds", sequence_length=args.length, batch_size=args.batch, seed=args.seed
    )
    evals = {kind: held_out(texts[kind], args.length, args.eval_sequences, args.batch) for kind in KINDS}
    config = make_config(
        "olmoe",
        {
            "hidden_size": args.hidden,
            "intermediate_size": args.intermediate,
            "num_hidden_layers": args.layers,
            "num_attention_heads": max(1, args.hidden // 64),
            "num_key_value_heads": max(1, args.hidden // 64),
            "num_experts": args.experts,
            "num_experts_per_tok": args.top_k,
            "vocab_size": tokenizer.vocab_size,
            "max_position_embeddings": args.length,
            "router_aux_loss_coef": args.aux,
            "bos_token_id": None,
            "pad_token_id": None,
            "eos_token_id": tokenizer.eos_id,
        },
    )
    model = build_model(config, distributed_config=None, dtype=torch.float32, seed=args.seed).to(device)
    install(model)
    objective = Objective(
        model,
        top_k=args.top_k,
        aux_coef=args.aux,
        balance_layers=args.balance == "layer",
        dp_size=1,
        autocast=torch.bfloat16 if device.type == "cuda" else None,
    )
    settings = TrainingSection(
        max_steps=args.steps, learning_rate=args.learning_rate, warmup_steps=min(100, args.steps // 10)
    )
    optimizer = make_optimizer(model, settings)
    layers = list(rides(model).values())
    # Counts since the beginning; differences are the loads of steps.
    counted_SLE = torch.zeros(args.steps + 1, len(layers), args.experts, dtype=torch.int64, device=device)
    losses: list[float] = []
    snapshots: list[dict[str, Any]] = []
    due: list[int] = []
    recorder: TraceRecorder | None = None
    step = 0
    while step < settings.max_steps:
        step += 1
        if step == min(20, args.steps):
            timed = time.monotonic()
        if step == min(50, args.steps):
            # Only now is it known how long a step takes; the schedule has not begun to fall.
            left = args.seconds - (time.monotonic() - began)
            each = (time.monotonic() - timed) / max(1, step - 20)
            steps = min(args.steps, step + int(left / max(each, 1e-6)))
            settings = settings.model_copy(update={"max_steps": max(steps, step + 1)})
            due = sorted({max(step + 1, int(share * settings.max_steps)) for share in (*args.at, 1.0)})
            say(f"{args.name}: {1e3 * each:.1f} ms a step, so {settings.max_steps} steps; traces at {due}")
        if due and recorder is None and step > due[0] - args.trace_tokens // args.stretch:
            recorder = TraceRecorder(model, args.trace_tokens, stretch=args.stretch)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, settings)
        losses.append(objective.backward([to_device(batch, device) for batch in next(loader)]).loss)
        clip_grad_norm(model.parameters(), settings.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        counted_SLE[step] = torch.stack([own.stats.load_E for own in layers])
        if recorder is not None and step == due[0]:
            held = {kind: evaluate(objective, own, device) for kind, own in evals.items()}
            counted_SLE[step] = torch.stack([own.stats.load_E for own in layers])  # with the evaluation's
            snapshots.append(snapshot(args, recorder, step, losses, held))
            recorder.close()
            recorder, due = None, due[1:]

    args.out.mkdir(parents=True, exist_ok=True)
    save_loads(args, counted_SLE[: step + 1].cpu().numpy(), [s["step"] for s in snapshots])
    folder = args.work / "models" / args.name
    model.save_pretrained(folder)
    result = {
        "settings": {name: value for name, value in vars(args).items() if name not in ("work", "out", "run")},
        "tokens": len(tokens),
        "environment": environment(device, 1),
        "seconds": time.monotonic() - began,
        "steps": step,
        "snapshots": snapshots,
        "loss": losses,
    }
    (args.out / f"{args.name}.json").write_text(json.dumps(result) + "\n")
    say(f"{args.name}: done after {result['seconds']:.0f} s; model in {folder}")


def snapshot(
    args: argparse.Namespace, recorder: TraceRecorder, step: int, losses: list[float], held: dict[str, float]
) -> dict[str, Any]:
    """Write a trace, and say what is known at this step."""
    trace = recorder.trace(
        steps=step,
        seed=args.seed,
        data=f"{', '.join(KINDS)}: installed source code and documentation, BPE of 4096 tokens",
        held_out_loss={kind: round(loss, 4) for kind, loss in held.items()},
        architecture=f"OLMoE, hidden {args.hidden}, {args.experts} experts of {args.intermediate}, top-{args.top_k}, "
        f"{args.layers} layers, balance loss {args.aux:g} ({args.balance})",
        command=f"python benchmarks/train_traces.py {' '.join(without_paths(sys.argv[1:]))}",
    )
    args.out.mkdir(parents=True, exist_ok=True)
    path = args.out / f"{args.name}-{step}.npz"
    trace.save(path)
    measures = [trace.layer(number).specialisation() for number in range(trace.num_layers)]
    mean = {name: float(np.mean([own[name] for own in measures])) for name in measures[0]}
    copies = copies_per_token(trace.expert_LTK, args.experts, 4)
    say(
        f"{args.name}: step {step}: loss {np.mean(losses[-50:]):.3f}, held out "
        + ", ".join(f"{kind} {loss:.3f}" for kind, loss in held.items())
        + "; "
        + ", ".join(f"{name} {value:.3f}" for name, value in mean.items())
        + f"; copies per token on 4 contiguous ranks {copies:.3f}; {path.stat().st_size / 1024:.0f} KiB"
    )
    return {
        "step": step,
        "loss": float(np.mean(losses[-50:])),
        "held_out": held,
        "specialisation": mean,
        "specialisation_by_layer": measures,
        "copies_contiguous_4": copies,
        "file": path.name,
        "bytes": path.stat().st_size,
    }


def without_paths(arguments: list[str]) -> list[str]:
    """A command line without the folders that it names."""
    paths = {i for i, word in enumerate(arguments) if word in ("--work", "--out")}
    return [word for i, word in enumerate(arguments) if i not in paths and i - 1 not in paths]


def copies_per_token(expert_LTK: np.ndarray[Any, Any], num_experts: int, num_ranks: int) -> float:
    """Distinct ranks that a token visits when experts lie in order."""
    rank_LTK = expert_LTK.astype(np.int64) * num_ranks // num_experts
    return float(np.mean(sum((rank_LTK == rank).any(-1) for rank in range(num_ranks))))


def save_loads(args: argparse.Namespace, counted_SLE: np.ndarray[Any, Any], evaluated: list[int]) -> None:
    """Loads of consecutive steps, early and at the end, without the steps that an evaluation is counted in."""
    load_SLE = np.diff(counted_SLE, axis=0)
    step_S = np.arange(1, len(load_SLE) + 1)
    late = len(load_SLE) - LOAD_WINDOW
    chosen_S = ((step_S <= LOAD_WINDOW) | (step_S > late)) & ~np.isin(step_S, evaluated)
    meta = json.dumps({"num_experts": args.experts, "aux": args.aux, "tokens_per_step": args.batch * args.length})
    np.savez_compressed(
        args.out / f"{args.name}-loads.npz",
        load_SLE=load_SLE[chosen_S].astype(np.uint16 if load_SLE.max() < 65536 else np.uint32),
        step_S=step_S[chosen_S].astype(np.int32),
        meta=np.array(meta),
    )


def say(line: str) -> None:
    print(line, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    first = commands.add_parser("prepare", help="gather text, train the tokenizer, tokenise")
    first.add_argument("--max-bytes", type=int, default=48 << 20, help="of each kind of text")
    first.add_argument("--sample-bytes", type=int, default=4 << 20, help="of each kind, to train the tokenizer on")
    first.add_argument("--vocab", type=int, default=4096)
    first.set_defaults(run=run_prepare)
    second = commands.add_parser("train", help="train a model and sample its routing")
    second.add_argument("--name", required=True)
    second.add_argument("--out", type=Path, default=Path("traces"))
    second.add_argument("--hidden", type=int, default=512)
    second.add_argument("--intermediate", type=int, default=256)
    second.add_argument("--experts", type=int, default=64)
    second.add_argument("--top-k", type=int, default=8)
    second.add_argument("--layers", type=int, default=8)
    second.add_argument("--length", type=int, default=512, help="tokens of a sequence")
    second.add_argument("--batch", type=int, default=64, help="sequences of a step")
    second.add_argument("--aux", type=float, default=0.01, help="weight of the balance loss; 0: none")
    second.add_argument("--balance", choices=("model", "layer"), default="layer", help="all layers together, or each")
    second.add_argument("--learning-rate", type=float, default=1e-3)
    second.add_argument("--steps", type=int, default=4000, help="at most")
    second.add_argument("--seconds", type=float, default=170, help="at most, from the start of the process")
    second.add_argument("--at", type=float, nargs="*", default=[0.1, 0.4], help="traces at these shares of the steps")
    second.add_argument("--trace-tokens", type=int, default=16384)
    second.add_argument("--stretch", type=int, default=64, help="neighbouring tokens of a sample")
    second.add_argument("--eval-sequences", type=int, default=64, help="of each kind of text")
    second.add_argument("--seed", type=int, default=0)
    second.set_defaults(run=train)
    for command in (first, second):
        command.add_argument("--work", type=Path, required=True, help="folder of text, tokens and models")
    args = parser.parse_args()
    args.run(args)


def run_prepare(args: argparse.Namespace) -> None:
    began = time.monotonic()
    args.work.mkdir(parents=True, exist_ok=True)
    sizes = gather(args.work, args.max_bytes)
    say(f"text: {', '.join(f'{kind} {size / 2**20:.1f} MiB' for kind, size in sizes.items())}")
    train_tokenizer(args.work, args.vocab, args.sample_bytes)
    _, texts = corpora(args.work)
    for kind, corpus in texts.items():
        say(f"{kind}: {len(corpus.train)} tokens of {corpus.train_documents} documents, {len(corpus.eval)} held out")
    say(f"prepared in {time.monotonic() - began:.0f} s")


if __name__ == "__main__":
    main()
