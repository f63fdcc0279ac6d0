"""A process that starts ranks, for tests that stop it: `python -m tests.train.launch_agent ENTRY FOLDER`.

Prints how the run ended, and exits as the command line would.
"""

from __future__ import annotations

import signal
import sys
from typing import Any

from carpool.train.config import load_config
from carpool.train.launch.failure import Interrupted, RankFailure
from carpool.train.launch.start import run
from carpool.train.launch.stopping import EXIT_STOPPED, Stopped


def main() -> None:
    # What a shell starts in the background, it has ignore Ctrl-C, and so do all processes of that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    entry, folder, *words = sys.argv[1:]
    config = load_config(None, ["parallelism.device=cpu", "parallelism.num_ranks=2", f"training.output_dir={folder}"])
    word: dict[str, Any] = {"word": words[0]} if words else {}
    try:
        run(config, f"tests.train.launch_entries:{entry}", folder=folder, **word)
    except (RankFailure, Interrupted, Stopped) as error:
        print(f"{type(error).__name__}: {error}", flush=True)
        codes = {RankFailure: 1, Stopped: EXIT_STOPPED}
        sys.exit(128 + error.signum if isinstance(error, Interrupted) else codes[type(error)])


if __name__ == "__main__":
    main()
