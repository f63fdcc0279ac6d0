"""What was written, read back: whether the files of a model hold what they should.

Transformers itself loads them, group by group (`OriginalWeights.load`), so memory is needed for one layer's experts. A
value that is rounded to the files' dtype is off by at most its unit roundoff u = eps / 2, times the value: 2^-8 in
bfloat16, 2^-24 in float32. Each value is compared, since a mean would hide a small one that is wrong:

    trained 0.100, written 0.1001 in bfloat16      0.0001 <= 2^-8 * 0.100: right
    trained 0.100, written 0.102                   0.002 is more: wrong
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from carpool.hf.weights.files import stored_weights
from carpool.hf.weights.original_layout import Group, OriginalLayout, OriginalWeights
from carpool.train.blueprint import meta_model

# Values that are compared at once.
_PIECE = 1 << 22


class ReadBack:
    """Compares a model folder with the tensors that were to be written.

    Args:
        folder, layout: of the model, and of its files.
        read: the values of a tensor, whole, by its name in the model."""

    def __init__(self, folder: Path, layout: OriginalLayout, read: Callable[[str], torch.Tensor]) -> None:
        self._written = OriginalWeights(meta_model(folder), folder, stored_weights(folder), layout)
        self._read = read

    def compare(self, group: Group) -> tuple[float, str]:
        """The largest difference of a group's tensors, relative to what should be there, and the name of the tensor.
        Raises ValueError if one is larger than by rounding to the dtype of the files, or a tensor is not there."""
        written, largest = self._written.load(group), (0.0, "")
        dtype = max((self._written.stored[name].dtype for name in group.outputs), key=unit_roundoff)
        for name in group.inputs:
            largest = max(largest, self._compare(name, written.pop(name), self._read(name), dtype))
        return largest

    def _compare(self, name: str, written: torch.Tensor, read: torch.Tensor, dtype: torch.dtype) -> tuple[float, str]:
        return check_values(name, written, read, 0.0 if read.dtype == dtype else unit_roundoff(dtype)), name

    def finish(self, largest: float, name: str) -> str:
        """Compares what else there is, once all groups are, and says in a sentence what it found. Raises ValueError."""
        how = f"rounded by up to {largest:.1e} ({name})" if largest else "bit by bit"
        return f"read back: it is the checkpoint's, {how}"


def unit_roundoff(dtype: torch.dtype) -> float:
    """By what share of it rounding to this dtype changes a value at most."""
    return torch.finfo(dtype).eps / 2 if dtype.is_floating_point else 0.0


def check_values(
    name: str, written: torch.Tensor, expected: torch.Tensor, roundoff: float, slack: float = 0.0
) -> float:
    """How large all differences are, relative to all values. Raises ValueError if a value is farther from the expected
    one than by `roundoff` times that, and `slack`."""
    written, expected = written.reshape(-1), expected.reshape(-1)
    if written.dtype == expected.dtype and torch.equal(written.view(torch.uint8), expected.view(torch.uint8)):
        return 0.0
    wrong, squares = 0, torch.zeros(2, dtype=torch.float64)
    for some, right in zip(written.split(_PIECE), expected.split(_PIECE), strict=True):
        right = right.float()
        difference = (some.float() - right).abs()
        # The last term is half the distance of the smallest numbers of float16.
        allowed = right.abs() * (roundoff * (1 + 2**-12)) + (slack + (2**-25 if roundoff else 0.0))
        # Not the other way around: NaN is never within.
        wrong += int((~(difference <= allowed)).sum())
        squares += torch.stack([difference.norm(), right.norm()]).double() ** 2
    relative = (squares[0] / squares[1].clamp_min(1e-60)).sqrt().item()
    if wrong:
        raise ValueError(
            f"{name} is wrong in {wrong:,} of {expected.numel():,} values, by {relative:.1%} of the whole: more than "
            "by rounding"
        )
    return relative
