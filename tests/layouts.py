"""The expert layouts that tests run through: 12 experts on 1, 2 or 4 ranks."""

from __future__ import annotations

from carpool import ExpertLayout

EXPERTS = 12
# Of those in slices, the second part of the name is in how many.
SLICED = ("sliced 2", "sliced_uneven 4")
LAYOUTS = ("contiguous", "permuted", "uneven", "replicated", "replicated_permuted", *SLICED)


def layout_of(name: str, num_ranks: int) -> ExpertLayout:
    """One of `LAYOUTS`. Unevenness includes a rank without any expert, and empty slots on a single rank."""
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
            return ExpertLayout((tuple(order),), ((3, -1, 1, 2, 0, *range(4, 9), -1, 10, 9, 11),))
        case "replicated", 4:
            return layout_of("contiguous", 4).with_replicas([(0, 1), (0, 2), (0, 3), (5, 3), (7, 0), (11, 0)])
        case "replicated", 2:
            return layout_of("contiguous", 2).with_replicas([(0, 1), (7, 0), (8, 0)])
        case "replicated_permuted", 4:
            homes = layout_of("permuted", 4).homes
            return ExpertLayout(homes, ((2, 7, 5, 0), (5, 9, 11, -1, 0), (4, 10, 1, 7), (6, 8, 3, 0)))
        case "replicated_permuted", 2:
            homes = layout_of("permuted", 2).homes
            return ExpertLayout(homes, ((9, 5, 0, 11, 2, 7, 6), (-1, 4, 1, 10, 3, 8, 6, 9, 0)))
        case "sliced 2", 1:
            return ExpertLayout((tuple(range(2 * EXPERTS)),), slices=2)
        case "sliced 2", _:
            return ExpertLayout.sliced(EXPERTS, num_ranks // 2, 2)
        case "sliced_uneven 4", _:
            return _sliced_uneven(num_ranks)
    raise ValueError(f"no layout {name} on {num_ranks} ranks")


def _sliced_uneven(num_ranks: int) -> ExpertLayout:
    """Four slices of each expert anywhere, unequally many on the ranks, and copies: a whole expert's on one rank, some
    of another's, one of all others'."""
    if num_ranks == 1:
        homes = [[(7 * i) % 48 for i in range(48)]]
    else:
        of = [(i * i + i // 5) % (num_ranks + 1) % num_ranks for i in range(48)]
        homes = [[i for i in range(48) if of[i] == rank] for rank in range(num_ranks)]
    slots = [[-1, *reversed(home)] for home in homes]
    for rank, wanted in enumerate(((20, 21, 22, 23, 9, 1), (0, 1, 8), (), (0, 1, 2, 3, 9))[:num_ranks]):
        slots[rank] += [i for i in wanted if i not in slots[rank]]
    return ExpertLayout(tuple(map(tuple, homes)), tuple(map(tuple, slots)), slices=4)
