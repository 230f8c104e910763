"""vLLM's engine, on a CPU, with our attention in the place of its own."""

from __future__ import annotations

import logging
import os
from dataclasses import replace
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
import torch

pytest.importorskip("vllm", reason="`nox -s integrations -- vllm` installs it")

from transformers import LlamaForCausalLM
from vllm import LLM, SamplingParams
from vllm.platforms.interface import DeviceCapability
from vllm.plugins import DEFAULT_PLUGINS_GROUP
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

from flash_dist import flash_attn_func
from flash_dist.integrations.vllm import NAME, backend, register
from tests.integrations.random_llama import LONGEST, save_llama

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

HEADS, HEADS_KV, HEAD_DIM, PAGE, PAGES = 8, 2, 64, 16, 12
LENGTHS, USED = [1, 9, 4], [50, 30, 4]  # queries and keys per sequence
TOKENS = 24
CONFIG = {
    "head_size": HEAD_DIM,
    "dtype": torch.bfloat16,
    "kv_cache_dtype": "auto",
    "block_size": 16,
    "use_mla": False,
    "has_sink": True,
    "use_sparse": False,
    "use_mm_prefix": False,
    "use_per_head_quant_scales": False,
    "device_capability": DeviceCapability(9, 0),
    "attn_type": "decoder",
    "has_sliding_window": True,
    "use_batch_invariant": True,
}


def test_vllm_finds_the_backend_by_its_name() -> None:
    (plugin,) = entry_points(group=DEFAULT_PLUGINS_GROUP, name="flash_dist")
    assert plugin.load() is register
    register()
    register()
    assert AttentionBackendEnum[NAME].get_class() is backend.FlashDistBackend
    assert backend.FlashDistBackend.get_name() == NAME


@pytest.mark.parametrize("version", ["0.31.1", "0.9.0.1+cpu"])
def test_an_older_vllm_is_told(
    version: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("vllm.__version__", version)
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    monkeypatch.setattr(AttentionBackendEnum, "register", None)  # calling None would fail
    register()
    assert f"{NAME} needs vLLM 0.32 or newer, this is {version}" in caplog.text


@pytest.mark.parametrize(
    ("changes", "reasons"),
    [
        ({}, []),
        ({"dtype": torch.float32, "head_size": 256}, []),
        ({"attn_type": "encoder_only"}, []),
        ({"head_size": 520}, ["head_size not supported"]),
        ({"kv_cache_dtype": "fp8"}, ["kv_cache_dtype not supported"]),
        ({"block_size": 8}, ["block_size not supported"]),
        ({"use_mla": True}, ["MLA not supported"]),
        ({"device_capability": DeviceCapability(7, 0)}, ["compute capability not supported"]),
        ({"device_capability": DeviceCapability(7, 5), "dtype": torch.float16}, []),
        ({"device_capability": DeviceCapability(7, 5)}, ["bfloat16 needs compute capability 8.0"]),
    ],
    ids=str,
)
def test_vllm_is_told_what_is_supported(changes: dict[str, Any], reasons: list[str]) -> None:
    found = backend.FlashDistBackend.validate_configuration(**{**CONFIG, **changes})
    assert len(found) >= len(reasons)
    assert all(any(reason in one for one in found) for reason in reasons)
    assert bool(found) is bool(reasons)


class Batch(NamedTuple):
    """Queries, and their keys twice: in the pages of a cache, and contiguous."""

    q: torch.Tensor
    cache: torch.Tensor
    keys: list[torch.Tensor]
    values: list[torch.Tensor]
    metadata: backend.FlashDistMetadata


def make_impl(**options: Any) -> backend.FlashDistImpl:  # noqa: ANN401 - vLLM's
    plain = {"alibi_slopes": None, "sliding_window": None, "kv_cache_dtype": "auto"}
    return backend.FlashDistImpl(HEADS, HEAD_DIM, HEAD_DIM**-0.5, HEADS_KV, **{**plain, **options})


def make_batch(impl: backend.FlashDistImpl, *, head_major: bool, causal: bool = True) -> Batch:
    """Write keys through the backend into pages in reverse order; the rest of the cache is NaN."""
    generator = torch.Generator().manual_seed(0)

    def normal(*size: int) -> torch.Tensor:
        return torch.randn(*size, generator=generator)

    shape = (PAGES, HEADS_KV, PAGE, 2 * HEAD_DIM)
    cache = torch.full(shape, torch.nan)
    if not head_major:
        cache = torch.full((PAGES, PAGE, HEADS_KV, 2 * HEAD_DIM), torch.nan).transpose(1, 2)
    table = torch.arange(PAGES - 1, -1, -1).reshape(3, -1)
    keys = [normal(used, HEADS_KV, HEAD_DIM) for used in USED]
    values = [normal(used, HEADS_KV, HEAD_DIM) for used in USED]
    slots = torch.cat(
        [
            table[i, torch.arange(used) // PAGE] * PAGE + torch.arange(used) % PAGE
            for i, used in enumerate(USED)
        ]
    )
    padded = torch.cat([slots, torch.tensor([-1, -1])])
    more = normal(2, HEADS_KV, HEAD_DIM)
    layer = torch.nn.Module()
    impl.do_kv_cache_update(
        layer, torch.cat([*keys, more]), torch.cat([*values, more]), cache, padded
    )
    ends = torch.tensor([0, *torch.tensor(LENGTHS).cumsum(0).tolist()], dtype=torch.int32)
    metadata = backend.FlashDistMetadata(
        sum(LENGTHS),
        max(LENGTHS),
        ends,
        max(USED),
        torch.tensor(USED, dtype=torch.int32),
        table.to(torch.int32),
        slots,
        causal,
    )
    return Batch(normal(sum(LENGTHS) + 2, HEADS, HEAD_DIM), cache, keys, values, metadata)


@pytest.mark.parametrize("head_major", [True, False], ids=["head-major", "token-major"])
@pytest.mark.parametrize(
    ("options", "arguments"),
    [
        ({}, {}),
        ({"sliding_window": 5}, {"window_size": (4, 0)}),
        ({"logits_soft_cap": 2.0}, {"softcap": 2.0}),
        (
            {"alibi_slopes": [2.0**-i for i in range(HEADS)]},
            {"alibi_slopes": torch.tensor([2.0**-i for i in range(HEADS)])},
        ),
        (
            {"sinks": torch.linspace(-1, 1, HEADS)},
            {"learnable_sink": torch.linspace(-1, 1, HEADS)},
        ),
    ],
    ids=["plain", "window", "softcap", "alibi", "sinks"],
)
def test_each_sequence_attends_to_its_own_pages(
    options: dict[str, Any], arguments: dict[str, Any], *, head_major: bool
) -> None:
    impl = make_impl(**options)
    batch = make_batch(impl, head_major=head_major)
    output = torch.full_like(batch.q, 7.0)
    layer = torch.nn.Module()
    found = impl.forward(layer, batch.q, batch.q, batch.q, batch.cache, batch.metadata, output)
    assert found is output
    assert (output[sum(LENGTHS) :] == 7.0).all()
    for i, q in enumerate(batch.q[: sum(LENGTHS)].split(LENGTHS)):
        wanted = flash_attn_func(
            q[None], batch.keys[i][None], batch.values[i][None], causal=True, **arguments
        )
        torch.testing.assert_close(output[: sum(LENGTHS)].split(LENGTHS)[i], wanted[0])


def test_a_sequence_has_the_same_bits_alone_and_in_a_batch() -> None:
    impl = make_impl()
    batch = make_batch(impl, head_major=True)
    together = torch.empty_like(batch.q)
    layer = torch.nn.Module()
    impl.forward(layer, batch.q, batch.q, batch.q, batch.cache, batch.metadata, together)
    for i, q in enumerate(batch.q[: sum(LENGTHS)].split(LENGTHS)):
        alone = replace(
            batch.metadata,
            num_actual_tokens=LENGTHS[i],
            max_query_len=LENGTHS[i],
            query_start_loc=torch.tensor([0, LENGTHS[i]], dtype=torch.int32),
            seq_lens=batch.metadata.seq_lens[i : i + 1],
            block_table=batch.metadata.block_table[i : i + 1],
        )
        out = impl.forward(layer, q, q, q, batch.cache, alone, torch.empty_like(q))
        assert torch.equal(out, together[: sum(LENGTHS)].split(LENGTHS)[i])


def test_an_encoder_attends_to_the_batch_itself_both_ways() -> None:
    impl = make_impl(attn_type="encoder_only", sliding_window=3)
    batch = make_batch(make_impl(), head_major=True, causal=False)
    k, v = torch.randn(2, sum(LENGTHS), HEADS_KV, HEAD_DIM).unbind()
    output = torch.empty_like(batch.q)
    impl.forward(torch.nn.Module(), batch.q, k, v, torch.empty(0), batch.metadata, output)
    for q, one_k, one_v, out in zip(
        batch.q[: sum(LENGTHS)].split(LENGTHS),
        k.split(LENGTHS),
        v.split(LENGTHS),
        output[: sum(LENGTHS)].split(LENGTHS),
        strict=True,
    ):
        wanted = flash_attn_func(q[None], one_k[None], one_v[None], window_size=(2, 2))
        torch.testing.assert_close(out, wanted[0])


def test_memory_profiling_gets_zeros_and_scales_are_refused() -> None:
    impl, x = make_impl(), torch.full((3, HEADS, HEAD_DIM), torch.nan)
    assert not impl.forward(torch.nn.Module(), x, x, x, x, None, x.clone()).any()
    with pytest.raises(NotImplementedError, match="output_scale"):
        impl.forward(torch.nn.Module(), x, x, x, x, None, x, output_scale=torch.ones(1))


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"kv_cache_dtype": "fp8"}, r"kv_cache_dtype must be one of auto, .* got fp8"),
        ({"attn_type": "encoder_decoder"}, r"attn_type must be .* got encoder_decoder"),
    ],
)
def test_a_layer_that_is_not_supported_is_refused(options: dict[str, str], text: str) -> None:
    with pytest.raises(NotImplementedError, match=text):
        make_impl(**options)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_llama(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def engine(model: Path) -> Iterator[LLM]:
    """Yield vLLM's engine, with our backend under the name that vLLM asks for on a CPU."""
    os.environ |= {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    }
    path = f"{backend.__name__}.{backend.FlashDistBackend.__name__}"
    register_backend(AttentionBackendEnum.CPU_ATTN, path)
    yield LLM(
        model=str(model),
        skip_tokenizer_init=True,
        enforce_eager=True,
        dtype="float32",
        max_model_len=LONGEST,
        max_num_batched_tokens=64,
        max_num_seqs=8,
        seed=0,
    )
    AttentionBackendEnum.CPU_ATTN.clear_override()


def draw_prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(0)
    lengths = (5, 100, 33, 1, 64)  # one prompt is prefilled in chunks
    return [torch.randint(0, 512, (n,), generator=generator).tolist() for n in lengths]


def generate(engine: LLM, prompts: list[list[int]]) -> list[tuple[list[int], list[float]]]:
    """Return the tokens after each prompt, with their log-probabilities."""
    sampling = SamplingParams(max_tokens=TOKENS, temperature=0, detokenize=False, logprobs=1)
    found = engine.generate([{"prompt_token_ids": x} for x in prompts], sampling, use_tqdm=False)
    return [
        (
            [*one.outputs[0].token_ids],
            [next(iter(x.values())).logprob for x in one.outputs[0].logprobs],
        )
        for one in found
    ]


def test_the_engine_generates_the_tokens_of_transformers(engine: LLM, model: Path) -> None:
    peer = LlamaForCausalLM.from_pretrained(model, attn_implementation="eager").eval()
    for prompt, (tokens, _) in zip(draw_prompts(), generate(engine, draw_prompts()), strict=True):
        ids = torch.tensor([prompt])
        wanted = peer.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=TOKENS, do_sample=False,
            pad_token_id=0, eos_token_id=None,
        )  # fmt: skip
        assert tokens == wanted[0, len(prompt) :].tolist()


def test_a_sequence_generates_the_same_tokens_alone_and_after_a_cached_prefix(engine: LLM) -> None:
    """Log-probabilities are only close: on a CPU, bits of matrix products depend on the batch."""
    prompts = draw_prompts()
    together = generate(engine, prompts)
    for (tokens, logs), prompt in zip(together, prompts, strict=True):
        for alone, alone_logs in generate(engine, [prompt]) + generate(engine, [prompt]):
            assert alone == tokens
            assert alone_logs == pytest.approx(logs, abs=1e-4)
