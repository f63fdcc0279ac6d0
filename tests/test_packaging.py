"""What a release needs: files that are not Python are packed, versions agree, and with the base dependencies alone the
layer works, and what needs more says what to install. `make package` builds and checks."""

from __future__ import annotations

import fnmatch
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import carpool

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def test_every_file_of_the_package_is_packed() -> None:
    patterns = PROJECT["tool"]["setuptools"]["package-data"]["*"]
    files = [path for name in ("carpool", "carpool_systems") for path in (ROOT / name).rglob("*") if path.is_file()]
    others = [path for path in files if path.suffix not in (".py", ".pyc")]
    assert {"page.html.j2", "py.typed", "carpool.toml", "lancet.toml"} <= {path.name for path in others}
    for path in others:
        assert any(fnmatch.fnmatch(path.name, pattern) for pattern in patterns), f"package-data has no {path.name}"
        assert (path.parent / "__init__.py").is_file(), f"{path.parent} is no package, so {path.name} is not packed"


def test_versions_agree() -> None:
    version = PROJECT["project"]["version"]
    citation = re.search(r"^version: (\S+)$", (ROOT / "CITATION.cff").read_text(), flags=re.MULTILINE)
    assert citation is not None
    assert version == carpool.__version__ == citation[1]
    assert f"## [{version}]" in (ROOT / "CHANGELOG.md").read_text()


def test_what_an_extra_asks_for_is_pinned() -> None:
    pinned = {
        re.sub(r"[-_.]+", "-", line.split("==")[0]).lower()
        for line in (ROOT / "constraints.txt").read_text().splitlines()
        if "==" in line
    }
    extras = PROJECT["project"]["optional-dependencies"].values()
    for requirement in [*PROJECT["project"]["dependencies"], *(one for extra in extras for one in extra)]:
        name = re.match(r"[\w.-]+", requirement)
        assert name is not None
        assert re.sub(r"[-_.]+", "-", name[0]).lower() in pinned, f"constraints.txt does not pin {requirement}"


PROGRAM = '''
import sys

HIDDEN = {"accelerate", "datasets", "jinja2", "matplotlib", "mtkahypar", "packaging", "peft", "pyarrow", "safetensors",
          "tensorboard", "tokenizers", "transformers"}

class Base:
    """The finder of installed modules, without those that only an extra brings."""
    def __init__(self, finder):
        self.finder = finder
    def find_spec(self, name, path=None, target=None):
        return None if name.split(".")[0] in HIDDEN else self.finder.find_spec(name, path, target)

sys.meta_path = [Base(one) if hasattr(one, "find_spec") else one for one in sys.meta_path]

import torch
from typer.testing import CliRunner

import carpool
from carpool.cli import app, doctor_checks as checks

moe = carpool.MoE(16, 32, 4, 2)
(moe(torch.ones(3, 16)).sum() + moe.aux_loss).backward()
assert "python" in [check.name for check in checks._versions()]
try:
    import carpool.hf
except ImportError as error:
    assert "pip install 'transformers>=5.23'" in str(error), error

def run(*arguments, code=0):
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == code, (arguments, result.output, result.exception)
    return result.output

run("--help")
assert "pip install transformers tokenizers safetensors" in run("train", "--dry-run", code=1)
'''


def test_base_dependencies_suffice() -> None:
    """tests/placement/test_command.py has `place` and `recipes` with them."""
    done = subprocess.run([sys.executable, "-c", PROGRAM], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
