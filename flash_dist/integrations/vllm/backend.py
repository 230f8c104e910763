"""The vLLM backend: its limits, the description of a batch, and the attention of a layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Final

import torch
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionImpl,
    AttentionMetadataBuilder,
    AttentionType,
    MultipleOf,
)

from ...attention.support import DTYPE_NAMES
from ...compat.vllm_flash_attn import flash_attn_varlen_func
from ...toolkit.targets.axes import AXES
from ...toolkit.targets.devices import Device
from . import NAME

if TYPE_CHECKING:
    from vllm.platforms.interface import DeviceCapability
    from vllm.v1.attention.backend import CommonAttentionMetadata

Tensor = torch.Tensor

_PAGE: Final = 16  # page sizes must be multiples of this many keys
_LONGEST_HEAD: Final = 512
_ENCODERS: Final = (AttentionType.ENCODER, AttentionType.ENCODER_ONLY)


class FlashDistBackend(AttentionBackend):
    """The name, limits and classes that vLLM reads to choose and to use a backend."""

    forward_includes_kv_cache_update = False
    supported_dtypes: ClassVar = [torch.float16, torch.bfloat16, torch.float32]
    supported_kv_cache_dtypes: ClassVar = ["auto", "float16", "bfloat16"]

    @staticmethod
    def get_name() -> str:
        """Return the name of the backend."""
        return NAME

    @staticmethod
    def get_impl_cls() -> type[FlashDistImpl]:
        """Return the class of a layer's attention."""
        return FlashDistImpl

    @staticmethod
    def get_builder_cls() -> type[FlashDistMetadataBuilder]:
        """Return the class that describes a batch."""
        return FlashDistMetadataBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(
        kv_cache_spec: object = None,  # noqa: ARG004 - the same for all caches
    ) -> list[int | MultipleOf]:
        """Return the supported page sizes."""
        return [MultipleOf(_PAGE)]

    @classmethod
    def supports_head_size(cls, head_size: int) -> bool:
        """Return whether there are kernels for a head_dim."""
        return head_size % 8 == 0 and head_size <= _LONGEST_HEAD

    @classmethod
    def supports_attn_type(cls, attn_type: str) -> bool:
        """Return whether a type is supported: attention of decoders, self-attention of encoders."""
        return attn_type in (AttentionType.DECODER, *_ENCODERS)

    @classmethod
    def supports_sink(cls) -> bool:
        """Return True: each head may have a sink."""
        return True

    @classmethod
    def supports_sliding_window(cls) -> bool:
        """Return True."""
        return True

    @classmethod
    def supports_non_causal(cls) -> bool:
        """Return True."""
        return True

    @classmethod
    def supports_batch_invariance(cls) -> bool:
        """Return True: the order of summation does not depend on other sequences."""
        return True

    @classmethod
    def supports_compute_capability(cls, capability: DeviceCapability) -> bool:
        """Return whether there are kernels for a compute capability, with at least one dtype."""
        return _device_of(capability) >= min(word.floor for word in AXES.words.values())

    @classmethod
    def supports_combination(  # noqa: PLR0913, PLR0917 - vLLM's signature
        cls,
        head_size: int,  # noqa: ARG003
        dtype: torch.dtype,
        kv_cache_dtype: str | None,  # noqa: ARG003
        block_size: int | None,  # noqa: ARG003
        use_mla: bool,  # noqa: ARG003, FBT001
        has_sink: bool,  # noqa: ARG003, FBT001
        use_sparse: bool,  # noqa: ARG003, FBT001
        use_mm_prefix: bool,  # noqa: ARG003, FBT001
        device_capability: DeviceCapability,
    ) -> str | None:
        """Return why a dtype is unsupported on a GPU; None if it is supported."""
        if not cls.supports_dtype(dtype):  # vLLM itself reports such a dtype
            return None
        floor = AXES.words[DTYPE_NAMES[dtype]].floor
        if _device_of(device_capability) >= floor:
            return None
        return f"{str(dtype).removeprefix('torch.')} needs compute capability {floor} or newer"


def _device_of(capability: DeviceCapability) -> Device:
    return Device(capability.major, capability.minor)


@dataclass
class FlashDistMetadata:
    """A batch of packed queries, and where the keys of each sequence are."""

    num_actual_tokens: int
    max_query_len: int
    query_start_loc: Tensor  # [batch + 1], cu_seqlens of the queries
    max_seq_len: int
    seq_lens: Tensor  # [batch], number of keys
    block_table: Tensor  # [batch, pages]
    slot_mapping: Tensor  # [num_actual_tokens], cache slot of each new key
    causal: bool


class FlashDistMetadataBuilder(AttentionMetadataBuilder[FlashDistMetadata]):
    """Describes a batch once for all layers."""

    _cudagraph_support: ClassVar = AttentionCGSupport.UNIFORM_BATCH

    def __init__(self, *arguments: Any) -> None:  # noqa: ANN401 - vLLM's signature
        super().__init__(*arguments)

    def build(
        self,
        common_prefix_len: int,  # noqa: ARG002 - always 0
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,  # noqa: ARG002, FBT001, FBT002 - nothing is scheduled ahead
    ) -> FlashDistMetadata:
        """Return the description of a batch."""
        common = common_attn_metadata
        if not isinstance(common.causal, bool):
            message = (
                f"causal must be a bool for the whole batch, got {type(common.causal).__name__}"
            )
            raise NotImplementedError(message)
        return FlashDistMetadata(
            common.num_actual_tokens,
            common.max_query_len,
            common.query_start_loc,
            common.max_seq_len,
            common.seq_lens,
            common.block_table_tensor,
            common.slot_mapping,
            common.causal,
        )


class FlashDistImpl(AttentionImpl[FlashDistMetadata]):
    """The attention of one layer."""

    def __init__(  # noqa: PLR0913, PLR0917 - vLLM's signature
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int,
        alibi_slopes: list[float] | None,
        sliding_window: int | None,
        kv_cache_dtype: str,
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        sinks: Tensor | None = None,
    ) -> None:
        if not FlashDistBackend.supports_kv_cache_dtype(kv_cache_dtype):
            allowed = ", ".join(FlashDistBackend.supported_kv_cache_dtypes)
            message = f"kv_cache_dtype must be one of {allowed}, got {kv_cache_dtype}"
            raise NotImplementedError(message)
        if not FlashDistBackend.supports_attn_type(attn_type):
            message = f"attn_type must be decoder, encoder or encoder_only, got {attn_type}"
            raise NotImplementedError(message)
        self.num_heads = num_heads
        self.head_size = head_size
        self.scale = float(scale)
        self.num_kv_heads = num_kv_heads
        self.num_queries_per_kv = num_heads // num_kv_heads
        self.kv_cache_dtype = kv_cache_dtype
        self.kv_sharing_target_layer_name = kv_sharing_target_layer_name
        self.attn_type = attn_type
        self.softcap = logits_soft_cap or 0.0
        self.alibi_slopes: Tensor | None = None
        if alibi_slopes is not None:  # the first call moves it to the GPU
            self.alibi_slopes = torch.tensor(alibi_slopes, dtype=torch.float32, device="cpu")
        self.sinks = sinks
        self.left = -1 if sliding_window is None else sliding_window - 1

    def forward(  # noqa: PLR0913, PLR0917 - vLLM's signature
        self,
        layer: torch.nn.Module,  # noqa: ARG002 - only for scales of 8-bit floats
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: FlashDistMetadata | None,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        """Fill `output` with the result, except for rows from num_actual_tokens on, and return it.

        Args:
            layer: The attention layer.
            query: [num_tokens, num_heads, head_size].
            key: [num_tokens, num_kv_heads, head_size]; read by encoders only. Decoders read the
                cache.
            value: Likewise.
            kv_cache: [num_pages, num_kv_heads, page_size, 2 * head_size], in any memory layout.
            attn_metadata: The batch. While vLLM measures the memory of a step it is None, and
                output is filled with 0.
            output: [num_tokens, num_heads, head_size].
            output_scale: Must be None.
            output_block_scale: Must be None.

        Raises:
            NotImplementedError: A scale of the output is given.
        """
        if output_scale is not None or output_block_scale is not None:
            message = "output_scale and output_block_scale must be None: out has the dtype of query"
            raise NotImplementedError(message)
        if attn_metadata is None:
            return output.fill_(0)
        batch, tokens = attn_metadata, attn_metadata.num_actual_tokens
        causal = batch.causal and self.attn_type not in _ENCODERS
        options: dict[str, Any] = {
            "softmax_scale": self.scale,
            "window_size": (self.left, 0 if causal else self.left),
            "softcap": self.softcap,
            "causal": causal,
            "alibi_slopes": self._slopes_on(query.device),
            "s_aux": self.sinks,
            "out": output[:tokens],
        }
        q, longest, ends = query[:tokens], batch.max_query_len, batch.query_start_loc
        if self.attn_type in _ENCODERS:
            k, v = key[:tokens], value[:tokens]
            flash_attn_varlen_func(q, k, v, longest, ends, longest, ends, **options)
        else:
            k, v = self._split(kv_cache)
            options |= {"seqused_k": batch.seq_lens, "block_table": batch.block_table}
            flash_attn_varlen_func(q, k, v, longest, ends, batch.max_seq_len, **options)
        return output

    def do_kv_cache_update(
        self,
        layer: torch.nn.Module,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        slot_mapping: Tensor,
    ) -> None:
        """Write new keys and values into the cache; tokens with a negative slot are skipped."""
        if self.attn_type in _ENCODERS:
            return
        keys, values = self._split(kv_cache)
        if kv_cache.is_cuda:
            from vllm.v1.attention.backends.fa_utils import (  # noqa: PLC0415 - missing on a CPU
                reshape_and_cache_flash,
            )

            reshape_and_cache_flash(
                key,
                value,
                keys,
                values,
                slot_mapping,
                self.kv_cache_dtype,
                layer._k_scale,  # noqa: SLF001 - vLLM's backends read it
                layer._v_scale,  # noqa: SLF001
            )
            return
        tokens = (slot_mapping >= 0).nonzero().squeeze(1)
        slots = slot_mapping[tokens]
        page, place = slots // keys.shape[1], slots % keys.shape[1]
        keys[page, place] = key[tokens]
        values[page, place] = value[tokens]

    def _split(self, kv_cache: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys and values as [num_pages, page_size, num_kv_heads, head_size]."""
        keys, values = kv_cache.transpose(1, 2).split(self.head_size, dim=-1)
        return keys, values

    def _slopes_on(self, device: torch.device) -> Tensor | None:
        if self.alibi_slopes is not None and self.alibi_slopes.device != device:
            self.alibi_slopes = self.alibi_slopes.to(device)
        return self.alibi_slopes
