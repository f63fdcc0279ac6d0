"""From a TOML file and `section.key=value` overrides to a `Config`, with errors that say what, where and what to do.

    config = load_config(Path("olmoe.toml"), ["parallelism.ep_size=4", "model.config.num_experts=16"])

Later wins: the file over the defaults, overrides over the file, key by key, also inside `model.config`. The value
of an override is read as TOML (`3`, `1e-3`, `true`, `["a", "b"]`, `{a = 1}`); what is not TOML is a bare word, hence
text (`training.output_dir=runs/a`). The word none (or null) means "not set".

The demo's model holds only until another is named: a `[model]` with `path`, `architecture`, `model_type` or a published
configuration (`model.config=qwen3-30b-a3b`) starts from nothing, while `model.config.num_experts=32` alone changes the
demo's. For a `path` with weights, other defaults hold (`carpool.train.config.fine_tuning`).
"""

from __future__ import annotations

import re
import tomllib
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from pydantic.fields import FieldInfo

from carpool.plugins.nearest import nearest
from carpool.train.config.declarations import Was, declared
from carpool.train.config.fine_tuning import FROM_DEMO, defaults, source_of_default
from carpool.train.config.published import FROM
from carpool.train.config.schema import DEMO_MODEL, Config, config_type, keys
from carpool.train.config.schema_base import NONE_WORDS, toml_value
from carpool.train.config.schema_data import DataSource

# Keys of the [model] section that name a model; any of them displaces the demo's.
_MODEL_SOURCES = ("path", "architecture", "model_type")
_MOST_BYTES = 1 << 20  # of a configuration file
# Sections that may be left to the planner as a whole.
_PLANNED = ("parallelism", "memory")
_COMMAND_LINE = "on the command line"

# pydantic's names of what it expected, in the words of the person who wrote the file.
_EXPECTED = {
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "bool_type": "true or false",
    "string_type": "text",
    "dict_type": "a table",
    "tuple_type": "text or a list of texts",
    "finite_number": "a finite number",
    "string_too_short": "text that is not empty",
}


@dataclass(frozen=True)
class Resolved:
    """A configuration.

    Attributes:
        sources: where each value is from that the user has not set, by (section, key).
        places: where the user has set each key ("in olmoe.toml"), by its parts.
        replaced: what keys would be that the command line sets, by (section, key): as in the file, or the default.
        recorded: the file is what a run has recorded.
    """

    config: Config
    sources: Mapping[tuple[str, str], str]
    places: Mapping[tuple[str, ...], str]
    replaced: Mapping[tuple[str, str], Any] = field(default_factory=dict)
    recorded: bool = False

    @property
    def fixed(self) -> list[str]:
        """What the user has set, by SECTION.KEY."""
        return [f"{section}.{key}" for section, _, key in keys() if (section, key) not in self.sources]

    @property
    def asked_now(self) -> list[str]:
        """What the command line sets, by SECTION.KEY."""
        return [f"{section}.{key}" for section, _, key in keys() if self.is_asked_now((section, key))]

    def is_asked_now(self, key: tuple[str, str]) -> bool:
        """Whether the command line sets this key, and not the file."""
        return self.places.get(key) == _COMMAND_LINE


def load_config(path: Path | None, overrides: Sequence[str] = ()) -> Config:
    """The configuration of `resolve_config`."""
    return resolve_config(path, overrides).config


def resolve_config(path: Path | None, overrides: Sequence[str] = ()) -> Resolved:
    """The configuration of a run: defaults, then the TOML file at `path`, then `overrides` (`section.key=value`).

    Raises:
        ValueError: a missing or malformed file, an unknown key (with the nearest known one), a value of the wrong
            type or range (with key, value, place and what was expected), values that contradict each other, or a
            checkpoint without data to train it on.
    """
    settings: dict[str, Any] = {}
    places: dict[tuple[str, ...], str] = {}
    recorded = path is not None and path.name == "config.toml" and (path.parent / "run.json").is_file()
    if path is not None:
        data = _read(path)
        if recorded:
            data = translated(data)
        _merge(settings, data, (), f"in {path}", places)
        # What is wrong in the file is wrong whatever the command line sets beside it.
        _check_keys(settings, places)
    of_file = {
        (name, key): one for name, table in settings.items() if isinstance(table, dict) for key, one in table.items()
    }
    for override in overrides:
        _merge(settings, _parse_override(override), (), _COMMAND_LINE, places)
    _check_keys(settings, places)
    _prefer_later_length(settings.get("training", {}), places)
    sources = {(name, key): source_of_default((name, key)) for name, _, key in keys() if (name, key) not in places}
    for (name, key), (value, source) in defaults(settings, recorded).items():
        settings.setdefault(name, {})[key] = value
        sources[name, key] = source
    if settings.get("training", {}).get("num_train_epochs") is not None:
        # It is none because of the epochs.
        sources.pop(("training", "max_steps"), None)
    model = settings.setdefault("model", {})
    if not _names_a_model(model):
        if settings.get("adapter", {}).get("kind") is not None:
            raise ValueError(
                "adapter.kind needs a model to adapt: name a checkpoint's folder in model.path, or, to see speed and "
                "memory alone, a published configuration in model.config, whose weights are then random"
            )
        settings["model"] = _merged(DEMO_MODEL, model)
        sources |= {("model", key): FROM_DEMO for key in DEMO_MODEL if ("model", key) in sources}
    try:
        config = config_type().model_validate(settings)
    except ValidationError as error:
        lines: dict[str, list[str]] = {}
        for detail in error.errors():
            what, expected = _explain(detail, places)
            # Of a key that may be several things, there is one error for each of them.
            lines.setdefault(what, []).append(expected)
        texts = [what + " or ".join(dict.fromkeys(expected)) for what, expected in lines.items()]
        raise ValueError("\n".join(texts)) from None
    replaced = {
        (name, key): of_file.get((name, key), cls.model_fields[key].get_default(call_default_factory=True))
        for name, cls, key in keys()
        if places.get((name, key)) == _COMMAND_LINE
    }
    return Resolved(config, sources, places, replaced, recorded)


def describe() -> Iterator[tuple[str, str, str, str]]:
    """Each key as `(dotted name, type, default as TOML, description)`, in the order of the sections. The description
    says what the setting needs and excludes, too."""
    default = config_type()()
    all_ = declared(config_type())
    for section, cls, key in keys():
        field = cls.model_fields[key]
        text = toml_value(getattr(getattr(default, section), key))
        about = [field.description or "", *all_.described(f"{section}.{key}")]
        yield f"{section}.{key}", _type_name(field), text, " ".join(about)


def _read(path: Path) -> dict[str, Any]:
    try:
        if path.exists() and not (path.is_file() or path.is_dir()):
            raise ValueError(f"configuration file {path} is a pipe or a device; write what it holds to a file")
        if path.is_file() and path.stat().st_size > _MOST_BYTES:
            raise ValueError(f"configuration file {path} has more than {_MOST_BYTES:,} bytes; name a file of settings")
        # Some editors put a byte order mark first.
        text = path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        # A path has one slash where an address has two.
        hint = ": download it first" if str(path).startswith(("http:/", "https:/")) else ""
        raise ValueError(f"configuration file {path} does not exist{hint}") from None
    except IsADirectoryError:
        raise ValueError(f"configuration file {path} is a folder; name a TOML file") from None
    except UnicodeDecodeError:
        raise ValueError(f"configuration file {path} is not text; name a TOML file") from None
    except OSError as error:
        raise ValueError(f"configuration file {path} cannot be read: {error.strerror}") from None
    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        at = re.search(r"line (\d+)", str(error))
        line = text.splitlines()[int(at[1]) - 1].strip() if at and int(at[1]) <= len(text.splitlines()) else ""
        raise ValueError(f"{path} is not valid TOML: {error}{f': {line[:80]}' if line else ''}") from None
    except RecursionError:
        raise ValueError(f"{path} is not read: its lists or tables are nested too deeply") from None
    if not data:
        raise ValueError(f"{path} sets nothing; write settings into it, or leave it out")
    # What a recipe says about itself (carpool/recipes) is for its reader, but for what it says is missing.
    recipe = data.pop("recipe", None)
    if isinstance(recipe, dict) and (missing := recipe.get("missing")):
        raise ValueError(f"{path} is a recipe that this version cannot follow, because it lacks {', '.join(missing)}")
    return _with_plans(data)


def _with_plans(data: dict[str, Any]) -> dict[str, Any]:
    """`parallelism = "auto"` leaves the section to the planner: the same as `parallelism.plan = "auto"`."""
    return {name: {"plan": value} if value == "auto" and name in _PLANNED else value for name, value in data.items()}


def _parse_override(override: str) -> dict[str, Any]:
    name, equals, text = override.partition("=")
    parts = name.strip().split(".")
    if not equals or not all(parts):
        raise ValueError(
            f"cannot read the override {override!r}: expected section.key=value, such as training.max_steps=200"
            + ("" if equals else "; a file, or a recipe, is named by --config")
        )
    text = text.strip()
    try:
        parsed = tomllib.loads(f"value = {text}")
        # More keys than one mean that the text held a line break: it is no single TOML value.
        value = parsed["value"] if len(parsed) == 1 else text
    except tomllib.TOMLDecodeError:
        if text[:1] in ("[", "{", '"', "'"):
            raise ValueError(
                f"cannot read the value of the override {override!r}: it begins like a TOML list, table or quoted "
                "text, but is not valid TOML (does the shell strip quotes? put single quotes around the whole of it)"
            ) from None
        value = text
    except RecursionError:
        raise ValueError(
            f"the value of {name.strip()} is not read: its lists or tables are nested too deeply"
        ) from None
    for part in reversed(parts):
        value = {part: value}
    return _with_plans(typing.cast(dict[str, Any], value))


def _merge(into: dict[str, Any], new: Mapping[str, Any], at: tuple[str, ...], place: str, places: Any) -> None:
    """Lays `new` over `into`, table by table; remembers in `places` where each key came from."""
    for key, value in new.items():
        here = (*at, key)
        places[here] = place
        if isinstance(value, Mapping):
            old = into.get(key)
            if here == ("model", "config") and isinstance(old, str):
                old = {FROM: old}
            # "data.sources.0.weight" is of the first table of a list.
            tables = {str(number): one for number, one in enumerate(old)} if isinstance(old, list) else old
            into[key] = dict(tables) if isinstance(tables, Mapping) else {}
            _merge(into[key], value, here, place, places)
            if isinstance(old, list) and len(into[key]) == len(old):
                into[key] = [*into[key].values()]
        else:
            none = isinstance(value, str) and value.lower() in NONE_WORDS
            # Of what a run reports to, the word none means the empty list.
            into[key] = None if none and here != ("training", "report_to") else value


def _prefer_later_length(training: Any, places: Mapping[tuple[str, ...], str]) -> None:
    """A number of steps on the command line displaces a file's number of epochs, and the other way round."""
    lengths = ("max_steps", "num_train_epochs")
    given = [key for key in lengths if isinstance(training, dict) and training.get(key) is not None]
    if len(given) == 2 and len({places["training", key] for key in given}) == 2:
        for key in given:
            if places["training", key] != _COMMAND_LINE:
                training[key] = None


def _merged(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    result: dict[str, Any] = dict(base)
    _merge(result, over, (), "", {})
    return result


def _names_a_model(model: Mapping[str, Any]) -> bool:
    config = model.get("config")
    published = isinstance(config, str) or (isinstance(config, Mapping) and not {FROM, "model_type"}.isdisjoint(config))
    return published or any(model.get(source) is not None for source in _MODEL_SOURCES)


# Settings that are gone, whose recorded values mean nothing now, and what to say of them.
_GONE = {
    "placement.prefetch": "replicas in moe.spare_slots are fetched while tokens travel",
    "placement.replicas": "replicas follow each micro-batch now: set moe.spare_slots, the slots of each rank for them",
}


def _renamed(section: str, key: str, value: Any) -> str | None:
    """What to write instead of `section.key = value`, such as "memory.expert_inputs = 'save'"; None: it is no old name
    or value."""
    old = f"{section}.{key}"
    name, was = declared(config_type()).renamed.get(old, (old, Was(old)))
    values = was.values
    known = isinstance(value, str | bool) and value in values
    return None if name == old and not known else f"{name} = {toml_value(values[value] if known else value)}"


def translated(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Sections that a run of version 0.1 has recorded, with the names and values of now.

    Example: {"memory": {"rows": "keep"}} -> {"memory": {"expert_inputs": "save"}}"""
    renamed = declared(config_type()).renamed
    found: dict[str, Any] = {}
    for section, table in settings.items():
        if not isinstance(table, Mapping):
            found[section] = table
            continue
        found.setdefault(section, {})
        for key, value in table.items():
            name, was = renamed.get(f"{section}.{key}", (f"{section}.{key}", Was(key)))
            if value == was.default or name in _GONE:
                continue
            first, *tables, last = name.split(".")
            into = found.setdefault(first, {})
            for one in tables:
                into = into.setdefault(one, {})
            into[last] = was.values.get(value, value) if isinstance(value, str) else value
    return found


def _check_keys(settings: dict[str, Any], places: Mapping[tuple[str, ...], str]) -> None:
    sections: dict[str, list[str]] = {}
    for section, _, key in keys():
        sections.setdefault(section, []).append(key)
    dotted = [f"{section}.{key}" for section, names in sections.items() for key in names]
    for section, table in settings.items():
        where = places[(section,)]
        if section not in sections:
            # A key written without its section is the likeliest slip, then a misspelt section.
            owner = next((name for name in dotted if name.endswith(f".{section}")), None)
            close = nearest(section, list(sections))
            if owner is None and close is None:
                leaf = nearest(section, [name.split(".")[1] for name in dotted])
                owner = next((name for name in dotted if leaf and name.endswith(f".{leaf}")), None)
            hint = f"did you mean {owner or close or 'one of the sections ' + ', '.join(sections)}?"
            kind = "section" if isinstance(table, Mapping) else "key"
            raise ValueError(f"unknown {kind} {section} {where}; {_in_our_words(section) or hint}")
        if not isinstance(table, Mapping):
            planned = f"; {section}=auto leaves it to the planner" if section in _PLANNED else ""
            key = next(key for key in sections[section] if key != "plan")
            raise ValueError(
                f"{section} = {table!r} ({where}): {section} is a section; set its keys, such as "
                f"{section}.{key}{planned}"
            )
        for key, value in table.items():
            if (now := _renamed(section, key, value)) is not None:
                where = places[(section, key)]
                raise ValueError(f"{section}.{key} {where} is a setting of version 0.1: write {now}")
            if key in sections[section]:
                continue
            where = places[(section, key)]
            if (why := _GONE.get(f"{section}.{key}")) is not None:
                raise ValueError(f"{section}.{key} {where} is no setting any more: {why}")
            close = nearest(key, sections[section])
            guess = f"{section}.{close}" if close else None
            guess = next((name for name in dotted if name.endswith(f".{key}")), guess)
            guess = guess or nearest(f"{section}.{key}", dotted)
            hint = f"; did you mean {guess}?" if guess else f"; [{section}] knows {', '.join(sections[section])}"
            theirs = _in_our_words(key)
            raise ValueError(f"unknown key {section}.{key} {where}{f'; {theirs}' if theirs else hint}")


def names_of_transformers() -> dict[str, str]:
    """Names of TrainingArguments that are no keys: the key that stands for each, or why there is none."""
    return tomllib.loads(Path(__file__).with_name("training_arguments.toml").read_text(encoding="utf-8"))


def searched_words() -> dict[str, str]:
    """Words of users that no setting has, several of a thing divided by bars: what stands for each."""
    return tomllib.loads(Path(__file__).with_name("searched_words.toml").read_text(encoding="utf-8"))


def _in_our_words(name: str) -> str | None:
    """What to say where a name is one of Transformers' TrainingArguments, and no key; None: it is not."""
    if (said := names_of_transformers().get(name)) is None:
        return None
    return f"Carpool has no {name}: {said}" if " " in said else f"what TrainingArguments call {name} is {said} here"


def _explain(error: Any, places: Mapping[tuple[str, ...], str]) -> tuple[str, str]:
    """One pydantic error in words: (key, value and place, what was expected)."""
    loc = tuple(str(part) for part in error["loc"])
    kind, context = error["type"], error.get("ctx", {})
    if kind == "value_error":
        return str(context["error"]), ""
    key = loc[:2]
    value = error["input"]
    if kind == "tuple_type" and "float" in str(loc[2:]):
        expected = "a list of numbers"
    elif kind in _EXPECTED:
        expected = _EXPECTED[kind]
    elif kind == "literal_error":
        several = "," in context["expected"] or " or " in context["expected"]
        expected = f"one of {context['expected']}" if several else context["expected"]
        guess = nearest(str(value), [word.strip("' ") for word in context["expected"].replace(" or ", ",").split(",")])
        expected += f" (did you mean {guess}?)" if guess else ""
    elif kind.startswith(("greater_than", "less_than")):
        (limit,) = context.values()
        words = {"greater_than": "above", "greater_than_equal": "at least", "less_than": "below"}
        expected = f"a number {words.get(kind, 'at most')} {limit:g}"
    else:
        expected = error["msg"]
    at = loc[2:]
    item = f", item {at[0]}" if at and at[0].isdigit() else ""
    place = places.get(key) or places.get(key[:1]) or ""
    shown = "true" if value is True else "false" if value is False else repr(value)
    return f"{'.'.join(key)} = {shown}{f' ({place}{item})' if place else ''}: expected ", expected


def _type_name(field: FieldInfo) -> str:
    """`int | None` for a person: "integer or none"."""
    names = {int: "integer", float: "number", bool: "true/false", str: "text", type(None): "none"}
    args = typing.get_args(field.annotation) if typing.get_args(field.annotation) else (field.annotation,)
    if typing.get_origin(field.annotation) is typing.Literal:
        return " | ".join(map(str, args))
    if typing.get_origin(field.annotation) in (tuple, dict):
        return "table" if typing.get_origin(field.annotation) is dict else "text or list"
    words: list[str] = []
    for arg in args:
        origin = typing.get_origin(arg)
        if origin is typing.Literal:
            words.extend(map(str, typing.get_args(arg)))
        elif origin is typing.Annotated or origin is tuple:
            inner = typing.get_args(arg)[0]
            kinds: dict[Any, str] = {float: "list of numbers", DataSource: "list of tables"}
            item = next(iter(typing.get_args(inner)), None)
            words.append(names.get(inner) or kinds.get(item, "text or list"))
        elif origin is dict:
            words.append("table")
        else:
            words.append(names.get(arg, str(arg)))
    return " | ".join(words)
