"""The table of families is the only place that names them."""

from __future__ import annotations

import ast

from transformers import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from carpool.families import FAMILIES
from tests.environment import ROOT
from tests.hf.tiny_models import discover

# The demo's model, and sizes of published models for benchmarks.
ALLOWED = {"families.py", "train/config/schema_model.py", "bench/options.py"}


def test_each_entry_is_a_family_of_transformers() -> None:
    assert [name for name in FAMILIES if name not in discover()] == []
    assert [kind for one in FAMILIES.values() for kind in one.types if kind not in CONFIG_MAPPING] == []


def test_no_other_code_names_a_family() -> None:
    names = discover().keys() | set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values())
    for path in sorted((ROOT / "carpool").rglob("*.py")):
        file = path.relative_to(ROOT / "carpool").as_posix()
        if file not in ALLOWED:
            strings = {one.value for one in ast.walk(ast.parse(path.read_text())) if isinstance(one, ast.Constant)}
            assert not strings & names, f"{file} names {strings & names}: what differs belongs to carpool/families.py"
