"""Deterministic attention for PyTorch on NVIDIA GPUs, and tools that build and audit CUDA wheels.

Importing flash_dist needs neither torch nor a GPU: names are loaded on first use, so that
`python -m flash_dist doctor` starts on a broken install.
"""

from __future__ import annotations

import logging
import sys
from importlib import import_module
from typing import TYPE_CHECKING, Final

from .moved import MovedModules

if TYPE_CHECKING:
    from . import compat as compat
    from . import integrations as integrations
    from .attention.batched import flash_attn_func
    from .attention.conversions import refresh_mask
    from .attention.decoding.kvcache import flash_attn_with_kvcache
    from .attention.decoding.latent import flash_mla_with_kvcache
    from .attention.dropout.dropped import dropout_mask
    from .attention.flex import flex_attention
    from .attention.packed import flash_attn_varlen_func
    from .attention.sdpa import scaled_dot_product_attention
    from .attention.stacked import (
        flash_attn_kvpacked_func,
        flash_attn_qkvpacked_func,
        flash_attn_varlen_kvpacked_func,
        flash_attn_varlen_qkvpacked_func,
    )
    from .context_parallel.merge import merge_attention
    from .context_parallel.ring import ring_attention
    from .context_parallel.shards import ring_positions, ring_shard, ring_unshard
    from .integrations.torch_sdpa.replacement import sdpa
    from .kernels.choices import float32_precision, match_kvcache
    from .masks import BlockMask, IntervalMask
    from .toolkit.doctor.gpu_report import check
    from .toolkit.loading.library import last_variant

    __version__: str

__all__ = [
    "BlockMask",
    "IntervalMask",
    "__version__",
    "check",
    "dropout_mask",
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
    "flash_mla_with_kvcache",
    "flex_attention",
    "float32_precision",
    "last_variant",
    "match_kvcache",
    "merge_attention",
    "refresh_mask",
    "ring_attention",
    "ring_positions",
    "ring_shard",
    "ring_unshard",
    "scaled_dot_product_attention",
    "sdpa",
]

sys.meta_path.append(MovedModules)
logging.getLogger(__name__).addHandler(logging.NullHandler())  # the application configures logging

_MODULES: Final = {
    "BlockMask": ".masks",
    "IntervalMask": ".masks",
    "check": ".toolkit.doctor.gpu_report",
    "dropout_mask": ".attention.dropout.dropped",
    "flash_attn_func": ".attention.batched",
    "flash_attn_kvpacked_func": ".attention.stacked",
    "flash_attn_qkvpacked_func": ".attention.stacked",
    "flash_attn_varlen_func": ".attention.packed",
    "flash_attn_varlen_kvpacked_func": ".attention.stacked",
    "flash_attn_varlen_qkvpacked_func": ".attention.stacked",
    "flash_attn_with_kvcache": ".attention.decoding.kvcache",
    "flash_mla_with_kvcache": ".attention.decoding.latent",
    "flex_attention": ".attention.flex",
    "float32_precision": ".kernels.choices",
    "last_variant": ".toolkit.loading.library",
    "match_kvcache": ".kernels.choices",
    "merge_attention": ".context_parallel.merge",
    "refresh_mask": ".attention.conversions",
    "ring_attention": ".context_parallel.ring",
    "ring_positions": ".context_parallel.shards",
    "ring_shard": ".context_parallel.shards",
    "ring_unshard": ".context_parallel.shards",
    "scaled_dot_product_attention": ".attention.sdpa",
    "sdpa": ".integrations.torch_sdpa.replacement",
}

_PACKAGES: Final = ("compat", "integrations")


def __getattr__(name: str) -> object:
    if name == "__version__":
        from .toolkit.version import read_version  # noqa: PLC0415

        return read_version()
    if name in _MODULES:
        return getattr(import_module(_MODULES[name], __name__), name)
    if name in _PACKAGES:
        return import_module(f".{name}", __name__)
    # `from flash_dist import x` hides an error of a finder, but not an error raised here.
    MovedModules.find_spec(f"{__name__}.{name}")
    message = f"module `flash_dist` has no attribute `{name}`"
    raise AttributeError(message)


def __dir__() -> list[str]:
    return sorted(__all__)
