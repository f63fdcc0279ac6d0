"""Similar rows for the same expert travel as one. LOSSY.

    6 rows for expert 5, far away     lsh: two buckets of 4 and 2     2 rows travel, the mean of each bucket
                                      condense: four are alike        3 rows travel, the first of the four among them

| name       | rows are merged if                          | what travels | what a merged row gets back      |
|------------|---------------------------------------------|--------------|----------------------------------|
| `lsh`      | their hashes are equal                      | their mean   | the mean's output + (row - mean) |
| `condense` | their cosine with the first is large enough | the first    | the first's output               |

A hash is cross-polytope: a random projection to `merge_width` numbers, of which the one with the largest absolute value
and its sign are kept. `merge_hashes` of them must all agree, so more of them merge less. The projection is the same in
all steps and on all ranks. LSH-MoE rotates instead, which costs H x H products a row.

`condense` compares a row with those of the same expert among its `WINDOW` neighbours. LUFFY lowers its threshold as the
loss falls; here it stays.

Rows of a token's K experts are merged each for itself, so a token takes K rows before merging, as with `alltoall`, and
not one for each rank, as with `dedup`. Rows for experts of their own rank stay as they are.

Sources: LSH-MoE (arXiv 2411.08446), LUFFY's token condensation.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from carpool.transport.codecs import Codecs

# Rows that are compared with each other at once, which takes WINDOW x WINDOW numbers.
WINDOW = 1024


class Merger:
    """Says which rows are merged.

    Args:
        codecs: `merge` is not "none".

    Attributes:
        residual: whether a merged row gets back what it differs from what travelled.
    """

    def __init__(self, codecs: Codecs) -> None:
        self.codecs, self.residual = codecs, codecs.merge == "lsh"
        self._projections: dict[tuple[int, torch.device], torch.Tensor] = {}

    @torch.no_grad()
    def groups(self, x_NH: torch.Tensor, slot_N: torch.Tensor) -> tuple[torch.Tensor, int]:
        """Waits for the device.

        Args:
            slot_N: global slots. Only rows for the same one are merged.

        Returns:
            group_N int64, and how many groups there are. Each has a row."""
        alike_N = self._hashed(x_NH) if self.codecs.merge == "lsh" else self._first_alike(x_NH, slot_N)
        key_N2 = torch.stack([slot_N.long(), alike_N], dim=1)
        groups, group_N = torch.unique(key_N2, dim=0, return_inverse=True)
        return group_N, groups.shape[0]

    def merged(self, rows_NH: torch.Tensor, group_N: torch.Tensor, number: int) -> torch.Tensor:
        """(number, H): what travels of each group. Differentiable."""
        if not self.residual:
            first_C = torch.full((number,), len(group_N), device=group_N.device)
            first_C.scatter_reduce_(0, group_N, torch.arange(len(group_N), device=group_N.device), "amin")
            return rows_NH[first_C]
        sum_CH = rows_NH.new_zeros(number, rows_NH.shape[1], dtype=torch.float32)
        # Not `index_add`, whose order of additions differs from call to call on CUDA.
        sum_CH = sum_CH.index_put((group_N,), rows_NH.float(), accumulate=True)
        return (sum_CH / torch.bincount(group_N, minlength=number)[:, None]).to(rows_NH.dtype)

    def _hashed(self, x_NH: torch.Tensor) -> torch.Tensor:
        """(N,) int64: the hashes of a row as one number."""
        hashes, width = self.codecs.merge_hashes, self.codecs.merge_width
        key = (x_NH.shape[1], x_NH.device)
        if key not in self._projections:
            drawn = torch.randn(x_NH.shape[1], hashes * width, generator=torch.Generator().manual_seed(0))
            self._projections[key] = drawn.to(x_NH.device)
        projected = (x_NH.float() @ self._projections[key]).view(-1, hashes, width)
        most = projected.abs().argmax(2)
        code = 2 * most + (projected.gather(2, most[:, :, None])[:, :, 0] > 0)
        base = (2 * width) ** torch.arange(hashes, device=x_NH.device)
        return (code * base).sum(1)

    def _first_alike(self, x_NH: torch.Tensor, slot_N: torch.Tensor) -> torch.Tensor:
        """(N,) int64: the number of the row that travels for this one; its own if it travels itself."""
        order_N = torch.argsort(slot_N, stable=True)
        first_N = torch.empty_like(order_N)
        if not len(order_N):
            return first_N
        for window in order_N.split(WINDOW):
            unit = F.normalize(x_NH[window].float(), dim=1)
            alike = unit @ unit.t() >= self.codecs.merge_similarity
            alike &= slot_N[window][:, None] == slot_N[window]
            own = torch.arange(len(window), device=x_NH.device)
            alike = torch.tril(alike).fill_diagonal_(True)
            first = alike.int().argmax(1)
            # One that is alike to a row which does not travel itself is on its own: the two might be too far apart.
            first_N[window] = window[torch.where(first[first] == first, first, own)]
        return first_N
