"""Recipes of how rows travel: each mechanism changes what travels, counted on ranks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import carpool
from carpool.recipes import load, names
from carpool.recipes.resolve import resolve
from carpool.transport import TransportOptions
from carpool.transport.codecs import PLAIN, Codecs
from tests.ranks import WORLD_SIZE, Ranks, mesh

SYSTEMS = {
    "lsh-moe": {"transport:alltoall", "merge:lsh"},
    "luffy": {"transport:alltoall", "merge:condense"},
    "deepseek-v3-dispatch": {"transport:hierarchical", "limit:groups", "dispatch:fp8", "combine:bf16"},
}
H, E, K, TOKENS = 128, 8, 4, 48


def sent(settings: list[tuple[str, Codecs]]) -> list[dict[str, int]]:
    """Bytes to other ranks by verb. Tokens are of a few kinds, as those of text are."""
    ep_mesh, found = mesh((1, WORLD_SIZE), ("edp", "ep"))["ep"], []
    for transport, codecs in settings:
        torch.manual_seed(0)
        options = TransportOptions(codecs=codecs)
        moe = carpool.MoE(H, 16, E, K, ep_mesh=ep_mesh, transport=transport, transport_options=options)
        x = torch.randn(6, H).repeat(TOKENS // 6, 1) + 0.01 * torch.randn(TOKENS, H)
        moe(x.requires_grad_()).sum().backward()
        found.append(dict(moe.stats().bytes_remote))
    return found


def test_the_recipes_are_what_they_say() -> None:
    assert set(names("transport")) >= set(SYSTEMS)
    for name, mechanisms in SYSTEMS.items():
        assert set(load(name).mechanisms) == mechanisms
        assert resolve(load(name)).codec.codecs.lossy_reasons


@pytest.fixture(scope="module")
def counted(ranks: Ranks) -> dict[tuple[str, Codecs], dict[str, int]]:
    asked: list[Any] = []
    for name in SYSTEMS:
        config = resolve(load(name))
        asked += [(config.moe.transport, config.codec.codecs), (config.moe.transport, PLAIN)]
    asked += [("dedup", resolve(load("deepseek-v3-dispatch")).codec.codecs), ("hierarchical", Codecs(combine="bf16"))]
    every = ranks(sent, asked)
    return {key: {verb: sum(one[i][verb] for one in every) for verb in every[0][i]} for i, key in enumerate(asked)}


@pytest.mark.parametrize("name", ["lsh-moe", "luffy"])
def test_merged_rows_are_fewer_on_every_way(name: str, counted: dict[tuple[str, Codecs], dict[str, int]]) -> None:
    config = resolve(load(name))
    ours, plain = counted["alltoall", config.codec.codecs], counted["alltoall", PLAIN]
    assert all(0 < ours[verb] < plain[verb] / 2 for verb in plain if verb != "plan")


def test_deepseek_sends_half_the_bytes_out_and_rows_of_two_bytes_back(
    counted: dict[tuple[str, Codecs], dict[str, int]],
) -> None:
    config = resolve(load("deepseek-v3-dispatch"))
    assert (config.moe.limit_nodes, config.moe.limit_by) == (4, "groups"), "shown in tests/test_routing_limit.py"
    codecs = config.codec.codecs
    ours, plain = counted["hierarchical", codecs], counted["hierarchical", PLAIN]
    rows = plain["combine"] // (4 * H)
    assert ours["dispatch"] == rows * (H + 16 + 8 * K) < plain["dispatch"] / 2
    assert ours["combine"] == rows * 2 * H == counted["hierarchical", replace(codecs, dispatch="none")]["combine"]
    assert ours["dispatch_backward"] == plain["dispatch_backward"], "gradients as they are"
    assert counted["dedup", codecs]["dispatch"] != ours["dispatch"], "nodes count"
