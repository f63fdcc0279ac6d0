"""Which ranks still answer: so that an error about a lost node or link names it.

When a node or its link is gone, the others wait in a collective, and learn after a time only that it took too long.
So a thread of each rank writes a number into the process group's store, again and again, whatever the main thread
waits for, with the time that the store took to answer:

    beat/0 = "41 0.0002"    beat/1 = "41 0.0003"    beat/2 = "17 0.0004"  <- has not changed since 10 s: rank 2 is gone

Rank 0 reads all numbers, the others only what rank 0 declares: of W ranks that all read all, the store would be asked
for W * W numbers a second. Who fails in a collective looks, too, which numbers go on (`explain`). If all do, the link
whose store takes longest to answer is named. Where the main thread cannot fail, as inside a collective of NCCL, rank 0
declares ranks lost after `timeout` seconds; all others read that, and end. A rank that does not reach the store for so
long ends by itself: the store is on the node of rank 0, and the link to that node is down.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Sequence

import torch.distributed as dist

from carpool.layout.topology import whereabouts

BEAT_SECONDS = 1.0
# So long a rank that has failed looks at the others. Who says nothing in the second half of it is gone.
PATIENCE_SECONDS = 6.0
# Of more ranks, rank 0 alone looks.
MOST_WATCHERS = 256
# After the timeout, for the main thread to fail by itself.
GRACE_SECONDS = 5.0


class RanksLostError(RuntimeError):
    """Ranks do not answer any more, or a collective took too long. The text says which ranks, on which nodes."""


class RollCall:
    """Threads of one rank that say that it is there, and see who is.

    Args:
        store: of the process group; with a connection of its own, because a call may never return.
        timeout: seconds after which a rank that says nothing is lost.
        end: called with the error where the main thread cannot raise it.
        ranks_per_node: `parallelism.ranks_per_node`.
    """

    def __init__(
        self, store: dist.Store, rank: int, world: int, timeout: float, end: Callable[[RanksLostError], None],
        ranks_per_node: int | None = None,
    ) -> None:  # fmt: skip
        self._store = dist.PrefixStore(f"carpool/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
        self.rank, self.world, self.timeout, self._end = rank, world, timeout, end
        self._beats = [f"beat/{one}" for one in range(world)]
        self._watches = rank == 0
        self._where = {rank: str(whereabouts(os.environ, rank, socket.gethostname(), ranks_per_node))}
        self._stopped = threading.Event()
        self._reached = time.monotonic()
        self._latest, self._changed, self._lost = [""] * world, [self._reached] * world, list[int]()
        threads = (self._beat, self._judge)
        self._threads = [threading.Thread(target=one, name="carpool-roll-call", daemon=True) for one in threads]

    def start(self) -> None:
        self._store.set(f"where/{self.rank}", self._where[self.rank])
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        self._stopped.set()
        for thread in self._threads:
            thread.join(2 * BEAT_SECONDS)

    def explain(self, error: BaseException) -> RanksLostError:
        """What is behind an error of a collective. Takes some seconds: ranks get the time for a beat."""
        now, last = time.monotonic(), (str(error).strip().splitlines() or [""])[-1]
        short = f"({type(error).__name__}: {last[:200]})"
        self._watches = self._watches or self.world <= MOST_WATCHERS
        time.sleep(PATIENCE_SECONDS)
        if self._reached < now:
            return RanksLostError(f"{self._unreached(time.monotonic() - self._reached)} {short}")
        if not self._watches:
            return RanksLostError(f"a collective failed {short}; rank 0 says who does not answer")
        if silent := self._silent():
            return RanksLostError(f"{self._gone(silent)} {short}")
        delay_W, slowest = self._delays()
        return RanksLostError(
            f"a collective failed, but all {self.world} ranks answer {short}. If a link is slow, it is most likely "
            f"that of {self._name([slowest])}: the store took {delay_W[slowest]:.3g} s to answer it, and "
            f"{sorted(delay_W)[self.world // 2]:.3g} s the rank in the middle. 'carpool doctor --measure' measures "
            "links"
        )

    def _beat(self) -> None:
        count, delay = 0, 0.0
        while not self._stopped.wait(BEAT_SECONDS):
            began = time.monotonic()
            try:
                count += 1
                self._store.set(self._beats[self.rank], f"{count} {delay:.6f}")
                self._read()
            except Exception as error:  # the store may go before this thread is stopped; `_judge` sees if it stays so
                logging.getLogger("carpool").debug("roll call: %s", error)
                continue
            self._reached = time.monotonic()
            delay = self._reached - began

    def _read(self) -> None:
        """What rank 0 has declared, and of who watches all beats; and where the ranks are that may have to be named."""
        named = {0}
        if self._watches:
            there = [one for one in range(self.world) if self._latest[one] or self._store.check([self._beats[one]])]
            for one, text in zip(there, self._store.multi_get([self._beats[one] for one in there]), strict=True):
                if self._latest[one] != text.decode():
                    self._latest[one], self._changed[one] = text.decode(), time.monotonic()
            named |= {*self._silent(), self._delays()[1]}
        if self.rank == 0:
            limit = time.monotonic() - self.timeout - GRACE_SECONDS
            if silent := [one for one in range(1, self.world) if self._changed[one] < limit]:
                self._store.set("lost", " ".join(map(str, silent)))
        lost = [int(one) for one in self._store.get("lost").decode().split()] if self._store.check(["lost"]) else []
        for one in sorted(named.union(lost) - self._where.keys()):
            if self._store.check([f"where/{one}"]):
                self._where[one] = self._store.get(f"where/{one}").decode()
        self._lost = lost

    def _silent(self) -> list[int]:
        """Ranks whose numbers stand still."""
        limit = self._reached - PATIENCE_SECONDS / 2
        return [one for one in range(self.world) if self._changed[one] < limit]

    def _delays(self) -> tuple[list[float], int]:
        """Seconds that the store took to answer each rank, and the rank that waited longest."""
        delay_W = [float(beat.split()[1]) if beat else 0.0 for beat in self._latest]
        return delay_W, max(range(self.world), key=delay_W.__getitem__)

    def _judge(self) -> None:
        while not self._stopped.wait(BEAT_SECONDS):
            away = time.monotonic() - self._reached
            if self._lost or away > self.timeout + GRACE_SECONDS:
                text = self._gone(self._lost) if self._lost else self._unreached(away)
                if not self._stopped.wait(GRACE_SECONDS):
                    self._end(RanksLostError(text))
                return

    def _gone(self, ranks: Sequence[int]) -> str:
        why = "its processes have ended or stand still, or its link is down or too slow"
        return f"{self._name(ranks)} does not answer any more: {why}"

    def _unreached(self, seconds: float) -> str:
        return (
            f"{self._name([self.rank])} has not reached rank 0 on {self._where.get(0, 'its node')} for {seconds:.0f} "
            "s: rank 0 has ended, that node is gone, or the link to it is down or too slow"
        )

    def _name(self, ranks: Sequence[int]) -> str:
        """For people: "rank 2, rank 3 on node 1 (gpu07)"."""
        nodes: dict[str, list[int]] = {}
        for rank in ranks:
            nodes.setdefault(self._where.get(rank, "an unknown node"), []).append(rank)
        return " and ".join(f"rank {', rank '.join(map(str, on))} on {node}" for node, on in nodes.items())
