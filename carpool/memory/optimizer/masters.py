"""A bfloat16 weight and 16 more bits are a float32 master: no second copy of the weights.

The weight that the model sees is the master rounded to the nearest bfloat16. The optimizer keeps how far, in units of
float32's last bit, as a signed int16:

    master   0x3F80_9000     1.0044...
    weight   0x3F81          the nearest, here above the master
    low     -0x7000          0x3F81_0000 - 0x7000 = 0x3F80_9000

Halfway cases round away from zero and not to even: then `low` lies in [-0x8000, 0x7FFF] and fits exactly (to even, the
same 16 bits would stand for two masters). NVIDIA Apex's distributed Adam does so (`store_param_remainders`); the idea
is of Split-SGD-BF16, arXiv 2005.04680, section 5. A NaN is kept as the one bfloat16 NaN, whatever its bits were.

Before the first step `low` is 0: the master is the weight.
"""

from __future__ import annotations

import torch

NAN_BITS = 0x7FC00000


def join(weight: torch.Tensor, low: torch.Tensor) -> torch.Tensor:
    """The float32 masters of bfloat16 weights and their int16 low bits; all of one shape."""
    return ((weight.view(torch.int16).int() << 16) + low.int()).view(torch.float32)


def split(master: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """bfloat16 weights and int16 low bits of float32 masters, exactly."""
    bits = master.view(torch.int32)
    bits = torch.where(master.isnan(), NAN_BITS, bits)
    upper = (bits + 0x8000) >> 16
    low = bits - (upper << 16)
    return upper.short().view(torch.bfloat16), low.short()
