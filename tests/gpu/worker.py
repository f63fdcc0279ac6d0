"""What tests/gpu/test_gpu.py runs on every GPU: `torchrun --nproc-per-node 4 -m tests.gpu.worker`.

The parity matrix of tests/test_parity.py over NCCL, each case against the same float64 reference, and once more to see
that it is bitwise the same.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from tests.test_parity import BF16, CASES, differences, run_cases


def main() -> None:
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    cases = CASES + BF16
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
