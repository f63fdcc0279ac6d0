"""The loss that an output layer computes: equal to that of the model's logits, for all models, sharded or not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from carpool.families import Family, Logits
from carpool.hf import loss_head as head_module
from carpool.hf.build_model import build_model
from carpool.hf.loss_head import HeadLoss, known_change, next_tokens, output_layer, why_whole
from carpool.hf.weights.model_config import make_config
from carpool.parallel.degrees import Degrees
from carpool.train.plan.division import distributed_config
from tests.hf.meshes import reuse_meshes
from tests.hf.parity import EXCEPTIONS, full_gradients, relative_error
from tests.hf.test_compiled import SIZES
from tests.hf.tiny_models import discover, tiny_model
from tests.ranks import Ranks

QUICK = ["olmoe", "gpt_oss", "granitemoe", "gemma4", "nemotron_h", "qwen3_moe", "hy_v4"]
CAUSAL = [name for name in sorted(discover().keys() - EXCEPTIONS.keys()) if "CausalLM" in discover()[name].class_name]
VOCABULARY = 97


def batch(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Two sequences of 9 tokens; some labels are none, and the first of a row is never predicted."""
    ids = torch.randint(3, 90, (2, 9), generator=torch.Generator().manual_seed(seed))
    labels = ids.clone()
    labels[0, 2:5] = -100
    return ids, next_tokens(labels)


@pytest.mark.parametrize(
    "folder", [pytest.param(name, marks=[] if name in QUICK else pytest.mark.slow) for name in CAUSAL]
)
def test_every_model_is_known(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that a later transformers adds, or changes, shows here what `carpool.families` must say of it."""
    model: Any = tiny_model(discover()[folder])
    known = why_whole(model) is not None
    for key, value in {"final_logit_softcapping": 30.0, "unpadded_vocab_size": 90}.items():
        if hasattr(model.config, key):
            setattr(model.config, key, value)
    if known_change(model) == Logits("other"):
        monkeypatch.setattr(head_module, "family_of_class", lambda _: Family(""))
    ids, target = batch()
    with torch.no_grad():
        plain, _ = HeadLoss(model, 0)(ids, target, use_cache=False)
        try:
            loss, _ = HeadLoss(model, 5)(ids, target, use_cache=False)
        except (RuntimeError, IndexError):
            assert known, f"say in carpool.families what {type(model).__name__} does to its logits"
            return
    assert not known
    torch.testing.assert_close(loss, plain, rtol=1e-5, atol=1e-5)


def test_a_model_that_changes_its_logits_is_noticed() -> None:
    model = make("granitemoe", logits_scaling=2.0)
    model.__class__ = type("Later", (type(model),), {"forward": lambda self, **given: _scaled(model, **given)})
    with pytest.raises(RuntimeError, match=r"Later changes its logits .* set training.loss_chunk_size=0"):
        HeadLoss(model)(*batch(), use_cache=False)


def test_logits_that_are_scaled_or_capped_go_in_chunks() -> None:
    granite = make("granitemoe", logits_scaling=3.0)
    gemma = tiny_model(discover()["gemma4"])
    gemma.config.get_text_config().final_logit_softcapping = 0.5
    for model in (granite, gemma):
        assert HeadLoss(model, 5).why_whole is None
        (loss, found), (plain, expected) = (gradients(model, HeadLoss(model, size)) for size in (5, 0))
        assert loss == pytest.approx(plain, rel=1e-5)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)


def _scaled(model: Any, **given: Any) -> Any:
    out = type(model).__mro__[1].forward(model, **given)
    out.logits = out.logits * 2
    return out


def make(kind: str, **more: Any) -> Any:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **SIZES | {"vocab_size": VOCABULARY}, **more))


def gradients(model: nn.Module, loss: HeadLoss) -> tuple[float, dict[str, torch.Tensor]]:
    model.zero_grad()
    value, _ = loss(*batch(), use_cache=False)
    (value / 7).backward()
    return float(value.detach()), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_loss_and_gradients_of_an_unsharded_model(tied: bool, bias: bool) -> None:
    model = make("olmoe", tie_word_embeddings=tied)
    if bias:
        output_layer(model).bias = nn.Parameter(torch.randn(VOCABULARY))
    plain, expected = gradients(model, HeadLoss(model, 0))
    for at_once in (None, 5):
        loss, found = gradients(model, HeadLoss(model, at_once))
        assert loss == pytest.approx(plain, rel=1e-6) and found.keys() == expected.keys()
        for name, gradient in expected.items():
            assert relative_error(found[name], gradient, 1e-6) < 1e-5, name
    # Without a loss to compute, logits are as ever.
    assert model(input_ids=batch()[0]).logits.shape == (2, 9, VOCABULARY)


def test_layers_that_are_no_plain_linear_ones_make_logits() -> None:
    model = make("olmoe")
    own = output_layer(model).forward
    output_layer(model).forward = lambda x: own(x)
    assert "has been replaced" in (why_whole(model) or "")
    model.lm_head = nn.Sequential(nn.Linear(32, VOCABULARY))
    assert "no plain linear layer, but Sequential" in (why_whole(model) or "")
    assert HeadLoss(make("olmoe"), 0).why_whole == "that was asked for"


def test_an_output_layer_that_is_called_with_some_rows_only() -> None:
    model = make("olmoe")
    with pytest.raises(RuntimeError, match=r"shape \(2, 1, 32\) for labels of shape \(2, 9\)"):
        HeadLoss(model)(*batch(), use_cache=False, logits_to_keep=1)


def _sharded(tied: bool, tp: int, bf16: bool, checkpointed: bool) -> tuple[str | None, float, float]:
    """(why logits are whole, relative error of the loss, of the worst gradient) on ranks, against plain logits."""
    reuse_meshes()
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4}
    overrides = SIZES | heads | {"vocab_size": 100, "num_experts": 8, "tie_word_embeddings": tied}
    degrees = Degrees(dp_replicate=1, fsdp=4 // tp, tp=tp, ep=4)
    model = build_model(
        make_config("olmoe", overrides),
        distributed_config=distributed_config(degrees, bf16),
        dtype=torch.float32,
        seed=0,
    )
    if checkpointed:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    found = []
    why: str | None = None
    for at_once in (0, 5):
        loss = HeadLoss(model, at_once)
        why = loss.why_whole
        model.zero_grad()
        for micro in range(2):
            value, _ = loss(*batch(10 * micro + dist.get_rank() // tp), use_cache=False)
            (value / 7).backward()
        found.append((float(value.detach()), full_gradients(model)))
    (plain, expected), (ours, gradients) = found
    worst = max(relative_error(gradients[name], g, 1e-6) for name, g in expected.items() if g is not None)
    return why, abs(ours - plain) / plain, worst


@pytest.mark.parametrize(
    ("tied", "tp", "bf16", "checkpointed"),
    [(False, 1, False, True), (True, 1, False, False), (False, 2, False, False), (False, 1, True, False)],
    ids=["checkpointed", "tied", "tensor parallel", "bfloat16"],
)
def test_loss_and_gradients_of_a_sharded_model(
    ranks: Ranks, tied: bool, tp: int, bf16: bool, checkpointed: bool
) -> None:
    for why, loss, gradient in ranks(_sharded, tied, tp, bf16, checkpointed):
        assert (why is None) == (tp == 1), why
        assert loss <= (1e-2 if bf16 else 1e-6) and gradient <= (3e-2 if bf16 else 2e-5), (loss, gradient)
