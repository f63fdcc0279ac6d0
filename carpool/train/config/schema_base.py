"""What all sections of a configuration are made of: the closed, frozen base class, and values as TOML writes them."""

from __future__ import annotations

from typing import Annotated, Any

import tomli_w
from pydantic import BaseModel, BeforeValidator, ConfigDict

NONE_WORDS = ("none", "null")


def _texts(value: Any) -> Any:
    """One string stands for a list of one; lists become tuples, so that a frozen section is frozen throughout."""
    if isinstance(value, str):
        return () if value.lower() in NONE_WORDS else (value,)
    return tuple(value) if isinstance(value, list) else value


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
