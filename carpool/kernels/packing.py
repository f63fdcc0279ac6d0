"""Makes packets of rows (packets.py): by a kernel on CUDA, in plain PyTorch elsewhere. LOSSY."""

from __future__ import annotations

import torch

from carpool.kernels.packets import packet_bytes, quantise, scales_of


def pack(x_RH: torch.Tensor, came_W: torch.Tensor | None = None, slab: int = 0) -> torch.Tensor:
    """(R, packet_bytes(H)) uint8.

    Args:
        came_W: (W,) on the device: how many of each `slab` rows are there; the others' packets may hold anything.
    """
    rows, hidden = x_RH.shape
    if x_RH.is_cuda:
        from carpool.kernels.packet_kernel import launch_quantise  # Triton, which a CPU can do without

        return launch_quantise(x_RH.contiguous(), packet_bytes(hidden), came_W, slab)
    packet_RB = torch.zeros(rows, packet_bytes(hidden), dtype=torch.uint8, device=x_RH.device)
    code_RH, scale_RG = quantise(x_RH)
    packet_RB[:, :hidden] = code_RH.view(torch.uint8)
    scales_of(packet_RB, hidden).copy_(scale_RG)
    return packet_RB
