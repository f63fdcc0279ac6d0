"""Text of three kinds that a machine has, and a run of `carpool train` on it: for real routing.

    python -m benchmarks.texts --work W
    carpool train --config W/train.toml training.output_dir=W/e64
    carpool trace W/e64 --tokens 16384 --out e64.npz

Gathers Python (the standard library and installed packages), C (header files) and prose (documentation, licences and
manual pages), holds a twentieth of each kind's documents out, and trains a byte-pair tokenizer of 4096 tokens on it:

    W/KIND.jsonl, W/KIND-held-out.jsonl, W/tokenizer.json

W/train.toml trains OLMoE's architecture on all three kinds: hidden size 512, 64 experts of 256, top-8, 8 layers,
32 768 tokens a step on one GPU, and a balance loss for each layer. The run's metrics.jsonl has the loads of every step,
and its folder `model` is what other benchmarks look for (`--work W --name e64`).
"""

from __future__ import annotations

import gzip
import json
import re
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch

from benchmarks.script import make_parser
from carpool.train.config import load_config
from carpool.train.config.schema import DataSection
from carpool.train.data.corpus import Corpus, prepare
from carpool.train.data.tokenizer import FileTokenizer

EOS = "<|endoftext|>"
KINDS = ("python", "c", "prose")
HELD_OUT = 20  # one document of so many
PROSE = re.compile(
    r"\.(md|rst|txt)(\.gz)?$|\.[1-8](\.gz)?$|(licen[cs]e|copying|readme|notice|changelog|copyright)", re.I
)


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
    sizes = dict.fromkeys(KINDS, 0)
    for kind, paths in files.items():
        seen: set[int] = set()
        with (folder / f"{kind}.jsonl").open("w") as learnt, (folder / f"{kind}-held-out.jsonl").open("w") as held:
            for index in np.random.default_rng(0).permutation(len(paths)):
                text = read(paths[index])
                if text is None or hash(text) in seen:
                    continue
                seen.add(hash(text))
                (held if len(seen) % HELD_OUT == 0 else learnt).write(json.dumps({"text": text}) + "\n")
                sizes[kind] += len(text)
                if sizes[kind] >= max_bytes:
                    break
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
    """The tokens of each kind of text."""
    tokenizer = FileTokenizer(work / "tokenizer.json", EOS)
    return tokenizer, {kind: prepare(DataSection(**data_of(work, kind)), tokenizer) for kind in KINDS}


def data_of(work: Path, *kinds: str) -> dict[str, object]:
    """[data] of a run on some kinds of text."""
    return {
        "train": tuple(str(work / f"{kind}.jsonl") for kind in kinds),
        "eval": tuple(str(work / f"{kind}-held-out.jsonl") for kind in kinds),
        "tokenizer": str(work / "tokenizer.json"),
        "eos_token": EOS,
        "cache_dir": str(work / "tokens"),
    }


def settings(work: Path) -> list[str]:
    """Of the run, as `carpool train` takes them."""
    model = {
        "hidden_size": 512,
        "intermediate_size": 256,
        "num_hidden_layers": 8,
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
        "num_experts": 64,
        "num_experts_per_tok": 8,
    }
    training = {"max_steps": 1435, "per_device_train_batch_size": 64, "learning_rate": 1e-3, "warmup_steps": 100}
    return [
        "model.model_type=olmoe",
        *(f"model.config.{key}={value}" for key, value in model.items()),
        *(f"data.{key}={json.dumps(value)}" for key, value in data_of(work, *KINDS).items()),
        "data.sequence_length=512",
        *(f"training.{key}={value}" for key, value in training.items()),
        *("training.save_pretrained=true", "training.logging_steps=1"),
        *("moe.router_aux_loss_coef=0.01", "moe.balance_scope=layer"),
    ]


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--work", type=Path, required=True, help="folder of text, tokens and runs")
    parser.add_argument("--max-bytes", type=int, default=48 << 20, help="of each kind of text")
    parser.add_argument("--sample-bytes", type=int, default=4 << 20, help="of each kind, to train the tokenizer on")
    parser.add_argument("--vocab", type=int, default=4096)
    args = parser.parse_args()
    work = args.work.resolve()
    work.mkdir(parents=True, exist_ok=True)
    sizes = gather(work, args.max_bytes)
    say(f"text: {', '.join(f'{kind} {size / 2**20:.1f} MiB' for kind, size in sizes.items())}")
    train_tokenizer(work, args.vocab, args.sample_bytes)
    for kind, corpus in corpora(work)[1].items():
        say(f"{kind}: {len(corpus.train)} tokens of {corpus.train_documents} documents, {len(corpus.eval)} held out")
    (work / "train.toml").write_text(load_config(None, settings(work)).to_toml())


def say(line: str) -> None:
    print(line, flush=True)


if __name__ == "__main__":
    main()
