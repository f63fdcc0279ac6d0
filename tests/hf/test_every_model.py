"""Every MoE architecture of the installed transformers: parity, or a reason.

Which architectures there are is found out, not listed (tests/hf/tiny_models.py); how each is measured is in
tests/hf/parity.py; the results are the table in docs/models.md, which `python -m tools.models_table` writes.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import transformers
from transformers import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from carpool.families import FAMILIES
from tests.environment import ROOT
from tests.hf import parity
from tests.hf.tiny_models import discover, tiny_batch, tiny_config, tiny_model
from tests.ranks import Ranks
from tools import models_table

WHAT_TO_DO = (
    "If transformers is new: run `python -m tools.models_table`. If the architecture cannot be built small, add the "
    "values it insists on to EXTRAS in tests/hf/tiny_models.py. If it cannot run on several ranks, say why in "
    "EXCEPTIONS in tests/hf/parity.py."
)

RANKS_IMPORT = ["tests.hf.every_class"]
# One of each structure of experts, for the meshes beside ep_size = 4.
STRUCTURES = ["olmoe", "gpt_oss", "nemotron_h", "muse_spark", "step3p7"]
# And those that most people train; the others are slow.
QUICK = [*STRUCTURES, "deepseek_v3", "gemma4", "glm4_moe", "kimi_linear", "mixtral", "qwen2_moe", "qwen3_moe"]
FOLDERS = [
    pytest.param(folder, marks=[] if folder in QUICK else pytest.mark.slow)
    for folder in sorted(discover().keys() - parity.EXCEPTIONS.keys())
]


def _check(outcome: parity.Outcome, folder: str) -> None:
    bound = parity.HANDLING.get(folder, parity.Handling()).bound
    assert not outcome.missing, f"{folder}: a gradient on one side only: {outcome.missing}"
    assert outcome.rows > 0, f"{folder}: nothing travelled, so nothing was tested"
    assert outcome.error <= bound, f"{folder}: {outcome}. {WHAT_TO_DO}"


@pytest.mark.parametrize("folder", FOLDERS)
def test_parity(ranks: Ranks, tmp_path: Path, folder: str) -> None:
    assert discover()[folder].class_name, f"transformers has no class to train for {folder}. {WHAT_TO_DO}"
    outcome = ranks(parity.measure, folder, str(tmp_path), parity.Mesh())[0]
    _check(outcome, folder)
    if parity.HANDLING.get(folder, parity.Handling()).cannot_load:
        assert outcome.loading, f"{folder} loads correctly now; remove `cannot_load` from its entry in HANDLING"
    else:
        assert not outcome.loading, f"{folder} loads wrong weights: {outcome.loading}. {WHAT_TO_DO}"


@pytest.mark.parametrize("folder", [pytest.param(f, marks=pytest.mark.slow) if f != "olmoe" else f for f in STRUCTURES])
def test_parity_with_two_copies_of_the_expert_group(ranks: Ranks, tmp_path: Path, folder: str) -> None:
    _check(ranks(parity.measure, folder, str(tmp_path), parity.Mesh(ep=2))[0], folder)


@pytest.mark.parametrize(
    "folder", ["olmoe", *(pytest.param(one, marks=pytest.mark.slow) for one in ("gpt_oss", "step3p7", "gemma4"))]
)
@pytest.mark.parametrize("mesh", [parity.Mesh(fsdp=2, tp=2, ep=2), parity.Mesh(fsdp=2, tp=2, ep=4)], ids=str)
def test_parity_with_tensor_parallelism(ranks: Ranks, tmp_path: Path, folder: str, mesh: parity.Mesh) -> None:
    """The ranks of a tensor-parallel group hold the same tokens, which must not be computed twice."""
    _check(ranks(parity.measure, folder, str(tmp_path), mesh)[0], folder)


def _with_head_norms(path: str) -> str:
    """The first training forward of GLM-4.5 with norms of queries and keys, and tp_size = 2."""
    parity.quiet()
    architecture, mesh = discover()["glm4_moe"], parity.Mesh(fsdp=2, tp=2, ep=2)
    if dist.get_rank() == 0:
        tiny_model(architecture, use_qk_norm=True).save_pretrained(path)
    dist.barrier()
    config = mesh.config(parity.IMPLEMENTATION, parity.Handling())
    model = architecture.model_class.from_pretrained(path, distributed_config=config, dtype=torch.float32).train()
    with pytest.raises(ValueError) as refusal:
        parity.loss_of(model, {name: value[:1] for name, value in tiny_batch(model).items()})
    return str(refusal.value)


def test_norms_that_a_tensor_parallel_plan_forgets_are_refused(ranks: Ranks, tmp_path: Path) -> None:
    """Their gradient would be that of one rank's heads, with the right loss."""
    for message in ranks(_with_head_norms, str(tmp_path)):
        assert "does not add up the ranks' gradients of model.layers.0.self_attn.q_norm" in message


@pytest.mark.parametrize("folder", sorted(parity.EXCEPTIONS))
def test_exceptions_are_refused(ranks: Ranks, tmp_path: Path, folder: str) -> None:
    """Each is refused before any work is lost. Should one get a plan, this fails, and it moves to the tested ones."""
    assert folder in discover(), f"transformers has no {folder} any more; remove it from EXCEPTIONS"
    if not discover()[folder].class_name:
        return
    for message in ranks(parity.refusal, folder, str(tmp_path), parity.Mesh()):
        assert re.search(r"`ep_size=4` was requested, but `\w+` has no `ep_plan`", message), message


def test_checkpoints_that_cannot_be_sharded_are_known() -> None:
    """What `carpool.hf` refuses to load sharded is just what comes out wrong in `test_parity`."""
    from carpool.hf.weights import weight_files as conversions

    unshardable = set()
    for folder in discover().keys() - parity.EXCEPTIONS.keys():
        with torch.device("meta"):
            if conversions.unshardable(discover()[folder].model_class(tiny_config(discover()[folder]))):
                unshardable.add(folder)
    assert unshardable == {folder for folder, handling in parity.HANDLING.items() if handling.cannot_load}


def test_no_experts_class_is_left_out() -> None:
    """Every class with transformers' experts decorator is in a tested model, or there is a reason why not."""
    missing = {}
    for folder, architecture in discover().items():
        sources = Path(transformers.__file__).parent.joinpath("models", folder).glob("modeling_*.py")
        pattern = re.compile(r"^@use_experts_implementation.*\nclass (\w+)", re.MULTILINE)
        decorated = {name for source in sources for name in pattern.findall(source.read_text(encoding="utf-8"))}
        if decorated and architecture.class_name:
            missing[folder] = decorated - {type(module).__name__ for module in tiny_model(architecture).modules()}
    left_out = {name for names in missing.values() for name in names}
    assert left_out == set(parity.UNTESTED_CLASSES), WHAT_TO_DO


def test_docs_have_every_architecture() -> None:
    rows = {row[0]: row for row in models_table.read_rows()}
    assert rows.keys() == discover().keys(), f"docs/models.md is out of date. {WHAT_TO_DO}"
    for folder, row in rows.items():
        expected = (discover()[folder].class_name or "none", folder in parity.EXCEPTIONS)
        assert (row[1], row[5] == models_table.NOT_POSSIBLE) == expected, f"docs/models.md is out of date for {folder}"


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
