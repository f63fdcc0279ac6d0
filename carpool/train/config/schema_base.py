"""What all sections of a configuration are made of: the closed, frozen base class, and values as TOML writes them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from importlib import import_module
from typing import Annotated, Any, ClassVar

import tomli_w
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, TypeAdapter, ValidationError
from pydantic_core import PydanticCustomError

from carpool.plugins.nearest import did_you_mean, nearest

NONE_WORDS = ("none", "null")


def _texts(value: Any) -> Any:
    """One string stands for a list of one; lists become tuples, so that a frozen section is frozen throughout."""
    if isinstance(value, str):
        return () if value.lower() in NONE_WORDS else (value,)
    return tuple(value) if isinstance(value, list) else value


# For a setting one of whose words is "none": files and the command line mean no value by it.
NONE_IS_A_WORD = BeforeValidator(lambda value: NONE_WORDS[0] if value is None else value)
# The same where that word is "no", as in Transformers; TOML also reads it as false.
NONE_IS_NO = BeforeValidator(lambda value: "no" if value is None or value is False else value)
# For a setting of "auto", "on" and "off" that was, or that reads well as, true or false.
SWITCH = BeforeValidator(lambda value: {True: "on", False: "off"}[value] if isinstance(value, bool) else value)
Texts = Annotated[tuple[str, ...], BeforeValidator(_texts)]


def _numbers(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


Numbers = Annotated[tuple[float, ...], BeforeValidator(_numbers)]
# One number stands for a list of one.
WholeNumbers = Annotated[
    tuple[Annotated[int, Field(ge=0)], ...],
    BeforeValidator(lambda value: _numbers([value] if type(value) is int else value)),
]


UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
_SIZE = f"a size with its unit ({', '.join(UNITS)}), such as 70GiB"


def size_of(text: str, what: str) -> int:
    """Bytes of a size with its unit, such as "70GiB". `what`: whose size it is, for the error.

    Raises:
        ValueError: it is none."""
    found = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]+)\s*", text)
    units = {unit.lower(): factor for unit, factor in UNITS.items()}
    if found is None or found[2].lower() not in units or float(found[1]) == 0:
        raise ValueError(f"{what} = {text!r}: expected {_SIZE}")
    return int(float(found[1]) * units[found[2].lower()])


def _size(text: str) -> str:
    try:
        size_of(text, "")
    except ValueError:
        raise PydanticCustomError("size", _SIZE) from None  # type: ignore[arg-type]
    return text


# A number without a unit is text, too, so that the error says what it lacks.
Size = Annotated[
    str,
    BeforeValidator(lambda value: str(value) if type(value) in (int, float) else value),
    AfterValidator(_size),
]


class Section(BaseModel):
    """Frozen, typed without coercion (an int may stand for a float), and closed: unknown keys are refused. The text
    below a setting is its help.

    Attributes:
        needs: without which no setting of the section does something (`carpool.train.config.declarations.Needs`)."""

    needs: ClassVar[Any] = None

    @classmethod
    def __pydantic_init_subclass__(cls, **kwargs: Any) -> None:
        """The text below a setting is its help, on one line."""
        for about in cls.model_fields.values():
            about.description = " ".join((about.description or "").split())

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        strict=True,
        allow_inf_nan=False,
        protected_namespaces=(),
        use_attribute_docstrings=True,
    )


def toml_value(value: Any, as_key: bool = False) -> str:
    """One value on one line of TOML: tables inline, None as the word none."""
    if value is None:
        return f'"{NONE_WORDS[0]}"'
    if isinstance(value, dict):
        return "{" + ", ".join(f"{toml_value(k, as_key=True)} = {toml_value(v)}" for k, v in value.items()) + "}"
    if isinstance(value, Section):
        return toml_value(value.model_dump(exclude_none=True))
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(map(toml_value, value)) + "]"
    key, _, text = tomli_w.dumps({str(value): 0} if as_key else {"v": value}).strip().partition(" = ")
    return key if as_key else text


def registered(key: str, registry: str, *words: str) -> AfterValidator:
    """For a setting that takes one of these words, or a name of the registry (or function) MODULE.NAME, plug-ins'
    included. It may need PyTorch, and is imported for a name alone. Others are refused with the nearest one."""

    def known(name: str) -> str:
        if name in words:
            return name
        module, _, attribute = registry.rpartition(".")
        found = getattr(import_module(module), attribute)
        names = tuple(dict.fromkeys((*words, *(found() if callable(found) else found))))
        if name in names:
            return name
        raise ValueError(f"{key} = {name!r}: expected one of {', '.join(names)}{did_you_mean(name, names)}")

    return AfterValidator(known)


def listed_options(options: Mapping[str, Any]) -> str:
    """For errors: which options there are."""
    return f"the options {', '.join(options)}" if options else "no options of this section"


def check_options(key: str, given: Mapping[str, Any], told: str, known: Mapping[str, Any]) -> None:
    """Raise ValueError for a name that is not known, and for a value of another type."""
    for name, value in given.items():
        if name not in known:
            close = nearest(name, list(known))
            raise ValueError(f"unknown key {key}.{name}: {f'did you mean {key}.{close}?' if close else told}")
        try:
            TypeAdapter(known[name]).validate_python(value, strict=True)
        except ValidationError as error:
            raise ValueError(f"{key}.{name} = {value!r}: {error.errors()[0]['msg']}") from None
