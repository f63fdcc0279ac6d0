"""The stages of a pipeline that a rank keeps of a model."""

from __future__ import annotations

import copy
import re

from carpool.hf.pipeline_stages import cut_model, keep_parts
from tests.hf.tiny_models import discover, tiny_model


def test_what_other_stages_have_of_a_checkpoint_is_ignored() -> None:
    whole = tiny_model(discover()["qwen3_moe"])
    names, kept = set(whole.state_dict()), set()
    for part in cut_model(whole, 2):
        model = copy.deepcopy(whole).to("meta")
        keep_parts(model, [part])
        own = set(model.state_dict())
        # Transformers adds others to this set.
        ignored = model._keys_to_ignore_on_load_unexpected
        assert isinstance(ignored, set)
        assert {name for name in names if any(re.search(one, name) for one in ignored)} == names - own
        assert not kept & own
        kept |= own
    assert kept == names
