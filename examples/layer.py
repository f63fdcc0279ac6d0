"""carpool.MoE in a plain PyTorch training loop.

    torchrun --nproc-per-node 2 examples/layer.py

Each rank holds half of the experts and trains on its own batch. On a machine with GPUs replace "cpu" with "cuda".
"""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import carpool

STEPS = int(os.environ.get("STEPS", "20"))
HIDDEN = 32


class Block(nn.Module):
    """A residual block whose feed-forward network is a mixture of 8 experts, of which each token visits 2."""

    def __init__(self, mesh) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN)
        self.moe = carpool.MoE(HIDDEN, 64, num_experts=8, num_experts_per_tok=2, ep_mesh=mesh)

    def forward(self, x):
        return x + self.moe(self.norm(x))


def main() -> None:
    mesh = init_device_mesh("cpu", (int(os.environ["WORLD_SIZE"]),), mesh_dim_names=("ep",))
    torch.manual_seed(0)  # the same initial weights on every rank, for all that every rank holds
    block = Block(mesh["ep"])
    optimizer = torch.optim.AdamW(block.parameters(), lr=3e-3)

    torch.manual_seed(1 + dist.get_rank())  # other data on every rank
    x = torch.randn(256, HIDDEN)
    target = x.roll(1, dims=1)
    for step in range(STEPS):
        loss = (block(x) - target).square().mean()
        (loss + block.moe.aux_loss).backward()  # aux_loss keeps experts equally busy
        carpool.reduce_gradients(block, mesh["ep"])  # gradients of the mean loss over all ranks
        optimizer.step()
        optimizer.zero_grad()
        if dist.get_rank() == 0 and step % 5 == 0:
            print(f"step {step:3d}  loss {loss.item():.4f}  ranks per token {block.moe.stats().copies_per_token:.2f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
