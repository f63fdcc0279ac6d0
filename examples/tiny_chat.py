"""A tiny OLMoE with random weights, a tokenizer and a chat template, so that the examples download nothing."""

import tempfile

import torch
import torch.distributed as dist
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import OlmoeConfig, OlmoeForCausalLM, PreTrainedTokenizerFast

TEMPLATE = (
    "{% for m in messages %}<begin>{{ m['role'] + '\\n' + m['content'] }}<end>\n{% endfor %}"
    "{% if add_generation_prompt %}<begin>assistant\n{% endif %}"
)


def write_tiny_chat() -> str:
    """Writes the checkpoint on rank 0; every rank gets its folder. A token is a character."""
    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(folder)
    if dist.get_rank() == 0:
        special = ["<pad>", "<begin>", "<end>"]
        vocabulary = {token: number for number, token in enumerate([*special, "\n", *map(chr, range(32, 127))])}
        plain = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
        plain.pre_tokenizer, plain.decoder = pre_tokenizers.Split("", "isolated"), decoders.Fuse()
        tokenizer = PreTrainedTokenizerFast(
            tokenizer_object=plain, pad_token="<pad>", bos_token="<begin>", eos_token="<end>"
        )
        tokenizer.chat_template = TEMPLATE
        tokenizer.save_pretrained(folder[0])
        config = OlmoeConfig(
            vocab_size=128, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=4, num_experts=8, num_experts_per_tok=2, max_position_embeddings=128, pad_token_id=0,
            bos_token_id=1, eos_token_id=2,
        )  # fmt: skip
        torch.manual_seed(0)
        OlmoeForCausalLM(config).save_pretrained(folder[0])
    dist.barrier()
    return folder[0]
