"""How rows become bytes on their way between ranks, and rows again.

| name   | bytes of a row of H elements          | what it changes                                                |
|--------|---------------------------------------|----------------------------------------------------------------|
| `none` | as the model computes                 | nothing                                                        |
| `bf16` | 2 H                                   | rows of float32 lose 16 bits; rows of 16 bits stay as they are |
| `fp8`  | H, and 4 for each 128, rounded to 16  | three bits are left behind the point: LOSSY                    |

A ride has four verbs that carry rows, and each has a codec of its own:

    Codecs(dispatch="fp8")                                     DeepSeek-V3: rows out as FP8, sums back as they are
    Codecs(dispatch="fp8", combine="bf16", inter_node="nodes")        only over the hop between nodes

    dispatch           rows to experts                      combine_backward    gradients of sums to experts
    combine            experts' partial sums back           dispatch_backward   gradients of rows back

Only rows that leave their rank are encoded. A rank's rows for itself stay as they are. Gradients pass a codec straight
through: the gradient of what was decoded is the gradient of what was encoded.

Rows may also become fewer: similar ones for the same expert travel as one (`merging.py`).

Rows that are decoded and encoded again, as over two hops, do not change a second time.

Sources: DeepSeek-V3 (arXiv 2412.19437, section 3.3) for FP8 with scales of 1 x 128.
"""

from __future__ import annotations

from carpool.transport.codecs.base import Codec
from carpool.transport.codecs.choice import CODECS, HOPS, PLAIN, ROW_VERBS, Codecs

__all__ = ["CODECS", "HOPS", "PLAIN", "ROW_VERBS", "Codec", "Codecs"]
