"""Runs that upload what they have trained, by huggingface_hub's client, to a server of this process that speaks the
Hub's endpoints which the client needs (HF_ENDPOINT)."""

from __future__ import annotations

import base64
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import redirect_stdout
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from io import StringIO
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import yaml
from huggingface_hub import constants
from safetensors.torch import load as load_tensors
from transformers import AutoModelForCausalLM

from carpool.train.checkpoints.hub import Hub
from carpool.train.config import load_config
from carpool.train.config.schema_training import TrainingSection
from carpool.train.run.run import train
from tests.hf.tiny_models import discover, tiny_model
from tests.ranks import Ranks
from tests.train.test_loop import MODEL

TOKEN = "hf_tokenOfAnnaThatNobodyElseEverSees"
OWNERS = ("anna", "lab")


class Server(ThreadingHTTPServer):
    """Repositories of the users anna and lab.

    Attributes:
        files: of each repository, by path.
        role: of anna's token.
        refuses: paths that answer 503.
        asked: of each request: its method and path."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.files: dict[str, dict[str, bytes]] = {}
        self.private: dict[str, bool] = {}
        self.role, self.refuses, self.asked = "write", "", list[str]()

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class Handler(BaseHTTPRequestHandler):
    server: Server

    def log_message(self, *args: Any) -> None:
        pass

    def _answer(self, value: Any, code: int = 200) -> None:
        body = json.dumps(value).encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self) -> None:
        self._serve(b"")

    def do_POST(self) -> None:
        self._serve(self.rfile.read(int(self.headers["Content-Length"])))

    def _serve(self, body: bytes) -> None:
        server, path = self.server, self.path.partition("?")[0]
        server.asked.append(f"{self.command} {path}")
        if self.headers.get("Authorization") != f"Bearer {TOKEN}":
            return self._answer({"error": "Invalid credentials"}, 401)
        if server.refuses and server.refuses in path:
            return self._answer({"error": "the store is full"}, 507)
        if path == "/api/whoami-v2":
            return self._answer({"name": "anna", "auth": {"accessToken": {"role": server.role}}})
        if path == "/api/validate-yaml":
            return self._answer({"errors": [], "warnings": []})
        if path == "/api/repos/create":
            asked = json.loads(body)
            name = f"{asked.get('organization') or 'anna'}/{asked['name']}"
            if name.split("/")[0] not in OWNERS:
                return self._answer({"error": "no rights in this namespace"}, 403)
            there = name in server.files
            server.files.setdefault(name, {})
            server.private.setdefault(name, asked.get("visibility") == "private" or asked.get("private") is True)
            return self._answer({"url": f"{server.address}/{name}"}, 409 if there else 200)
        _, _, _, owner, name, what, *_ = [*path.split("/"), ""]
        files = server.files.get(f"{owner}/{name}")
        if files is None:
            return self._answer({"error": "Repository not found"}, 404)
        if what == "auth-check":
            return self._answer({})
        if what == "preupload":
            asked = [
                {"path": one["path"], "uploadMode": "regular", "shouldIgnore": False}
                for one in json.loads(body)["files"]
            ]
            return self._answer({"files": asked})
        if what == "commit":
            for line in map(json.loads, body.splitlines()):
                if line["key"] == "file":
                    files[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
                elif line["key"] == "deletedFile":
                    del files[line["value"]["path"]]
            return self._answer(
                {"success": True, "commitOid": "1" * 40, "commitUrl": f"{server.address}/{owner}/{name}/commit/1"}
            )
        if what in ("tree", "revision", ""):
            listed = [{"type": "file", "path": one, "size": len(raw), "oid": "0"} for one, raw in files.items()]
            return self._answer(
                listed
                if what == "tree"
                else {"id": f"{owner}/{name}", "sha": "1" * 40, "siblings": [{"rfilename": one} for one in files]}
            )
        self._answer({"error": path}, 404)  # fmt: skip


@pytest.fixture
def server() -> Iterator[Server]:
    server = Server()
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()


def settings_of(folder: Path) -> list[str]:
    steps = ["training.max_steps=4", "training.save_steps=2"]
    return ["training.save_pretrained=true", *steps, "parallelism.device=cpu", f"training.output_dir={folder}"]


def check_no_token(folder: Path, *said: str) -> None:
    written = [path.read_bytes() for path in folder.rglob("*") if path.is_file()]
    assert not any(TOKEN.encode() in one for one in (*written, *(text.encode() for text in said)))


def carpool(server: Server, folder: Path, *words: str, model: bool = True) -> subprocess.CompletedProcess[str]:
    env = {
        **os.environ, "HF_ENDPOINT": server.address, "HF_HUB_OFFLINE": "0", "HF_TOKEN": TOKEN,
        "HF_HUB_DISABLE_TELEMETRY": "1",
    }  # fmt: skip
    settings = [one for one in MODEL if model or not one.startswith("model.")]
    command = [sys.executable, "-m", "carpool", "train", *settings, *settings_of(folder), *words]
    done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=400)
    check_no_token(folder, done.stdout, done.stderr)
    return done


def said_by(address: str, words: list[str]) -> str:
    """On a rank: train; what it says."""
    reached = {"ENDPOINT": address, "HF_HUB_OFFLINE": False, "HF_HUB_DISABLE_TELEMETRY": True}
    with (
        mock.patch.multiple(constants, **reached),
        mock.patch.dict(os.environ, HF_TOKEN=TOKEN),
        redirect_stdout(StringIO()) as text,
    ):
        train(load_config(None, words), command="test")
    return text.getvalue()


def test_a_model_and_its_newest_checkpoint_are_uploaded(
    two_ranks: Ranks, server: Server, tmp_path: Path, text: list[str]
) -> None:
    folder = tmp_path / "my-moe"
    words = ["training.push_to_hub=true", "training.hub_strategy=checkpoint", "training.hub_private_repo=true"]
    said = two_ranks(said_by, server.address, [*MODEL, *settings_of(folder), *text, *words])
    check_no_token(folder, *said)
    assert f"uploaded: {server.address}/anna/my-moe" in said[0] and server.private == {"anna/my-moe": True}
    files = server.files["anna/my-moe"]
    for path in (folder / "model").iterdir():
        assert files[path.name] == path.read_bytes(), path.name
    newest = folder / "checkpoints" / "step-00000004"
    mine = {f"last-checkpoint/{path.relative_to(newest)}": path for path in newest.rglob("*") if path.is_file()}
    assert mine and {name: files[name] for name in mine} == {name: path.read_bytes() for name, path in mine.items()}
    assert {name for name in files if name.startswith("last-checkpoint/")} == mine.keys()
    assert not (folder / ".upload").exists()
    _, head, card = files["README.md"].decode().split("---\n", 2)
    assert yaml.safe_load(head)["library_name"] == "transformers" and "# my-moe" in card and "4 steps" in card
    for name in [name for name in files if "/" not in name]:
        (tmp_path / "got").mkdir(exist_ok=True)
        (tmp_path / "got" / name).write_bytes(files[name])
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "got").config.num_experts == 8


def test_an_upload_that_fails_loses_nothing(server: Server, tmp_path: Path, text: list[str]) -> None:
    """Of an adapter. It is said how to upload it; the same by hand works then."""
    folder, base = tmp_path / "run", tmp_path / "models--maker--moe" / "snapshots" / "1"
    tiny_model(discover()["qwen3_moe"], vocab_size=259, output_router_logits=False).save_pretrained(base)
    words = [
        f"model.path={base}", "model.dtype=float32", "data.tokenizer=bytes",
        "adapter.kind=lora", "adapter.targets=attention", "training.push_to_hub=true", "parallelism.num_ranks=1",
        "training.hub_model_id=lab/ours",
    ]  # fmt: skip
    server.refuses = "/commit"
    done = carpool(server, folder, *text, *words, model=False)
    assert done.returncode == 1 and server.files == {"lab/ours": {}}, done.stdout + done.stderr
    by_hand = f"hf upload lab/ours {folder}/adapter ."
    assert f"`{by_hand}`" in done.stderr and "the store is full" in done.stderr, done.stderr
    assert (folder / "summary.json").is_file() and (folder / "checkpoints" / "step-00000004").is_dir()
    server.refuses = ""
    env = {**os.environ, "HF_ENDPOINT": server.address, "HF_HUB_OFFLINE": "0", "HF_TOKEN": TOKEN}
    hf = str(Path(sys.executable).with_name("hf"))
    subprocess.run([hf, *by_hand.split()[1:]], check=True, capture_output=True, env=env, timeout=120)
    files = server.files["lab/ours"]
    assert load_tensors(files["adapter_model.safetensors"]) and "adapter_config.json" in files
    assert yaml.safe_load(files["README.md"].decode().split("---\n")[1])["base_model"] == "maker/moe"


@pytest.mark.parametrize(
    ("settings", "token", "role", "message"),
    [
        ({"hub_model_id": "a//b"}, TOKEN, "write", "training.hub_model_id = 'a//b' is no id of a repository"),
        ({"hub_model_id": "other/b"}, TOKEN, "write", "nothing can be uploaded to other/b: .*no rights"),
        ({}, "", "write", "there is no token: set HF_TOKEN"),
        ({}, "hf_wrongwrong", "write", "does not know who this is: Invalid user token."),
        ({}, TOKEN, "read", "the token of anna may only read"),
        ({}, TOKEN, "offline", "HF_HUB_OFFLINE=1 forbids to reach the Hub"),
        ({"hub_strategy": "every_save"}, TOKEN, "write", 'hub_strategy = "every_save": checkpoints hold shards'),
    ],
)
def test_what_cannot_be_uploaded_is_refused(
    server: Server, monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any], token: str, role: str, message: str
) -> None:
    server.role = role
    monkeypatch.setattr(constants, "ENDPOINT", server.address)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", role == "offline")
    monkeypatch.setenv("HF_TOKEN", token)
    with pytest.raises(ValueError, match=message):
        Hub(TrainingSection.model_validate({"push_to_hub": True, **settings}))
    assert server.files == {}


@pytest.mark.slow
def test_a_run_is_refused_before_it_writes_and_sends_nothing_unasked(
    server: Server, tmp_path: Path, text: list[str]
) -> None:
    words = ["training.push_to_hub=true", "training.hub_model_id=other/b"]
    done = carpool(server, tmp_path / "run", *text, *words, "parallelism.num_ranks=2")
    assert done.returncode == 1 and "nothing can be uploaded to other/b" in done.stderr, done.stdout + done.stderr
    assert not (tmp_path / "run").exists() and server.files == {}
    done = carpool(server, tmp_path / "run", *text, *words[:1], "training.save_pretrained=false")
    assert done.returncode == 1 and "changes nothing without training.save_pretrained=true" in done.stderr
    server.asked.clear()
    done = carpool(server, tmp_path / "run", *text, "parallelism.num_ranks=1")
    assert done.returncode == 0 and server.asked == [], done.stderr
