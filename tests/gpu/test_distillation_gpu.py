"""Learning from a teacher on GPUs: the loss against float64, captured runs against eager ones, and a second model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, OlmoeConfig

from tests.gpu.ranks import needs, torchrun
from tests.gpu.runs import RUNS, train
from tests.no_waits import no_waits
from tests.test_distillation import CASES, Case, check

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(560)]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_sums_and_gradients_are_those_of_autograd(case: Case) -> None:
    check(case, "cuda")


def test_logits_are_never_whole_and_the_host_never_waits() -> None:
    from carpool.kernels.cross_entropy import linear_cross_entropy
    from carpool.kernels.distillation import Distillation, LogProbs

    tokens, hidden, vocabulary, k = 8192, 256, 151_936, 64
    x = torch.randn(tokens, hidden, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(vocabulary, hidden, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    target = torch.randint(vocabulary, (tokens,), device="cuda")
    log_TK = torch.full((tokens, k), -5.0, device="cuda")
    ids_TK = torch.arange(k, device="cuda", dtype=torch.int32).expand(tokens, k)

    def compute() -> None:
        teacher = lambda chunk: LogProbs(log_TK[chunk], ids_TK[chunk])  # noqa: E731
        linear_cross_entropy(x, weight, None, target, losses=Distillation(teacher, 0.5))[0].backward()

    compute()
    weight.grad = x.grad = None
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    with no_waits():
        compute()
    # Whole logits are 2.3 GiB in bfloat16, and there would be several in float32.
    assert torch.cuda.max_memory_allocated() - before <= 2.2 * 2**30 + 8 * vocabulary * hidden


@needs(2)
def test_captured_steps_are_eager_ones_and_nearly_those_of_a_second_model(tmp_path: Path) -> None:
    torch.manual_seed(0)
    sizes = {"vocab_size": 320, "hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4, "num_experts": 8, "num_experts_per_tok": 2}
    config = OlmoeConfig(**sizes, **heads, initializer_range=0.2, pad_token_id=None, bos_token_id=None)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "tiny")
    own = RUNS["distilled, files eager"].arguments(tmp_path)
    torchrun(2, "carpool.cli", "teach", str(tmp_path / "tiny"), *own, seconds=240)
    found = {}
    for name in ("files eager", "files captured", "online"):
        lines = [line for line in train(f"distilled, {name}", tmp_path / name) if line["kind"] == "train"]
        found[name] = [line[key] for line in lines for key in ("loss", "distillation_loss", "grad_norm")]
        used = json.loads((tmp_path / name / "run.json").read_text())["decisions"]["cuda_graphs"]["used"]
        assert used == (name == "files captured")
    assert found["files captured"] == found["files eager"] and len(found["online"]) == 18
    assert found["online"] == pytest.approx(found["files eager"], rel=2e-2)
