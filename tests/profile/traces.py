"""A trace of one step with a known answer, in the format of PyTorch's profiler: times in microseconds after START.

host     attention  [dispatch: plan, dispatch 1][experts][combine]                        [backward: dispatch]
7             ####  ####                 ########                            ####      ####              #     ##
20                 ======             ..     =====            ====
24                                               ooooooo
"""

from __future__ import annotations

from typing import Any

START = 5_000_000.0
HOST, DEVICE, FORWARD, BACKWARD = 4711, 0, 4711, 4799


def span(cat: str, name: str, start: float, end: float, pid: int, tid: int, **args: Any) -> dict[str, Any]:
    place = {"ph": "X", "cat": cat, "name": name, "pid": pid, "tid": tid}
    return {**place, "ts": START + start, "dur": end - start, "args": args}


def annotated(name: str, start: float, end: float, thread: int = FORWARD) -> dict[str, Any]:
    return span("user_annotation", name, start, end, HOST, thread)


def kernel(name: str, stream: int, start: float, end: float, **args: Any) -> dict[str, Any]:
    cat = "gpu_memcpy" if name.startswith("Memcpy") else "kernel"
    return span(cat, name, start, end, DEVICE, stream, device=DEVICE, stream=stream, **args)


def launched(
    name: str, stream: int, start: float, end: float, at: float, correlation: int, triton: bool = False
) -> list[dict[str, Any]]:
    """A kernel, and the call that launched it."""
    call = ("cuda_driver", "cuLaunchKernelEx") if triton else ("cuda_runtime", "cudaLaunchKernel")
    return [
        span(*call, at, at + 0.5, HOST, FORWARD, correlation=correlation),
        kernel(name, stream, start, end, correlation=correlation),
    ]


def two_streams(base: int = 1_790_000_000_000_000_000) -> dict[str, Any]:
    """Milliseconds: step 1, computation 0.415, rides 0.32 of which 0.23 are exposed, other communication 0.12 of which
    0.1 is, idle 0.255."""
    forward, backward = "carpool::layers.0::forward", "carpool::layers.0::backward"
    events = [
        {"ph": "M", "name": "process_name", "pid": HOST, "tid": 0, "ts": START, "args": {"name": "python"}},
        {"ph": "M", "name": "process_labels", "pid": HOST, "tid": 0, "ts": START, "args": {"labels": "CPU"}},
        {"ph": "M", "name": "process_labels", "pid": DEVICE, "tid": 0, "ts": START, "args": {"labels": "GPU 0"}},
        {"ph": "M", "name": "thread_name", "pid": DEVICE, "tid": 7, "ts": START, "args": {"name": "stream 7"}},
        annotated("carpool::step", 0, 1000),
        annotated("ProfilerStep#3", -5, 1005),
        annotated(f"{forward}::dispatch::0", 10, 20),
        annotated(f"{forward}::dispatch::1", 14, 18),
        annotated(f"{forward}::experts::0", 20, 30),
        annotated(f"{forward}::combine::0", 30, 40),
        annotated(f"{backward}::dispatch", 100, 110, BACKWARD),
        annotated("carpool::optimizer", 120, 130),
        *launched("before the step", 7, -50, -1, -60, 1),
        *launched("flash_fwd_kernel", 7, 50, 150, 5, 2),
        *launched("plan_kernel", 7, 150, 170, 11, 3, triton=True),
        *launched("dispatch_kernel", 20, 100, 200, 15, 4, triton=True),
        *launched("_grouped_gemm", 7, 200, 400, 25, 5, triton=True),
        *launched("combine_kernel", 20, 380, 500, 35, 6, triton=True),
        *launched("ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)", 24, 480, 600, 6, 7),
        # The launch is on a thread that has another number elsewhere, but the operator is known.
        span("cuda_runtime", "cudaLaunchKernelExC", 105, 106, HOST, 123456, correlation=9),
        span("cpu_op", "c10d::alltoall_base_", 104, 108, HOST, BACKWARD, **{"External id": 88}),
        kernel("ncclDevKernel_SendRecv(ncclDevKernelArgs)", 20, 600, 700, correlation=9, **{"External id": 88}),
        # Nothing is known of the host; the range is drawn over the stream.
        span("gpu_user_annotation", f"{backward}::experts", 700, 800, DEVICE, 7),
        kernel("_outer_kernel", 7, 710, 790),
        kernel("Memcpy DtoD (Device -> Device)", 7, 900, 910, correlation=99),
        *launched("after the step", 7, 995, 1050, 130, 8),
        {"ph": "s", "id": 4, "pid": HOST, "tid": FORWARD, "ts": START + 15, "cat": "ac2g", "name": "ac2g"},
        {"ph": "f", "id": 4, "pid": DEVICE, "tid": 20, "ts": START + 100, "cat": "ac2g", "name": "ac2g", "bp": "e"},
        {"ph": "i", "s": "g", "name": "Record Window End", "pid": "", "tid": "", "ts": START + 1100},
    ]
    return {"schemaVersion": 1, "baseTimeNanoseconds": base, "traceEvents": events}
