"""What settings declare of themselves beside type, default and help, and what follows from it.

    limit_by: Annotated[Literal["score", "groups"], Needs("moe.limit_ranks or moe.limit_nodes")] = Field(...)
    ->  moe.limit_by = 'groups' (in olmoe.toml) changes nothing without moe.limit_ranks or moe.limit_nodes

    data_parallel: Annotated[..., Excludes("parallelism.tp_size", "...", own="parallelism.data_parallel=zero1")]
    ->  parallelism.tp_size = 2 with parallelism.data_parallel = 'zero1': ... The nearest combination that works: ...

`Needs`, `Excludes`, `Was` and `Demo` stand in a field's annotation. `Declared` collects them from a type of
configuration, plug-ins' sections included. A condition is text, as a user writes settings:

    moe.limit_ranks                             has another value than its default, and not none
    moe.experts=auto or grouped                 has one of these values
    memory.experts!=device                      has another value
    training.max_grad_norm>0                    is larger
    placement.every and placement.policy=place  both; "or" binds more strongly than "and"
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal

from carpool.train.config.schema_base import Section, toml_value

if TYPE_CHECKING:
    from carpool.train.config.load import Resolved

# Values by SECTION.KEY. A key that is not there has its default.
Settings = Mapping[str, Any]
Test = Callable[[Settings], bool]
# As text; or a setting, and what is asked of its value; or what is asked of all settings.
Condition = str | tuple[str, Callable[[Any], bool]] | Test

_KEY = r"\w+\.\w+"
_AXES = tuple(f"parallelism.{axis}_size" for axis in ("pp", "dp_replicate", "fsdp", "cp", "tp", "ep", "etp"))
DERIVED: Literal["derived"] = "derived"


@dataclass(frozen=True)
class Needs:
    """A setting, or each of a section's, does nothing without this.

    Attributes:
        says: the condition in words, where it does not read well itself."""

    when: Condition
    says: str = ""

    @property
    def text(self) -> str:
        """The condition in words."""
        return self.says or (self.when if isinstance(self.when, str) else "")


@dataclass(frozen=True)
class Excludes:
    """A setting does not go together with others.

    Attributes:
        other: a condition of those.
        why: half a sentence; {SECTION.KEY} stands for the value of a setting.
        own: a condition of the setting itself; by default, that it has another value than its default.
        instead: values that make the combination work, by key; a function gives the value for all settings. None: the
            setting's default. Besides, an axis of parallelism can be given up."""

    other: Condition
    why: str
    own: Condition = ""
    instead: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class Was:
    """What a setting was called in version 0.1.

    Attributes:
        values: new values by the old ones where they changed, too.
        option: which key of the setting, a table, it is now.
        default: the recorded value where nobody set it, which is dropped; ...: there is none."""

    name: str
    values: Mapping[Any, Any] = field(default_factory=dict)
    option: str = ""
    default: Any = ...


@dataclass(frozen=True)
class Demo:
    """The default suits the demo's tiny model alone. `fine_tuning`: the default for a checkpoint; `DERIVED`: it follows
    from the checkpoint (`carpool.train.config.fine_tuning`)."""

    fine_tuning: Any = DERIVED


@dataclass(frozen=True)
class Rule:
    """What one `Excludes` refuses.

    Attributes:
        conditions: all must hold, of each one alternative: a key and what is asked of it.
        instead: see `Excludes`."""

    conditions: Sequence[Sequence[tuple[str, Test]]]
    why: str
    instead: Mapping[str, Any]

    def applies(self, settings: Settings) -> bool:
        """Whether it refuses these settings."""
        return _hold(self.conditions, settings)

    def may_apply(self, keys: Set[str]) -> bool:
        """Whether it can refuse settings of these keys, all others of which have their defaults."""
        return all(
            any(key in keys or not isinstance(test, _Comparison) or test({}) for key, test in group)
            for group in self.conditions
        )

    def keys(self, settings: Settings) -> list[str]:
        """The settings that make it apply, axes of parallelism first."""
        found = dict.fromkeys(key for group in self.conditions for key, test in group if key and test(settings))
        return [key for key in _AXES if key in found] + [key for key in found if key not in _AXES]


class Declared:
    """What the fields of a configuration type declare, by SECTION.KEY."""

    def __init__(self, config: type[Section]) -> None:
        fields = {
            f"{section}.{key}": (cls, about)
            for section, of in config.model_fields.items()
            for cls in (of.annotation,)
            if isinstance(cls, type) and issubclass(cls, Section)
            for key, about in cls.model_fields.items()
        }
        self.defaults = {name: about.get_default(call_default_factory=True) for name, (_, about) in fields.items()}
        self.of = {name: tuple(about.metadata) for name, (_, about) in fields.items()}
        own = {name: next((one for one in all_ if isinstance(one, Needs)), None) for name, all_ in self.of.items()}
        self.needs = {name: own[name] or cls.needs for name, (cls, _) in fields.items()}
        self._needs = {name: self._conditions(one.when) for name, one in self.needs.items() if one is not None}
        self.rules = [
            self._rule(name, one) for name, all_ in self.of.items() for one in all_ if isinstance(one, Excludes)
        ]
        self._possible: dict[frozenset[str], list[Rule]] = {}
        # By the old name: the new one, with its option, and how values changed.
        self.renamed = {
            one.name: (f"{name}.{one.option}".rstrip("."), one)
            for name, all_ in self.of.items()
            for one in all_
            if isinstance(one, Was)
        }

    def has_effect(self, settings: Settings, name: str) -> bool:
        """Whether the setting does something."""
        return name not in self._needs or _hold(self._needs[name], settings)

    def why_idle(self, settings: Settings, name: str) -> str | None:
        """What the setting would need to do something, in words; None: it does something, or is its default."""
        if name not in self.defaults or self.has_effect(settings, name):
            return None
        # none says that something is off.
        if settings[name] in (None, self.defaults[name]):
            return None
        needs = self.needs[name]
        return f"changes nothing without {needs.text if needs else ''}"

    def refusal(self, settings: Settings) -> Rule | None:
        """The first rule that refuses a combination, or None if it works."""
        keys = frozenset(settings)
        if keys not in self._possible:
            self._possible[keys] = [rule for rule in self.rules if rule.may_apply(keys)]
        return next((rule for rule in self._possible[keys] if rule.applies(settings)), None)

    def why_refused(self, settings: Settings) -> str | None:
        """Why there is no such combination, in short; None: there is."""
        if (rule := self.refusal(settings)) is None:
            return None
        axes = [key.removeprefix("parallelism.").removesuffix("_size") for key in rule.keys(settings) if key in _AXES]
        return f"{' and '.join(axes)}: {rule.why}" if axes else rule.why

    def check(self, settings: Settings) -> None:
        """Raise a ValueError that names the settings and the nearest combination that works, if one does not."""
        if (rule := self.refusal(settings)) is None:
            return
        values = {key: settings.get(key, self.defaults[key]) for key in rule.keys(settings)}
        given = [f"{key} = {_shown(value)}" for key, value in values.items() if value is not None]
        changes = ", ".join(f"{key} = {_shown(value)}" for key, value in self._nearest(settings).items())
        why = re.sub(rf"\{{({_KEY})}}", lambda name: str(settings.get(name[1], self.defaults[name[1]])), rule.why)
        raise ValueError(f"{' with '.join(given)}: {why}. The nearest combination that works: {changes}")

    def described(self, name: str) -> Iterator[str]:
        """What the reference says of a setting besides its help."""
        others: dict[str, list[str]] = {}
        for one in self.of[name]:
            if isinstance(one, Needs) and one.text not in ("", name):
                yield f"Needs {one.text}."
            elif isinstance(one, Excludes) and isinstance(one.other, str) and isinstance(one.own, str):
                if " and " in f"{one.other} {one.own}":  # the refusal says it better
                    continue
                others.setdefault(one.own, []).append(one.other)
        for own, excluded in others.items():
            yield f"{f'With {own}: not' if own else 'Not'} together with {'; '.join(excluded)}."

    def _nearest(self, settings: Settings) -> dict[str, Any]:
        """What to change, by key: one setting or axis if that is enough, otherwise one after the other."""
        changed: dict[str, Any] = {}
        while (rule := self.refusal({**settings, **changed})) is not None:
            now = {**settings, **changed}
            ways = [{key: value(now) if callable(value) else value} for key, value in rule.instead.items()]
            ways = [way for way in ways if any(now.get(key, self.defaults[key]) != one for key, one in way.items())]
            # An axis is given up: its ranks go to FSDP, those of etp to ep.
            for axis in (key for key in rule.keys(now) if key in _AXES and (now.get(key) or 1) > 1):
                to = "parallelism.ep_size" if axis.endswith(".etp_size") else "parallelism.fsdp_size"
                more = {to: now[to] * now[axis]} if now.get(to) is not None else {}
                ways.append({axis: 1, **more})
            changed |= next((way for way in ways if self.refusal({**now, **way}) is None), ways[0])
        return changed

    def _rule(self, name: str, excludes: Excludes) -> Rule:
        # Of an axis, the nearest combination gives it up.
        default = {} if name in _AXES else {name: self.defaults[name]}
        conditions = [*self._conditions(excludes.own or name, name), *self._conditions(excludes.other)]
        return Rule(conditions, excludes.why, default if excludes.instead is None else excludes.instead)

    def _conditions(self, condition: Condition, name: str = "") -> list[list[tuple[str, Test]]]:
        """Groups of which one alternative each must hold. `name`: the setting that a function is about."""
        if isinstance(condition, tuple):
            key, test = condition
            return [[(key, _Comparison(key, self.defaults[key], test))]]
        if not isinstance(condition, str):
            return [[(name, condition)]]
        return [list(self._alternatives(group)) for group in condition.split(" and ")]

    def _alternatives(self, group: str) -> Iterator[tuple[str, Test]]:
        """Of "memory.experts=host or disk or memory.budget", one for each key."""
        for text in re.split(rf" or (?={_KEY})", group):
            key, sign, value = re.fullmatch(rf"({_KEY})(!=|=|>|)(.*)", text).groups()  # type: ignore[union-attr]
            yield key, _compared(key, sign, value.split(" or "), self.defaults[key])


def _hold(conditions: Sequence[Sequence[tuple[str, Test]]], settings: Settings) -> bool:
    return all(any(test(settings) for _, test in group) for group in conditions)


@dataclass(frozen=True)
class _Comparison:
    """A condition of one setting alone."""

    key: str
    default: Any
    test: Callable[[Any], bool]

    def __call__(self, settings: Settings) -> bool:
        return self.test(settings.get(self.key, self.default))


def _compared(key: str, sign: str, values: list[str], default: Any) -> Test:
    if not sign:
        return _Comparison(key, default, lambda value: value not in (None, default))
    if sign == ">":
        limit = float(values[0])
        return _Comparison(key, default, lambda value: value is not None and value > limit)
    return _Comparison(key, default, lambda value: (_word(value) in values) == (sign == "="))


def _word(value: Any) -> str:
    """As a condition writes it."""
    if isinstance(value, bool):
        return str(value).lower()
    return "none" if value is None else f"{value:g}" if isinstance(value, int | float) else str(value)


def _shown(value: Any) -> str:
    """As a configuration writes it."""
    return str(value).lower() if isinstance(value, bool) else repr("none" if value is None else value)


@lru_cache
def declared(config: type[Section]) -> Declared:
    """What a type of configuration declares."""
    return Declared(config)


def check_effects(resolved: Resolved, form: str | None = None, compare: str | None = None) -> None:
    """Refuse what a user has set to something else than its default, and what changes nothing where it is set: in the
    file by itself, or on the command line over it. What a run has recorded is taken as it is, and so is what a file
    says and the command line puts out of effect: `--config olmoe.toml placement.every=none` turns off all of the file's
    [placement].

    Args:
        form: what the rows of the data are, as `data.format` names it; None: not known.
        compare: a transport beside that of the run.

    Raises:
        ValueError: that, with key, value, place and what it would need."""
    all_ = resolved.config.declared
    known = resolved.config.flat()
    settings = known if form is None else {**known, "data.format": form}
    replaced = {".".join(key): value for key, value in resolved.replaced.items()}
    # Of the file's own data the format is not known.
    of_file = {**(known if "data.train" in replaced else settings), **replaced}
    for name, value in known.items():
        section, key = name.split(".")
        place = resolved.places.get((section, key))
        if place is None or section == compare or (why := all_.why_idle(settings, name)) is None:
            continue
        if not resolved.is_asked_now((section, key)) and (resolved.recorded or _had_effect(all_, of_file, name)):
            continue
        shown = toml_value(value) if isinstance(value, bool) else repr(value)
        raise ValueError(f"{name} = {shown} ({place}) {why}; set that, too, or leave {name} out")


def _had_effect(all_: Declared, of_file: Settings, name: str) -> bool:
    try:
        return all_.has_effect(of_file, name)
    except TypeError:  # values that the command line replaces have not been checked
        return False
