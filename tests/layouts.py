"""The expert layouts that tests run through: 12 experts on 1, 2 or 4 ranks."""

from __future__ import annotations

from carpool import ExpertLayout

EXPERTS = 12
LAYOUTS = ("contiguous", "permuted", "uneven", "replicated", "replicated_permuted")


def layout_of(name: str, num_ranks: int) -> ExpertLayout:
    """One of `LAYOUTS`; unevenness includes a rank without any expert, and empty slots on a single rank."""
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
    raise ValueError(f"no layout {name} on {num_ranks} ranks")
