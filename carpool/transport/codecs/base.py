"""What a codec says and does."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

import torch


class Codec(ABC):
    """One way for rows to become bytes.

    Attributes:
        name: what settings call it.
        lossy: how rows travel then, for logs: "as FP8". "": nothing is lost.
    """

    name: ClassVar[str]
    lossy: ClassVar[str] = ""

    @abstractmethod
    def row_bytes(self, hidden: int, element_size: int) -> int:
        """Bytes of a row of `hidden` elements of `element_size` bytes."""

    @abstractmethod
    def encode(self, x_NH: torch.Tensor) -> torch.Tensor:
        """Rows as they travel: (N, ...), `row_bytes` each."""

    @abstractmethod
    def decode(self, coded: torch.Tensor, hidden: int, dtype: torch.dtype) -> torch.Tensor:
        """(N, hidden) rows in `dtype`."""


class AsTheyAre(Codec):
    """Rows travel as the model computes them."""

    name = "none"

    def row_bytes(self, hidden: int, element_size: int) -> int:
        return hidden * element_size

    def encode(self, x_NH: torch.Tensor) -> torch.Tensor:
        return x_NH

    def decode(self, coded: torch.Tensor, hidden: int, dtype: torch.dtype) -> torch.Tensor:
        return coded
