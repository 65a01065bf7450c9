"""A small Llama, its tokenizer and texts for the examples of trainers; nothing is downloaded."""

from data import standard_library_text
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

EOS, PAD = 256, 257
"""Tokens beside the 256 bytes."""


def llama(vocab_size: int = 258) -> LlamaForCausalLM:
    """A Llama of 100,000 parameters."""
    sizes = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
    }
    tokens = {"bos_token_id": None, "eos_token_id": EOS, "pad_token_id": PAD}
    return LlamaForCausalLM(
        LlamaConfig(vocab_size=vocab_size, max_position_embeddings=128, **sizes, **tokens)
    )


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer with one token a byte, and `EOS` and `PAD`."""
    symbols = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "<eos>", "<pad>"]
    tokenizer = Tokenizer(
        models.BPE(vocab={symbol: index for index, symbol in enumerate(symbols)}, merges=[])
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<pad>")


def texts(count: int, length: int) -> list[str]:
    """Pieces of the standard library's sources, of `length` bytes each."""
    source = standard_library_text().train[: count * length].reshape(count, length)
    return [bytes(piece.tolist()).decode(errors="replace") for piece in source]
