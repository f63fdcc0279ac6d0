"""A transport outside the package that is only planned with: what its class says decides where and how (DeepEP's way).

A token is sent once to each other node, and passed on there while further ones come.
"""

from __future__ import annotations

from carpool.layout.topology import Topology
from carpool.transport.dedup import Dedup
from carpool.transport.nodes import why_not_several


class NodeRows(Dedup):
    name = "node-rows"
    automatic = False
    anywhere = False
    one_send_per_rank = False
    one_send_per_node = True

    @classmethod
    def why_not_on(cls, topology: Topology) -> str | None:
        return why_not_several(topology)


class Streamed(NodeRows):
    """The same with kernels that wait for nobody, and buffers."""

    name = "streamed"
    graphable = True
    writes_to_peers = True
    needs_nvlink = True

    @classmethod
    def planned_buffer_bytes(cls, tokens: int, num_ranks: int, row_bytes: int, top_k: int) -> int:
        return 2 * num_ranks * tokens * row_bytes
