"""What sequences that move (`sequence_moves.every`) save between nodes, on the routing of a trained model.

    python -m benchmarks.sequence_moves --nodes 2 --ranks 4 --transport alltoall

Each stretch of the trace is a sequence. Before each layer but the first, sequences go to where that layer costs least,
as in a run, but by what the layer really chooses: about what the best guess can save. Bytes are of four rides of a
layer's rows, and of moves there and back. Nothing travels, and nothing is timed.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

from benchmarks.script import make_parser, write_results
from carpool.layout import ExpertLayout
from carpool.layout.topology import Topology
from carpool.placement.trace import Trace
from carpool.planner.machine.cost import RIDES
from carpool.planner.machine.hardware import find_hardware
from carpool_systems.sequence_moves import MOVES, PICO, rows_of_sequences, seconds_per_byte, seconds_per_row
from carpool_systems.sequences import assign_sequences

TRACE = Path(__file__).parents[1] / "docs" / "traces" / "e64-1435.npz"


def rows_between(trace: Trace, topology: Topology, transport: str, every: int, hardware: str) -> dict[str, float]:
    """For each token and layer: rows between nodes if sequences stay and if they move, sequences that move, and the
    share of bytes that is saved."""
    ranks, length = topology.num_ranks, int(np.bincount(trace.sequence_T).min())
    number = len(np.unique(trace.sequence_T)) // ranks * ranks
    tokens = [np.flatnonzero(trace.sequence_T == sequence)[:length] for sequence in range(number)]
    layers = len(trace.layers)
    layout = ExpertLayout.contiguous(int(trace.meta["num_experts"]), ranks)
    rank_E = torch.tensor([rank for rank, _ in layout.home_of])
    seconds_WW = seconds_per_byte(topology, find_hardware(hardware))
    ride_WU = seconds_per_row(seconds_WW, transport, topology)
    # Of a row, whether it crosses.
    crosses_WU = seconds_per_row(topology.pairs["network"].astype(float), transport, topology)
    home_N = np.arange(ranks).repeat(number // ranks)
    rank_N, every_N, stay, move, moved = home_N, np.arange(number), 0.0, 0.0, 0
    for layer in range(layers):
        expert_NLK = torch.from_numpy(trace.expert_LTK[layer][np.stack(tokens)].astype(np.int64))
        rows_NU = rows_of_sequences(F.one_hot(rank_E[expert_NLK], ranks).sum(2), transport, topology).numpy()
        if layer and layer % every == 0:
            cost_NW = RIDES * rows_NU @ ride_WU.T + MOVES * length * seconds_WW[rank_N]
            before_N, rank_N = rank_N, assign_sequences(np.rint(PICO * 4096 * cost_NW).astype(np.int64), rank_N)
            moved += length * int(topology.pairs["network"][before_N, rank_N].sum())
        crossing_NW = rows_NU @ crosses_WU.T
        stay, move = stay + crossing_NW[every_N, home_N].sum(), move + crossing_NW[every_N, rank_N].sum()
    each = number * length * layers
    saved = 1 - (RIDES * move + MOVES * moved) / (RIDES * stay)
    return {"stay": stay / each, "move": move / each, "moves": moved / each, "saved": saved}


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--trace", type=Path, default=TRACE)
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--transport", default="alltoall")
    parser.add_argument("--every", type=int, default=1)
    parser.add_argument("--hardware", default="H200", help="rates of links")
    args = parser.parse_args()
    topology = Topology.even(args.ranks, args.nodes)
    found = rows_between(Trace.load(args.trace), topology, args.transport, args.every, args.hardware)
    print(
        f"{args.transport}, {args.nodes} nodes of {args.ranks // args.nodes} ranks: {found['stay']:.3f} rows a token "
        f"and layer cross if sequences stay, {found['move']:.3f} if they move; {found['moves']:.3f} rows of sequences "
        f"cross; {found['saved']:.1%} of the bytes are saved"
    )
    write_results(args, torch.device("cpu"), **found)


if __name__ == "__main__":
    main()
