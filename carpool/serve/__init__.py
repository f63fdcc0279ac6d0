"""What does a trained model answer? Generating, chatting and evaluating, thin around Transformers and lm-eval."""

from __future__ import annotations

from pathlib import Path


def check_folder(path: Path) -> None:
    """Raise ValueError unless it is the folder of a checkpoint of Transformers, or of a run."""
    if not path.is_dir():
        raise ValueError(f"there is no folder {path}; name a checkpoint's folder, or a run's (training.output_dir)")
    if not (path / "config.toml").is_file() and not (path / "config.json").is_file():
        hint = "; it holds an adapter: merge it into its base model first" if any(path.glob("adapter_*")) else ""
        raise ValueError(f"{path} has neither a config.json, as a checkpoint has, nor a run's config.toml{hint}")
