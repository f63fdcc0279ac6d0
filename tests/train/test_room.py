"""Buffers that are too small: they grow, the step is repeated, and nothing of the first attempt remains."""

from __future__ import annotations

import json
import subprocess
import sys
import unittest.mock
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from carpool.kernels import MAX_CTAS
from carpool.parallel.degrees import Degrees
from carpool.train.config import Config, load_config
from carpool.train.config.schema import NvlinkSection
from carpool.train.plan.transport_choice import most_tokens, transport_options
from carpool.train.run.run import train
from carpool.train.steps.capacity import grow_if_short
from carpool.transport import Codecs
from carpool.transport.nvlink import Buffers, NVLink, NVLinkOptions
from tests.ranks import Ranks
from tests.train.test_launch import clean_environment
from tests.train.test_loop import MODEL, losses, records

CPU = torch.device("cpu")
CUT = ["training.max_steps=4", "training.eval_steps=none", "training.sample_prompt=none", "nvlink.capacity=0.25"]


def test_options_follow_the_configuration() -> None:
    section, options = NvlinkSection(), NVLinkOptions()
    assert (section.dispatch_ctas, section.combine_ctas) == (options.dispatch_ctas, options.combine_ctas)
    assert section.leases == options.num_leases
    for name in ("dispatch_ctas", "combine_ctas"):
        configured = load_config(None, [f"nvlink.{name}={MAX_CTAS}"])
        assert getattr(configured.nvlink, name) == MAX_CTAS
    settings = ["training.per_device_train_batch_size=2", "training.per_device_eval_batch_size=3"]
    settings += ["data.sequence_length=33", "parallelism.timeout_seconds=7"]
    degrees = Degrees(dp_replicate=1, fsdp=2, tp=2, ep=4)
    whole = load_config(None, [*settings, "codec.dispatch=fp8"])
    assert most_tokens(whole, degrees) == 50  # 99 tokens for two ranks
    options = transport_options(whole, degrees, "nvlink")
    assert isinstance(options, NVLinkOptions)
    assert (options.max_tokens, options.timeout_seconds, options.codecs) == (50, 7, Codecs(dispatch="fp8"))
    assert (
        options.lossy_reasons == ["tokens to experts are sent as FP8"]
        and transport_options(Config(), degrees, "nvlink").lossy_reasons == []
    )
    assert options.capacity is None
    half = transport_options(load_config(None, [*settings, "nvlink.capacity=0.5"]), degrees, "nvlink")
    assert isinstance(half, NVLinkOptions)
    assert (half.max_tokens, half.capacity, half.balance_limit) == (50, 25, None)
    balanced = transport_options(load_config(None, ["moe.spare_slots=2", "moe.balance_limit=1.25"]), degrees, "nvlink")
    assert isinstance(balanced, NVLinkOptions) and balanced.balance_limit == 1.25
    assert (
        transport_options(load_config(None, [*settings, "nvlink.capacity=0.01"]), degrees, "nvlink").capacity == 17
    ), "a sample"
    assert NVLink.buffer_bytes(half, 4, 64, 2, 4) < NVLink.buffer_bytes(options, 4, 64, 2, 4)


@pytest.mark.parametrize(("needed", "most", "capacity"), [(0, 64, 0), (4, 64, 0), (5, 64, 8), (9, 12, 12), (9, 64, 16)])
def test_room_is_made_when_rows_had_no_place(needed: int, most: int, capacity: int) -> None:
    buffers = [Buffers(None, CPU, max_tokens=most, capacity=4) for _ in range(2)]
    buffers[1].needed.fill_(needed)
    assert grow_if_short(buffers, CPU) == ((capacity, 0, None, None) if capacity else None)
    assert [one.capacity for one in buffers] == [capacity or 4] * 2
    assert grow_if_short(buffers, CPU) is None


def test_an_arena_that_was_too_small_has_the_size_that_was_needed() -> None:
    buffers = Buffers(None, CPU, max_tokens=4, arena_bytes=1024)
    assert buffers.arena is not None
    fits = buffers.arena.reserve(64, torch.float32, torch.tensor([4]))
    assert grow_if_short([buffers], CPU) is None
    late = buffers.arena.reserve(64, torch.float32, torch.tensor([12]))
    assert fits.start is not None and late.start is not None and int(late.start) == -1
    assert grow_if_short([buffers], CPU) == (4, 1.25 * 4096, None, None) and buffers.arena.capacity == 1.25 * 4096
    assert grow_if_short([buffers], CPU) is None


def test_the_worst_case_asks_no_device() -> None:
    untouchable = Buffers(None, CPU, max_tokens=64)
    del untouchable.needed
    assert grow_if_short([untouchable], CPU) is None


class Cramped(Buffers):
    """Stands for the buffers of a transport: too small on one rank in the first two attempts, and in two more later."""

    asked = 0

    def __init__(self) -> None:
        super().__init__(None, CPU, max_tokens=10**6, capacity=64)

    @property
    def needed(self) -> torch.Tensor:
        self.asked += 1
        return torch.tensor([self.capacity + 1 if dist.get_rank() == 1 and self.asked in (2, 3, 6) else 0])

    @needed.setter
    def needed(self, value: torch.Tensor) -> None:
        pass

    def grow(self, capacity: int) -> None:
        self.capacity = capacity


def _train(output: str, settings: list[str], cramped: bool) -> int:
    buffers: list[Any] = [Cramped()] if cramped else []
    with unittest.mock.patch("carpool.train.run.loop.capacities_of_rides", lambda layers: buffers):
        train(load_config(None, [*MODEL, *settings, *CUT, f"training.output_dir={output}"]))
    return buffers[0].capacity if cramped else 0


def test_a_repeated_step_is_as_if_it_had_been_the_first(two_ranks: Ranks, text: list[str], tmp_path: Path) -> None:
    # Drop-out: the random state must be put back. Two micro-batches: both are repeated.
    settings = [*text, "model.config.attention_dropout=0.3", "training.per_device_eval_batch_size=32"]
    settings += ["training.per_device_train_batch_size=1", "training.gradient_accumulation_steps=2"]
    assert two_ranks(_train, str(tmp_path / "plain"), settings, False) == [0] * 2
    assert two_ranks(_train, str(tmp_path / "cramped"), settings, True) == [512] * 2, "all ranks grew alike"
    assert losses(tmp_path / "cramped") == losses(tmp_path / "plain")
    evals = [
        {step: line["loss"] for step, line in records(tmp_path / run, "eval").items()} for run in ("plain", "cramped")
    ]
    assert evals[0] == evals[1] and len(evals[0]) == 2
    for step, line in records(tmp_path / "plain").items():
        again = records(tmp_path / "cramped")[step]
        assert again["bytes_remote"] == line["bytes_remote"] and again["tokens_seen"] == line["tokens_seen"]
    lines = [json.loads(line) for line in (tmp_path / "cramped" / "metrics.jsonl").read_text().splitlines()]
    repeats = [(line["step"], line["capacity"]) for line in lines if line["kind"] == "repeat"]
    assert repeats == [(1, 128), (1, 256), (3, 512)]
    assert not records(tmp_path / "plain", "repeat")


STUCK = """
import time, torch
from carpool.train.launch.worker import Watchdog
from carpool.transport.nvlink import Buffers

def missing(grace):
    buffers = Buffers(None, torch.device("cpu"), max_tokens=4)
    watchdog = Watchdog(lambda: [buffers], grace=grace)
    watchdog.start()
    buffers.host_status.copy_(torch.tensor([1, 2]))
    return watchdog

raises = missing(600)
time.sleep(0.5)
raises.stop()
raises._thread.join(60)
assert not raises._thread.is_alive()
print("goes on", flush=True)
hangs = missing(0.2)
time.sleep(600)
print("came to its end")
"""


def test_the_watchdog_ends_a_process_that_cannot_and_no_other(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", STUCK],
        env=clean_environment(TORCHELASTIC_ERROR_FILE=str(tmp_path / "error.json")),
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert (done.returncode, done.stdout) == (1, "goes on\n")
    assert done.stderr.count("rank 0 did not arrive at combine within 300 s") == 1
    recorded = json.loads((tmp_path / "error.json").read_text())["carpool"]
    assert recorded["type"] == "RankMissingError" and not recorded["user_error"]
