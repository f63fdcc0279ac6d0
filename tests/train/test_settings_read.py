"""In how many files of the package a setting is read: `config.data.sequence_length`, or `data.train` of a section that
has its own name there."""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

from carpool.train.config.schema import keys

PACKAGE = Path(__file__).parents[2] / "carpool"
MOST = 6
# More files, and why.
EXCEPTIONS = {
    "data.sequence_length": 12,  # a size of all that a run predicts, measures and records, on both sides of a plan
    "model.path": 7,  # weights, the tokenizer of data beside them, and the model that an adapter is of
    "training.seed": 8,  # whatever is random starts from it: weights, order of data, samples, sketches of solvers
}


def test_a_setting_is_read_in_few_files() -> None:
    settings = {f"{section}.{key}" for section, _, key in keys()}
    files: dict[str, set[str]] = defaultdict(set)
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Attribute) or not isinstance(node.ctx, ast.Load):
                continue
            *owner, section, key = ["", *ast.unparse(node).split(".")]
            # Models have attributes of the same names.
            known = owner[-1] == "config" or (owner[-1] == "" and section != "model")
            if known and f"{section}.{key}" in settings:
                files[f"{section}.{key}"].add(str(path.relative_to(PACKAGE)))
    assert len(files) > 100
    many = {setting: sorted(found) for setting, found in files.items() if len(found) > EXCEPTIONS.get(setting, MOST)}
    assert not many, "\n".join(f"{setting}: {len(found)} files, {', '.join(found)}" for setting, found in many.items())
    assert {setting: len(files[setting]) for setting in EXCEPTIONS} == EXCEPTIONS, "an exception that is not needed"
