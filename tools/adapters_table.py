"""Writes docs/reference/adapters.md: an adapter from training to peft, a merged model and servers, for each family.

    python -m tools.adapters_table [FAMILY ...]

It does what tests/train/test_served_adapter.py does, with the same code: ten minutes. A family whose logits are not
those that were trained stops it. With families it prints their rows alone.
"""

from __future__ import annotations

import math
import re
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import peft
import transformers

from carpool.train.checkpoints.checkpoint_files import CheckpointWriteError
from carpool.train.checkpoints.served_adapter import VERSIONS, check_served
from tests.ranks import Ranks
from tests.train.adapter_families import BOUND, FAMILIES, MOVED, follow

DOCS = Path(__file__).parents[1] / "docs" / "reference" / "adapters.md"
COLUMNS = ("family", "moved by training", "peft", "merged", "vLLM", "SGLang")

INTRODUCTION = """\
# Adapters, from training to a server

`python -m tools.adapters_table` writes this page from measurements. For each family, `carpool train` with
`adapter.kind=lora` trains adapters of attention and all experts of a tiny random model on four ranks, and the logits of
the very model that is trained are compared with those of the files:

- **peft**: base and `RUN/adapter`, loaded by Transformers {transformers} and peft {peft} in a process without Carpool.
- **merged**: what `carpool merge` writes, loaded by Transformers.
- **vLLM {vllm}, SGLang {sglang}**: what `carpool adapter RUN --server vllm` finds, which has those servers' rules for
  names, ranks and shapes, read in their sources. *as written*: the server reads peft's files. *`--out`*: it reads
  what `carpool adapter RUN --server vllm --out DIR` writes. No server was run.

Numbers are the largest difference of a logit, relative to the largest logit, in float32. *Moved* is how far training
has moved the logits from the base's.

{table}

A server that reads *m of n* adapted matrices refuses the adapter or leaves the others out, and `--out` writes nothing.
Name other `adapter.targets`, or serve the merged model.
"""


def main() -> int:
    names = sys.argv[1:] or FAMILIES
    rows, failed, ranks = [], [], Ranks()
    for family in names:
        with tempfile.TemporaryDirectory() as path:
            found = follow(ranks, family, Path(path))
            served = [_served(Path(path), server) for server in VERSIONS]
        if max(found.peft, found.merged) > BOUND or found.moved < MOVED:
            failed.append(f"{family}: {found}")
        rows.append([family, f"{found.moved:.2f}", _below(found.peft), _below(found.merged), *served])
        print(_line(rows[-1]), flush=True)
    ranks.stop()
    if failed:
        print(f"{DOCS} is not written:", *failed, sep="\n", file=sys.stderr)
        return 1
    if names == FAMILIES:
        table = "\n".join(_line(cells) for cells in [COLUMNS, ["---"] * len(COLUMNS), *rows])
        versions = {"transformers": transformers.__version__, "peft": peft.__version__, **VERSIONS}
        DOCS.write_text(INTRODUCTION.format(table=table, **versions), encoding="utf-8")
    return 0


def _served(folder: Path, server: str) -> str:
    run, base = folder / "run", folder / "base"
    if not check_served(run / "adapter", base, server).wrong:
        return "as written"
    try:
        check_served(run / "adapter", base, server, out=folder / server)
    except CheckpointWriteError as error:
        first, *reasons = str(error).splitlines()
        share = re.search(r"reads (.*) adapted", first)
        leaves = (re.match(r"  (.*?)( and .*)?: (refused|left)", one) for one in reasons)
        assert share is not None
        return f"{share[1]}: not {', '.join(re.split('[.: ]', one[1])[-1] + (one[2] or '') for one in leaves if one)}"
    except ValueError:
        return "experts: no rules known"
    return "`--out`"


def _below(error: float) -> str:
    return f"< 1e{math.floor(math.log10(max(error, 1e-9))) + 1}"


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    sys.exit(main())
