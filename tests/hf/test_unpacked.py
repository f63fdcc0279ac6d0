"""Packed sequences are looked for, but not where it is known that there are none."""

from __future__ import annotations

import threading

import pytest
import torch
from transformers import masking_utils

from carpool.hf.unpacked import unpacked
from tests.hf.test_compiled import make

IDS = torch.arange(24).reshape(2, 12)


def test_rows_are_single_sequences_inside_and_only_there(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make("olmoe", num_experts=4, num_experts_per_tok=2)
    packed = torch.arange(6).repeat(2).expand(2, 12)
    with torch.no_grad():
        plain, apart = model(input_ids=IDS).logits, model(input_ids=IDS, position_ids=packed).logits
        with unpacked():
            assert torch.equal(model(input_ids=IDS).logits, plain)
            assert masking_utils.find_packed_sequence_indices(packed) is None
            found = []
            thread = threading.Thread(target=lambda: found.append(masking_utils.find_packed_sequence_indices(packed)))
            thread.start()
            thread.join()
            assert found[0] is not None, "another thread's forward may be of packed sequences"
        assert torch.equal(model(input_ids=IDS, position_ids=packed).logits, apart)
    assert not torch.allclose(plain, apart)
