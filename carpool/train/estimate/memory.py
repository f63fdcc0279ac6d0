"""The memory that a rank will need, before anything is built: the planner's account of a step
(`carpool.planner.memory.peak`, which says what it assumes) of what the model itself takes and keeps.

`memory_peak_bytes` of a run is PyTorch's own count on GPUs, hence without context, NCCL and fragments (`tensors_of`),
and the growth of the resident set on CPUs.
"""

from __future__ import annotations

import math

from carpool.memory.disk import BUFFERS
from carpool.planner.memory.held import BESIDE_TENSORS
from carpool.planner.memory.peak import Peak, peak_of
from carpool.train.config.schema import Config
from carpool.train.estimate.rank_sizes import ModelSizes, state_bytes

Memory = dict[str, int]


class MemoryEstimate(ModelSizes):
    """Predicts the memory of one rank of a run. Its arguments are those of `ModelSizes`."""

    def changed(self, config: Config) -> MemoryEstimate:
        """The same of a run with other settings, on the same ranks."""
        return MemoryEstimate(config, self.degrees, self.model, self.cuda, self.nodes, self)

    def __call__(self, transport: str, dense: str) -> Memory:
        """Predicted bytes of each component on one rank when memory is highest, and their total.

        Args:
            transport: the one that is used, not "auto".
            dense: "fsdp" or "replicate", as `parallelism.dense`.

        Returns:
            parameters, gradients, optimizer, activations, logits, transport, copies (of experts that came from other
            ranks) if there are any, and loading where that is more; on GPUs context, nccl and fragments, and graphs if
            steps are captured; on CPUs process and allocator; total.
        """
        found = {name: math.ceil(size) for name, size in self._peak(transport, dense).parts.items()}
        return {**found, "total": sum(found.values())}

    def _peak(self, transport: str, dense: str) -> Peak:
        """Of the fullest rank of the pipeline."""
        candidate = self.candidate(transport, dense)
        found = (peak_of(self.of_stage(candidate, one), candidate, one) for one in sorted({0, self.degrees.pp - 1}))
        return max(found, key=lambda one: one.total)

    def host_bytes(self, transport: str) -> int:
        """What a rank keeps in host memory: state of the optimizer, experts, and activations that are offloaded."""
        on_disk = self.trained * state_bytes(self.config) if self.config.training.optimizer_state == "disk" else 0
        experts = 0
        own = math.ceil(self.expert_bytes / self.degrees.expert_shards)
        if self.config.memory.experts == "host":
            experts = own
        elif self.config.memory.experts == "disk":
            # Buffers for layers that are read ahead; and what stays there.
            stays = min(own, self.config.memory.experts_bytes[1])
            buffers = (BUFFERS if self.experts.trained else 2) * own / self.moe_layers
            experts = math.ceil(buffers + stays if self.experts.trained else max(buffers, stays))
        return max(0, int(self._peak(transport, "fsdp").host - on_disk)) + experts

    def disk_bytes(self) -> int:
        """What a rank keeps in files: state of the optimizer, and experts that are trained."""
        state = self.trained * state_bytes(self.config) if self.config.training.optimizer_state == "disk" else 0
        experts = 0
        if self.config.memory.experts == "disk" and (self.experts.trained or self.config.model.from_scratch):
            own = math.ceil(self.expert_bytes / self.degrees.expert_shards)
            experts = max(0, own - self.config.memory.experts_bytes[1])
        return int(state) + experts


def tensors_of(memory: Memory) -> int:
    """Of an estimate: the bytes of PyTorch's tensors, as `torch.cuda.max_memory_allocated` counts them."""
    return sum(size for name, size in memory.items() if name not in (*BESIDE_TENSORS, "process", "allocator", "total"))
