"""Saving and resuming, on the same ranks, on others, and when something goes wrong."""

from __future__ import annotations

import errno
import json
import multiprocessing
import os
import random
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM
from transformers.distributed import DistributedConfig

from carpool.hf.build_model import build_model
from carpool.hf.weights.model_config import make_config
from carpool.layout import ExpertLayout
from carpool.layout.layouts import Layouts
from carpool.optim import AdamW
from carpool.train.checkpoints import shard_files
from carpool.train.checkpoints.checkpoint_files import (
    STATE_FILE,
    CheckpointError,
    CheckpointWriteError,
    file_record,
    write_state,
)
from carpool.train.checkpoints.export import export_checkpoint
from carpool.train.checkpoints.manager import CheckpointManager
from carpool.train.checkpoints.reading import load
from carpool.train.checkpoints.resume import check_goes_on, checkpoint_to_resume, read_run_state
from carpool.train.checkpoints.run_source import keep_source
from carpool.train.checkpoints.state_tensors import as_rectangles, model_tensors, optimizer_tensors
from carpool.train.config import load_config
from tests.full_tensor import full_tensor
from tests.hf.meshes import reuse_meshes
from tests.ranks import Ranks

# Transformers' own, so that these tests say nothing about Carpool's transports; those must pass with it too.
EP_IMPLEMENTATION = "all_to_all"
TINY = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "attention_dropout": 0.2,  # so that the random generators matter
}
Layout = dict[str, int]


def _build(
    layout: Layout | None, seed: int = 0, frozen: tuple[str, ...] = (), **overrides: Any
) -> tuple[Any, torch.optim.Optimizer]:
    config = None
    if layout is not None:
        reuse_meshes()
        config = DistributedConfig.from_dict({"ep_implementation": EP_IMPLEMENTATION, **layout})
    model = build_model(
        make_config("olmoe", TINY | overrides), distributed_config=config, dtype=torch.float32, seed=seed
    )
    for name in frozen:
        model.get_parameter(name).requires_grad_(False)
    return model, torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2, weight_decay=0.1)


def _train(model: Any, optimizer: torch.optim.Optimizer, steps: range, dropout: bool = True) -> list[float]:
    """Losses over a fixed global batch of 4 rows, of which each rank takes its part."""
    model.train(dropout)
    sharded = dist.is_initialized() and any(isinstance(p, DTensor) for p in model.parameters())
    rank, world = (dist.get_rank(), dist.get_world_size()) if sharded else (0, 1)
    losses = []
    for step in steps:
        ids = torch.randint(2, 61, (4, 12), generator=torch.Generator().manual_seed(step))
        mine = ids[rank * 4 // world : (rank + 1) * 4 // world]
        loss = model(input_ids=mine, labels=mine).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        loss = loss.detach()
        if sharded:
            dist.all_reduce(loss)
        losses.append(loss.item() / world)
    return losses


def _evaluate(model: Any) -> None:
    """A forward without a backward: FSDP leaves some parameters whole after it."""
    with torch.no_grad():
        model(input_ids=torch.arange(2, 14)[None])


def _full(model: Any, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    tensors = model_tensors(model) | optimizer_tensors(model, optimizer)
    return {name: full_tensor(tensor).detach().clone() for name, tensor in tensors.items()}


def _seed_everything(seed: int) -> None:
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)


def _train_and_save(output_dir: str, layout: Layout | None) -> tuple[dict[str, torch.Tensor], list[float], Any]:
    """Two steps, a checkpoint, and two more: everything at the checkpoint, the later losses, everything at the end."""
    model, optimizer = _build(layout)
    _seed_everything(dist.get_rank() if dist.is_initialized() else 0)
    _train(model, optimizer, range(2))
    saved = _full(model, optimizer)
    CheckpointManager(output_dir).save(2, model, optimizer, {"loader": {"position": 17}, "tokens": 96})
    losses = _train(model, optimizer, range(2, 4))
    draws = [torch.rand(1).item(), random.random(), float(np.random.rand())]
    return saved, losses, (_full(model, optimizer), draws)


def _resume(path: str, layout: Layout | None, dropout: bool = True) -> tuple[dict[str, torch.Tensor], list[float], Any]:
    model, optimizer = _build(layout, seed=99)
    _seed_everything(1234)
    state = load(path, model, optimizer)
    assert state == {"loader": {"position": 17}, "tokens": 96, "step": 2}
    loaded = _full(model, optimizer)
    losses = _train(model, optimizer, range(2, 4), dropout)
    draws = [torch.rand(1).item(), random.random(), float(np.random.rand())]
    # Without drop-out, losses are compared and not bits; gathering everything again takes long.
    return loaded, losses, (_full(model, optimizer) if dropout else {}, draws)


def _assert_same(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    assert any(".experts." in name and "exp_avg_sq" in name for name in ours)
    differ = [name for name in ours if not torch.equal(ours[name], theirs[name])]
    assert not differ


TWO: Layout = {"fsdp_size": 2, "ep_size": 2}
EP4, EP2, HSDP = (
    {"fsdp_size": 4, "ep_size": 4},
    {"fsdp_size": 4, "ep_size": 2},
    {"dp_replicate_size": 2, "fsdp_size": 2},
)
SOURCES: dict[str, Layout | None] = {"ep4": EP4, "ep2": EP2, "hsdp": HSDP | {"ep_size": 2}, "one": None}


@pytest.fixture(scope="module")
def saved(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A checkpoint of each source layout, made once: (path, everything at the checkpoint, later losses, the end)."""
    made: dict[str, Any] = {}

    def make(source: str) -> Any:
        if source not in made:
            out = tmp_path_factory.mktemp(source)
            results = (
                [_train_and_save(str(out), None)]
                if source == "one"
                else ranks(_train_and_save, str(out), SOURCES[source])
            )
            made[source] = (CheckpointManager(out).latest(), results)
        return made[source]

    return make


@pytest.mark.parametrize("source", ["ep4", pytest.param("ep2", marks=pytest.mark.slow), "one"])
def test_the_same_ranks_resume_bit_by_bit(ranks: Ranks, saved: Any, source: str) -> None:
    """Losses, weights, moments and random draws; dropout is on, so the generators had to come back."""
    path, results = saved(source)
    again = [_resume(str(path), None)] if source == "one" else ranks(_resume, str(path), SOURCES[source])
    for (at_save, losses, (end, draws)), (loaded, new_losses, (new_end, new_draws)) in zip(results, again, strict=True):
        _assert_same(loaded, at_save)
        assert new_losses == losses
        _assert_same(new_end, end)
        assert new_draws == draws


@pytest.mark.parametrize(
    ("source", "target"),
    [
        ("ep4", EP2),
        ("one", EP4),
        pytest.param("ep4", HSDP, marks=pytest.mark.slow),
        pytest.param("ep2", {"fsdp_size": 4}, marks=pytest.mark.slow),
        pytest.param("hsdp", EP4, marks=pytest.mark.slow),
    ],
)
def test_other_layouts_resume_to_the_same_values(ranks: Ranks, saved: Any, source: str, target: Layout) -> None:
    """And what they train from there is, up to rounding, what one process trains."""
    path, results = saved(source)
    alone, reference, _ = _resume(str(path), None, dropout=False)
    _assert_same(alone, results[0][0])
    for loaded, losses, _ in ranks(_resume, str(path), target, dropout=False):
        _assert_same(loaded, results[0][0])
        assert losses == pytest.approx(reference, abs=1e-6)


def _move(output_dir: str, source: Layout, target: Layout, model_of: dict[str, Any]) -> bool:
    model, optimizer = _build(source, **model_of)
    _train(model, optimizer, range(1))
    _evaluate(model)
    before = _full(model, optimizer)
    _evaluate(model)
    path = CheckpointManager(output_dir).save(1, model, optimizer, {}).path
    again, again_optimizer = _build(target, seed=5, **model_of)
    load(path, again, again_optimizer)
    assert (again.lm_head.weight is again.model.embed_tokens.weight) == ("lm_head.weight" not in before)
    after = _full(again, again_optimizer)
    return before.keys() == after.keys() and all(after[name].equal(before[name]) for name in before)


@pytest.mark.parametrize(
    ("source", "target", "model_of"),
    [
        # 6 experts, 3 on each rank of ep, over 2 ranks of efsdp: shards of 2 and 1; vocabulary 61 over 4.
        (EP2, {"fsdp_size": 4}, {"num_experts": 6, "vocab_size": 61}),
        (EP4, EP2, {"tie_word_embeddings": True, "frozen": ("model.norm.weight",)}),
    ],
    ids=["uneven shards", "tied and frozen"],
)
def test_values_on_another_layout(
    ranks: Ranks, tmp_path: Path, source: Layout, target: Layout, model_of: dict[str, Any]
) -> None:
    assert all(ranks(_move, str(tmp_path), source, target, model_of))


def _rectangles_share_memory() -> bool:
    model, _ = _build(EP2)
    tensors = model_tensors(model)
    strided = [name for name, t in tensors.items() if isinstance(t, DTensor) and ".experts." in name]
    assert strided
    rectangles = as_rectangles(tensors)
    return all(
        rectangles[name].to_local().data_ptr() == tensors[name].to_local().data_ptr()  # type: ignore[attr-defined]
        and rectangles[name].placements != tensors[name].placements  # type: ignore[attr-defined]
        for name in strided
    )


def test_describing_expert_shards_moves_no_data(ranks: Ranks) -> None:
    assert all(ranks(_rectangles_share_memory))


def test_states_that_are_not_there_yet(tmp_path: Path) -> None:
    # The optimizer creates its state by a step; it must not be remembered, nor move anything.
    model, optimizer = _build(None)
    before = {name: tensor.clone() for name, tensor in model_tensors(model).items()}
    path = CheckpointManager(tmp_path).save(0, model, optimizer, {}).path
    assert all(before[name].equal(tensor) for name, tensor in model_tensors(model).items())
    again, again_optimizer = _build(None, seed=7)
    load(path, again, again_optimizer)
    expected = _train(*_build(None), range(2), dropout=False)
    assert _train(model, optimizer, range(2), dropout=False) == expected
    assert _train(again, again_optimizer, range(2), dropout=False) == expected
    # A parameter without a gradient so far has no state; with zeros, it starts later exactly as it would have.
    model, optimizer = _build(None)
    late = model.model.norm.weight
    late.requires_grad_(False)
    _train(model, optimizer, range(1), dropout=False)
    late.requires_grad_(True)
    assert late not in optimizer.state
    path = CheckpointManager(tmp_path).save(1, model, optimizer, {}).path
    again, again_optimizer = _build(None, seed=7)
    load(path, again, again_optimizer)
    assert _train(again, again_optimizer, range(1, 3), dropout=False) == _train(
        model, optimizer, range(1, 3), dropout=False
    )


def test_kept_to_a_number_in_the_order_of_saving(tmp_path: Path) -> None:
    model, optimizer = _build(None)
    manager = CheckpointManager(tmp_path, save_total_limit=2)
    assert manager.latest() is None and manager.list() == []
    for step in (10, 20, 30):
        saved = manager.save(step, model, optimizer, {})
        files = [p for p in saved.path.rglob("*") if p.is_file() and p.name != STATE_FILE]
        assert saved.bytes == sum(p.stat().st_size for p in files)
    assert [p.name for p in manager.list()] == ["step-00000020", "step-00000030"]
    # Rewound to 20 and saved again: that is the newest, whatever the older 30 says.
    manager.save(25, model, optimizer, {})
    assert [p.name for p in manager.list()] == ["step-00000030", "step-00000025"]
    assert manager.latest() == tmp_path / "checkpoints" / "step-00000025"
    # The same step again replaces the first.
    path = manager.save(25, model, optimizer, {"mark": 1}).path
    assert load(path, model, optimizer) == {"mark": 1, "step": 25}
    assert sorted(p.name for p in manager.folder.iterdir()) == ["step-00000025", "step-00000030"]
    with pytest.raises(ValueError, match="save_total_limit is 0"):
        CheckpointManager(tmp_path, save_total_limit=0)
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointWriteError, match=r"Not a directory \(.*file/checkpoints\)"):
        CheckpointManager(tmp_path / "file").save(1, *_build(None), {})


def test_a_replacement_that_was_interrupted(tmp_path: Path) -> None:
    """Killed between the two renames: the old one still counts, and gets its name back."""
    model, optimizer = _build(None)
    manager = CheckpointManager(tmp_path)
    path = manager.save(1, model, optimizer, {}).path
    aside = path.rename(path.with_name(".old-step-00000001-0a0b0c0d"))
    assert manager.list() == [aside]
    load(aside, model, optimizer)
    manager.save(2, model, optimizer, {})
    assert [p.name for p in manager.list()] == ["step-00000001", "step-00000002"]


def _other_state_on_rank_1(output_dir: str) -> str:
    model, optimizer = _build(TWO)
    with pytest.raises(ValueError) as caught:
        CheckpointManager(output_dir).save(1, model, optimizer, {"a": 1, "seen": dist.get_rank()})
    return str(caught.value)


def test_state_must_be_json_and_the_same_everywhere(two_ranks: Ranks, tmp_path: Path) -> None:
    for message in two_ranks(_other_state_on_rank_1, str(tmp_path)):
        assert "the same on all ranks, but rank 1 has another seen than rank 0" in message
    model, optimizer = _build(None)
    with pytest.raises(ValueError, match="cannot be written as JSON"):
        CheckpointManager(tmp_path).save(1, model, optimizer, {"loader": object()})
    assert CheckpointManager(tmp_path).list() == []


@contextmanager
def _full_disk(part: str) -> Iterator[None]:
    """Every file under `part` is written to /dev/full, where each write fails as on a full disk."""
    original = shard_files.write_file

    def write_file(path: str, blocks: Any) -> Any:
        return original("/dev/full" if f"/{part}/" in path else path, blocks)

    with mock.patch.object(shard_files, "write_file", write_file):
        yield


def _save_on_a_full_disk(output_dir: str, part: str) -> tuple[str, list[str], bool]:
    model, optimizer = _build(TWO)
    manager = CheckpointManager(output_dir)
    manager.save(1, model, optimizer, {})
    _train(model, optimizer, range(1))
    with pytest.raises(CheckpointWriteError) as caught:
        if dist.get_rank() == 1:
            with _full_disk(part):
                manager.save(2, model, optimizer, {})
        else:
            manager.save(2, model, optimizer, {})
    left = sorted(p.name for p in manager.folder.iterdir())
    dist.barrier()
    path = manager.latest()
    assert path is not None
    load(path, model, optimizer)
    # The run goes on, and the next save works.
    manager.save(3, model, optimizer, {})
    return str(caught.value), left, manager.latest() == manager.folder / "step-00000003"


@pytest.mark.parametrize("part", ["model", "optimizer"])
def test_a_full_disk_on_one_rank_stops_the_save_on_all(two_ranks: Ranks, tmp_path: Path, part: str) -> None:
    results = two_ranks(_save_on_a_full_disk, str(tmp_path), part)
    for message, _, went_on in results:
        assert message == results[0][0]
        assert f"checkpoint {tmp_path}/checkpoints/step-00000002 was not written" in message
        assert f"rank 1: {os.strerror(errno.ENOSPC)}" in message
        assert "; free some space or lower training.save_total_limit" in message
        assert went_on
    assert results[0][1] == ["step-00000001"]


def _write_half(folder: Path, pipe: Any) -> None:
    """In a process of its own: a checkpoint, and half of the next."""
    model = torch.nn.Linear(64, 64)
    optimizer = torch.optim.AdamW(model.parameters())
    manager = CheckpointManager(folder, save_total_limit=1)
    manager.save(1, model, optimizer, {"mark": 1})
    original = shard_files.write_file

    def write_file(path: str, blocks: Any) -> Any:
        if "/optimizer/" in path:
            Path(path).write_bytes(b"half of a fi")
            pipe.send("in the middle")
            time.sleep(600)
        return original(path, blocks)

    shard_files.write_file = write_file
    manager.save(2, model, optimizer, {"mark": 2})


def test_a_killed_writer_leaves_the_last_good_checkpoint(tmp_path: Path) -> None:
    context = multiprocessing.get_context("forkserver")
    ours, theirs = context.Pipe()
    process = context.Process(target=_write_half, args=(tmp_path, theirs), daemon=True)
    process.start()
    theirs.close()
    assert ours.recv() == "in the middle"
    process.kill()
    process.join()
    manager = CheckpointManager(tmp_path, save_total_limit=1)
    left = sorted(p.name for p in manager.folder.iterdir())
    assert len(left) == 2 and left[0].startswith(".tmp-step-00000002-") and left[1] == "step-00000001"
    path = manager.latest()
    assert path is not None and manager.list() == [path]
    model = torch.nn.Linear(64, 64)
    optimizer = torch.optim.AdamW(model.parameters())
    assert load(path, model, optimizer) == {"mark": 1, "step": 1}
    manager.save(2, model, optimizer, {"mark": 3})
    assert [p.name for p in manager.folder.iterdir()] == ["step-00000002"]


@pytest.fixture
def small(tmp_path: Path) -> tuple[Path, torch.nn.Module, torch.optim.Optimizer]:
    """A checkpoint, and a model and optimizer with other values to load it into."""
    model = torch.nn.Linear(8, 8)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(8)).sum().backward()
    optimizer.step()
    path = CheckpointManager(tmp_path).save(1, model, optimizer, {}).path
    other = torch.nn.Linear(8, 8)
    return path, other, torch.optim.AdamW(other.parameters())


def _refuses(path: Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer | None) -> str:
    """The message of the refusal; the weights must not have changed."""
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(CheckpointError) as caught:
        load(path, model, optimizer)
    assert all(tensor.equal(before[name]) for name, tensor in model.state_dict().items())
    return str(caught.value)


def _shard(path: Path, part: str) -> Path:
    return next((path / part).glob("*.safetensors"))


@pytest.mark.parametrize("part", ["model", "optimizer"])
def test_damaged_files_are_found(small: Any, part: str) -> None:
    path, model, optimizer = small
    shard = _shard(path, part)
    content = shard.read_bytes()
    for damaged, wanted in (
        (content[:-5], f"{shard} is truncated: it has {len(content) - 5} bytes instead of {len(content)}"),
        (content + b"x", f"{shard} is damaged: it has {len(content) + 1} bytes"),
        (content[:-3] + bytes([content[-3] ^ 1]) + content[-2:], f"{shard} is damaged (wrong checksum)"),
        (b"\xff" * 9 + content[9:], f"{shard} is damaged (wrong checksum)"),
    ):
        shard.write_bytes(damaged)
        assert wanted in _refuses(path, model, optimizer)
    shard.write_bytes(content[:-3] + bytes([content[-3] ^ 1]) + content[-2:])
    with pytest.raises(CheckpointError, match="wrong checksum"):
        load(path, model, optimizer, sums_first=False)
    assert CheckpointManager(path.parent.parent).latest() == path  # right size; only its content is wrong
    shard.unlink()
    assert f"{part}/{shard.name} is missing" in _refuses(path, model, optimizer)
    assert CheckpointManager(path.parent.parent).latest() is None
    shard.write_bytes(content)
    load(path, model, optimizer)


def test_a_wrong_header_is_found_even_with_a_right_checksum(small: Any) -> None:
    """As if it had been damaged before it was written."""
    from carpool.train.checkpoints.checkpoint_files import read_state

    path, model, optimizer = small
    shard = _shard(path, "model")
    shard.write_bytes(b"\xff" * 9 + shard.read_bytes()[9:])
    content = read_state(path)
    content["files"][f"model/{shard.name}"] = file_record(shard)
    write_state(path, content)
    assert "not intact safetensors" in _refuses(path, model, optimizer)


def test_a_damaged_state_file_is_found(small: Any) -> None:
    path, model, optimizer = small
    state = path / STATE_FILE
    text = state.read_text()
    for damaged, wanted in (
        (text[: len(text) // 2], "is damaged"),
        ("[]", "is damaged"),
        (text.replace('"step": 1', '"step": 2'), "wrong checksum"),
        (text.replace("carpool-checkpoint-1", "carpool-checkpoint-2"), "update Carpool"),
        (json.dumps({"global_step": 5}), "is not a Carpool checkpoint"),
    ):
        state.write_text(damaged)
        assert wanted in _refuses(path, model, optimizer)
        assert CheckpointManager(path.parent.parent).latest() is None


WRONG: list[Any] = [None, [], {}, "x", -1, 1.5, float("nan"), True, [1], {"a": 1}]


def _signed(path: Path, where: tuple[Any, ...], value: Any) -> None:
    """Puts a value into state.json, or with `KeyError` takes one out, and signs it again."""
    content = json.loads((path / STATE_FILE).read_text())
    inside = content
    for key in where[:-1]:
        inside = inside[key]
    if value is KeyError:
        del inside[where[-1]]
    else:
        inside[where[-1]] = value
    del content["sha256"], content["format"]
    write_state(path, content)


@pytest.mark.parametrize(
    ("where", "right"),
    [
        (("step",), []),
        (("sequence",), []),
        (("written",), [str]),
        (("versions",), [{}]),
        (("world_size",), []),
        (("state",), [dict]),
        (("files",), []),
        (("files", "model/config.json"), [KeyError]),  # no weights: it need not be there
        (("files", "model/config.json", "bytes"), []),
        (("files", "model/config.json", "sha256"), []),
        (("ranks",), []),
        (("ranks", 0), []),
        (("ranks", 0, "rng"), []),
        (("ranks", 0, "rng", "python"), []),
        (("ranks", 0, "rng", "python", "version"), []),
        (("ranks", 0, "rng", "python", "words"), []),
        (("ranks", 0, "rng", "numpy"), []),
        (("ranks", 0, "rng", "numpy", "kind"), []),
        (("ranks", 0, "rng", "numpy", "key"), []),
        (("ranks", 0, "rng", "numpy", "pos"), [int, float, bool]),
        (("ranks", 0, "rng", "torch"), []),
    ],
    ids=lambda value: ".".join(map(str, value)) if isinstance(value, tuple) else "",
)
def test_a_state_file_that_is_signed_but_malformed(small: Any, where: tuple[Any, ...], right: list[Any]) -> None:
    """Whatever is in it, it is refused in words, before a weight or a generator has changed."""
    path, model, optimizer = small
    config = path / "model" / "config.json"
    config.write_text("{}")
    _signed(path, ("files", "model/config.json"), file_record(config))
    whole = (path / STATE_FILE).read_text()
    generators = torch.get_rng_state(), random.getstate()
    for value in [KeyError, *WRONG]:
        if type(value) in right or value in right:
            continue
        (path / STATE_FILE).write_text(whole)
        _signed(path, where, value)
        assert (text := _refuses(path, model, optimizer)).startswith(str(path)), (value, text)
        CheckpointManager(path.parent.parent).latest()
    assert torch.get_rng_state().equal(generators[0]) and random.getstate() == generators[1]


@pytest.mark.parametrize("name", ["", "/etc/passwd", "../step-00000002/model/x.safetensors"])
def test_a_state_file_names_no_file_outside(small: Any, name: str) -> None:
    path, model, optimizer = small
    _signed(path, ("files", name), {"bytes": 1, "sha256": ""})
    assert f"files names {name!r}, which is not inside the checkpoint" in _refuses(path, model, optimizer)


RUN_STATE: dict[str, Any] = {
    "totals": {"tokens": 5, "bytes_remote": 1, "bytes_remote_alltoall": 2},
    "losses": {"final_loss": 1.5, "first_eval_loss": None, "final_eval_loss": float("nan")},
    "loader": {"position": 3, "fingerprint": "x"},
    "placement": {"moe_layout": "contiguous", "layouts": None, "pending": None, "since": None, "measured": {"rows": 1}},
}


@pytest.mark.parametrize(
    "where", [(key,) for key in RUN_STATE] + [(key, inner) for key, values in RUN_STATE.items() for inner in values]
)
def test_a_runs_state_that_is_malformed(tmp_path: Path, where: tuple[str, ...]) -> None:
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    path = CheckpointManager(tmp_path).save(1, model, optimizer, RUN_STATE).path
    assert read_run_state(path)["totals"] == RUN_STATE["totals"]
    whole = (path / STATE_FILE).read_text()
    for value in [KeyError, [], "x", -1, True, [1]]:
        if where == ("loader", "fingerprint") or (where[-1], type(value)) in (("moe_layout", str), ("since", int)):
            continue  # the loader compares
        if value == -1 and where[0] == "losses":
            continue
        (path / STATE_FILE).write_text(whole)
        _signed(path, ("state", *where), value)
        with pytest.raises(CheckpointError, match=rf"state\.json is damaged \(state\.{'.'.join(where)}"):
            read_run_state(path)


def test_a_run_goes_on_without_the_replicas_that_its_layouts_had(tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 2)
    old = {"layers": {"a": {"homes": [[1], [0]], "slots": [[1, -1], [0, 1]]}}, "about": {}}
    answer: dict[str, Any] = {"why": "", "solver": "search", "solve_seconds": None, "before": {}, "predicted": {}}
    placed = {"layouts": old, "pending": {"asked": 1, "answer": {**answer, "layouts": {"a": old}}}}
    state = {**RUN_STATE, "placement": {**RUN_STATE["placement"], **placed}}
    path = CheckpointManager(tmp_path).save(1, model, torch.optim.AdamW(model.parameters()), state).path
    found = read_run_state(path)["placement"]
    assert found["pending"]["answer"]["layouts"] == {"a": found["layouts"]}
    assert Layouts.from_dict(found["layouts"])["a"] == ExpertLayout(((1,), (0,)))


def test_what_a_run_cannot_go_on_from_is_said_before_weights_are_read(tmp_path: Path) -> None:
    model = torch.nn.Linear(256, 16).bfloat16()
    state = {**RUN_STATE, "loader": {"position": 3, "sequence_length": 96, "seed": 0}}
    plain, whole = torch.optim.AdamW(model.parameters()), AdamW(model.parameters(), moments="int8")
    for optimizer in (plain, whole):
        model(torch.ones(1, 256).bfloat16()).sum().backward()
        optimizer.step()
    manager = CheckpointManager(tmp_path)
    one, two = (manager.save(step, model, each, state).path for step, each in ((1, plain), (2, whole)))
    for path, settings, message in (
        (one, [], None),
        (one, ["model.dtype=bfloat16"], None),
        (one, ["training.stop_at_step=1"], "is at step 1 already, and this run ends at step 1"),
        (one, ["training.seed=3"], "made with training.seed = 0, now it is 3"),
        (one, ["data.sequence_length=48"], "data.sequence_length = 96, now it is 48"),
        (one, ["training.optimizer_state_dtype=int8"], "this run keeps the optimizer's moments in int8, and"),
        (two, ["training.optimizer_state_dtype=int8", "model.dtype=bfloat16"], None),
        (two, ["training.optimizer=torch"], "has float32 masters of bfloat16 parameters, which this run does not keep"),
        (two, ["model.dtype=bfloat16"], "the checkpoint keeps the optimizer's moments in int8, and this run"),
    ):
        with nullcontext() if message is None else pytest.raises(ValueError, match=message):
            check_goes_on(path, read_run_state(path), load_config(None, settings))
    for path in (one, two):
        next((path / "model").glob("*.safetensors")).unlink()
    with pytest.raises(ValueError, match=r"can be read \(.*step-00000002.*safetensors.*; restore one"):
        checkpoint_to_resume("last", tmp_path, manager)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_what_is_no_checkpoint_is_refused(small: Any, tmp_path: Path) -> None:
    path, model, optimizer = small
    assert "there is no checkpoint" in (text := _refuses(path.with_name("step-9"), model, optimizer))
    assert "beside it are step-00000001" in text
    for above in (tmp_path, tmp_path / "checkpoints"):
        assert f"resume from {path}" in _refuses(above, model, optimizer)

    foreign = tmp_path / "foreign"
    torch.distributed.checkpoint.save({"w": torch.ones(2)}, checkpoint_id=foreign, no_dist=True)
    assert ".metadata" in (text := _refuses(foreign, model, optimizer)) and "never unpickles" in text
    pickled = tmp_path / "model.pt"
    torch.save(model.state_dict(), pickled)
    assert "is a file" in (text := _refuses(pickled, model, optimizer)) and "never unpickles" in text
    model_folder = tmp_path / "hf"
    _build(None)[0].save_pretrained(model_folder)
    assert "start a new run from it with model.path" in _refuses(model_folder, model, optimizer)
    (empty := tmp_path / "empty").mkdir()
    assert f"it has no {STATE_FILE}" in _refuses(empty, model, optimizer)
    shutil.copy(_shard(path, "model"), path / "model" / "shard-00009-model-00001-of-00001.safetensors")
    assert "files that Carpool did not write there" in _refuses(path, model, optimizer)


def _other_config(path: str) -> str:
    model, optimizer = _build(EP4, num_experts=16)
    return _refuses(Path(path), model, optimizer)


def _damaged_on_one_rank(path: str) -> str:
    return _refuses(Path(path), *_build(EP2))


def test_all_ranks_refuse_with_the_same_words(ranks: Ranks, saved: Any, tmp_path: Path) -> None:
    path, _ = saved("ep4")
    for message in ranks(_other_config, str(path)):
        assert message.count("has shape") == 1 and "(8," in message and "(16," in message
    copy = shutil.copytree(path, tmp_path / path.name)
    shard = _shard(copy, "model")
    content = shard.read_bytes()
    shard.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    messages = ranks(_damaged_on_one_rank, str(copy))
    assert len(set(messages)) == 1 and "wrong checksum" in messages[0]


def test_another_dtype_is_converted_and_said(small: Any, caplog: pytest.LogCaptureFixture) -> None:
    path, model, _ = small
    expected = torch.nn.Linear(8, 8)
    load(path, expected)
    load(path, model.bfloat16())
    assert torch.equal(model.weight, expected.weight.bfloat16())
    assert "from torch.float32 to torch.bfloat16" in caplog.text


def _export(run: str, layout: Layout) -> torch.Tensor:
    model, optimizer = _build(layout, tie_word_embeddings=layout == EP2)
    _train(model, optimizer, range(1))
    folder = Path(run)
    if dist.get_rank() == 0:
        keep_source(folder, None, "bytes")
    dist.barrier()
    for _ in range(2):  # the second replaces the first
        _evaluate(model)
        saved = CheckpointManager(run).save(1, model, optimizer, {})
        export_checkpoint(folder, saved.path, folder / "model", replace=True)
    assert model.config.distributed_config is not None
    model.eval()
    with torch.no_grad():
        logits: torch.Tensor = model(input_ids=torch.arange(2, 14)[None]).logits
    return logits


@pytest.mark.parametrize(
    "layout", [pytest.param(EP4, marks=pytest.mark.slow), EP2, HSDP | {"ep_size": 2}], ids=["ep4", "ep2-tied", "hsdp"]
)
def test_an_export_loads_in_plain_transformers(ranks: Ranks, tmp_path: Path, layout: Layout) -> None:
    logits = ranks(_export, str(tmp_path), layout)
    out = tmp_path / "model"
    loaded: Any = AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
    model, info = loaded
    assert not info["missing_keys"] and not info["unexpected_keys"]
    with torch.no_grad():
        expected = model(input_ids=torch.arange(2, 14)[None]).logits
    for ours in logits:
        torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-6)
    assert {p.suffix for p in out.iterdir()} == {".json", ".safetensors"}
    assert "distributed_config" not in json.loads((out / "config.json").read_text())
    config = json.loads((out / "config.json").read_text())
    assert config["architectures"] == ["OlmoeForCausalLM"] and config["dtype"] == "float32"
    assert {p.name for p in tmp_path.iterdir()} == {"checkpoints", "model", "source"}
    again = export_checkpoint(tmp_path, tmp_path / "checkpoints" / "step-00000001", tmp_path / "again").folder
    for path in out.iterdir():
        assert path.read_bytes() == (again / path.name).read_bytes(), path.name


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_transformers_loads_the_model_of_a_checkpoint(saved: Any) -> None:
    path, results = saved("ep4")
    model = AutoModelForCausalLM.from_pretrained(path / "model")
    for name, tensor in model.state_dict().items():
        assert tensor.equal(results[0][0][name]), name
