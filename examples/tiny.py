"""A small Llama for the examples of trainers, which is not downloaded."""

from transformers import LlamaConfig, LlamaForCausalLM

EOS, PAD = 256, 257
"""Tokens beside the 256 bytes."""


def llama(vocab_size: int = 258) -> LlamaForCausalLM:
    """A Llama of 100,000 parameters."""
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}
    tokens = {"bos_token_id": None, "eos_token_id": EOS, "pad_token_id": PAD}
    return LlamaForCausalLM(LlamaConfig(vocab_size=vocab_size, max_position_embeddings=128, **sizes, **tokens))
