"""Tiny checkpoints with a tokenizer and a chat template, as people download them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from tests.hf.tiny_models import VOCAB_SIZE, discover, tiny_model

SPECIAL = ("<pad>", "<begin>", "<end>")
TEMPLATE = (
    "{% for m in messages %}{{ m.role[0] + ':' + m.content + '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'a:' }}{% endif %}"
)


def tokenizer(template: str | None = TEMPLATE) -> PreTrainedTokenizerFast:
    """Printable characters, one token each."""
    characters = "\n" + "".join(map(chr, range(32, 126)))
    vocabulary = {token: number for number, token in enumerate((*SPECIAL, *characters[: VOCAB_SIZE - len(SPECIAL)]))}
    plain = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    plain.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    plain.decoder = decoders.Fuse()
    made = PreTrainedTokenizerFast(tokenizer_object=plain, pad_token="<pad>", bos_token="<begin>", eos_token="<end>")
    made.chat_template = template
    return made


def save(folder: Path, architecture: str, template: str | None = TEMPLATE, **overrides: Any) -> PreTrainedModel:
    """Write a checkpoint with random weights."""
    model = tiny_model(discover()[architecture], **overrides)
    model.save_pretrained(folder)
    tokenizer(template).save_pretrained(folder)
    return model.eval()


def greedy(model: PreTrainedModel, prompt: list[int], count: int, end: int | None = 2) -> list[int]:
    """What Transformers makes of one prompt, up to the end."""
    ids = torch.tensor([prompt])
    out = model.generate(ids, do_sample=False, max_new_tokens=count, eos_token_id=end, pad_token_id=0, use_cache=True)
    new = out[0, len(prompt) :].tolist()
    return new[: new.index(end)] if end in new else new
