"""The time of a step by kind: on a trace whose answer is known, and on a real step of a CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.profiler import ProfilerActivity, record_function

import carpool
from carpool.profile.kinds import (
    IDLE,
    KINDS,
    LOSS,
    OPTIMIZER,
    OUR_EXPERTS,
    OUR_PACKING,
    kind_of_kernel,
    time_by_kind,
)
from carpool.profile.rank_trace import STEP, load
from tests.profile.traces import BACKWARD, FORWARD, HOST, kernel, span, two_streams

TRITON = "triton_poi_fused_add_mul_silu_0"
ELEMENTWISE = "void at::native::vectorized_elementwise_kernel<4, at::native::AddFunctor>"


@pytest.mark.parametrize(
    ("name", "operator", "section", "kind"),
    [
        ("nvjet_hsh_256x128_64x4_2x1_v_bz_coopA_NNT", "aten::mm", None, "dense"),
        ("void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm_relu>", "", None, "dense"),
        ("void cutlass::device_kernel<GemmUniversal<cutlass::gemm::GroupProblemShape>>", "", None, "experts"),
        ("anything", "aten::_grouped_mm", None, "experts"),
        (ELEMENTWISE, "aten::mul", "experts", "experts"),
        ("flash_fwd_kernel", "", None, "attention"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_bprop", "", None, "attention"),
        ("nvjet_hsh_256x128_64x4_2x1_v_bz_coopA_NNT", "aten::mm", "loss", "dense"),
        (ELEMENTWISE, "aten::to", "loss", "loss"),
        ("void cunn_SoftMaxForward<at::native::LogSoftMaxForwardEpilogue>", "aten::_log_softmax", None, "loss"),
        ("void multi_tensor_apply_kernel<FusedAdamMathFunctor>", "aten::_fused_adamw_", None, "optimizer"),
        (ELEMENTWISE, "aten::mul_", "optimizer", "optimizer"),
        ("ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)", "", None, "rides"),
        ("ncclDevKernel_AllGather_RING_LL", "c10d::_allgather_base_", None, "communication"),
        ("ncclDevKernel_AllGather_RING_LL", "c10d::_allgather_base_", "rides", "rides"),
        ("dispatch_kernel", "", "experts", "rides"),
        ("plan_kernel", "", "rides", "rides"),
        ("Memcpy DtoD (Device -> Device)", "aten::copy_", None, "copies"),
        ("void at::native::elementwise_kernel<direct_copy_kernel_cuda>", "aten::copy_", None, "copies"),
        (TRITON, "", None, "elementwise"),
        ("_dact", "", None, "experts"),
        ("_gemm", "", None, "experts"),
        ("_activation", "", None, "experts"),
        ("_cross_entropy", "", None, "loss"),
        ("_adamw", "", None, "optimizer"),
        ("_sum_pairs", "", "rides", "rides"),
        ("choices_kernel", "", None, "rides"),
        (ELEMENTWISE, "aten::add", None, "elementwise"),
    ],
)
def test_kinds_of_kernels(name: str, operator: str, section: str | None, kind: str):
    assert kind_of_kernel(name, operator, section) == kind


def test_kernels_that_are_named_exist():
    package = Path(carpool.__file__).parent
    sources = "".join(path.read_text() for path in package.rglob("*kernel*.py"))
    sources += "".join(path.read_text() for path in (package / "experts").rglob("*.py"))
    assert not [name for name in OUR_EXPERTS | OUR_PACKING if f"def {name}(" not in sources]


def test_a_step_is_divided_among_the_kinds():
    found = time_by_kind(two_streams())
    assert found.on_device
    busy = {kind: ms for kind, ms in found.busy.items() if ms}
    # Of rides: 100-200, 380-500, 600-700; the plan at 150-170 lies inside. Experts: 200-400, 710-790.
    assert busy == pytest.approx(
        {"attention": 0.1, "experts": 0.28, "rides": 0.32, "communication": 0.12, "copies": 0.01, "elementwise": 0.005}
    )
    share = {kind: ms for kind, ms in found.share.items() if ms}
    assert share == pytest.approx(
        {
            "attention": 0.1, "experts": 0.28, "rides": 0.25, "communication": 0.1, "copies": 0.01,
            "elementwise": 0.005, IDLE: 0.255,
        }
    )  # fmt: skip
    assert sum(found.share.values()) == pytest.approx(found.step) == pytest.approx(1.0)


def operator(name: str, start: float, end: float, thread: int, number: int, forward: int = 0) -> dict[str, Any]:
    return span("cpu_op", name, start, end, HOST, thread, **{"Sequence number": number, "Fwd thread id": forward})


def test_the_backward_of_an_operator_is_of_the_forwards_section():
    trace = two_streams()
    trace["traceEvents"] += [
        operator("aten::add", 22, 24, FORWARD, 77),  # in the range of the experts
        operator("aten::add", 52, 54, FORWARD, 78),  # in none
        operator("AddBackward0", 140, 150, BACKWARD, 77, forward=1),
        operator("AddBackward0", 150, 160, BACKWARD, 78, forward=1),
        span("cuda_runtime", "cudaLaunchKernel", 142, 143, HOST, BACKWARD, correlation=50),
        span("cuda_runtime", "cudaLaunchKernel", 152, 153, HOST, BACKWARD, correlation=51),
        kernel(ELEMENTWISE, 7, 800, 830, correlation=50),
        kernel(ELEMENTWISE, 7, 830, 840, correlation=51),
    ]
    found = time_by_kind(trace)
    assert found.busy["experts"] == pytest.approx(0.28 + 0.03)
    assert found.busy["elementwise"] == pytest.approx(0.005 + 0.01)


def test_without_kernels_operators_count(tmp_path: Path):
    weight, x = torch.randn(64, 64, requires_grad=True), torch.randn(32, 64)
    optimizer = torch.optim.AdamW([weight], fused=True)
    with torch.profiler.profile(activities=[ProfilerActivity.CPU]) as recorded, record_function(STEP):
        y = F.linear(x, weight).tanh()
        with record_function(LOSS):
            loss = (y.exp() * 2).sum()
        loss.backward()
        with record_function(OPTIMIZER):
            optimizer.step()
    path = tmp_path / "trace.json"
    recorded.export_chrome_trace(str(path))
    found = time_by_kind(load(path))
    assert not found.on_device
    assert {kind for kind in KINDS if found.busy[kind]} >= {"dense", "loss", "optimizer", "elementwise"}
    assert not any(found.busy[kind] for kind in ("experts", "attention", "rides", "communication"))
    assert sum(found.share.values()) == pytest.approx(found.step)


def test_a_trace_without_a_step_is_refused():
    with pytest.raises(ValueError, match="no range 'carpool::step'"):
        time_by_kind({"traceEvents": []})
