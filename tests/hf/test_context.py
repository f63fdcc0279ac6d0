"""Transformers' models whose ranks share sequences, against one rank with whole ones: loss and every gradient.

Here each rank has all parameters and experts, so that what is compared is attention, positions, masks and labels alone;
whole training steps are in tests/meshes.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from carpool.hf.context_parallel import ContextParallel, attention_heads, choose_way
from carpool.hf.documents import packed, packed_settings, unpacked
from carpool.hf.loss_head import next_tokens
from carpool.parallel.context import Cut
from carpool.train.steps.training_objective import Objective
from tests.hf.parity import EXCEPTIONS, quiet
from tests.hf.tiny_models import VOCAB_SIZE, discover, tiny_model
from tests.ranks import Ranks, on_ranks

# Longer and shorter than the tiny models' sliding windows of 8, and no seam is where a sequence is cut.
LENGTHS = [13, 4, 7]
FAMILIES = ["deepseek_v3", "gpt_oss"]
OTHERS = sorted(name for name, found in discover().items() if found.class_name and name not in FAMILIES)
# Models compute some of their sums in float32 whatever they are given.
BOUND = 1e-6


def _measure(name: str, is_packed: bool, way: str, config: dict[str, Any]) -> tuple[float, float]:
    """Largest relative errors: of the loss, of a gradient."""
    quiet()
    model = tiny_model(discover()[name], **config).double().train()
    model.set_experts_implementation("eager")
    ids_BL = torch.randint(3, VOCAB_SIZE, (2, sum(LENGTHS)), generator=torch.Generator().manual_seed(1))
    position_BL = torch.cat([torch.arange(n) for n in LENGTHS]).expand(2, -1) if is_packed else None
    target_BL, length = next_tokens(ids_BL), ids_BL.shape[1]
    settings: dict[str, Any] = {} if position_BL is None else packed_settings(model, position_BL)

    def loss_of(ids_BL: torch.Tensor, target_BL: torch.Tensor, **settings: Any) -> torch.Tensor:
        logits = model(input_ids=ids_BL, use_cache=False, **settings).logits
        return F.cross_entropy(logits.flatten(0, 1), target_BL.flatten(), reduction="sum", ignore_index=-100)

    with packed() if is_packed else unpacked():
        expected = loss_of(ids_BL, target_BL, **settings)
    expected.backward()
    gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)

    group = dist.group.WORLD
    assert group is not None
    cut = Cut(group.size(), group.rank(), way)  # type: ignore[arg-type]
    context = ContextParallel(model, cut, group)
    with packed() if is_packed else unpacked(), context.whole(length, position_BL):
        if position_BL is not None:
            settings = packed_settings(model, position_BL)
        settings |= context.settings(ids_BL, position_BL)
        loss = loss_of(cut.part(ids_BL), cut.part(target_BL), **settings)
    loss.backward()
    found = loss.detach().clone()
    dist.all_reduce(found)
    largest, worst = max(float(g.abs().max()) for g in gradients.values()), 0.0
    for parameter_name, parameter in model.named_parameters():
        if parameter_name in gradients:
            own = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            dist.all_reduce(own)
            expected_grad = gradients[parameter_name]
            size = max(float(expected_grad.abs().max()), 1e-3 * largest)
            worst = max(worst, float((own - expected_grad).abs().max()) / size)
    return abs(float(found - expected.detach())) / float(expected.detach()), worst


def _refusal(name: str, way: str = "auto") -> str:
    try:
        choose_way(tiny_model(discover()[name]), 2, 24, way)  # type: ignore[arg-type]
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("name", [*FAMILIES, *(pytest.param(name, marks=pytest.mark.slow) for name in OTHERS)])
def test_ranks_that_share_sequences_compute_what_one_computes(two_ranks: Ranks, name: str) -> None:
    if name in EXCEPTIONS or _refusal(name):
        assert name not in FAMILIES
        pytest.skip("refused")
    for is_packed in (False, True):
        for loss, gradient in two_ranks(_measure, name, is_packed, "ulysses", {}):
            assert loss < BOUND and gradient < BOUND, (is_packed, loss, gradient)


def test_ring_attention_in_a_model(two_ranks: Ranks) -> None:
    # Its values are narrower than its keys.
    for loss, gradient in two_ranks(_measure, "deepseek_v3", False, "ring", {}):
        assert loss < BOUND and gradient < 1e-5


def _like_flash(module: Any, *args: Any, **settings: Any) -> tuple[torch.Tensor, None]:
    """As flash attention of transformers: it sees no mask, but documents in the positions of a single row."""
    position_BL, query_BHLD = settings.pop("position_ids"), args[0]
    assert args[3] is None and position_BL.shape == (1, query_BHLD.shape[2])
    document_L = (position_BL[0] == 0).cumsum(0)
    mask_LL = (document_L[:, None] == document_L).tril()
    return sdpa_attention_forward(module, *args[:3], mask_LL[None, None], **settings)


@on_ranks("two_ranks")
def test_flash_attention_sees_the_documents_of_whole_sequences() -> None:
    """Loss and gradient, where attention takes documents from positions."""
    quiet()
    AttentionInterface.register("flash_of_tests", _like_flash)
    AttentionMaskInterface.register("flash_of_tests", lambda *args, **settings: None)
    group = dist.group.WORLD
    assert group is not None
    ids_BL = torch.randint(3, VOCAB_SIZE, (2, 24), generator=torch.Generator().manual_seed(1))
    position_BL = torch.cat([torch.arange(n) for n in LENGTHS]).repeat(2, 1)
    batch = {"input_ids": ids_BL, "labels": ids_BL.masked_fill(position_BL == 0, -100), "position_ids": position_BL}
    found = []
    for implementation in ("sdpa", "flash_of_tests"):
        model = tiny_model(discover()["olmoe"]).double()
        model.set_experts_implementation("eager")
        model.config._attn_implementation = implementation
        context = None if implementation == "sdpa" else ContextParallel(model, Cut(2, group.rank()), group)
        objective = Objective(model, top_k=2, aux_coef=0.0, dp_size=1, autocast=None, context=context)
        loss, _ = objective.forward(batch)
        loss.backward()
        gradient = model.model.embed_tokens.weight.grad
        sums = torch.cat([loss.detach().view(1), gradient.flatten()])
        if context is not None:
            dist.all_reduce(sums)
        found.append(sums)
    errors = (found[0] - found[1]).abs()
    assert errors[0] / found[0][0] < 1e-12 and errors[1:].max() < 1e-10


def test_what_cannot_be_is_refused_with_what_can() -> None:
    assert "linear_attention" in _refusal("qwen3_next") and "conv" in _refusal("lfm2_moe")
    model = tiny_model(discover()["mixtral"])
    refused: list[tuple[dict[str, Any], str]] = [
        ({"ranks": 3, "length": 24, "asked": "ulysses"}, "cp_size can be 2, 4"),
        ({"ranks": 3, "length": 24}, "window of 8"),
        ({"ranks": 3, "length": 6, "packed": True}, "need masks"),
        ({"ranks": 3, "length": 6, "implementation": "eager"}, "'eager'"),
        ({"ranks": 4, "length": 30}, "28 or 32 can"),
        ({"ranks": 3, "length": 7, "implementation": "sdpa"}, "6 or 12 can"),
    ]
    for settings, why in refused:
        with pytest.raises(ValueError, match=why):
            choose_way(model, **settings)
    assert choose_way(model, 4, 32) == "ulysses" and choose_way(model, 3, 6) == "ring"
    dynamic = tiny_model(discover()["olmoe"], rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2})
    assert choose_way(dynamic, 2, 64) == "ulysses"
    with pytest.raises(ValueError, match="at most 64"):
        choose_way(dynamic, 2, 66)


def test_layers_may_have_different_numbers_of_heads() -> None:
    assert attention_heads(tiny_model(discover()["laguna"]).config) == 4
    config = discover()["laguna"].model_class.config_class(num_attention_heads_per_layer=[48, 64] * 20)
    assert attention_heads(config) == 16


def test_without_parts_a_model_computes_as_ever(two_ranks: Ranks) -> None:
    assert two_ranks(_off) == [True, True]


def _off() -> bool:
    model = tiny_model(discover()["olmoe"])
    ids_BL = torch.arange(12).view(2, 6)
    group = dist.group.WORLD
    assert group is not None
    with torch.no_grad():
        plain = model(input_ids=ids_BL).logits
        context = ContextParallel(model, Cut(2, group.rank()), group)
        with context.off():
            return torch.equal(model(input_ids=ids_BL).logits, plain)
