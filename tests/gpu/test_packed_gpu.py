"""Packed documents on a GPU: as if each were alone, in the attention that the trainer takes, and in captured steps."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from carpool.hf.documents import DOCUMENTS, one_row_only, packed, packed_settings
from carpool.train.data.sequences import IGNORED
from carpool.train.steps.training_objective import Objective
from examples.tiny_chat_model import write
from tests.gpu.ranks import needs
from tests.gpu.runs import train
from tests.hf.tiny_models import VOCAB_SIZE, discover, tiny_model

# Of two rows of 64.
LENGTHS = [37, 3, 24, 47, 17]


@pytest.mark.gpu
@pytest.mark.timeout(300)
@pytest.mark.parametrize("attention", ["sdpa", DOCUMENTS, "flash_attention_2"])
@pytest.mark.parametrize("name", ["qwen3_moe", "olmoe", "mixtral"])
def test_the_loss_of_packed_documents_is_the_sum_of_theirs(name: str, attention: str) -> None:
    if attention == "flash_attention_2":
        pytest.importorskip("flash_attn")
    model = tiny_model(discover()[name], max_position_embeddings=128, sliding_window=None).to("cuda", torch.bfloat16)
    model.set_attn_implementation(attention)
    assert one_row_only(model) == (attention == "flash_attention_2")
    objective = Objective(model, top_k=2, aux_coef=0.0, dp_size=1, autocast=None)
    generator = torch.Generator().manual_seed(0)
    documents = [torch.randint(3, VOCAB_SIZE, (length,), generator=generator) for length in LENGTHS]
    ids_BL = torch.cat(documents).view(2, 64).cuda()
    positions_BL = torch.cat([torch.arange(length) for length in LENGTHS]).view(2, 64).cuda()
    labels_BL = ids_BL.masked_fill(positions_BL == 0, IGNORED)
    packed_batch = {
        "input_ids": ids_BL,
        "labels": labels_BL,
        "position_ids": positions_BL,
        "padding": torch.zeros_like(ids_BL, dtype=torch.bool),
    }
    with torch.no_grad():
        together = objective.forward(packed_batch)[0].item()
        alone = [objective.forward({"input_ids": one, "labels": one})[0].item() for one in rows(documents)]
        wrong = objective.forward({"input_ids": ids_BL, "labels": labels_BL})[0].item()
    assert together == pytest.approx(sum(alone), rel=5e-3)
    assert wrong != pytest.approx(sum(alone), rel=5e-3)


@pytest.mark.gpu
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", ["qwen3_moe", "mixtral", "deepseek_v3"])
def test_bounds_give_the_gradients_of_a_mask(name: str) -> None:
    model = tiny_model(discover()[name], max_position_embeddings=128, sliding_window=8).to("cuda", torch.bfloat16)
    ids_BL = torch.randint(3, VOCAB_SIZE, (2, 64), generator=torch.Generator().manual_seed(0)).cuda()
    positions_BL = torch.cat([torch.arange(length) for length in LENGTHS]).view(2, 64).cuda()
    # Of a row fewer documents than there is room for.
    ends_BD = torch.tensor([[37, 40, 64, 64], [47, 64, 64, 64]], dtype=torch.int32).cuda()
    found = []
    for attention, kind in (("sdpa", torch.float32), ("sdpa", torch.bfloat16), (DOCUMENTS, torch.bfloat16)):
        one = tiny_model(discover()[name], max_position_embeddings=128, sliding_window=8).to("cuda", kind)
        one.load_state_dict(model.state_dict())
        one.set_attn_implementation(attention)
        with packed():
            settings = packed_settings(one, positions_BL, ends_BD)
            loss = one(input_ids=ids_BL, labels=ids_BL, use_cache=False, **settings).loss
        loss.backward()
        found.append({key: p.grad.float() for key, p in one.named_parameters() if p.grad is not None})
    exact, masked, bounded = found
    assert exact.keys() == bounded.keys()
    for key in (key for key in exact if "_proj" in key and "attn" in key):
        errors = [float((of[key] - exact[key]).norm() / exact[key].norm()) for of in (masked, bounded)]
        assert errors[1] < 1.5 * errors[0] + 1e-3, (key, errors)


def rows(documents: list[torch.Tensor]) -> list[torch.Tensor]:
    return [document[None].cuda() for document in documents]


@pytest.mark.gpu
@pytest.mark.timeout(560)
@needs(2)
def test_captured_steps_on_conversations_are_eager_ones(tmp_path: Path) -> None:
    write(tmp_path / "tiny")
    eager, captured = (train(f"conversations {way}", tmp_path / way) for way in ("eager", "captured"))
    losses = [[line["loss"] for line in found if line["kind"] == "train"] for found in (eager, captured)]
    # Flash attention adds gradients of queries in any order.
    assert losses[0] == pytest.approx(losses[1], rel=1e-3) and losses[0][-1] < losses[0][0]
