"""The SGLang backend: describes each batch, and computes the attention of each layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, cast

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.radix_attention import AttentionType
from sglang.srt.mem_cache.layout.paged_view import paged_kv_view
from sglang.srt.mem_cache.memory_pool import KVWriteLoc
from sglang.srt.model_executor.forward_batch_info import ForwardMode

from ...compat.vllm_flash_attn import flash_attn_varlen_func
from .limits import check_layer, check_mode, check_runner

if TYPE_CHECKING:
    from sglang.srt.layers.radix_attention import RadixAttention
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch
    from sglang.srt.model_executor.model_runner import ModelRunner

Tensor = torch.Tensor

_DECODING: Final = (ForwardMode.DECODE, ForwardMode.IDLE)
_CHUNKS: Final = (ForwardMode.EXTEND, ForwardMode.MIXED, ForwardMode.SPLIT_PREFILL)


@dataclass
class FlashDistMetadata:
    """A batch of packed queries, and where the keys of each sequence are."""

    cu_seqlens_q: Tensor  # [batch + 1], int32
    max_seqlen_q: int
    seq_lens: Tensor  # [batch], int32: number of keys, including new ones
    block_table: Tensor  # [batch, pages], int32


class FlashDistBackend(AttentionBackend):
    """The attention of all layers of a model."""

    needs_cpu_seq_lens = False
    forward_metadata: FlashDistMetadata
    _static: FlashDistMetadata  # the tensors that CUDA graphs read

    def __init__(self, model_runner: ModelRunner) -> None:
        super().__init__()
        check_runner(model_runner)
        self.page_size: int = model_runner.page_size
        self.token_to_kv_pool = model_runner.token_to_kv_pool
        # [requests, pages]: the cache slot of the first token of each page
        self._slots: Tensor = model_runner.req_to_token_pool.req_to_token[:, :: self.page_size]
        self._longest: int = model_runner.model_config.context_len

    def init_forward_metadata(self, forward_batch: ForwardBatch) -> None:
        """Describe a batch once for all layers.

        Raises:
            NotImplementedError: The batch belongs to speculative decoding or to a diffusion model.
        """
        check_mode(forward_batch.forward_mode, (*_DECODING, *_CHUNKS))
        lengths = forward_batch.seq_lens.to(torch.int32)
        if forward_batch.forward_mode in _DECODING:
            ends, longest = _count(len(lengths), lengths.device), 1
        else:
            new = forward_batch.extend_seq_lens.cumsum(0, dtype=torch.int32)
            ends = torch.nn.functional.pad(new, (1, 0))
            longest = int(max(forward_batch.extend_seq_lens_cpu))
        table = self._slots[forward_batch.req_pool_indices] // self.page_size
        self.forward_metadata = FlashDistMetadata(ends, longest, lengths, table)

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:  # noqa: ARG002
        """Allocate the batch description that all CUDA graphs read."""
        table = self._slots.new_zeros(max_bs, self._slots.shape[1])  # int32, like all tensors here
        self._static = FlashDistMetadata(
            _count(max_bs, table.device), 1, table.new_ones(max_bs), table
        )

    def init_forward_metadata_out_graph(
        self,
        forward_batch: ForwardBatch,
        in_capture: bool = False,  # noqa: ARG002, FBT001, FBT002 - SGLang's signature
    ) -> None:
        """Select the part of the allocated description that a decoding graph reads.

        Raises:
            NotImplementedError: The graph is not for decoding.
        """
        check_mode(forward_batch.forward_mode, _DECODING)
        n, whole = forward_batch.batch_size, self._static
        self.forward_metadata = FlashDistMetadata(
            whole.cu_seqlens_q[: n + 1], 1, whole.seq_lens[:n], whole.block_table[:n]
        )

    def init_forward_metadata_in_graph(self, forward_batch: ForwardBatch) -> None:
        """Fill the selected description; the graph records this work."""
        batch, n = self.forward_metadata, forward_batch.batch_size
        batch.seq_lens.copy_(forward_batch.seq_lens[:n])
        indices = forward_batch.req_pool_indices[:n]
        torch.index_select(self._slots, 0, indices, out=batch.block_table)
        batch.block_table.floor_divide_(self.page_size)

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        """Return the number of keys of each sequence that pads the batch of a CUDA graph."""
        return 1

    def forward_extend(  # noqa: PLR0913, PLR0917 - SGLang's signature
        self,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        layer: RadixAttention,
        forward_batch: ForwardBatch,
        save_kv_cache: bool = True,  # noqa: FBT001, FBT002
        sinks: Tensor | None = None,
        **others: object,
    ) -> Tensor:
        """Write new keys and values into the cache, and attend to the cache.

        Args:
            q: [tokens, num_heads_q * head_dim].
            k: [tokens, num_heads_kv, head_dim], new keys; None if the cache already has them.
            v: Likewise, with head_dim_v.
            layer: The layer of the model.
            forward_batch: The batch that `forward_metadata` describes.
            save_kv_cache: False if the cache already has the new keys and values.
            sinks: [num_heads_q], for models with sinks.
            others: Arguments of other backends, which must be None or False.

        Returns:
            [tokens, num_heads_q * head_dim_v]; rows after the last token of the batch are 0.

        Raises:
            NotImplementedError: The layer, or an argument of another backend, is not supported.
        """
        check_layer(layer, others)
        if save_kv_cache and k is not None:
            where = KVWriteLoc.for_batch(forward_batch)
            self.token_to_kv_pool.set_kv_buffer(layer, where, k, v)
        keys, values = self.token_to_kv_pool.get_kv_buffer(layer.layer_id)
        causal = layer.attn_type is not AttentionType.ENCODER_ONLY
        left, batch = layer.sliding_window_size, self.forward_metadata
        out = flash_attn_varlen_func(
            q.reshape(-1, layer.tp_q_head_num, layer.qk_head_dim),
            paged_kv_view(keys, self.page_size, layer.tp_k_head_num, layer.qk_head_dim),
            paged_kv_view(values, self.page_size, layer.tp_v_head_num, layer.v_head_dim),
            batch.max_seqlen_q,
            batch.cu_seqlens_q,
            self._longest,
            seqused_k=batch.seq_lens,
            block_table=batch.block_table,
            softmax_scale=layer.scaling,
            causal=causal,
            window_size=(left, 0 if causal else left),
            softcap=layer.logit_cap or 0.0,
            s_aux=sinks,
        )
        return cast("Tensor", out).flatten(1)

    forward_decode = forward_extend


def _count(batch: int, device: torch.device) -> Tensor:
    """Return cu_seqlens_q for a batch with one query per sequence."""
    return torch.arange(batch + 1, dtype=torch.int32, device=device)
