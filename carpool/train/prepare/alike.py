"""What must be the same on all ranks: settings and data.

Whoever starts ranks by hand, or by a script for each node, may start them with different ones. Most differences would
not show, and train a model that nobody asked for; others would end in a collective that nobody understands.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from carpool.train.config.schema import Config
from carpool.train.data.corpus import Corpus
from carpool.train.launch.ranks import gather

# Nodes may have copies of the same files in places of their own.
_PLACES = (
    "data.train", "data.eval", "data.tokenizer", "data.chat_template", "data.cache_dir",
    "model.path", "memory.disk_folder", "parallelism.hardware",
)  # fmt: skip


def check_same_settings(config: Config, compare_with: str | None) -> None:
    """Collective.

    Raises:
        ValueError: on all ranks, if one has other settings than rank 0; names them."""
    own = {"--compare": str(compare_with), **_flat(config.model_dump(mode="json"))}
    # Thousands of ranks send a digest each. Who differs is asked for more.
    if len(set(gather(hashlib.sha256(json.dumps(own, sort_keys=True).encode()).hexdigest()))) == 1:
        return
    found = gather(own)
    for rank, other in enumerate(found):
        if differ := [f"{key} = {other.get(key)}, not {found[0].get(key)}" for key in _differing(found[0], other)]:
            raise ValueError(
                f"rank {rank} was started with other settings than rank 0: {'; '.join(differ)}. Start all ranks with "
                "the same command and the same configuration"
            )


def check_same_data(corpus: Corpus) -> None:
    """Collective.

    Raises:
        ValueError: on all ranks, if one has read other data than rank 0."""
    found = gather({"data.train": corpus.fingerprint, "data.eval": str(len(corpus.eval)), "source": corpus.source})
    for rank, other in enumerate(found):
        differ = [key for key in _differing(found[0], other) if key != "source"]
        if differ:
            raise ValueError(
                f"rank {rank} has read another {' and '.join(differ)} than rank 0: {other['source']} there, and "
                f"{found[0]['source']} on rank 0. Give all nodes the same files"
            )


def _flat(settings: Mapping[str, Any], before: str = "") -> dict[str, str]:
    """`{"model": {"config": {"hidden_size": 64}}}` -> `{"model.config.hidden_size": "64"}`, without places."""
    flat: dict[str, str] = {}
    for key, value in settings.items():
        name = f"{before}{key}"
        if isinstance(value, dict):
            flat |= _flat(value, f"{name}.")
        elif name not in _PLACES:
            flat[name] = json.dumps(value, sort_keys=True)
    return flat


def _differing(first: Mapping[str, str], other: Mapping[str, str]) -> list[str]:
    return [key for key in {**first, **other} if other.get(key) != first.get(key)]
