"""Record which experts tokens choose, find a better place for each expert, and move the experts there.

    torchrun --nproc-per-node 2 examples/place_experts.py

The command line does the same: `carpool trace`, `carpool place`, `carpool train moe.layout=FILE`
(docs/communication.md).
"""

import torch
import torch.distributed as dist
from tiny_model import write_tiny_olmoe
from transformers import AutoModelForCausalLM
from transformers.distributed import DistributedConfig

import carpool.hf
from carpool.layout import ExpertLayout
from carpool.layout.layouts import Layouts
from carpool.layout.topology import Topology
from carpool.placement.objective import evaluate
from carpool.placement.solvers import solve


def main() -> None:
    dist.init_process_group("gloo")
    ranks = dist.get_world_size()
    model = AutoModelForCausalLM.from_pretrained(
        write_tiny_olmoe(),
        distributed_config=DistributedConfig(fsdp_size=ranks, ep_size=ranks, ep_implementation="carpool"),
    ).eval()
    torch.manual_seed(dist.get_rank())
    batches = [torch.randint(64, (4, 64)) for _ in range(4)]

    # 1. Record. Each rank records its own tokens; trace() gathers them.
    with torch.no_grad(), carpool.record(model, stretch=64) as recorder:
        before = [model(batch).logits for batch in batches]
    trace = recorder.trace()

    # 2. Solve, each layer by itself: experts that are chosen together go to one rank, none of which is overloaded.
    layouts = Layouts(
        {name: solve("search", trace.layer(name), Topology.even(ranks), load_limit=1.2) for name in trace.layers}
    )

    # 3. Move. The model computes the same as before, and fewer rows travel.
    carpool.hf.set_layout(model, layouts)
    with torch.no_grad():
        after = [model(batch).logits for batch in batches]
    assert all(torch.allclose(one, other, atol=1e-5) for one, other in zip(before, after, strict=True))

    if dist.get_rank() == 0:
        in_order = ExpertLayout.contiguous(8, ranks)
        for name in trace.layers:
            old, new = (evaluate(trace.layer(name), layout) for layout in (in_order, layouts[name]))
            print(f"{name}: ranks per token {old.ranks_per_token:.3f} -> {new.ranks_per_token:.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
