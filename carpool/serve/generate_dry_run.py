"""`carpool generate --dry-run`: whether it fits, and what it takes at least. Nothing is loaded, and no rank starts.

    memory    of a rank: weights, the cache, rows (`carpool.serve.serve_memory`), beside what a GPU or this machine has
    work      rounds of prompts, tokens of prompts, steps of decoding at most
    time      with --gpu: what the datasheet's rates allow at best. Products of prompts by FLOP/s; a step of decoding
              reads the cache, dense weights, and those experts that its tokens are expected to choose by chance

Time is a bound from below: rides, launches and uneven routing come on top.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich.filesize import decimal

from carpool.families import family_of
from carpool.planner.machine.hardware import Hardware
from carpool.serve.generate_answers import ready
from carpool.serve.prompts import Prompt, Round, deal
from carpool.serve.serve_memory import ExpertTier, expert_elements, host_bytes, needed_bytes, rank_needs
from carpool.serve.served_model import find_source
from carpool.train.launch.machine import find_gpu, rank_memory


def describe(
    model: str,
    prompts: list[Prompt],
    options: dict[str, Any],
    batch_size: int,
    dtype: str | None,
    ranks: int,
    experts: ExpertTier,
    gpu: str | None = None,
) -> str:
    """What `carpool.serve.generate_answers.run_rank` of these would take, on `ranks` ranks.

    Args:
        gpu: the name of a GPU for which it is meant; None: this machine.

    Raises:
        ValueError: a model, prompts or a GPU that cannot be used, or more ranks than experts go on."""
    source, hardware = find_source(Path(model)), None if gpu is None else find_gpu(gpu)
    kind = source.dtype if dtype is None else getattr(torch, dtype)
    if experts.away and ranks > 1:
        raise ValueError(f"--experts {experts.where}: experts come on one rank alone; use --ranks 1")
    known = family_of(source.config)
    keys = known.experts_key(source.config), known.top_k_key(source.config)
    number, top_k = (getattr(source.config, key) if key else 0 for key in keys)
    if number and -(-number // ranks) * (ranks - 1) >= number:
        raise ValueError(f"{number} experts leave one of {ranks} ranks without any: lower --ranks")
    tokens, sampling = ready(source, prompts, options)
    lengths = [len(one) for one in tokens]
    batch_size = min(batch_size, -(-len(prompts) // ranks))
    rounds = deal(lengths, ranks, batch_size)
    cached = batch_size * (max(lengths) + sampling.max_new_tokens)
    needs = rank_needs(source.build, kind, ranks, batch_size * max(lengths), cached, experts)
    total, cuda = sum(needs.values()), torch.cuda.is_available()
    room = hardware.capacity if hardware is not None else rank_memory(cuda, ranks)
    assert room is not None
    where = f"of {hardware.name}" if hardware is not None else f"of {'GPU' if cuda else 'host'} memory"
    span = f"{min(lengths)}" if min(lengths) == max(lengths) else f"{min(lengths)} to {max(lengths)}"
    lines = [
        f"prompts: {len(prompts)}, of {span} tokens, and {sampling.max_new_tokens} new ones each at most",
        f"ranks: {ranks}, with {batch_size} prompts at a time; rounds: {len(rounds)}",
        f"a rank takes {decimal(total)}: " + ", ".join(f"{name} {decimal(size)}" for name, size in needs.items()),
    ]
    if experts.away:
        lines.append(f"and {decimal(host_bytes(source.build, kind, experts))} of host memory for experts")
    fits = total <= room
    lines.append(f"{'fits' if fits else 'does NOT fit'} into the {room / 2**30:,.1f} GiB {where}")
    if hardware is not None:
        lines.append(_time(hardware, source, kind, ranks, rounds, lengths, sampling.max_new_tokens, number, top_k))
    return "\n".join(lines)


def _time(
    hardware: Hardware,
    source: Any,
    kind: torch.dtype,
    ranks: int,
    rounds: Sequence[Round],
    lengths: Sequence[int],
    new_tokens: int,
    number: int,
    top_k: int,
) -> str:
    elements, _ = expert_elements(source.build)
    of_experts = elements * kind.itemsize
    dense = needed_bytes(source.build, kind, 1, 0, 0)["weights"] - of_experts
    active = dense + (of_experts * top_k // number if number else 0)
    peak, memory = hardware.peak_flops or hardware.flops, hardware.memory
    assert memory is not None
    prefill = decode = 0.0
    for one in rounds:
        of_ranks = [[lengths[prompt] for prompt in mine] for mine in one.of_rank]
        # Two operations for each weight that a token meets; each rank computes its share of all.
        prefill += 2 * active / kind.itemsize * sum(map(sum, of_ranks)) / ranks / peak
        texts = sum(map(len, of_ranks))
        read = dense + of_experts / ranks * (1 - (1 - top_k / number) ** texts if number else 0)
        # On the mean over steps, the new tokens are half there.
        most = max(sum(mine) + len(mine) * new_tokens / 2 for mine in of_ranks)
        cache = needed_bytes(source.build, kind, 1, 0, 1)["cache"] * most
        decode += (new_tokens - 1) * (read + cache) / memory
    made = len(lengths) * new_tokens
    return (
        f"at least {_duration(prefill + decode)} by {hardware.name}'s datasheet: prefill {_duration(prefill)}, decode "
        f"{_duration(decode)}, which is at most {made / max(prefill + decode, 1e-9):,.0f} new tokens/s"
    )


def _duration(seconds: float) -> str:
    """In the unit that leaves the fewest digits: 13.1 µs, 2.5 ms, 1,200 s."""
    unit, size = next(((unit, size) for unit, size in (("s", 1.0), ("ms", 1e-3)) if seconds >= size), ("µs", 1e-6))
    value = seconds / size
    return f"{value:,.0f} {unit}" if value >= 100 else f"{value:.3g} {unit}" if value >= 0.1 else f"under 0.1 {unit}"
