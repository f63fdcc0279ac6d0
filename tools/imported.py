"""As a plug-in (`CARPOOL_PLUGINS=tools.imported`): each process adds the modules that it has imported at its end to the
file that SOAK_IMPORTED names, one a line. `tools.soak` imports them before it forks."""

from __future__ import annotations

import atexit
import os
import sys
from pathlib import Path

IMPORTED = "SOAK_IMPORTED"


def _note() -> None:
    with Path(os.environ[IMPORTED]).open("a") as file:
        file.write("".join(f"{name}\n" for name, module in list(sys.modules.items()) if module is not None))


if IMPORTED in os.environ:
    atexit.register(_note)
