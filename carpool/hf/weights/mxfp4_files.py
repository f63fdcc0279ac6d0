"""Experts in files as gpt-oss is published, in MXFP4 (Open Compute Project, Microscaling Formats 1.0): 4.25 bits.

    experts.gate_up_proj (E, I, O)      gate_up_proj_blocks (E, O, I / 32, 16) uint8, gate_up_proj_scales (E, O, I / 32)

A block is 32 values of the input dimension: each is one of 16 numbers, two to a byte, the first in the lower half,
times 2 ** (scale - 127). What came from MXFP4 goes back without loss; any other value is off by at most a quarter of
the largest in its block.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from carpool.experts.quantised import quantise
from carpool.hf.weights.weight_files import Stored

BLOCK = 32
BLOCKS, SCALES = "_blocks", "_scales"


def packed_names(names: Iterable[str]) -> frozenset[str]:
    """The tensors of the model that files hold in blocks, of the names in the files."""
    return frozenset(name.removesuffix(BLOCKS) for name in names if name.endswith(BLOCKS))


def is_packed(folder: Path) -> bool:
    """Whether a checkpoint folder has its experts in MXFP4."""
    raw = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return (raw.get("quantization_config") or {}).get("quant_method") == "mxfp4"


def unpacked_names(names: Iterable[str]) -> set[str]:
    """The names that files would have if they held nothing in blocks."""
    return {name.removesuffix(BLOCKS).removesuffix(SCALES) for name in names}


def unpack(blocks: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """(E, I, O), by the code of Transformers. In bfloat16 this is exact."""
    return convert_moe_packed_tensors(blocks, scales, dtype=dtype)


def unpacked(stored: Mapping[str, Stored], shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Stored]:
    """What files would hold without blocks: in the place of these, weights in bfloat16. `shapes`: theirs, by name."""
    weights = {name: Stored(stored[f"{name}{BLOCKS}"].file, torch.bfloat16, shape) for name, shape in shapes.items()}
    blocks = {f"{name}{end}" for name in shapes for end in (BLOCKS, SCALES)}
    return {name: one for name, one in stored.items() if name not in blocks} | weights


def mark(folder: Path) -> None:
    """Say in the config.json of a folder that its experts are in MXFP4."""
    path = folder / "config.json"
    config = json.loads(path.read_text(encoding="utf-8")) | {"quantization_config": {"quant_method": "mxfp4"}}
    path.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def packed_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Of the blocks of a weight (E, I, O); scales have no last dimension.

    Raises:
        ValueError: inputs that are no blocks."""
    experts, inputs, outputs = shape
    if inputs % BLOCK:
        raise ValueError(f"MXFP4 has blocks of {BLOCK} inputs, and weights of {shape} have {inputs}")
    return experts, outputs, inputs // BLOCK, BLOCK // 2


def pack(weight_EIO: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Blocks and scales (`carpool.experts.quantised`)."""
    shape = packed_shape(tuple(weight_EIO.shape))
    code, scale = quantise(weight_EIO.transpose(1, 2), "mxfp4")
    return code.view(shape), scale


def check_blocks(name: str, written_OI: torch.Tensor, expected_OI: torch.Tensor) -> float:
    """How large all differences are, relative to all values, of inputs in rows. Raises ValueError if a value is farther
    from the expected one than packing can move it."""
    difference = (written_OI.float() - expected_OI.float()).abs().unflatten(-1, (-1, BLOCK))
    largest = expected_OI.float().abs().unflatten(-1, (-1, BLOCK)).amax(-1, keepdim=True)
    # Not the other way around: NaN is never within.
    if wrong := int((~(difference <= largest * (0.25 + 2**-7) + 2.0**-125)).sum()):
        raise ValueError(
            f"{name} is wrong in {wrong:,} of {difference.numel():,} values: more than by packing to MXFP4"
        )
    return (difference.norm() / expected_OI.float().norm().clamp_min(1e-30)).item()
