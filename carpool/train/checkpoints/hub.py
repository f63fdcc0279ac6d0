"""Upload to the Hugging Face Hub (`training.push_to_hub`), by huggingface_hub's own client.

    before there are ranks   is the id one, is there a token, and may it write there?
    before the first step    the repository is made, unless it is there
    with each checkpoint     hub_strategy=checkpoint: the folder last-checkpoint, in a thread beside training
    at the end               what the run has written: the adapter, or the model for Transformers, with a model card

The token comes from the environment (HF_TOKEN) or from `hf auth login`; the client alone reads it. An upload that fails
ends no run and loses nothing: what was to be uploaded is in the run's folder, and the error has the command for it.
"""

from __future__ import annotations

import re
import shlex
import shutil
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import carpool
from carpool.plugins.redact import redact
from carpool.train.config.schema_training import TrainingSection

LAST_CHECKPOINT = "last-checkpoint"
# Hard links to the checkpoint that is uploaded, which may be removed meanwhile.
_STAGED = ".upload"
# The folder of a repository in the Hub's cache.
_CACHED = re.compile(r"models--([\w.-]+?)--([\w.-]+)")


def check_hub(training: TrainingSection) -> str:
    """The repository to upload to, OWNER/NAME. Asks the Hub, and changes nothing there.

    Raises:
        ValueError: the id is none, or there is no token that may write to it."""
    from huggingface_hub import HfApi, constants, get_token
    from huggingface_hub.utils import HFValidationError, validate_repo_id

    asked = training.hub_model_id or training.folder.absolute().name
    try:
        validate_repo_id(asked)
    except HFValidationError as error:
        raise ValueError(f"training.hub_model_id = {asked!r} is no id of a repository: {error}") from None
    if constants.is_offline_mode():
        raise ValueError("training.push_to_hub = true, but HF_HUB_OFFLINE=1 forbids to reach the Hub: leave one out")
    if get_token() is None:
        raise ValueError(
            "training.push_to_hub = true, but there is no token: set HF_TOKEN, or log in by `hf auth login`"
        )
    try:
        who = HfApi().whoami()
    except Exception as error:  # of the network, or of the Hub
        raise ValueError(
            f"training.push_to_hub: {constants.ENDPOINT} does not know who this is: {_why(error)}"
        ) from None
    owner, _, name = asked.rpartition("/")
    token = who.get("auth", {}).get("accessToken") or {}
    if token.get("role") == "read":
        raise ValueError(f"training.push_to_hub: the token of {who['name']} may only read: make one that may write")
    return f"{owner or who['name']}/{name}"


class Hub:
    """The repository of a run, on rank 0. It is made, unless it is there.

    Raises:
        ValueError: the token may not write to it, or it cannot be made."""

    def __init__(self, training: TrainingSection) -> None:
        from huggingface_hub import HfApi

        self.name, self._folder, self._api = check_hub(training), training.folder, HfApi()
        self._thread = ThreadPoolExecutor(1, "carpool-upload")
        self._uploading: tuple[Path, Future[Any]] | None = None
        try:
            self._api.create_repo(self.name, private=training.hub_private_repo, exist_ok=True)
            self._api.auth_check(self.name, write=True)
        except Exception as error:
            raise ValueError(f"training.hub_model_id: nothing can be uploaded to {self.name}: {_why(error)}") from None

    @property
    def address(self) -> str:
        return f"{self._api.endpoint}/{self.name}"

    def push_checkpoint(self, checkpoint: Path) -> str | None:
        """Upload it beside training, unless another one is being uploaded. What to say of the one before."""
        if self._uploading is not None and not self._uploading[1].done():
            return None
        said = self.wait()
        staged = self._folder / _STAGED
        shutil.rmtree(staged, ignore_errors=True)
        try:
            shutil.copytree(checkpoint, staged, copy_function=_link)
        except OSError as error:
            return f"warning: {checkpoint} was not uploaded: {error.strerror}"
        self._uploading = checkpoint, self._thread.submit(self._upload, staged, checkpoint.name, LAST_CHECKPOINT)
        return said

    def wait(self) -> str | None:
        """For the checkpoint that is being uploaded; a warning if it was not."""
        if self._uploading is None:
            return None
        (checkpoint, future), self._uploading = self._uploading, None
        error = future.exception()
        shutil.rmtree(self._folder / _STAGED, ignore_errors=True)
        return None if error is None else f"warning: {self._missed(checkpoint, error, LAST_CHECKPOINT)}"

    def push(self, folder: Path, message: str) -> None:
        """Upload what a folder holds. Raises OSError: it was not, with what to do."""
        try:
            self._upload(folder, message)
        except Exception as error:  # of the network, or of the Hub
            raise OSError(self._missed(folder, error)) from None

    def _upload(self, folder: Path, message: str, place: str | None = None) -> None:
        from huggingface_hub.utils import are_progress_bars_disabled, disable_progress_bars

        if not are_progress_bars_disabled():
            disable_progress_bars()
        # Of an earlier checkpoint there may be more files.
        delete = None if place is None else ["*"]
        self._api.upload_folder(
            repo_id=self.name, folder_path=folder, path_in_repo=place, commit_message=message, delete_patterns=delete
        )

    def _missed(self, folder: Path, error: BaseException, place: str = ".") -> str:
        by_hand = shlex.join(["hf", "upload", self.name, str(folder), place])
        return f"{folder} was not uploaded to {self.address}: {_why(error)}; it is whole, and goes there by `{by_hand}`"


def write_card(
    folder: Path, name: str, steps: int, tokens: int, loss: float | None, base: Any, lossy: Sequence[str]
) -> None:
    """Write the model card (README.md) of what a run has trained.

    Args:
        name: of the repository, OWNER/NAME.
        loss: on held-out data.
        base: the folder of the model that an adapter belongs to (or a configuration, for random weights); None: the
            folder has a model.
        lossy: what was lossy about the training."""
    from huggingface_hub import ModelCardData

    found = None if base is None else _CACHED.search(str(base))
    of = None if found is None else f"{found[1]}/{found[2]}"
    kind = ["lora"] if base is not None else []
    data = ModelCardData(library_name="peft" if kind else "transformers", base_model=of, tags=["carpool", "moe", *kind])
    if kind:
        load = f'PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained("{of or "BASE"}"), "{name}")'
    else:
        load = f'AutoModelForCausalLM.from_pretrained("{name}")'
    held_out = "" if loss is None else f" The loss on held-out data is {loss:.4f}."
    inexact = f" Lossy in training: {'; '.join(lossy)}." if lossy else ""
    (folder / "README.md").write_text(
        f"---\n{data.to_yaml()}\n---\n\n# {name.rpartition('/')[2]}\n\n"
        f"Trained by Carpool {carpool.__version__} for {steps:,} steps, {tokens:,} tokens.{held_out}{inexact}\n\n"
        f"```python\n{load}\n```\n",
        encoding="utf-8",
    )


def _link(source: str, target: str) -> None:
    """The same file once more, or, where there are no links, a copy."""
    try:
        Path(target).hardlink_to(source)
    except OSError:
        shutil.copy2(source, target)


def _why(error: BaseException) -> str:
    """What went wrong, on one line and without credentials."""
    return redact(" ".join(str(error).split())) or type(error).__name__
