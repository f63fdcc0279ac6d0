"""One rank of the tests of generation on GPUs: `python -m tests.gpu.generate_worker MODE FOLDER`, under torchrun."""

from __future__ import annotations

from pathlib import Path

import torch

from carpool.hf.generation import DecodeGraphs, Sampling, generate
from carpool.serve.generate_answers import answer
from carpool.serve.served_model import find_source, open_model
from tests.gpu.ranks import run_mode
from tests.serve.checkpoints import greedy, save

LENGTHS = (5, 1, 11, 3, 8, 2)
COUNT = 12
# Multiples of 8, which grouped products of bfloat16 take.
SIZES = {"hidden_size": 64, "moe_intermediate_size": 32}


def prompts() -> list[list[int]]:
    """Six, of other lengths."""
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(3, 96, (length,), generator=generator).tolist() for length in LENGTHS]


def over_ranks(folder: str) -> tuple[bool, str]:
    """Twice as many prompts as fit into a round and twice the same, so that caches and graphs are used again."""
    source = find_source(Path(folder))
    source.text.end = (2,)
    # In float32 experts ask the host how many rows they have: no graph holds that.
    model = open_model(source, dtype="bfloat16", max_tokens=64)
    graphs, sampling = DecodeGraphs(), Sampling(max_new_tokens=COUNT)
    own = {way: answer(model, source.text, prompts(), sampling, batch_size=1, graphs=way)[0] for way in (graphs, None)}
    again = answer(model, source.text, prompts(), sampling, batch_size=1, graphs=graphs)[0]
    right = own[graphs] == own[None] == again and graphs.why_not is None
    return right, f"graphs: {graphs.why_not or 'yes'}; {own[graphs]}"


def one_gpu(folder: str) -> tuple[bool, str]:
    """Three batches: in float32, which no graph holds, against Transformers on the CPU; in bfloat16 with graphs and
    without."""
    plain = save(Path(folder), "qwen3_moe", **SIZES)
    want = [greedy(plain, prompt, COUNT) for prompt in prompts()]
    batches = (slice(0, 3), slice(3, 6), slice(0, 2))
    right, said = True, []
    for dtype in ("float32", "bfloat16"):
        model = open_model(find_source(Path(folder)), dtype=dtype, max_tokens=64)
        graphs, sampling = DecodeGraphs(), Sampling(max_new_tokens=COUNT)
        for batch in batches:
            got = generate(model, prompts()[batch], sampling, end=(2,), graphs=graphs).tokens
            if dtype == "bfloat16":
                right &= got == generate(model, prompts()[batch], sampling, end=(2,), graphs=None).tokens
            else:
                right &= got == want[batch]
        said.append(graphs.why_not)
    return right and "float32" in str(said[0]) and said[1] is None, f"graphs: {said}"


if __name__ == "__main__":
    run_mode({"over_ranks": over_ranks})
