"""The expert layouts that tests run through: 12 experts on 1, 2 or 4 ranks."""

from __future__ import annotations

from carpool import ExpertLayout

EXPERTS = 12
# Of those in slices, the second part of the name is in how many.
SLICED = ("sliced 2", "sliced_uneven 4")
LAYOUTS = ("contiguous", "permuted", "uneven", *SLICED)


def layout_of(name: str, num_ranks: int) -> ExpertLayout:
    """One of `LAYOUTS`. Unevenness includes a rank without any expert."""
    order = [7, 2, 11, 0, 5, 9, 4, 1, 10, 3, 8, 6]
    match name, num_ranks:
        case "contiguous", _:
            return ExpertLayout.contiguous(EXPERTS, num_ranks)
        case "permuted", _:
            return ExpertLayout.permuted(order, num_ranks)
        case "uneven", 4:
            return ExpertLayout(((0, 1, 2, 3, 4), (), (5,), (6, 7, 8, 9, 10, 11)))
        case "uneven", 2:
            return ExpertLayout(((9, 1, 2), (0, 3, 4, 5, 6, 7, 8, 10, 11)))
        case "uneven", 1:
            return ExpertLayout((tuple(order),))
        case "sliced 2", 1:
            return ExpertLayout((tuple(range(2 * EXPERTS)),), slices=2)
        case "sliced 2", _:
            return ExpertLayout.sliced(EXPERTS, num_ranks // 2, 2)
        case "sliced_uneven 4", _:
            return _sliced_uneven(num_ranks)
    raise ValueError(f"no layout {name} on {num_ranks} ranks")


def _sliced_uneven(num_ranks: int) -> ExpertLayout:
    """Four slices of each expert anywhere, unequally many on the ranks."""
    if num_ranks == 1:
        return ExpertLayout((tuple((7 * i) % 48 for i in range(48)),), slices=4)
    of = [(i * i + i // 5) % (num_ranks + 1) % num_ranks for i in range(48)]
    homes = [tuple(i for i in range(48) if of[i] == rank) for rank in range(num_ranks)]
    return ExpertLayout(tuple(homes), slices=4)
