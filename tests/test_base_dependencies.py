"""With the base dependencies alone the layer works, and what needs more says what to install."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]

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

import numpy as np
import torch
from typer.testing import CliRunner

import carpool
from carpool.cli import app, doctor_checks as checks
from carpool.placement.trace import Trace

moe = carpool.MoE(16, 32, 4, 2)
(moe(torch.ones(3, 16)).sum() + moe.aux_loss).backward()
assert "python" in [check.name for check in checks._versions()]
try:
    import carpool.hf
except ImportError as error:
    assert "pip install 'transformers>=5.23'" in str(error), error

expert_TK = np.random.default_rng(0).permuted(np.tile(np.arange(8), (64, 1)), axis=1)[:, :2]
sequence_T = np.arange(64, dtype=np.int32) // 16
Trace(expert_TK[None].astype(np.uint8), sequence_T, ("layer",), {"num_experts": 8}).save(f"{sys.argv[1]}/trace.npz")

def run(*arguments, code=0):
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == code, (arguments, result.output, result.exception)
    return result.output

run("--help")
run("recipes", "list")
placed = run("place", f"{sys.argv[1]}/trace.npz", "--ranks", "2", "--out", f"{sys.argv[1]}/place")
assert "mtkahypar" in placed and "pip install matplotlib" in placed and "layouts.json" in placed, placed
assert "pip install transformers tokenizers safetensors" in run("train", "--dry-run", code=1)
'''


def test_base_dependencies_suffice(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM, str(tmp_path)], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
