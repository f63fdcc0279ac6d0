"""What the tests here run on every GPU: `torchrun --nproc-per-node 4 -m tests.gpu.worker [nvlink]`.

The parity matrix of tests/test_parity.py over NCCL, each case against the same float64 reference, and once more to see
that it is bitwise the same. With `nvlink` the matrix of that transport, which exists on GPUs only.
"""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from tests.pairwise import all_pairs
from tests.test_parity import BF16, CASES, FACTORS, FORBIDDEN, PRODUCT, Case, differences, run_cases

# Kernels are compiled for each K, hidden size, number of slots and number of ranks: so K and size go with the EP here.
# Rows are multiples of 16 bytes.
K_AND_SIZE = {4: (8, (32, 24)), 2: (3, (20, 36)), 1: (2, (32, 24))}


def nvlink_cases() -> list[Case]:
    """Every layout with every EP, and every pair of all other settings; K 1 and bf16 added."""
    factors = FACTORS | {
        "transport": ("nvlink",),
        "top_k": tuple(top_k for top_k, _ in K_AND_SIZE.values()),
        "size": ((20, 36), (32, 24)),
        # On a GPU the kernels that wait for rows take bfloat16: below.
        "schedule": tuple(one for one in FACTORS["schedule"] if not one.startswith("tiles")),
    }
    untied = [
        {"ep": ep, name: value}
        for ep, (top_k, size) in K_AND_SIZE.items()
        for name, tied in (("top_k", top_k), ("size", size))
        for value in factors[name]
        if value != tied
    ]
    # What follows from these: K says the EP, and so the size.
    untied += [
        {"top_k": top_k, "size": value}
        for top_k, size in K_AND_SIZE.values()
        for value in factors["size"]
        if value != size
    ]
    start = [cell | {"transport": "nvlink"} for cell in PRODUCT if cell["transport"] == "dedup"]
    cases = [Case(**case) for case in all_pairs(factors, FORBIDDEN + untied, start=start)]
    cases += [Case("nvlink", "contiguous", 4, top_k=1), Case("nvlink", "permuted", 2, top_k=1, tokens="empty_ranks")]
    cases += [Case("nvlink", layout, ep, top_k=top_k, bias=bias, shared=shared, tokens=tokens, dtype=torch.bfloat16)
              for layout, ep, top_k, bias, shared, tokens in [
                  ("contiguous", 4, 8, True, 0, "ragged"), ("uneven", 4, 8, True, 20, "empty_ranks"),
                  ("permuted", 4, 8, False, 0, "ragged"), ("permuted", 2, 3, True, 20, "ragged"),
                  ("uneven", 1, 2, False, 20, "ragged"), ("contiguous", 4, 8, False, 0, "no_tokens")]]  # fmt: skip
    tiles = [replace(case, schedule="tiles 3") for case in cases[-6:]]
    cases += [replace(cases[-6], experts="reference"), replace(cases[-6], routing="recorded", tokens="holes")]
    return cases + tiles


def main() -> None:
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    # On a GPU only nvlink rides in parts that kernels wait for.
    others = [replace(case, schedule=case.schedule.replace("tiles", "chunks")) for case in CASES + BF16]
    cases = nvlink_cases() if "nvlink" in sys.argv else others
    own, again = run_cases(cases), run_cases(cases)
    unequal = [str(case) for case, a, b in zip(cases, own, again, strict=True) if not same(a, b)]
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, (own, unequal))
    dist.destroy_process_group()
    if dist.is_initialized() or int(os.environ["RANK"]) != 0:
        return
    wrong = 0
    for i, case in enumerate(cases):
        if found := differences(case, [results[i] for results, _ in gathered]):
            wrong += 1
            print(case, *(f"  {name}: {what}" for name, what in sorted(found.items())), sep="\n")
    moved = sorted({name for _, names in gathered for name in names})
    print(f"parity on {torch.cuda.get_device_name(device)}: {len(cases)} cases, {wrong} differ from the reference, "
          f"{len(moved)} differ between two runs {moved[:5]}")  # fmt: skip
    sys.exit(1 if wrong or moved else 0)


def same(a: dict[str, Any], b: dict[str, Any]) -> bool:
    return all(np.array_equal(a[k], b[k]) for k in ("y", "expert")) and all(
        np.array_equal(a["gradients"][k], b["gradients"][k]) for k in a["gradients"]
    )


if __name__ == "__main__":
    main()
