"""Writes a tiny Qwen3-MoE with random weights, a tokenizer and a chat template, to try fine-tuning without a download.

python examples/tiny_chat_model.py tiny
"""

import json
import sys
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen3MoeConfig, Qwen3MoeForCausalLM

CONVERSATIONS = Path(__file__).with_name("conversations.jsonl")
END, BEGIN, PAD = "<|im_end|>", "<|im_start|>", "<|endoftext|>"
# As Qwen's, with tools, and without thinking.
TEMPLATE = """\
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
    {{- '# Tools\\n<tools>' }}
    {%- for tool in tools %}{{- '\\n' }}{{- tool | tojson }}{%- endfor %}
    {{- '\\n</tools><|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'tool' %}
        {{- '<|im_start|>user\\n<tool_response>\\n' + message.content + '\\n</tool_response><|im_end|>\\n' }}
    {%- elif message.role in ('user', 'assistant') %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content }}
        {%- for call in message.tool_calls %}
            {{- '<tool_call>\\n' }}{{- call.function | tojson }}{{- '\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role != 'system' or not loop.first %}
        {{- raise_exception('unexpected role ' + message.role) }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""


def make_tokenizer(template: str | None = TEMPLATE) -> PreTrainedTokenizerFast:
    """A byte-level BPE of 512 tokens, learned from the conversations."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=512, special_tokens=[PAD, BEGIN, END], initial_alphabet=alphabet, show_progress=False
    )
    rows = map(json.loads, CONVERSATIONS.read_text(encoding="utf-8").splitlines())
    tokenizer.train_from_iterator([message["content"] for row in rows for message in row["messages"]], trainer)
    pretrained = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END, pad_token=PAD)
    pretrained.chat_template = template
    return pretrained


def write(folder: str | Path, **changes: object) -> None:
    """Writes the checkpoint. 2 layers, 8 experts, 2 of them per token; `changes` are of the configuration."""
    tokenizer = make_tokenizer()
    settings = {
        "vocab_size": len(tokenizer), "hidden_size": 64, "intermediate_size": 64, "moe_intermediate_size": 32,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "num_experts": 8,
        "num_experts_per_tok": 2, "norm_topk_prob": True, "max_position_embeddings": 1024,
        "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id, "bos_token_id": None,
    }  # fmt: skip
    torch.manual_seed(0)
    Qwen3MoeForCausalLM(Qwen3MoeConfig(**(settings | changes))).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    write(sys.argv[1])
