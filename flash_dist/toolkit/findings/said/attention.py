"""Entries that explain messages about attention, from torch and from attention packages.

Sources: the checks in flash-attention (2, 3 and its CuTe kernels), SageAttention, xformers, vLLM,
FlashInfer and torch's scaled_dot_product_attention.
"""

from __future__ import annotations

from typing import Final

from ...product import PROGRAM
from ..entry import Entry

FLASH_ATTENTION_GPU: Final = Entry(
    "flash-attention has no kernels for this GPU",
    "flash-attention 2 needs Ampere (8.0) or newer. It refuses Turing and Volta, and versions "
    "from before Blackwell refuse 12.0 with the same message. flash-attention 3 needs Hopper "
    "(9.0).",
    'Use torch\'s own attention (`attn_implementation="sdpa"` in transformers) on that GPU, or a '
    f"newer flash-attention. This package supports Turing (7.5) and newer: `{PROGRAM} "
    "select --gpu 7.5` names the build.",
    messages=(
        "FlashAttention only supports Ampere GPUs or newer",
        "FlashAttention only supports Hopper GPUs or newer",
        "FlashAttentionHopper only supports Hopper GPUs or newer",
        "FlashAttention-3 only supports Hopper GPUs or newer",
    ),
)

KERNEL_NOT_BUILT: Final = Entry(
    "SageAttention was built without the kernels for this GPU",
    "Its setup compiles for the visible GPUs, or for TORCH_CUDA_ARCH_LIST, and files of an older "
    "build stay in the package. SageAttention itself may support the GPU.",
    "Uninstall it until pip finds none, then install a wheel for this GPU and torch, or build it "
    "on this machine without TORCH_CUDA_ARCH_LIST.",
    messages=("SM{target} kernel is not available. Make sure you GPUs with compute capability",),
)

SDPA_NO_KERNEL: Final = Entry(
    "No allowed attention kernel of torch supports this call",
    "`sdpa_kernel` limits scaled_dot_product_attention to some backends, and none of them "
    "supports the dtype, head_dim, mask or GPU of this call. torch prints the reasons as warnings "
    "right before.",
    "Read those warnings, or allow `SDPBackend.MATH`, which supports every call. Flash attention "
    "needs float16 or bfloat16, four dimensions, and no arbitrary mask.",
    messages=("No available kernel. Aborting execution",),
)

XFORMERS_NO_OPERATOR: Final = Entry(
    "No kernel of xformers supports this call",
    "The lines below the message say for each kernel why not: the GPU is too old or too new for "
    "it, the dtype or mask is not supported, or the kernel was not built (`operator wasn't "
    "built`).",
    "For `operator wasn't built` install the xformers that belongs to this torch. For a GPU that "
    "is too new, install a newer xformers or use torch's scaled_dot_product_attention.",
    messages=("No operator found for `{operator}` with inputs",),
)

FLEX_MASK_DEVICE: Final = Entry(
    "A mask is on another GPU than the queries",
    "With layers spread over several GPUs, a BlockMask or a tensor that its mask_mod reads was "
    "made on the first one and is used on the second. An older torch fails while compiling, "
    "a newer one names the two devices.",
    "Make one mask for each GPU, with tensors of that GPU: `block_mask.to(device)`. A BlockMask "
    "of this package is planned on the host and works on all of them.",
    messages=(
        "Expect q/k/v and block_mask to be on the same device",
        "'MultiOutput' object has no attribute 'inner_fn' target: flex_attention",
    ),
)

FLASH_ATTENTION_DTYPE: Final = Entry(
    "flash-attention supports only float16 and bfloat16",
    "The tensors are float32: the model was loaded without a dtype, or a norm, rotary embedding "
    "or adapter converted them.",
    "Load the model with `dtype=torch.bfloat16` (older transformers: `torch_dtype`), or call it "
    'under `torch.autocast("cuda", dtype=torch.bfloat16)`. `flash_attn_func` of this package '
    "accepts float32, too.",
    messages=(
        "FlashAttention only support fp16 and bf16 data type",
        "FlashAttention only supports fp16 and bf16 data type",
        "FlashAttention only support fp16, bf16",
        "Flash Attention only supports fp16 and bf16 data type",
    ),
)

FLASH_ATTENTION_HEAD_DIM: Final = Entry(
    "flash-attention has no kernel for this head_dim on this GPU",
    "Its kernels support head_dim up to 256. Older versions have a backward above 192 only for "
    "A100 and H100, which have more shared memory than GeForce cards.",
    'Use torch\'s own attention (`attn_implementation="sdpa"`), which supports every head_dim, or '
    "for the backward above 192 flash-attn 2.5.5 or newer without dropout. This package supports "
    "head_dim up to 512 from 8.0 on and up to 256 on 7.5, with a backward.",
    messages=(
        "head dimension at most 256",
        "head dimension at most {most}",
        "FlashAttention backward for head dim > {limit} requires",
        "FlashAttention backward for head dim 256 with dropout",
    ),
)

FLASH_ATTENTION_FP8: Final = Entry(
    "FlashAttention 4 supports FP8 only on compute capability 10.x",
    "Its CuTe kernels have FP8 for datacenter Blackwell (B200, B300) and for no other GPU; on "
    "Hopper FlashAttention 3 has it.",
    "Use bfloat16 on this GPU, or FlashAttention 3 (package flash_attn_3) on 9.0.",
    messages=(
        "FP8 is only supported on SM100 (compute capability 10.x)",
        "AssertionError: FP8 is only supported on SM100",
        "FA4 CuTe FP8 backward is not supported",
    ),
)

ATTENTION_DEVICE: Final = Entry(
    "An argument of the attention call is on the CPU",
    "Kernels read GPU memory. The tensor that the message names, often cu_seqlens from a "
    "tokenizer or collator, was never moved there.",
    '`x = x.to(q.device)` before the call; for a whole batch `batch.to("cuda")`.',
    messages=("{tensor} must be on CUDA", "Input tensor must be on CUDA"),
    said="{tensor} is on the CPU, but the kernel reads GPU memory",
)

ATTENTION_CONTIGUOUS: Final = Entry(
    "The values of a head are not contiguous",
    "flash-attention reads rows of head_dim values with a stride of 1. A transpose or a slice "
    "with steps changed that.",
    "Call `.contiguous()` on q, k and v right before. For dout use `out = out.contiguous()` after "
    "the call.",
    messages=(
        "Input tensor must have contiguous last dimension",
        "Q,K,V last dim must be contiguous",
        "must have contiguous last dimension",
    ),
)

CU_SEQLENS_DTYPE: Final = Entry(
    "Boundaries of packed sequences must be int32",
    "`torch.cumsum` gives int64, whatever its input was. flash-attention reads cu_seqlens as "
    "32-bit integers.",
    "`torch.cumsum(lengths, 0, dtype=torch.int32)`, or `cu_seqlens.to(torch.int32)`.",
    messages=("{tensor} must have dtype int32", "{tensor} must have dtype torch.int32"),
    said="{tensor} must be int32",
)

ATTENTION_SHAPES: Final = Entry(
    "The shapes of q, k and v do not match",
    "flash-attention expects [batch, seqlen, heads, head_dim]; torch's own attention has heads "
    "before seqlen. The number of heads of q must be a multiple of that of k and v, and batches "
    "must be equal.",
    "Print the three shapes before the call. Tensors for torch's attention need `.transpose(1, "
    "2)`; with tensor parallelism divide both numbers of heads by its size.",
    messages=(
        "batch_size must be equal to batch_size_k",
        "Number of heads in key/value must divide number of heads in query",
        "batch size must be positive",
    ),
)

ATTN_BIAS_ALIGNED: Final = Entry(
    "Rows of the mask do not begin at multiples that the kernel reads",
    "The memory-efficient kernel of torch and xformers reads a bias in vectors: each row must "
    "begin at a multiple of 8 values (16 bits) or 4 (32 bits), but seqlen_k is not such a "
    "multiple.",
    "Make the mask wider and cut it: `torch.empty(b, h, sq, (sk + 7) // 8 * 8, dtype=q.dtype, "
    "device=q.device)[..., :sk]`. Newer torch does this itself.",
    messages=("attn_bias is not correctly aligned",),
)

CAPTURE_LENGTHS: Final = Entry(
    "FlashInfer needs lengths on the CPU while a CUDA graph is captured",
    "Its prefill plans with the lengths of the sequences. A capture forbids copying them from the "
    "GPU.",
    "Pass `q_seq_lens_cpu` and `kv_seq_lens_cpu`, or upgrade FlashInfer, or capture only the "
    "decoding.",
    messages=("q_seq_lens_cpu and kv_seq_lens_cpu must be provided",),
)

VLLM_BATCH_INVARIANT: Final = Entry(
    "vLLM's batch-invariant mode needs a named attention backend",
    "VLLM_BATCH_INVARIANT=1 is checked before vLLM chooses its backend, so `None` is refused, as "
    "is each backend that the message does not list.",
    "Name one of the list: `--attention-backend FLASH_ATTN`, from Python "
    '`LLM(..., attention_backend="FLASH_ATTN")`; older versions read '
    "VLLM_ATTENTION_BACKEND=FLASH_ATTN.",
    messages=("batch_invariant mode requires an attention backend in",),
)

SAGE_ATTENTION_GPU: Final = Entry(
    "SageAttention 2 has no kernels for this GPU",
    "Its kernels need Ampere (8.0) or newer. It refuses GeForce RTX 20, T4 and Quadro RTX (sm75), "
    "and GPUs newer than the package.",
    "On 7.5 `pip install sageattention==1.0.6`, whose kernels are written in Triton, or use "
    "torch's own attention. For a newer GPU install a newer SageAttention.",
    messages=("Unsupported CUDA architecture: {target}",),
    said="SageAttention has no kernels for this GPU, which is {target}",
)
