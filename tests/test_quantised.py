"""Experts' matrices in 4 and 8 bits: what bitsandbytes makes of them, and what experts compute with them."""

from __future__ import annotations

import hashlib

import pytest
import torch

from carpool.experts import make_activation, make_experts
from carpool.experts.quantised import Kind, Quantised, dequantise, quantise, quantised_bytes
from tests.experts_problem import ExpertProblem

KINDS: tuple[Kind, ...] = ("nf4", "int8")
# Of `digest`, as bitsandbytes 0.50.2 made them (`test_equals_bitsandbytes`, where it is installed).
OF_BITSANDBYTES = {"nf4": "222797d84cbb4080", "int8": "9a111571496bc18e"}


def stack(dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Three experts with an odd number of rows; values that vanish, that are large, and of one block alone."""
    weight = (torch.arange(3 * 37 * 192).view(3, 37, 192) * 7919 % 10007 - 5003) / 1009
    weight[0, 0], weight[1, 5, :64], weight[2, 7, 3] = 0, 0, 1e4
    return weight.to(dtype)


def digest(one: Quantised) -> str:
    values = dequantise(*one, torch.bfloat16).view(torch.int16)
    return hashlib.sha256(b"".join(t.numpy().tobytes() for t in (one.code, one.scale, values))).hexdigest()[:16]


@pytest.mark.parametrize("kind", KINDS)
def test_equals_what_bitsandbytes_made(kind: Kind) -> None:
    assert digest(quantise(stack(), kind)) == OF_BITSANDBYTES[kind]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_equals_bitsandbytes(kind: Kind, dtype: torch.dtype) -> None:
    theirs = pytest.importorskip("bitsandbytes").functional
    weight = stack(dtype)
    ours = quantise(weight, kind)
    for expert, one in enumerate(weight):
        if kind == "nf4":
            code, state = theirs.quantize_4bit(one, blocksize=64, quant_type="nf4")
            scale, values = state.absmax, theirs.dequantize_4bit(code, state)
        else:
            code, scale, _ = theirs.int8_vectorwise_quant(one)
            code = torch.where(scale[:, None] == 0, 0, code)
            values = theirs.int8_vectorwise_dequant(code, scale).to(dtype)
        assert torch.equal(ours.code[expert].flatten(), code.flatten())
        assert torch.equal(ours.scale[expert].flatten(), scale.flatten())
        assert torch.equal(dequantise(*ours, dtype)[expert], values)


@pytest.mark.parametrize(("kind", "most"), [("nf4", 0.16), ("int8", 0.008)])
def test_errors_are_half_a_step_and_zeros_stay(kind: Kind, most: float) -> None:
    weight = stack(torch.float32)
    one = quantise(weight, kind)
    error = (dequantise(*one, torch.float32) - weight).abs()
    largest = one.scale.repeat_interleave(192 // one.scale.shape[-1], -1)
    assert (error <= most * largest).all() and not error[0, 0].any() and not error[1, 5, :64].any()
    assert one.nbytes == quantised_bytes(kind, weight.shape)


def test_rows_that_are_no_blocks() -> None:
    with pytest.raises(ValueError, match=r"rows of \(2, 8, 96\) do not divide"):
        quantise(torch.zeros(2, 8, 96), "nf4")


def problem(kind: Kind, transposed: bool, dtype: torch.dtype) -> tuple[ExpertProblem, ExpertProblem]:
    """With quantised matrices, and with what they are dequantised to. Rows of int8 are of any length."""
    hidden, inner = (64, 192) if kind == "nf4" else (37, 19)
    made = ExpertProblem(
        "random", hidden, inner, make_activation("silu", True), True, dtype, transposed, ranks=(3, 5), frozen=True
    )
    return made, made.quantise(kind)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["grouped", "reference"])
def test_experts_compute_with_dequantised_matrices(name: str, kind: Kind, transposed: bool) -> None:
    """Bit by bit what they compute with these in memory, and what the formulas say."""
    for dtype, tolerance in ((torch.float32, 5e-6), (torch.bfloat16, 3e-2)):
        ours, twin = problem(kind, transposed, dtype)
        got = ours.run(make_experts(name, ours.function), True, all_rows=True)
        want = twin.run(make_experts(name, twin.function), True, all_rows=True)
        assert all(torch.equal(got[key], want[key]) for key in want) and got.keys() == want.keys()
        twin.check(got, tolerance, all_rows=True)


def test_recomputed_pre_activations() -> None:
    ours, twin = problem("nf4", False, torch.float32)
    got = ours.run(make_experts("grouped", ours.function, recompute=True), False, all_rows=True)
    twin.check(got, 5e-6, all_rows=True)


def test_no_matrix_outlives_its_product(monkeypatch: pytest.MonkeyPatch) -> None:
    """The forward keeps none for the backward: each of the four products makes its own."""
    made: list[tuple[int, ...]] = []

    def counted(code: torch.Tensor, *rest: object) -> torch.Tensor:
        made.append(tuple(code.shape))
        return dequantise(code, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr("carpool.experts.gemm.grouped.dequantise", counted)
    ours, _ = problem("nf4", False, torch.float32)
    ours.run(make_experts("grouped", ours.function), False, all_rows=True)
    up, down = (tuple(code.shape) for code in (ours.weights.up_code, ours.weights.down_code) if code is not None)
    assert made == [up, down, down, up]


def test_stand_ins_have_no_memory_and_are_not_numbers() -> None:
    ours, _ = problem("nf4", False, torch.float32)
    up = ours.weights.up_SFH
    assert up.untyped_storage().nbytes() == 4 and up.isnan().all()
    cast = ours.weights.to(torch.bfloat16)
    assert cast.up_SFH.shape == up.shape and cast.up_SFH.untyped_storage().nbytes() == 2
    assert cast.up_scale is ours.weights.up_scale and cast.up_bias_SF is not None
    assert cast.up_bias_SF.dtype == torch.bfloat16
