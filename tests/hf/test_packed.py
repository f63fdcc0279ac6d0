"""Packed documents are looked for where nobody says what is in the rows, and each is computed as if it were alone."""

from __future__ import annotations

import threading

import pytest
import torch
from transformers import masking_utils

from carpool.hf.packed import packed, packed_settings, unpacked, why_not_packed
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


def test_models_with_a_state_are_refused() -> None:
    for name, why in [("qwen3_next", "linear_attention"), ("lfm2_moe", "conv"), ("nllb_moe", "encoder")]:
        assert why in str(why_not_packed(tiny_model(discover()[name])))
