"""Tiny models of many families, with random weights that do not depend on the attention.

They are on the CPU, or on the device in FLASH_DIST_TEST_DEVICE.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Any, Final

import torch
import transformers

DEVICE: Final = torch.device(os.environ.get("FLASH_DIST_TEST_DEVICE", "cpu"))
SEED: Final = 5
VOCABULARY: Final = 64

_SIZES: Final = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}
_DECODER: Final = {**_SIZES, "num_key_value_heads": 2}
_TOWER: Final = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}


@dataclass(frozen=True)
class Family:
    """Recipe for a model of a family, and the arguments of its forward."""

    model: str
    config: str
    options: dict[str, Any] = field(default_factory=dict)
    causal: bool = True

    @property
    def model_class(self) -> Any:  # noqa: ANN401
        """The class of the model in transformers."""
        return getattr(transformers, self.model)

    def make_config(self, **more: Any) -> Any:  # noqa: ANN401
        """Return a configuration."""
        return getattr(transformers, self.config)(**{**self.options, **more})

    def make(self, attention: str, dtype: torch.dtype = torch.float32, **more: Any) -> Any:  # noqa: ANN401
        """Return a model with an attention implementation, always with the same weights."""
        config = self.make_config(**more)
        config._attn_implementation = attention
        torch.manual_seed(SEED)
        model = self.model_class._from_config(config, attn_implementation=attention)
        torch.manual_seed(SEED)
        with torch.no_grad():
            for parameter in model.parameters():  # sinks and biases may be zero or unset
                parameter.add_(0.1 * torch.randn_like(parameter))
        return model.to(DEVICE, dtype).eval()


DECODERS: Final = {
    "llama": Family("LlamaForCausalLM", "LlamaConfig", _DECODER),
    "mistral": Family("MistralForCausalLM", "MistralConfig", {**_DECODER, "sliding_window": 5}),
    "qwen3": Family("Qwen3ForCausalLM", "Qwen3Config", {**_DECODER, "head_dim": 16}),
    "gemma3": Family(
        "Gemma3ForCausalLM",
        "Gemma3TextConfig",
        {
            **_DECODER,
            "head_dim": 16,
            "sliding_window": 5,
            "layer_types": ["sliding_attention", "full_attention"],
        },
    ),
    "gemma2": Family(
        "Gemma2ForCausalLM",
        "Gemma2Config",
        {**_DECODER, "head_dim": 16, "sliding_window": 5, "attn_logit_softcapping": 2.0},
    ),
    "gpt_oss": Family(
        "GptOssForCausalLM",
        "GptOssConfig",
        {
            **_DECODER,
            "head_dim": 16,
            "sliding_window": 5,
            "layer_types": ["sliding_attention", "full_attention"],
            "num_local_experts": 2,
            "num_experts_per_tok": 1,
            "rope_scaling": None,
        },
    ),
    "phi3": Family("Phi3ForCausalLM", "Phi3Config", _DECODER),
    "deepseek_v3": Family(
        "DeepseekV3ForCausalLM",
        "DeepseekV3Config",
        {
            **_SIZES,
            "num_key_value_heads": 4,
            "moe_intermediate_size": 32,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "n_group": 2,
            "topk_group": 1,
            "first_k_dense_replace": 1,
            "q_lora_rank": 16,
            "kv_lora_rank": 16,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 16,
            "v_head_dim": 16,
        },
    ),
}
ENCODERS: Final = {
    "bert": Family("BertModel", "BertConfig", _SIZES, causal=False),
    "roberta": Family("RobertaModel", "RobertaConfig", _SIZES, causal=False),
    "modernbert": Family(
        "ModernBertModel",
        "ModernBertConfig",
        {
            **_SIZES,
            "num_hidden_layers": 4,
            "local_attention": 6,
            "cls_token_id": 1,
            "sep_token_id": 2,
        },
        causal=False,
    ),
}
ESMC: Final = Family("EsmcModel", "EsmcConfig", _SIZES, causal=False)
SIGLIP: Final = Family(
    "SiglipModel",
    "SiglipConfig",
    {
        "text_config": {**_TOWER, "vocab_size": VOCABULARY, "max_position_embeddings": 16},
        "vision_config": {**_TOWER, "image_size": 32, "patch_size": 8},
    },
    causal=False,
)
WHISPER: Final = Family(
    "WhisperForConditionalGeneration",
    "WhisperConfig",
    {
        "vocab_size": VOCABULARY,
        "d_model": 64,
        "encoder_layers": 2,
        "decoder_layers": 2,
        "encoder_attention_heads": 4,
        "decoder_attention_heads": 4,
        "encoder_ffn_dim": 96,
        "decoder_ffn_dim": 96,
        "num_mel_bins": 8,
        "max_source_positions": 20,
        "max_target_positions": 40,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": None,
        "decoder_start_token_id": 1,
        "suppress_tokens": None,
        "begin_suppress_tokens": None,
    },
)
OWN: Final = {  # models with their own attention, but transformers' masks
    "bloom": Family(
        "BloomForCausalLM",
        "BloomConfig",
        {"vocab_size": VOCABULARY, "hidden_size": 64, "n_layer": 2, "n_head": 4},
    ),
    "xglm": Family(
        "XGLMForCausalLM",
        "XGLMConfig",
        {
            "vocab_size": VOCABULARY,
            "d_model": 64,
            "ffn_dim": 96,
            "num_layers": 2,
            "attention_heads": 4,
            "max_position_embeddings": 64,
        },
    ),
}
LED: Final = Family(
    "LEDForConditionalGeneration",
    "LEDConfig",
    {
        "vocab_size": VOCABULARY,
        "d_model": 64,
        "encoder_layers": 1,
        "decoder_layers": 1,
        "encoder_attention_heads": 4,
        "decoder_attention_heads": 4,
        "encoder_ffn_dim": 96,
        "decoder_ffn_dim": 96,
        "attention_window": 4,
        "pad_token_id": 0,
        "decoder_start_token_id": 1,
    },
)
GEMMA4: Final = Family(
    "Gemma4ForCausalLM",
    "Gemma4TextConfig",
    {
        **_DECODER,
        "head_dim": 16,
        "global_head_dim": 512,
        "vocab_size_per_layer_input": VOCABULARY,
        "hidden_size_per_layer_input": 8,
        "sliding_window": 5,
        "layer_types": ["sliding_attention", "full_attention"],
    },
)
DEEPSEEK_V4: Final = Family(
    "DeepseekV4ForCausalLM",
    "DeepseekV4Config",
    {
        **_SIZES,
        "num_hidden_layers": 4,
        "head_dim": 16,
        "moe_intermediate_size": 32,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 8},
    },
)
REFUSED: Final = {
    "deepseek_v32": Family(
        "DeepseekV32ForCausalLM",
        "DeepseekV32Config",
        {
            **DECODERS["deepseek_v3"].options,
            "index_topk": 3,
            "index_n_heads": 2,
            "index_head_dim": 16,
        },
    ),
}
T5: Final = Family(
    "T5ForConditionalGeneration",
    "T5Config",
    {
        "vocab_size": VOCABULARY,
        "d_model": 64,
        "d_kv": 16,
        "d_ff": 96,
        "num_layers": 2,
        "num_heads": 4,
        "dropout_rate": 0.0,
        "pad_token_id": 0,
        "decoder_start_token_id": 0,
    },
)
