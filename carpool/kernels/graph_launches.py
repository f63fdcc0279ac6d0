"""The launches of captured CUDA graphs, which time stamps inside of them need to know."""

from __future__ import annotations

import torch


class _Launches:
    """The launches of the graphs that `carpool.kernels.capture.Recorder` has captured in this process.

    Attributes:
        number: how many launches there were.
        counted: True while a recorder captures, which then counts each launch of the graph.
        ends: of each stream, the end of its latest launch.
    """

    number = 0
    counted = False

    def __init__(self) -> None:
        self.ends: dict[torch.cuda.Stream, torch.cuda.Event] = {}

    def count(self) -> None:
        """A graph has been launched on the current stream."""
        self.number += 1
        stream = torch.cuda.current_stream()
        if stream not in self.ends:
            self.ends[stream] = torch.cuda.Event()
        self.ends[stream].record(stream)


launches = _Launches()
