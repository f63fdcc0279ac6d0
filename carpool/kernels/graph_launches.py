"""The launches of captured CUDA graphs, which time stamps inside of them need to know."""

from __future__ import annotations


class _Launches:
    """The launches of the graphs that `carpool.kernels.capture.Recorder` has captured in this process.

    Attributes:
        number: how many launches there were.
        counted: True while a recorder captures, which then counts each launch of the graph.
    """

    number = 0
    counted = False


launches = _Launches()
