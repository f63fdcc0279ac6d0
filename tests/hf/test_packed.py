"""Packed documents are looked for where nobody says what is in the rows, and each is computed as if it were alone."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    GptOssForCausalLM,
    Qwen3MoeForCausalLM,
    masking_utils,
)

from carpool.hf.documents import (
    DOCUMENTS,
    FLEX,
    attend,
    attention_of_any_length,
    bounds,
    fused_attention,
    packed,
    packed_settings,
    takes_bounds,
    takes_lengths,
    unpacked,
    why_no_bounds,
    why_not_packed,
)
from carpool.parallel.degrees import Degrees
from carpool.train.blueprint import attention_of
from carpool.train.config import load_config
from carpool.train.steps.training_objective import Objective
from tests.hf.test_compiled import make
from tests.hf.tiny_models import VOCAB_SIZE, discover, tiny_model

IDS = torch.arange(24).reshape(2, 12)


def test_rows_are_single_sequences_inside_and_only_there(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make("olmoe", num_experts=4, num_experts_per_tok=2)
    seams = torch.arange(6).repeat(2).expand(2, 12)
    with torch.no_grad():
        plain, apart = model(input_ids=IDS).logits, model(input_ids=IDS, position_ids=seams).logits
        with unpacked():
            assert torch.equal(model(input_ids=IDS).logits, plain)
            assert masking_utils.find_packed_sequence_indices(seams) is None
            found = []
            thread = threading.Thread(target=lambda: found.append(masking_utils.find_packed_sequence_indices(seams)))
            thread.start()
            thread.join()
            assert found[0] is not None, "another thread's forward may be of packed sequences"
        assert torch.equal(model(input_ids=IDS, position_ids=seams).logits, apart)
    assert not torch.allclose(plain, apart)


# Longer and shorter than the tiny models' sliding windows of 8.
LENGTHS = [13, 4, 19, 3]
FAMILIES = ["deepseek_v3", "glm4_moe", "gpt_oss", "afmoe", "mixtral", "olmoe", "qwen3_moe"]
OTHERS = sorted(name for name, found in discover().items() if found.class_name and name not in FAMILIES)
# Sums that a shape decides, in float32 even here.
ROUNDING = 1e-5


@pytest.mark.parametrize("name", [*FAMILIES, *(pytest.param(name, marks=pytest.mark.slow) for name in OTHERS)])
def test_a_packed_document_is_computed_as_if_it_were_alone_or_refused(name: str) -> None:
    model = tiny_model(discover()[name]).double().eval()
    if why_not_packed(model) is not None:
        assert name not in FAMILIES
        pytest.skip("refused")
    model.set_experts_implementation("eager")
    generator = torch.Generator().manual_seed(0)
    documents = [torch.randint(3, VOCAB_SIZE, (length,), generator=generator) for length in LENGTHS]
    positions_BL = torch.cat([torch.arange(length) for length in LENGTHS]).expand(2, -1)
    with torch.no_grad():
        with packed():
            settings = packed_settings(model, positions_BL)
            together = model(input_ids=torch.cat(documents).expand(2, -1), use_cache=False, **settings).logits
        with unpacked():
            alone = [model(input_ids=document[None], use_cache=False).logits[0] for document in documents]
    for row in together:
        assert (row - torch.cat(alone)).abs().max() < ROUNDING
    assert together.std() > 0.01


@pytest.mark.parametrize("name", [*FAMILIES, *(pytest.param(name, marks=pytest.mark.slow) for name in OTHERS)])
def test_bounds_in_place_of_a_mask_give_its_loss_and_gradients(name: str) -> None:
    model = tiny_model(discover()[name]).double().eval()
    if why_not_packed(model) is not None or why_no_bounds(model, cuda=False, half=False) is not None:
        assert name in ("gpt_oss", *OTHERS)
        pytest.skip("takes no bounds")
    model.set_experts_implementation("eager")
    ids_BL = torch.randint(3, VOCAB_SIZE, (2, sum(LENGTHS)), generator=torch.Generator().manual_seed(0))
    # The second row has other documents, the last of which is padding.
    of_rows = (LENGTHS, [5, 30, 4])
    positions_BL = torch.stack([torch.cat([torch.arange(length) for length in row]) for row in of_rows])
    ends_BD = torch.tensor([[13, 17, 36, 39, 39, 39], [5, 35, 39, 39, 39, 39]], dtype=torch.int32)
    found = []
    for given in (None, ends_BD):
        if given is not None:
            model.config.get_text_config()._attn_implementation = DOCUMENTS
            assert takes_bounds(model)
        with packed():
            settings = packed_settings(model, positions_BL, given)
            loss = model(input_ids=ids_BL, labels=ids_BL, use_cache=False, **settings).loss
        loss.backward()
        found.append([loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)])
        model.zero_grad(set_to_none=True)
    assert len(found[0]) == len(found[1]) > 5
    for mask, without in zip(*found, strict=True):
        torch.testing.assert_close(without, mask, rtol=ROUNDING, atol=ROUNDING)


def _by_lengths(
    module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *args: Any, **given: Any
) -> Any:
    """As flash attention of transformers where it is told where documents end: by these, not by positions."""
    ends, same = given.pop("cu_seq_lens_q"), given.pop("cu_seq_lens_k")
    assert query.shape[0] == 1 and torch.equal(ends, same) and isinstance(given.pop("max_length_q"), int)
    given = {name: given[name] for name in ("scaling", "sliding_window", "dropout") if name in given}
    return attend(module, query, key, value, ends.view(1, 1, 1, -1), **given)


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("documents", [True, False])
def test_lengths_of_documents_are_given_to_flash_attention(rows: int, documents: bool) -> None:
    """As many numbers for each batch, so that nobody looks at positions, and a CUDA graph holds them."""
    AttentionInterface.register("flash_of_lengths", _by_lengths)
    AttentionMaskInterface.register("flash_of_lengths", lambda *args, **settings: None)
    ids_BL = torch.randint(3, VOCAB_SIZE, (rows, 24), generator=torch.Generator().manual_seed(1))
    batch = {"input_ids": ids_BL, "labels": ids_BL}
    if documents:
        batch["position_ids"] = torch.stack(
            [torch.cat([torch.arange(n) for n in (11 + row, 13 - row)]) for row in range(rows)]
        )
        batch["document_ends"] = torch.tensor([[11 + row, 24, 24, 24] for row in range(rows)], dtype=torch.int32)
    found = []
    for attention in ("sdpa", "flash_of_lengths"):
        model = tiny_model(discover()["qwen3_moe"]).double()
        model.set_experts_implementation("eager")
        model.config._attn_implementation = attention
        assert takes_lengths(model) == (attention != "sdpa")
        if attention != "sdpa" and rows == 2 and not documents:
            return  # several rows without documents need none
        loss, _ = Objective(model, top_k=2, aux_coef=0.0, dp_size=1, autocast=None).forward(batch)
        loss.backward()
        found.append([loss.detach(), model.model.embed_tokens.weight.grad])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=ROUNDING, atol=ROUNDING)


def test_what_attention_by_bounds_does_not_compute_is_refused() -> None:
    x = torch.zeros(1, 1, 4, 8)
    with pytest.raises(ValueError, match="softcap"):
        attend(torch.nn.Identity(), x, x, x, bounds(torch.arange(4)[None]), softcap=30.0)


def test_a_window_that_only_the_mask_has_needs_the_mask() -> None:
    windowed = make("qwen2_moe", use_sliding_window=True, sliding_window=8)
    assert "sliding_attention" in windowed.config.layer_types
    assert "window" in str(why_no_bounds(windowed, cuda=False, half=False))
    assert why_no_bounds(make("qwen2_moe"), cuda=False, half=False) is None


def test_models_with_a_state_are_refused() -> None:
    for name, why in [("qwen3_next", "linear_attention"), ("lfm2_moe", "conv"), ("nllb_moe", "encoder")]:
        assert why in str(why_not_packed(tiny_model(discover()[name])))


# --------------------------------------------------------------------------------------------------------------------
# Which attention a model takes, where nobody says.


def test_models_with_sinks_take_flex_attention() -> None:
    assert fused_attention(GptOssForCausalLM) == FLEX and fused_attention(Qwen3MoeForCausalLM) is None


@pytest.mark.parametrize(
    ("overrides", "cuda", "cp", "expected"),
    [
        ([], True, 1, FLEX),
        ([], False, 1, None),
        ([], True, 2, None),
        (["data.packing=examples"], True, 1, None),
        (["training.full_determinism=true"], True, 1, None),
        (["model.attn_implementation=eager"], True, 1, "eager"),
    ],
)
def test_where_it_was_shown_to_be_right(overrides: list[str], cuda: bool, cp: int, expected: str | None) -> None:
    model: Any = GptOssForCausalLM
    assert attention_of(load_config(None, overrides), Degrees(cp=cp), model, cuda) == expected


@pytest.mark.parametrize(("taken", "inside"), [(FLEX, "eager"), ("sdpa", "sdpa")])
def test_token_by_token_nothing_is_compiled(taken: str, inside: str) -> None:
    text = SimpleNamespace(_attn_implementation=taken)
    with attention_of_any_length(SimpleNamespace(config=SimpleNamespace(get_text_config=lambda: text))):
        assert text._attn_implementation == inside
    assert text._attn_implementation == taken
