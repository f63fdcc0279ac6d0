"""The launches of captured CUDA graphs, which time stamps inside of them need to know."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

import torch


@dataclass
class _Launches:
    """The launches of the graphs that `carpool.kernels.capture.Recorder` has captured in this process.

    Attributes:
        number: how many launches there were.
        counted: True while a recorder captures, which then counts each launch of the graph.
        ends: of each stream, the end of its latest launch.
    """

    number: int = 0
    counted: bool = False
    ends: dict[torch.cuda.Stream, torch.cuda.Event] = field(default_factory=lambda: defaultdict(torch.cuda.Event))

    def count(self) -> None:
        """A graph has been launched on the current stream."""
        self.number += 1
        self.ends[torch.cuda.current_stream()].record()


launches = _Launches()
