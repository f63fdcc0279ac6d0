"""Rows as packets: FP8 codes and the scales that go with them, side by side.

A row of H elements becomes H codes (e4m3) and one float32 scale for each 128 columns (the largest absolute value /
448), rounded up to 16 bytes, so that it can be sent and gathered like any other row:

    H 7168        [7168 codes | 56 scales]  =  7392 bytes instead of 14336

`quantise` and `unpack` define in plain PyTorch what the kernels compute (packet_kernel.py); `pack` is the one or
the other. LOSSY: a code has three bits behind the point, so an element is off by up to 1/16 of itself, by less
on average.
"""

from __future__ import annotations

from functools import cache

import torch
import torch.nn.functional as F

from carpool.kernels import FP8_MAX, GROUP

FP8 = torch.float8_e4m3fn
SMALLEST = 1e-30  # stands for the largest absolute value where all are zero


@cache
def why_no_fp8(device: torch.device) -> str:
    """Why there are no kernels for FP8 on this device; "" if there are."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device) >= (8, 9):
        return ""
    has = ".".join(map(str, torch.cuda.get_device_capability(device)))
    name = torch.cuda.get_device_name(device)
    return f"FP8 needs a GPU of compute capability 8.9 or later (Ada, Hopper, Blackwell), and {name} has {has}"


def packet_bytes(hidden: int) -> int:
    """Bytes of a packet of `hidden` columns."""
    return -(-(scales_at(hidden) + 4 * -(-hidden // GROUP)) // 16) * 16


def scales_at(hidden: int) -> int:
    """The byte of a packet where its scales begin."""
    return -(-hidden // 4) * 4


def quantise(x_RH: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(codes, scales) of rows in plain PyTorch: (R, H) float8_e4m3fn, (R, groups) float32."""
    rows, hidden = x_RH.shape
    groups = -(-hidden // GROUP)
    x_RGC = F.pad(x_RH.float(), (0, groups * GROUP - hidden)).view(rows, groups, GROUP)
    scale_RG = x_RGC.abs().amax(2).clamp(min=SMALLEST) / FP8_MAX
    code_RGC = (x_RGC * (1.0 / scale_RG)[:, :, None]).to(FP8)
    return code_RGC.view(rows, groups * GROUP)[:, :hidden], scale_RG


def unpack(packet_RB: torch.Tensor, hidden: int) -> torch.Tensor:
    """(R, hidden) float32, in plain PyTorch."""
    code_RH = packet_RB[:, :hidden].contiguous().view(FP8).float()
    return code_RH * scales_of(packet_RB, hidden).repeat_interleave(GROUP, 1)[:, :hidden]


def scales_of(packet_RB: torch.Tensor, hidden: int) -> torch.Tensor:
    """(R, groups) float32, a view."""
    first = scales_at(hidden) // 4
    return packet_RB.view(torch.float32)[:, first : first + -(-hidden // GROUP)]


def pack(x_RH: torch.Tensor, came_W: torch.Tensor | None = None, slab: int = 0) -> torch.Tensor:
    """(R, packet_bytes(H)) uint8.

    Args:
        came_W: (W,) on the device: how many of each `slab` rows are there; the others' packets may hold anything.
    """
    rows, hidden = x_RH.shape
    if x_RH.is_cuda:
        if why := why_no_fp8(x_RH.device):
            raise ValueError(why)
        from carpool.kernels.packet_kernel import launch_quantise  # Triton, which a CPU can do without

        return launch_quantise(x_RH.contiguous(), packet_bytes(hidden), came_W, slab)
    packet_RB = torch.zeros(rows, packet_bytes(hidden), dtype=torch.uint8, device=x_RH.device)
    code_RH, scale_RG = quantise(x_RH)
    packet_RB[:, :hidden] = code_RH.view(torch.uint8)
    scales_of(packet_RB, hidden).copy_(scale_RG)
    return packet_RB
