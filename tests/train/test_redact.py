"""Credentials of addresses stay out of what a run writes, says and records."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import fsspec
import pytest
from typer.testing import CliRunner

from carpool import cli
from carpool.plugins.redact import bare, redact
from carpool.report.page import write_report
from carpool.train.config.schema_data import DataSource, source_name
from carpool.train.data.readers import Source, read_rows
from carpool.train.data.rows import Fields, Url
from carpool.train.data.sources import find_sources
from tests.train.test_loop import MODEL

# A store that fsspec finds as an installed package's. It wants a password and a token, and says in errors what it was
# given, as real ones do.
VAULT = """
import os
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit
from fsspec.spec import AbstractFileSystem

class Vault(AbstractFileSystem):
    protocol = "vault"
    cachable = False

    def _place(self, path):
        asked = urlsplit(path if "://" in path else f"vault://{path}")
        token = parse_qs(asked.query).get("token")
        if unquote(asked.netloc) != "annas-user:pass/word@store" or token != ["token-of-anna"]:
            raise PermissionError(f"no bucket {asked.netloc} for {unquote(asked.netloc)} with {token}")
        return Path(os.environ["VAULT"], asked.path.strip("/"))

    def info(self, path, **kwargs):
        place = self._place(path)
        if not place.exists():
            raise FileNotFoundError(path)
        return {"name": path, "size": place.stat().st_size, "type": "file"}

    def ls(self, path, detail=True, **kwargs):
        return [self.info(path)]

    def _open(self, path, mode="rb", **kwargs):
        if "broken" in path:
            raise RuntimeError(f"{path} of annas-user with pass/word is gone")
        return open(self._place(path), mode)
"""
ADDRESS = "vault://annas-user:pass%2Fword@store/{}?token=token-of-anna"
SECRETS = ("annas-user", "pass/word", "pass%2Fword", "token-of-anna")


def vault(folder: Path) -> Path:
    """A folder for sys.path with the store as a package, beside the store's files."""
    modules = folder / "modules"
    (modules / "vault_store-1.dist-info").mkdir(parents=True)
    (modules / "vault_store.py").write_text(VAULT)
    (modules / "vault_store-1.dist-info" / "METADATA").write_text("Name: vault-store\nVersion: 1\n")
    (modules / "vault_store-1.dist-info" / "entry_points.txt").write_text("[fsspec.specs]\nvault=vault_store.Vault\n")
    for name in ("a.txt", "b.txt"):
        (folder / name).write_text("def f(x):\n    return x\n" * 400)
    return modules


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("https://anna:pw@host/a.jsonl?token=x,y", "https://REDACTED@host/a.jsonl?token=REDACTED"),
        ("s3://KEY:SE/CR+ET@bucket/x*.parquet", "s3://REDACTED@bucket/x*.parquet"),
        ("['ftp://me@x.org:p'w@h/a', 'http://T@h']", "['ftp://REDACTED@h/a', 'http://REDACTED@h']"),
        ("zip://*.csv::https://u:p@h/x.zip?a=b&sig=c#q", "zip://*.csv::https://REDACTED@h/x.zip?a=REDACTED&sig=REDACTED#q"),
        (f"token hf_{'aB3' * 12}", "token REDACTED"),
        *[(one, one) for one in ("https://h:80/a@b", "s3://b/part-?.parquet", "hf://datasets/o/n@main/x", "a@b?c=d")],
        *[(one, one) for one in ("/data/hf_checkpoints/x", "hf_transfer", "https://m.org/@a", "x://[::1]:8/x@y")],
    ],
)  # fmt: skip
def test_what_is_redacted(text: str, expected: str) -> None:
    assert redact(text) == expected and redact(expected) == expected


def test_json_stays_json_and_long_texts_take_no_time() -> None:
    said = {"text": 'a "http://x/?q=1" b', "next": "http://x/?q=1\nleft", "end": "http://x/?q=1\\"}
    expected = {name: one.replace("q=1", "q=REDACTED") for name, one in said.items()}
    assert json.loads(redact(json.dumps(said))) == expected | {"end": "http://x/?q=REDACTED"}
    begin = time.process_time()
    for text in ("http://x " + "A" * 2_000_000, "http://a:b:c," * 20_000, "http://" + "1:" * 200_000):
        assert redact(text) == text
    assert time.process_time() - begin < 5  # of patterns that look again from each letter, minutes


@pytest.fixture
def known_vault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(vault(tmp_path)))
    monkeypatch.setenv("VAULT", str(tmp_path))
    fsspec.register_implementation("vault", "vault_store.Vault", clobber=True)


def settings_of(folder: Path) -> list[str]:
    a, b = ADDRESS.format("a.txt"), ADDRESS.format("b.txt")
    return [
        f"data.sources=[{{path='{a}', weight=2}}, {{path='{b}', weight=1}}]", f"data.eval.held='{b}'",
        "data.allow_download=true", f"data.cache_dir={folder}/cache", f"training.output_dir={folder}/run",
        "training.report_to=tensorboard", "training.max_steps=2", "parallelism.device=cpu", "parallelism.num_ranks=1",
    ]  # fmt: skip


@pytest.mark.usefixtures("known_vault")
def test_a_dry_run_says_none(tmp_path: Path) -> None:
    done = CliRunner().invoke(cli.app, ["train", "--dry-run", *MODEL, *settings_of(tmp_path)])
    assert done.exit_code == 0 and "token=REDACTED" in done.stdout, done.output
    assert not any(secret in done.output for secret in SECRETS), done.output


@pytest.mark.usefixtures("known_vault")
def test_errors_of_stores_and_names_of_sources(tmp_path: Path) -> None:
    for address in (ADDRESS.format("no.txt"), ADDRESS.format("a.txt").replace("word", "x"), ADDRESS.format("*.gif")):
        with pytest.raises(ValueError, match=r"data\.train: .*vault://REDACTED@store/") as caught:
            find_sources([address], "data.train", ["train"])
        assert not any(secret in str(caught.value) for secret in (*SECRETS, "pass/x", "pass%2Fx"))
    (tmp_path / "broken.txt").write_text("x")
    url = Url(ADDRESS.format("broken.txt"))
    with pytest.raises(ValueError, match="of REDACTED with REDACTED is gone"):
        list(read_rows([Source("text", url)], Fields((), (), "", "text"), ()))
    assert all(secret not in str(Source("text", url).signature()) for secret in SECRETS)
    with pytest.raises(ValueError, match="has no credentials: give the address again"):
        find_sources([redact(url)], "data.train", ["train"])
    assert source_name(DataSource(path=(url,))) == "broken" and bare(url) == "vault://store/broken.txt"


def test_a_run_says_and_writes_none(tmp_path: Path) -> None:
    modules, folder, root = vault(tmp_path), tmp_path / "run", str(Path(__file__).parents[2])
    env = {"PYTHONPATH": f"{modules}:{root}", "VAULT": str(tmp_path)}

    def carpool(*words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "carpool", "train", *MODEL, *settings_of(tmp_path), *words]
        done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **env}, timeout=300)
        assert not any(secret in done.stdout + done.stderr for secret in SECRETS), done.stdout + done.stderr
        return done

    done = carpool()
    assert done.returncode == 0 and "vault://REDACTED@store/a.txt?token=REDACTED" in done.stdout, done.stderr
    write_report(folder)
    places = [path for top in (folder, tmp_path / "cache") for path in top.rglob("*") if path.is_file()]
    assert len(places) > 15 and "data.sources" in (folder / "run.json").read_text()
    for path in places:
        assert not any(secret.encode() in path.read_bytes() for secret in SECRETS), path
    # Errors of ranks, with tracebacks.
    (tmp_path / "broken.txt").write_text("x")
    wrong = ADDRESS.format("broken.txt")
    done = carpool(f"training.output_dir={tmp_path}/other", f"data.eval.held='{wrong}'", "--debug")
    assert done.returncode == 1 and "vault://REDACTED@store/broken.txt?token=REDACTED cannot be read" in done.stderr
    assert "Traceback" in done.stderr
