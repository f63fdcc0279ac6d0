"""Does a wheel hold all that Carpool needs at run time?

    python -m tools.check_wheel dist/carpool-0.2.0-py3-none-any.whl

Compares the wheel with the source tree: every file of `carpool/` and `carpool_systems/` must be in it, Python or not.
"""

from __future__ import annotations

import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGES = (ROOT / "carpool", ROOT / "carpool_systems")
LEFT_OUT = {".pyc"}


def missing(wheel: Path) -> list[str]:
    """Files of the package that the wheel lacks."""
    with zipfile.ZipFile(wheel) as archive:
        packed = set(archive.namelist())
    files = (path for package in PACKAGES for path in package.rglob("*"))
    files = (path for path in files if path.is_file() and path.suffix not in LEFT_OUT)
    return sorted(name for name in (path.relative_to(ROOT).as_posix() for path in files) if name not in packed)


def main() -> int:
    absent = missing(Path(sys.argv[1]))
    if absent:
        print(
            f"the wheel lacks {', '.join(absent)}: see tool.setuptools.package-data in pyproject.toml", file=sys.stderr
        )
    return bool(absent)


if __name__ == "__main__":
    sys.exit(main())
