"""What `carpool bench` refuses, in one line, before anything is measured."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from tests.bench.commands import bench

REFUSED: dict[str, list[tuple[tuple[str, ...], str]]] = {
    "transport": [
        (("--shape", "1,2,3"), "--shape 1,2,3 is not understood; .* such as --shape 4096,7168,256,8"),
        (("--shape", "many,2,3,4"), "is not understood"),
        (("--shape", "0,2,8,2"), "tokens must be at least 1"),
        (("--shape", "4,2,8,0"), "top-k must be at least 1"),
        (("--shape", "4,2,8,9"), "a token cannot choose 9 of 8 experts"),
        (("--shape", "4,2,3,2"), "3 experts .* cannot be spread over 4 ranks"),
        (
            ("--transports", "dedup,fast"),
            "'fast' is not known; use nvlink, alltoall, dedup, gather, hierarchical, 1d, 2d or 2dh",
        ),
        (("--transports", ""), "'' is not known"),
        (("--routing", "even"), "'even' is not known; use uniform, zipf, skewed or all"),
        (("--routing", "skewed", "--ranks", "3"), "needs more than 3 ranks"),
        (("--ctas", "0"), r"--ctas 0 must be 1\.\.64"),
        (("--ctas", "8", "--transports", "dedup"), "--ctas is for transport nvlink"),
        (("--routing", "zipf", "--zipf-exponent", "nan"), "--zipf-exponent nan must be 0"),
        (("--zipf-exponent", "2"), "--zipf-exponent 2 changes nothing without --routing zipf"),
        (("--out", __file__), f"--out {__file__} is a file; name a folder"),
        (("--ranks", "0"), "--ranks 0 must be at least 1"),
    ],
    "experts": [
        (("--shape", "1,2,3,4"), "--shape 1,2,3,4 is not understood; .* such as --shape 8192,2048,1024,64,8"),
        (("--shape", "a,2,3,4,1"), "is not understood"),
        (("--shape", "4,2,0,8,2"), "expert hidden must be at least 1"),
        (("--shape", "4,2,8,8,9"), "a token cannot choose 9 of 8 experts"),
        (("--shape", "4,2,8,8,2", "--activation", "swigl"), "--activation: 'swigl' is not known; .*mean swiglu"),
        (("--activation", "relu2"), "--activation is what the experts of --shape compute"),
        (("--model", "mixtral"), "--model: 'mixtral' is not known; .*did you mean mixtral-8x7b"),
        (("--model", "olmoe", "--tokens", "0"), "--tokens 0 must be at least 1"),
        (("--experts", "groupd"), "--experts: 'groupd' is not known; use .*did you mean grouped"),
        (("--against", "eagr"), "--against: 'eagr' is not known; use grouped_mm or eager; did you mean eager"),
        (("--routing", "skewed"), "--routing: 'skewed' is not known; use uniform, zipf, hot or all"),
        (("--dtype", "int8"), "'int8' is not known"),
        (("--repetitions", "0"), "--repetitions 0 must be at least 1"),
        (("--zipf-exponent", "-1"), "must be 0 .uniform. or a positive number"),
        (("--out", "/dev/null/here"), "/dev/null/here"),
    ],
    "layer": [
        (("--shape", "8,16,8,6,2"), "6 experts .* do not divide evenly among 4 ranks"),
        (("--transports", "dedupe"), "--transports: 'dedupe' is not known; .*did you mean dedup"),
        (("--iterations", "0"), "--iterations 0 must be at least 1"),
    ],
    "model": [
        (("--model", "qwen3-30b"), "'qwen3-30b' is neither a config.json.*did you mean qwen3-30b-a3b"),
        (("--routing", "balance"), "--routing balance is no file of a trace.*mean balanced"),
        (("--contenders", "carpol"), "--contenders: 'carpol' is not known.*mean carpool"),
        (("--layers", "0"), "--layers 0 must be at least 1"),
        (("--set", "moe.transprt=dedup"), "unknown key moe.transprt.*mean moe.transport"),
        (("--layers", "17"), "--layers 17: olmoe-1b-7b has 16"),
        (("--set", "training.output_dir=x"), "say so with --out"),
        (("--set", "data.tokenizer=x.json"), "tokens are drawn at random"),
        (("--contenders", "carpool+moe.shedule=none"), "unknown key moe.shedule"),
        (("--contenders", "carpool+data.sequence_length=8"), "the same for all contenders"),
        (("--contenders", "transformers+moe.schedule=none"), "is a setting of carpool alone"),
        (
            ("--contenders", "carpool+moe.chunks=3"),
            "moe.chunks changes nothing without moe.sch",
        ),
        (("--set", "moe.limit_by=groups"), "--set moe.limit_by changes nothing without"),
    ],
    "generate": [
        (("--contenders", "carpol"), "did you mean carpool?"),
        (("--new-tokens", "1"), "must be at least 2"),
        (("--routing", "random"), "use balanced or learned"),
        (("--dtype", "int8"), "use bfloat16, float16 or float32"),
    ],
}
MODEL = {"model": "olmoe-1b-7b", "generate": "olmoe-1b-7b"}


@pytest.mark.parametrize(
    ("name", "args", "message"), [(name, *case) for name, cases in REFUSED.items() for case in cases]
)
def test_errors_of_the_input_are_one_line(name: str, args: tuple[str, ...], message: str, tmp_path: Path) -> None:
    given = ["--device", "cpu", *(() if "--out" in args else ("--out", str(tmp_path)))]
    given += ["--model", MODEL[name]] if name in MODEL and "--model" not in args else []
    done = bench(name, *given, *args)
    assert done.exit_code == 1, done.output
    assert re.fullmatch(f"error: .*{message}.*\n", done.stderr), done.stderr


def test_ranks_are_as_many_as_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    def stderr_of(*args: str) -> str:
        result = bench(*args)
        assert result.exit_code == 1
        return result.stderr

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    said = stderr_of("transport", "--ranks", "3")
    assert "error: --ranks 3, but this machine has 2 GPUs; lower it, or use --device cpu" in said
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for name in ("transport", "experts"):
        assert "error: --device cuda, but PyTorch finds no GPU here" in stderr_of(name, "--device", "cuda")
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    said = stderr_of("transport", "--device", "cpu", "--ranks", "4")
    assert "--ranks 4, but torchrun started 2; leave --ranks out" in said
    said = stderr_of("experts", "--device", "cpu")
    assert "experts are measured on one device, but torchrun started 2 ranks" in said
