"""What does a trained model answer? Generating, chatting and evaluating, thin around Transformers and lm-eval."""

from __future__ import annotations

from pathlib import Path


def check_folder(path: Path) -> None:
    """Raise ValueError unless it is the folder of a checkpoint of Transformers, of a run, or of an adapter."""
    if not path.is_dir():
        raise ValueError(f"there is no folder {path}; name a checkpoint's folder, or a run's (training.output_dir)")
    if not any((path / name).is_file() for name in ("config.toml", "config.json", "adapter_config.json")):
        raise ValueError(f"{path} has neither a config.json, as a checkpoint has, nor a run's config.toml")
