"""A random Llama of two layers, with weights large enough for attention to matter."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch
from transformers import LlamaConfig, LlamaForCausalLM

if TYPE_CHECKING:
    from pathlib import Path

LONGEST: Final = 512  # tokens of a sequence


def save_llama(folder: Path) -> Path:
    """Save the model into a folder; its weights are the same each time."""
    config = LlamaConfig(
        initializer_range=0.2,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        vocab_size=512,
        max_position_embeddings=LONGEST,
        dtype="float32",
    )
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder
