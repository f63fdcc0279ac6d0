"""Run the commands of the guides whose output the guides show, and compare the two, or write the output anew.

    python -m tools.docs_outputs                    compare all that are run, one line for each
    python -m tools.docs_outputs --only train.md    those of one page, or of one command: --only train.md:91
    python -m tools.docs_outputs --only train.md --write

An example is a block of commands (```bash) that is followed by a block of output (no language), or a ```console
block with both, whose commands begin with `$`. The output shown is an excerpt: its lines occur in what is
printed, in this order, others may lie between. A line of `...` says so to the reader.

Words of a line must be equal. Numbers may differ by `TOLERANCE`; times and speeds of what really runs are not
compared, nor what depends on the machine's memory (`OF_THE_MACHINE`).
"""

from __future__ import annotations

import argparse
import difflib
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
TOLERANCE = 0.01
# As wide as the guides are, so that lines break where theirs do.
COLUMNS = 150
_BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", flags=re.DOTALL | re.MULTILINE)
_NUMBER = re.compile(r"\d[\d,]*(?:\.\d+)?(?:e-?\d+)?")
# What only a machine knows: how much memory it has, how fast it is (the column of seconds of `carpool place`), and how
# its products round (last: errors below 1e-5, and the tensor that has the largest).
OF_THE_MACHINE = re.compile(
    r"(?<=of )[\d.,]+(?= GiB of a rank would be used)|(?<=fits in )[\d.,]+(?= GiB, a rank's share)|searched in [\d.,]+"
    r"|(?<=\d {6})\d\.\d\d\s*$|\d\.\de-0[5-9](?: \(model\.[^)]*\))?"
)
_MEASURED = re.compile(r"[\d.,]+ ?(?=(ms|s|us|µs|min|tokens/s|[kMG]?B/s)(\W|$))")

# The tables below name an example by its page and by what its commands contain.
TINY = "python examples/tiny_chat_model.py tiny\n"
CHAT = "carpool train --config examples/train_from_config/chat_tiny.toml"
OLMOE = "carpool train --config examples/train_from_config/olmoe_tiny.toml"
ADAPTER = TINY + f"{CHAT} adapter.kind=lora adapter.rank=4 adapter.targets=all-linear training.output_dir=r1\n"
# Commands that come first.
BEFORE = {
    ("finetune.md", "adapter.targets=all-linear"): TINY,
    ("finetune.md", "carpool merge r1"): ADAPTER,
    ("finetune.md", "carpool adapter r1"): ADAPTER,
    ("fine-tuning-one-gpu.md", "adapter.base_dtype=int8"): TINY,
    ("placement.md", "carpool trace"): OLMOE + "\n",
}
# Examples that predict and do not train: a few seconds each. All others train, and their times are the machine's.
PREDICTS = {
    ("train.md", "memory.budget=76GB"),
    ("parallelism.md", "parallelism.tp_size=2 parallelism.data_parallel=zero1"),
    ("planner.md", "carpool plan"),
    ("placement.md", "--modelled"),
    ("planner.md", "carpool simulate"),
    ("train.md", "--dry-run"),
}
NOT_RUN = {
    ("finetune.md", "carpool chat"): "asks a person, and needs a file of prompts of the reader's own",
    ("finetune.md", "--experts host"): "needs the run of another example, whose choices decide how many experts come",
    ("index.md", "carpool doctor"): "says what this machine has: versions, files, devices",
    ("reliability.md", "--elastic 2:4"): "needs several agents, of which one dies",
    ("measurements.md", "benchmarks.bubbles"): "measures shares of time, which depend on what else the machine does",
}
# Blocks without a language that are the output of no block of commands, by the page and the words they begin with.
NO_EXAMPLE = {
    ("finetune.md", "example 2:"): "one of the examples that --show-examples prints",
    ("finetune.md", "prefill 21 tokens"): "a line of any run of carpool generate",
    ("multi-node.md", "RanksLostError: rank 1 on node 1"): "needs a cluster that loses a rank",
    ("multi-node.md", "RanksLostError: a collective failed"): "needs a cluster with a slow link",
}


class Example(NamedTuple):
    """Commands of a page, and what the page says that they print. `line`: of the page, where the commands begin."""

    page: str
    line: int
    commands: str
    shown: str

    @property
    def name(self) -> str:
        return f"{self.page}:{self.line}"

    def named(self, table: Collection[tuple[str, str]]) -> tuple[str, str] | None:
        """The key of the table that means this example."""
        return next((key for key in table if key[0] == self.page and key[1] in self.commands), None)

    @property
    def predicts(self) -> bool:
        return self.named(PREDICTS) is not None

    def difference(self) -> str:
        """Run it; how what it prints differs from what the page shows, and empty if it does not."""
        return compare(self.shown, self.printed(), measured=not self.predicts)

    def printed(self) -> str:
        key = self.named(BEFORE)
        return run(self.commands, "" if key is None else BEFORE[key])


def examples(page: Path) -> Iterator[Example]:
    """The examples of a page. Between commands and their output may be text, but no heading and no other block."""
    text, name = page.read_text(), page.name
    blocks = list(_BLOCK.finditer(text))
    for block, after in zip(blocks, [*blocks[1:], None], strict=False):
        line = text.count("\n", 0, block.start()) + 2
        if block[1] == "console":
            commands = re.match(r"\$ ((?:.*\\\n)*.*\n)", block[2])
            if commands is not None:
                yield Example(name, line, commands[1], block[2][commands.end() :])
        elif block[1] == "bash" and after is not None and not after[1]:
            between = text[block.end() : after.start()]
            if re.search(r"^#+ ", between, flags=re.MULTILINE) is None:
                yield Example(name, line, block[2], after[2])


def unexplained(page: Path) -> Iterator[str]:
    """The blocks of output of a page, by their first lines, that no example shows and `NO_EXAMPLE` does not name."""
    shown = [example.commands + example.shown for example in examples(page)]
    for language, block in _BLOCK.findall(page.read_text()):
        of_example = any(one.endswith(block) or block.endswith(one) for one in shown)
        listed = any(page.name == name and block.lstrip().startswith(begin) for name, begin in NO_EXAMPLE)
        if language in ("", "console") and not of_example and not listed:
            yield block.strip().partition("\n")[0]


def run(commands: str, before: str = "") -> str:
    """What the commands print, in an empty folder that has the examples and the docs.

    Args:
        before: commands that prepare the folder, whose output does not count.

    Raises:
        RuntimeError: `before` failed; its output.
    """
    variables = {name: value for name, value in os.environ.items() if name not in ("FORCE_COLOR", "PY_COLORS")}
    variables |= {"PYTHONPATH": str(ROOT), "COLUMNS": str(COLUMNS), "NO_COLOR": "1", "OMP_NUM_THREADS": "1"}
    python = f'"{sys.executable}"'
    named = f'carpool() {{ {python} -m carpool "$@"; }}; python() {{ {python} "$@"; }}; '
    named += f'torchrun() {{ {python} -m torch.distributed.run "$@"; }}\n'
    with tempfile.TemporaryDirectory() as folder:
        for shared in ("examples", "docs", "LICENSE"):
            (Path(folder) / shared).symlink_to(ROOT / shared)

        def bash(script: str) -> subprocess.CompletedProcess[str]:
            return subprocess.run(
                ["bash", "-c", named + script], cwd=folder, env=variables, text=True, stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False,
            )  # fmt: skip

        if before:
            done = bash("set -e\n" + before)
            if done.returncode:
                raise RuntimeError(f"{before.strip()} ended with {done.returncode}:\n{done.stdout[-2000:]}")
        return bash(commands).stdout


def difference(line: str, other: str, measured: bool) -> str | None:
    """Why two lines are not the same; None if they are. `measured`: times are of the machine."""
    line, other = _masked(line, measured), _masked(other, measured)
    if _words(line) != _words(other):
        return "other words"
    for ours, theirs in zip(_NUMBER.findall(line), _NUMBER.findall(other), strict=True):
        first, second = (float(number.replace(",", "")) for number in (ours, theirs))
        last_digit = 10.0 ** -len(ours.partition(".")[2].partition("e")[0])
        if abs(first - second) > max(TOLERANCE * max(abs(first), abs(second)), 1.001 * last_digit):
            return f"{ours} in the guide, {theirs} printed"
    return None


def compare(shown: str, printed: str, measured: bool) -> str:
    """What of the shown lines is not printed, in their order; empty if all is."""
    rest, wrong = printed.splitlines(), []
    for line in _told(shown):
        found = next((i for i, other in enumerate(rest) if difference(line, other, measured) is None), None)
        if found is not None:
            rest = rest[found + 1 :]
            continue
        near = _nearest(line, rest)
        why = "nothing like it is printed" if near is None else difference(line, near, measured)
        wrong.append(f"  {why}\n  - {line}" + ("" if near is None else f"\n  + {near}"))
    return "\n".join(wrong)


def renewed(shown: str, printed: str) -> str:
    """The shown lines as they are printed now; lines that are no longer printed are left out."""
    rest, new = printed.splitlines(), []
    for line in shown.splitlines():
        near = line if line.strip() in ("...", "") else _nearest(line, rest)
        if near is not None:
            new.append(near.rstrip())
            if near in rest:
                rest = rest[rest.index(near) + 1 :]
    return "".join(line + "\n" for line in new)


def _told(shown: str) -> list[str]:
    return [line for line in shown.splitlines() if line.strip() not in ("...", "")]


def _masked(line: str, measured: bool) -> str:
    line = OF_THE_MACHINE.sub("#", line)
    return _MEASURED.sub("# ", line) if measured else line


def _words(line: str) -> str:
    return " ".join(re.sub(r"[─━]+", "─", _NUMBER.sub("0", line)).split())


def _nearest(line: str, lines: list[str]) -> str | None:
    words = {_words(_masked(other, True)): other for other in reversed(lines)}
    near = difflib.get_close_matches(_words(_masked(line, True)), words, n=1, cutoff=0.6)
    return words[near[0]] if near else None


def pages() -> list[Path]:
    return [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", metavar="PAGE[:LINE]")
    parser.add_argument("--write", action="store_true", help="write what is printed into the guides")
    args = parser.parse_args()
    wrong = False
    for page in pages():
        for example in list(examples(page)):
            if args.only not in ("", page.name, example.name) or example.named(NOT_RUN):
                continue
            printed, measured = example.printed(), not example.predicts
            found = compare(example.shown, printed, measured)
            if found and args.write:
                new = renewed(example.shown, printed)
                page.write_text(page.read_text().replace(example.shown, new, 1))
                found = compare(new, printed, measured)
            wrong |= bool(found)
            print(f"{example.name}: {'differs' if found else 'as shown'}\n{found}".rstrip(), flush=True)
    sys.exit(wrong)


if __name__ == "__main__":
    main()
