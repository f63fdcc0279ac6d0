"""Experts' matrices in 4 and 8 bits: what bitsandbytes makes of them, and what experts compute with them."""

from __future__ import annotations

import hashlib

import pytest
import torch

from carpool.experts import make_activation, make_experts
from carpool.experts.quantised import (
    Kind,
    Quantised,
    dequantise,
    dequantised_rows,
    parts_of_scale,
    quantise,
    quantised_bytes,
    tables_of,
)
from tests.experts_problem import ExpertProblem

KINDS: tuple[Kind, ...] = ("nf4", "mxfp4", "int8")
# Of `digest`, as bitsandbytes 0.50.2 made them (`test_equals_bitsandbytes`, where it is installed).
OF_BITSANDBYTES = {"nf4": "68b20bc57a0e5d81", "int8": "9a111571496bc18e"}


def stack(dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Three experts with an odd number of rows; values that vanish, that are large, and of one block alone."""
    weight = (torch.arange(3 * 37 * 192).view(3, 37, 192) * 7919 % 10007 - 5003) / 1009
    weight[0, 0], weight[1, 5, :64], weight[2, 7, 3] = 0, 0, 1e4
    return weight.to(dtype)


def digest(one: Quantised) -> str:
    values = dequantise(*one, torch.bfloat16).view(torch.int16)
    return hashlib.sha256(b"".join(t.numpy().tobytes() for t in (one.code, one.scale, values))).hexdigest()[:16]


@pytest.mark.parametrize("kind", OF_BITSANDBYTES)
def test_equals_what_bitsandbytes_made(kind: Kind) -> None:
    assert digest(quantise(stack(), kind)) == OF_BITSANDBYTES[kind]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("kind", OF_BITSANDBYTES)
def test_equals_bitsandbytes(kind: Kind, dtype: torch.dtype) -> None:
    theirs = pytest.importorskip("bitsandbytes").functional
    weight = stack(dtype)
    ours = quantise(weight, kind)
    for expert, one in enumerate(weight):
        if kind == "nf4":
            code, state = theirs.quantize_4bit(one, blocksize=64, quant_type="nf4", compress_statistics=True)
            values = theirs.dequantize_4bit(code, state)
            codes, floats = parts_of_scale(ours.scale, state.absmax.numel())
            assert torch.equal(codes[expert], state.absmax.flatten())
            assert torch.equal(tables_of("nf4", one.device)[16:], state.state2.code)
            assert torch.allclose(floats[expert], torch.cat((state.state2.absmax, state.offset[None])), rtol=1e-6)
        else:
            code, scale, _ = theirs.int8_vectorwise_quant(one)
            code = torch.where(scale[:, None] == 0, 0, code)
            values = theirs.int8_vectorwise_dequant(code, scale).to(dtype)
            assert torch.equal(ours.scale[expert].flatten(), scale.flatten())
        assert torch.equal(ours.code[expert].flatten(), code.flatten())
        got = dequantise(*ours, dtype)[expert]
        # The mean of magnitudes is rounded otherwise.
        assert torch.equal(got, values) if kind == "int8" else torch.allclose(got, values, rtol=1e-2, atol=1e-6)


def test_mxfp4_is_what_transformers_reads() -> None:
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    generator = torch.Generator().manual_seed(0)
    blocks = torch.randint(0, 256, (3, 37, 6, 16), dtype=torch.uint8, generator=generator)
    scales = torch.randint(117, 134, (3, 37, 6), dtype=torch.uint8, generator=generator)
    want = convert_moe_packed_tensors(blocks, scales, dtype=torch.bfloat16)
    got = dequantise(blocks.flatten(-2), scales, torch.bfloat16)
    assert torch.equal(got, want.transpose(1, 2))
    # What is published so comes out as it was, though another code may stand for it.
    assert torch.equal(dequantise(*quantise(got, "mxfp4"), torch.bfloat16), got)


@pytest.mark.parametrize(("kind", "most"), [("nf4", 0.17), ("mxfp4", 0.25), ("int8", 0.008)])
def test_errors_are_half_a_step_and_zeros_stay(kind: Kind, most: float) -> None:
    # Without the expert of which one value is 1e4: 256 magnitudes of nf4 share a scale.
    weight = stack(torch.float32)[:2]
    one = quantise(weight, kind)
    error = (dequantise(*one, torch.float32) - weight).abs()
    blocks = weight.unflatten(-1, (-1, {"nf4": 64, "mxfp4": 32, "int8": 192}[kind]))
    largest = blocks.abs().amax(-1, keepdim=True).expand_as(blocks).flatten(-2)
    assert (error <= most * largest).all() and not error[0, 0].any() and not error[1, 5, :64].any()
    assert one.nbytes == quantised_bytes(kind, weight.shape)


@pytest.mark.parametrize("kind", KINDS)
def test_rows_of_an_embedding(kind: Kind) -> None:
    one = quantise(stack()[:1], kind)
    index = torch.tensor([[3, 0, 36], [3, 7, 5]])
    assert torch.equal(dequantised_rows(*one, index, torch.bfloat16), dequantise(*one, torch.bfloat16)[0][index])


def test_rows_that_are_no_blocks() -> None:
    with pytest.raises(ValueError, match=r"rows of \(2, 8, 96\) do not divide"):
        quantise(torch.zeros(2, 8, 96), "nf4")


def problem(kind: Kind, transposed: bool, dtype: torch.dtype) -> tuple[ExpertProblem, ExpertProblem]:
    """With quantised matrices, and with what they are dequantised to. Rows of int8 are of any length."""
    hidden, inner = (37, 19) if kind == "int8" else (64, 192)
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

    monkeypatch.setattr("carpool.experts.gemm.grouped_products.dequantise", counted)
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
