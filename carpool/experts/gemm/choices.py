"""Which kernel each matrix product of `GroupedExperts` uses, and how it is chosen.

    product   library                                          fused
    up        gather x, grouped product, activation            one kernel: rows are read where they are
    down      grouped product                                  the same, in Triton
    dact      gather dy, grouped product, activation backward  one kernel; dA is never written
    dx        grouped product                                  the same, in Triton
    dup       gather x, grouped outer product                  one kernel
    ddown     grouped outer product of the dy gathered above   one kernel that reads dy where it is

A choice names an implementation for each product: "library", or the tiling of the fused kernel (`gemm_tiles.TILINGS`):

    wide      128 x 256, one program on a multiprocessor; steps are half as deep where shared memory is small
    flat      the same, and the next tile's loads begin before this tile's results are written; on Hopper dact, dup and
              ddown are divided among warps of their own (dact_hopper_kernels.py, outer_hopper_kernels.py)
    square    128 x 128, two programs on a multiprocessor: one multiplies while the other writes

`measure_choices.py` times all of them for a shape, on the device at hand. Times differ from run to run, and so may the
choice, and with it the last bits of results: so a run that measures records `Choices.to_dict()`, and a resumed run uses
the record. Without measurement `default_choices` depends on the shape alone.

dact and ddown are chosen together: the library's sides of both need the gathered rows of dy, which are gathered once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from functools import cache

import torch

LIBRARY = "library"
WAYS = (LIBRARY, "wide", "flat", "square")


@dataclass(frozen=True)
class Choices:
    """The implementation of each product; see the module's docstring. The default is "library" for all.

    Raises:
        ValueError: an unknown implementation.
    """

    up: str = LIBRARY
    down: str = LIBRARY
    dact: str = LIBRARY
    dx: str = LIBRARY
    dup: str = LIBRARY
    ddown: str = LIBRARY

    def __post_init__(self) -> None:
        for stage, way in asdict(self).items():
            if way not in WAYS:
                raise ValueError(f"{stage}={way!r} is no way to compute a stage; use one of {', '.join(WAYS)}")

    @classmethod
    def all(cls, way: str) -> Choices:
        """The same implementation for every product."""
        return cls(**{stage: way for stage in STAGES})

    @classmethod
    def from_dict(cls, ways: Mapping[str, str]) -> Choices:
        """The inverse of `to_dict`; products that are not named use the library.

        Raises:
            ValueError: an unknown product.
        """
        unknown = sorted(set(ways) - set(STAGES))
        if unknown:
            raise ValueError(f"no such stage: {', '.join(unknown)}; the stages are {', '.join(STAGES)}")
        return cls(**ways)

    def to_dict(self) -> dict[str, str]:
        return asdict(self)


# Below this many pairs per slot the time is that of loading its matrices.
FEW_PAIRS = 512
STAGES = tuple(field.name for field in fields(Choices))


@cache
def default_choices(device: torch.device, pairs_per_slot: int, adapted: bool = False) -> Choices:
    """By the shape alone, as measured on one H100 and one H200 (docs/measurements.md); `measure_choices` knows other
    shapes better. Data centres' Blackwell gets the library's. So do GPUs before Ampere; other GPUs get the square tiles
    everywhere, for which two programs fit on their multiprocessors: there the library's products are a loop over
    experts, for which the host waits.

    Args:
        pairs_per_slot: how many there are, or could be, on average.
        adapted: experts have adapters, whose share the library's products would leave to a pass of its own, or a
            quantised base, of which these would need all matrices at once.
    """
    major = torch.cuda.get_device_capability(device)[0] if device.type == "cuda" else 0
    if major < 8 or major in (10, 11):
        return Choices()
    if major != 9:
        return Choices.all("square")
    if pairs_per_slot < FEW_PAIRS:
        # Matrices then come as fast as memory gives them, and smaller tiles ask for more of them at once.
        if adapted:
            return Choices(up="wide", down="wide", dact="flat", dx="wide", dup="flat", ddown="flat")
        return Choices(up="square", down=LIBRARY, dact="flat", dx=LIBRARY, dup="flat", ddown="flat")
    return Choices.all("flat")
