"""In how many files of the package a setting is read, by the syntax tree.

config.data.sequence_length          read: the attribute of a section of something that is called `config`
data = config.data; data.train       read, through a name for the section
def f(moe: MoeSection): moe.chunks   read, through an annotation
plan.model.path                      not: `plan` is no configuration
"""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path

from carpool.train.config.schema import Config

PACKAGE = Path(__file__).parents[2] / "carpool"
MOST = 6
# More files, and why.
EXCEPTIONS = {
    "adapter.base_dtype": 7,  # what is predicted of a quantised base, and what is served or merged beside it
    "data.sequence_length": 14,  # a size of all that a run predicts, measures and records, on both sides of a plan
    "model.path": 9,  # weights, the tokenizer of data beside them, and the model that an adapter is of
    "training.seed": 8,  # whatever is random starts from it: weights, order of data, samples, sketches of solvers
}
SECTIONS = {name: set(field.annotation.model_fields) for name, field in Config.model_fields.items()}  # type: ignore[union-attr]
CLASSES = {field.annotation.__name__: name for name, field in Config.model_fields.items()}  # type: ignore[union-attr]
CONFIG = "config of a run"  # what a name stands for that is a whole configuration
CALLED = ("source.run", "self.run")  # what a model comes from that is served (carpool/serve)
SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef)


def test_a_setting_is_read_in_few_files() -> None:
    files: dict[str, set[str]] = defaultdict(set)
    for path in PACKAGE.rglob("*.py"):
        for setting in reads(ast.parse(path.read_text())):
            files[setting].add(str(path.relative_to(PACKAGE)))
    assert len(files) > 100
    many = {
        setting: sorted(found) for setting, found in sorted(files.items()) if len(found) > EXCEPTIONS.get(setting, MOST)
    }
    assert all(len(files[setting]) == most for setting, most in EXCEPTIONS.items()), "an exception that is not needed"
    assert not many, "\n".join(f"{setting}: {len(found)} files, {', '.join(found)}" for setting, found in many.items())


def test_what_counts_as_a_read() -> None:
    code = """
training = config.training
def f(moe: MoeSection, plan, c: Config):
    data, top = plan.config.data, 3
    return moe.chunks, data.train, c.model.dtype, plan.model.path, training.seed, plan.data.eval
class MemorySection:
    def g(self): return self.budget
"""
    expected = {"moe.chunks", "data.train", "model.dtype", "training.seed", "memory.budget"}
    assert reads(ast.parse(code)) == expected


def reads(tree: ast.AST, names: Mapping[str, str] | None = None) -> set[str]:
    """The settings, SECTION.KEY, that a scope reads, with those inside it. `names`: sections by the names for them."""
    found, known = set[str](), dict(names or {})
    if isinstance(tree, ast.ClassDef):
        known.pop("self", None)
        if tree.name in CLASSES or tree.name == "Config":
            known["self"] = CLASSES.get(tree.name, CONFIG)
    elif isinstance(tree, SCOPES):
        for argument in (*tree.args.posonlyargs, *tree.args.args, *tree.args.kwonlyargs):
            if argument.arg != "self":
                known.pop(argument.arg, None)
                known |= _annotated(argument.arg, argument.annotation)
    nodes = list(_of_scope(tree))
    for name, value in (pair for node in nodes for pair in _assigned(node)):
        if (section := _section(value, known)) is not None:
            known[name] = section
    for node in nodes:
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
            section = _section(node.value, known)
            if section is not None and node.attr in SECTIONS.get(section, ()):
                found.add(f"{section}.{node.attr}")
        elif isinstance(node, SCOPES):
            found |= reads(node, known)
    return found


def _of_scope(tree: ast.AST) -> Iterator[ast.AST]:
    """Nodes of a scope, with those that open further ones, but not what is in them."""
    for node in ast.iter_child_nodes(tree):
        yield node
        if not isinstance(node, SCOPES):
            yield from _of_scope(node)


def _annotated(name: str, annotation: ast.AST | None) -> dict[str, str]:
    words = {getattr(node, "id", getattr(node, "attr", None)) for node in ast.walk(annotation)} if annotation else set()
    classes = {**CLASSES, "Config": CONFIG}
    found = [classes[word] for word in words if word in classes]
    return {name: found[0]} if found else {}


def _assigned(node: ast.AST) -> Iterator[tuple[str, ast.expr]]:
    """Names, and what an assignment gives them."""
    targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
    value = getattr(node, "value", None)
    for target in targets if isinstance(node, ast.Assign | ast.AnnAssign | ast.NamedExpr) and value is not None else ():
        if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple) and len(target.elts) == len(value.elts):
            pairs = list(zip(target.elts, value.elts, strict=True))
        else:
            pairs = [(target, value)]
        yield from ((name.id, one) for name, one in pairs if isinstance(name, ast.Name))


def _section(node: ast.expr, names: Mapping[str, str]) -> str | None:
    """The section that an expression is, `CONFIG` for a whole configuration, or None."""
    if isinstance(node, ast.Name):
        return names.get(node.id, CONFIG if node.id == "config" else None)
    if isinstance(node, ast.NamedExpr):
        return _section(node.value, names)
    if isinstance(node, ast.Attribute):
        if node.attr in SECTIONS and _section(node.value, names) == CONFIG:
            return node.attr
        return CONFIG if node.attr == "config" or ast.unparse(node) in CALLED else None
    return None
