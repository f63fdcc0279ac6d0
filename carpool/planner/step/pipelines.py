"""The orders in which the stages of a pipeline do their forwards and backwards, and such a pipeline as an event graph.

A pipeline of p stages cuts the model into p x v *chunks* of layers, v for each stage, and a step into m micro-batches.
The orders are those of `torch.distributed.pipelining`, by its names, so that what is planned is what runs:

    name                    chunks of a stage     bubble, where F = I = W is the time of one micro-batch on one chunk
    GPipe                   1                     (p - 1) (F + I + W)
    1F1B                    1                     (p - 1) (F + I + W)
    Interleaved1F1B         v, in loops           (p - 1) (F + I + W), of chunks that are v times as short; pairs, too
    InterleavedZeroBubble   v, in loops           (p - 1) (F + I - W)         (Qi et al., arXiv 2401.10241: ZB-H1)
    ZBVZeroBubble           2, as a V             (p - 1) F at the start alone                (the same, section 6)
    DualPipeV               2, as a V             pairs of a forward and a backward, at once where the schedule of rides
                                                  is "two-batch" (DeepSeek, arXiv 2412.19437)

F is a forward, I the backward for the gradients of inputs, W that for weights, and B both. 1F1B on 3 stages:

    stage 0   F0 F1 F2       B0 F3    B1 ...
    stage 1      F0 F1    B0 F2    B1 ...
    stage 2         F0 B0 F1    B1 ...
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from itertools import count
from typing import Literal, NamedTuple, TypeVar

from carpool.parallel.schedules import SCHEDULES, in_pairs, rank_of
from carpool.planner.step.clock import Clock
from carpool.planner.step.events import Graph
from carpool.plugins.counted import counted

Kind = Literal["F", "I", "W", "B"]


class Action(NamedTuple):
    """One forward or backward of one micro-batch through one chunk."""

    kind: Kind
    chunk: int
    micro_batch: int


class Send(NamedTuple):
    """Of one turn, what the next chunk needs from another stage; `place`: of the action among those of its turn."""

    place: int
    name: str
    phase: str
    micro_batch: int


class Turn(NamedTuple):
    """What a stage does at once, when all that it needs is there.

    Attributes:
        awaits: of each action, the result that it needs; None: none.
        sends: results for other stages.

    Results are numbered as they come: one for each action of a turn, then one for each of its sends."""

    stage: int
    actions: tuple[Action, ...]
    awaits: tuple[int | None, ...]
    sends: tuple[Send, ...]


Order = list[tuple[Action, ...]]  # Actions of one tuple may run at once.
AnyGraph = TypeVar("AnyGraph", Graph, Clock)
After = tuple[int, ...]
Work = Callable[[AnyGraph, tuple[Action, ...], int, list[After]], Sequence[int]]


def orders(schedule: str, stages: int, micro_batches: int, chunks: int = 1, paired: bool = False) -> list[Order]:
    """What each stage does, in order.

    Args:
        chunks: of each stage.
        paired: pairs of a forward and a backward, where the schedule has them, run at once.

    Raises:
        ValueError: an unknown schedule, or numbers that it cannot have."""
    if schedule not in SCHEDULES:
        raise ValueError(f"pipeline schedule {schedule!r} is not known; known are {', '.join(SCHEDULES)}")
    needed = chunks if schedule.startswith("Interleaved") else SCHEDULES[schedule].stages
    if chunks != needed or min(stages, micro_batches, chunks) < 1:
        raise ValueError(
            f"{schedule} needs {counted(needed, 'chunk')} of layers for each stage, and at least one stage and "
            f"micro-batch; here are {counted(stages, 'stage')} of {counted(chunks, 'chunk')}, and "
            f"{counted(micro_batches, 'micro-batch')}"
        )
    if schedule == "DualPipeV" and micro_batches < 2 * stages:
        raise ValueError(f"DualPipeV on {stages} stages needs at least {2 * stages} micro-batches, not {micro_batches}")
    rounds = max(1, micro_batches // stages)
    if schedule.startswith("Interleaved") and micro_batches % rounds:
        raise ValueError(
            f"{schedule} on {stages} stages does {rounds} rounds of micro-batches: take a multiple of {rounds}, not "
            f"{micro_batches}"
        )
    found = []
    for stage in range(stages):
        if schedule == "GPipe":
            both = [[Action(kind, stage, number) for number in range(micro_batches)] for kind in ("F", "B")]
            found.append(_alone(both[0] + both[1]))
        elif schedule == "ZBVZeroBubble":
            found.append(_zero_bubble_v(stages, micro_batches, stage))
        elif schedule == "DualPipeV":
            found.append(_dual_pipe_v(stages, micro_batches, stage))
        else:
            found.append(_one_by_one(schedule, stages, micro_batches, chunks, stage, micro_batches // rounds))
    if not paired:
        return [_alone([action for actions in order for action in actions]) for order in found]
    if schedule == "Interleaved1F1B":
        return [in_pairs([one for (one,) in order], lambda one: one.kind) for order in found]
    return found


def _alone(actions: Sequence[Action]) -> Order:
    return [(action,) for action in actions]


def _one_by_one(schedule: str, stages: int, micro_batches: int, chunks: int, stage: int, in_round: int) -> Order:
    """One forward, one backward, once as many forwards are under way as keep the later stages busy.

    Of several chunks, a round of micro-batches goes through one, then through the next. With zero bubbles, weight
    gradients follow `stage` backwards late, and the last of them fill the end."""
    split = schedule == "InterleavedZeroBubble"
    total = chunks * micro_batches
    numbers = [(*divmod(place // in_round, chunks), place % in_round) for place in range(total)]
    forwards = [Action("F", chunk * stages + stage, loop * in_round + at) for loop, chunk, at in numbers]
    backwards = [((chunks - 1 - chunk) * stages + stage, loop * in_round + at) for loop, chunk, at in numbers]
    hops = 2 if schedule == "Interleaved1F1B" else 1
    ahead = min((chunks - 1) * in_round + hops * (stages - 1 - stage), total)
    order = forwards[:ahead]
    for place, (chunk, number) in enumerate(backwards):
        order += forwards[ahead + place : ahead + place + 1]
        order.append(Action("I" if split else "B", chunk, number))
        if split and place >= stage:
            order.append(Action("W", *backwards[place - stage]))
    if split:
        order += [Action("W", *one) for one in backwards[max(0, total - stage) :]]
    return _alone(order)


class _Numbers:
    """Micro-batches of each chunk and kind, counted as they come; B counts as an I with its W."""

    def __init__(self, chunks: tuple[int, int]) -> None:
        self._chunks = chunks
        self._next = {(kind, half): count() for kind in "FIW" for half in (0, 1)}
        self.pending: list[Action] = []

    def action(self, kind: Kind, half: int) -> Action:
        """The next one of a half of the V, 0 on the way down and 1 on the way up."""
        number = next(self._next["I" if kind == "B" else kind, half])
        if kind == "I":
            self.pending.append(Action("W", self._chunks[half], number))
        return Action(kind, self._chunks[half], number)


def _zero_bubble_v(stages: int, micro_batches: int, stage: int) -> Order:
    """ZBV: made for at least 2 p - 1 micro-batches; what fewer lack is left out."""
    most = max(2 * stages - 1, micro_batches)
    numbers = _Numbers((stage, 2 * stages - 1 - stage))
    after = stages - stage
    order: list[Action] = []

    def add(*pieces: str) -> None:
        order.extend(numbers.action(piece[0], int(piece[1])) for piece in pieces)  # type: ignore[arg-type]

    add(*["F0"] * (2 * after - 1))
    add(*["F1", "F0"] * stage)
    add(*["F1", "I1", "W1"] * after)
    done = 2 * after - 1 + stage
    # Forwards of the upper half are `done - stages` behind those of the lower one.
    for place in range(most - stages):
        add(*(["F0"] if done + place < most else []), "I0", "W0", "F1", "I1", "W1")
    add(*["I0", "I1"] * stage)
    add(*["I0", "W0"] * after)
    add(*["W1"] * stage)
    add(*["W0"] * stage)
    return _alone([action for action in order if action.micro_batch < micro_batches])


def _dual_pipe_v(stages: int, micro_batches: int, stage: int) -> Order:
    """As DeepSeek publishes it: the steps are numbered as there."""
    numbers = _Numbers((stage, 2 * stages - 1 - stage))
    after = stages - stage - 1
    order: Order = []

    def add(*pieces: str) -> None:
        """One after the other; "F0B1" is a pair that runs at once."""
        for piece in pieces:
            if piece == "W":
                order.extend((numbers.pending.pop(0),) for _ in numbers.pending[:1])
            else:
                halves = [piece[at : at + 2] for at in range(0, len(piece), 2)]
                order.append(tuple(numbers.action(one[0], int(one[1])) for one in halves))  # type: ignore[arg-type]

    add(*["F0"] * (2 * after))  # 1
    add(*["F0", "F1"] * (stage + 1))  # 2
    add(*["I1", "W", "F1"] * after)  # 3
    for place in range(micro_batches - 2 * stages + stage + 1):  # 4
        add(*(["F0", "B1"] if place == 0 and stage == stages - 1 else ["F0B1"]), "F1B0")
    add(*["B1", "F1B0"] * after)  # 5
    late = False
    for place in range(stage + 1):  # 6: the second half puts weight gradients off
        half = place == (stage + 1) // 2
        late = late or (half and stage % 2 == 1)
        add("I1" if late else "B1")
        late = late or half
        add("I0" if late else "B0")
    add(*["W", "I0" if late else "B0"] * after)  # 7
    add(*["W"] * (stage + 1))  # 8
    return order


def alternate(*pieces: Iterator[int]) -> Iterator[int]:
    """Events of several pieces of work in turn, so that the rides of one run beside the computation of another."""
    going = list(pieces)
    while going:
        for one in list(going):
            number = next(one, None)
            if number is None:
                going.remove(one)
            else:
                yield number


def in_turns(work: Callable[[AnyGraph, Action, int, After], Iterator[int]]) -> Work[AnyGraph]:
    """Of what adds the events of one action, in order, and yields the number of each: the same of actions at once."""

    def of_all(graph: AnyGraph, actions: tuple[Action, ...], stage: int, after: list[After]) -> Sequence[int]:
        ends = [0] * len(actions)

        def of_one(place: int) -> Iterator[int]:
            for number in work(graph, actions[place], stage, after[place]):
                ends[place] = number
                yield number

        if len(actions) == 1:
            for ends[0] in work(graph, actions[0], stage, after[0]):
                pass
            return ends
        # Of a pair the backward begins (`carpool.ride.forward_backward`).
        for _ in alternate(*map(of_one, reversed(range(len(actions))))):
            pass
        return ends

    return of_all


@lru_cache(maxsize=128)
def pipeline(schedule: str, stages: int, micro_batches: int, chunks: int = 1, paired: bool = False) -> tuple[Turn, ...]:
    """The turns of `orders`, which raises the same errors."""
    return turns(schedule, stages, orders(schedule, stages, micro_batches, chunks, paired))


def turns(schedule: str, stages: int, found: Sequence[Order]) -> tuple[Turn, ...]:
    """The orders of all stages (`orders`) as one, in which each action comes after those that it needs."""
    last_chunk = max(action.chunk for order in found for actions in order for action in actions)
    ready: dict[tuple[str, int, int], int] = {}  # results that are on the stage of a chunk that needs them
    results = count()
    at = [0] * stages

    def needs(action: Action) -> tuple[str, int, int] | None:
        kind, chunk, number = action
        if kind == "F":
            return ("F", chunk, number) if chunk else None
        return ("W" if kind == "W" else "I", chunk, number)

    def passed_on(action: Action, stage: int, result: int, place: int) -> Iterator[Send]:
        kind, chunk, number = action
        if kind == "I":
            ready["W", chunk, number] = result
        forward = kind == "F"
        target = chunk + 1 if forward else chunk - 1
        if kind == "W" or target < 0:
            return
        if target > last_chunk:
            ready["I", chunk, number] = result
            return
        if rank_of(schedule, stages, target) != stage:
            phase = "forward" if forward else "backward"
            result = next(results)
            yield Send(place, f"chunks.{chunk}::{phase}::send", phase, number)
        ready["F" if forward else "I", target, number] = result

    done: list[Turn] = []
    left = sum(map(len, found))
    while left:
        before = left
        for stage, order in enumerate(found):
            while at[stage] < len(order):
                actions = order[at[stage]]
                awaited = [needs(action) for action in actions]
                if any(one is not None and one not in ready for one in awaited):
                    break
                awaits = tuple(None if one is None else ready[one] for one in awaited)
                own = [next(results) for _ in actions]
                sends = [
                    send
                    for place, (action, result) in enumerate(zip(actions, own, strict=True))
                    for send in passed_on(action, stage, result, place)
                ]
                done.append(Turn(stage, actions, awaits, tuple(sends)))
                at[stage] += 1
                left -= 1
        assert left < before, f"{schedule}: no stage can go on"
    return tuple(done)


def add_pipeline(graph: AnyGraph, found: Sequence[Turn], work: Work[AnyGraph], send: float) -> None:
    """Add the events of a step's forwards and backwards to a graph.

    Args:
        found: what `pipeline` gives.
        work: (graph, actions, stage, after) adds the events of what runs at once, and returns the number of the last of
            each action; of a forward, I or B that is what the next chunk waits for. `after`: what each waits for.
        send: seconds in which activations of a micro-batch, or their gradients, reach the next stage.
    """
    results: list[int] = []
    for stage, actions, awaits, sends in found:
        ends = work(graph, actions, stage, [() if one is None else (results[one],) for one in awaits])
        results += ends
        for place, name, phase, number in sends:
            after, stream = (ends[place],), f"sends {phase}"
            results.append(
                graph.add(name, "send", send, after, stream=stream, phase=phase, stage=stage, micro_batch=number)
            )
