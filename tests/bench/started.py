"""What a command of `carpool` or a script of benchmarks/ would do on GPUs, as far as that is known without one.

`check_command` passes a command line through everything that a user's command goes through before ranks start: options,
the schema, settings that change nothing, and the checks of the first step on GPUs that are imagined.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from unittest import mock

from typer.testing import CliRunner

from carpool.bench.model.model_settings import ModelSettings
from carpool.bench.options import RankOptions
from carpool.cli import app
from carpool.cli.train import check_paths
from carpool.train.config import Config, resolve_config
from carpool.train.config.load import Resolved
from carpool.train.launch.machine import imagine_machine
from carpool.train.plan.start_checks import check_fits, foresee

GPU = "h200"


def check_train(settings: Sequence[str], config: Path | None = None) -> None:
    """As `carpool train` on ranks that are GPUs. ValueError: what it would refuse."""
    resolved = resolve_config(config, list(settings))
    check_paths(resolved)
    check_steps(resolved)


def check_steps(resolved: Resolved) -> None:
    check_fits_on_gpus(resolved.config, resolved.fixed)


def check_fits_on_gpus(config: Config, fixed: Collection[str]) -> None:
    check_fits(foresee(config, fixed, imagine_machine(config, GPU), None))


def check_bench(words: Sequence[str], gpus: int) -> None:
    """As `carpool bench ...` on so many GPUs."""
    started: list[object] = []
    start = "carpool.bench.moe.moe_contest.benchmark" if words[0] == "experts" else "carpool.bench.contest.start_ranks"
    with mock.patch(start, lambda settings, *_, **__: started.append(settings)):
        done = CliRunner().invoke(app, ["bench", *words])
    if done.exit_code:
        raise ValueError(f"carpool bench {' '.join(words)}: {done.output}")
    (settings,) = started
    if not isinstance(settings, RankOptions):
        return  # one device
    on_gpus = settings.resolve(cuda=True, num_ranks=gpus)
    if isinstance(on_gpus, ModelSettings):
        for name in on_gpus.contenders:
            check_fits_on_gpus(on_gpus.config_of(name), [])


def options_of(script: str, words: Sequence[str]) -> argparse.Namespace:
    """What `python -m benchmarks.script words...` understands; nothing after that is reached. ValueError: options that
    it does not have."""
    found: list[argparse.Namespace] = []

    class Parsed(Exception):
        pass

    def stops(parse: Callable[..., argparse.Namespace]) -> Callable[..., argparse.Namespace]:
        def parse_and_stop(self: argparse.ArgumentParser, *given: object) -> argparse.Namespace:
            found.append(parse(self, list(words)))
            raise Parsed

        return parse_and_stop

    def refuse(self: argparse.ArgumentParser, message: str) -> None:
        raise ValueError(f"{script}: {message}")

    parser, module = argparse.ArgumentParser, importlib.import_module(script)
    with (
        mock.patch.object(parser, "parse_args", stops(parser.parse_args)),
        mock.patch.object(parser, "parse_intermixed_args", stops(parser.parse_intermixed_args)),
        mock.patch.object(parser, "error", refuse),
        mock.patch("sys.argv", [script]),
    ):
        try:
            module.main()
        except Parsed:
            return found[0]
    raise AssertionError(f"{script} reads no options")


def check_command(words: Sequence[str], gpus: int) -> None:
    """Of `python -m carpool ...`, `python -m benchmarks...`, `python -m torch.distributed.run ... -m benchmarks...` and
    `python FILE.py ...`.

    Raises:
        ValueError: what it would refuse on so many GPUs, or nothing that is checked here."""
    words = list(words)
    if words[0].endswith(".py"):
        with mock.patch("sys.path", [str(Path(words[0]).parent.resolve()), *sys.path]):
            options_of(Path(words[0]).stem, words[1:])
        return
    module = len(words) - 1 - words[::-1].index("-m") if "torch.distributed.run" in words else words.index("-m")
    name, given = words[module + 1], words[module + 2 :]
    if name == "carpool" and given[0] == "bench":
        check_bench(given[1:], gpus)
    elif name == "carpool" and given[0] == "train":
        config = Path(given[given.index("--config") + 1]) if "--config" in given else None
        check_train([one for one in given[1:] if "=" in one], config)
    elif name == "pytest":
        wanting = [one for one in given if one.endswith(".py") and not Path(one).is_file()]
        if wanting:
            raise ValueError(f"no such tests: {wanting}")
    elif name.startswith("benchmarks."):
        options_of(name, given)
    else:
        raise ValueError(f"{' '.join(words)}: no command that is known here")
