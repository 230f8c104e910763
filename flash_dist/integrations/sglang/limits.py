"""Limits of the SGLang backend: which models, servers, batches and layers it refuses."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from sglang.srt.layers.radix_attention import AttentionType
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
from sglang.srt.runtime_context import get_parallel

from ...toolkit.errors import show

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    import torch
    from sglang.srt.layers.radix_attention import RadixAttention
    from sglang.srt.model_executor.forward_batch_info import ForwardMode
    from sglang.srt.model_executor.model_runner import ModelRunner

_PAGE: Final = 16  # page sizes must be multiples of this many keys
_LAYER: Final = {
    "attn_type": (AttentionType.DECODER, AttentionType.ENCODER_ONLY),
    "is_cross_attention": (False,),
    "logit_capping_method": ("tanh",),
    "pos_encoding_mode": ("NONE",),
    "use_irope": (False,),
    "xai_temperature_len": (-1,),
}


def check_runner(runner: ModelRunner) -> None:
    """Raise for a model or a server that is not supported.

    Raises:
        NotImplementedError: The message says what is unsupported, and which server option helps.
    """
    parallel = get_parallel()
    ranks = {name: getattr(parallel, name) for name in ("attn_cp_size", "attn_dcp_size")}
    pool, wanted, dtype = runner.token_to_kv_pool, runner.dtype, runner.kv_cache_dtype
    if runner.use_mla_backend:
        message = "the attention of the model must not be latent (MLA)"
    elif runner.model_config.is_encoder_decoder:
        message = "the model must have no cross attention, got an encoder and a decoder"
    elif runner.spec_algorithm.is_speculative():
        message = f"speculative_algorithm must be None, got {runner.spec_algorithm.name}"
    elif set(ranks.values()) != {1}:
        message = f"{' and '.join(ranks)} must be 1, got {' and '.join(map(str, ranks.values()))}"
    elif runner.page_size % _PAGE:
        message = f"page_size must be a multiple of {_PAGE}, got {runner.page_size}"
        message += "\n\nhint: start the server with `--page-size 64`"
    elif dtype != wanted:
        message = f"kv_cache_dtype must be the model's {_name(wanted)}, got {_name(dtype)}"
        message += "\n\nhint: start the server without `--kv-cache-dtype`"
    elif type(pool) is not MHATokenToKVPool:
        message = f"the KV cache must be an MHATokenToKVPool, got {type(pool).__name__}"
        message += "\n\nhint: `--disable-hybrid-swa-memory` makes one for models with windows"
    else:
        return
    raise NotImplementedError(message)


def check_mode(mode: ForwardMode, allowed: Sequence[ForwardMode]) -> None:
    """Raise if a batch, or its CUDA graph, is not supported.

    Raises:
        NotImplementedError: The message says which batches are supported.
    """
    if mode not in allowed:
        message = f"forward_mode must be {_either(one.name for one in allowed)}, got {mode.name}"
        raise NotImplementedError(message)


def check_layer(layer: RadixAttention, others: Mapping[str, object]) -> None:
    """Raise if a layer is not supported, or if an argument that other backends take is set.

    Raises:
        NotImplementedError: The message says what is supported.
    """
    for name, allowed in _LAYER.items():
        if (value := getattr(layer, name)) not in allowed:
            names = _either(map(str, allowed))
            message = f"{name} must be {names}, got {value} in layer {layer.layer_id}"
            raise NotImplementedError(message)
    for name, value in others.items():
        if value is not None and value is not False:
            message = f"{name} must be None, got {show(value)} in layer {layer.layer_id}"
            raise NotImplementedError(message)


def _either(names: Iterable[str]) -> str:
    return " or ".join(names)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
