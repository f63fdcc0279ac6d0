"""What all sections of a configuration are made of: the closed, frozen base class, and values as TOML writes them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import tomli_w
from pydantic import BaseModel, BeforeValidator, ConfigDict, TypeAdapter, ValidationError

from carpool.plugins.nearest import nearest

NONE_WORDS = ("none", "null")


def _texts(value: Any) -> Any:
    """One string stands for a list of one; lists become tuples, so that a frozen section is frozen throughout."""
    if isinstance(value, str):
        return () if value.lower() in NONE_WORDS else (value,)
    return tuple(value) if isinstance(value, list) else value


# For a setting one of whose words is "none": files and the command line mean no value by it.
NONE_IS_A_WORD = BeforeValidator(lambda value: NONE_WORDS[0] if value is None else value)
Texts = Annotated[tuple[str, ...], BeforeValidator(_texts)]


def _numbers(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


Numbers = Annotated[tuple[float, ...], BeforeValidator(_numbers)]


class Section(BaseModel):
    """Frozen, typed without coercion (an int may stand for a float), and closed: unknown keys are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False, protected_namespaces=())


def toml_value(value: Any, as_key: bool = False) -> str:
    """One value on one line of TOML: tables inline, None as the word none."""
    if value is None:
        return f'"{NONE_WORDS[0]}"'
    if isinstance(value, dict):
        return "{" + ", ".join(f"{toml_value(k, as_key=True)} = {toml_value(v)}" for k, v in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(map(toml_value, value)) + "]"
    key, _, text = tomli_w.dumps({str(value): 0} if as_key else {"v": value}).strip().partition(" = ")
    return key if as_key else text


def known_name(key: str, name: str, names: Sequence[str]) -> str:
    """The name, if it is one of these; ValueError with the nearest one else."""
    if name in names:
        return name
    close = nearest(name, names)
    raise ValueError(
        f"{key} = {name!r}: expected one of {', '.join(names)}" + (f"; did you mean {close}?" if close else "")
    )


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
