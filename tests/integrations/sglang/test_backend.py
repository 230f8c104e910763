"""SGLang's engine, on a CPU, with our attention; `startup` replaces torchvision."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
import torch

pytest.importorskip("sglang", reason="`nox -s integrations -- sglang` installs it")

import sglang
from sglang.srt.arg_groups import choices
from sglang.srt.arg_groups.overrides import resolved_view
from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
from sglang.srt.layers.radix_attention import AttentionType, RadixAttention
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, ReqToTokenPool
from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode
from sglang.srt.runtime_context import get_parallel
from sglang.srt.server_args import ServerArgs
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
from transformers import LlamaForCausalLM

from flash_dist import flash_attn_func
from flash_dist.integrations.sglang import NAME, register
from flash_dist.integrations.sglang.backend import FlashDistBackend
from tests.integrations.random_llama import LONGEST, save_llama

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

HEADS, HEADS_KV, HEAD_DIM, PAGE, CONTEXT = 8, 2, 64, 16, 64
PREFIXES, NEW = [49, 21, 0], [1, 9, 4]  # keys in the cache, and queries, of each sequence
TOKENS = 24


@pytest.fixture(autouse=True)
def _one_rank() -> Iterator[None]:
    """Publish the sizes for one rank, as the engine does in its own process."""
    with get_parallel().override(attn_cp_size=1, attn_dcp_size=1):
        yield


def make_runner(**changes: Any) -> Any:  # noqa: ANN401 - the attributes of a ModelRunner
    requests = ReqToTokenPool(4, CONTEXT, "cpu", enable_memory_saver=False)
    pages = 4 * CONTEXT // PAGE  # page 0 of a pool belongs to no request
    slots = torch.arange(pages, 0, -1)[:, None] * PAGE + torch.arange(PAGE)
    requests.req_to_token[1:] = slots.reshape(4, CONTEXT).to(torch.int32)
    pool = MHATokenToKVPool(
        pages * PAGE, PAGE, torch.float32, HEADS_KV, HEAD_DIM, 1, "cpu", enable_memory_saver=False
    )
    for x in pool.get_kv_buffer(0):
        x.fill_(torch.nan)
    plain = {
        "use_mla_backend": False,
        "model_config": SimpleNamespace(is_encoder_decoder=False, context_len=CONTEXT),
        "spec_algorithm": SpeculativeAlgorithm.NONE,
        "page_size": PAGE,
        "dtype": torch.float32,
        "kv_cache_dtype": torch.float32,
        "req_to_token_pool": requests,
        "token_to_kv_pool": pool,
    }
    return SimpleNamespace(**{**plain, **changes})


def make_layer(**options: Any) -> RadixAttention:  # noqa: ANN401 - SGLang's
    return RadixAttention(HEADS, HEAD_DIM, HEAD_DIM**-0.5, HEADS_KV, 0, **options)


class Inputs(NamedTuple):
    """Queries, keys and values of each sequence."""

    q: list[torch.Tensor]
    k: list[torch.Tensor]
    v: list[torch.Tensor]


def draw(queries: list[int], keys: list[int]) -> Inputs:
    generator = torch.Generator().manual_seed(0)
    return Inputs(
        [torch.randn(n, HEADS, HEAD_DIM, generator=generator) for n in queries],
        [torch.randn(n, HEADS_KV, HEAD_DIM, generator=generator) for n in keys],
        [torch.randn(n, HEADS_KV, HEAD_DIM, generator=generator) for n in keys],
    )


def make_batch(
    runner: Any,  # noqa: ANN401
    mode: ForwardMode,
    rows: list[int],
    prefixes: list[int],
    new: list[int],
) -> ForwardBatch:
    slots = runner.req_to_token_pool.req_to_token.long()
    lengths = [a + b for a, b in zip(prefixes, new, strict=True)]
    return ForwardBatch(
        forward_mode=mode,
        batch_size=len(rows),
        input_ids=torch.zeros(sum(new), dtype=torch.int64),
        req_pool_indices=torch.tensor(rows),
        seq_lens=torch.tensor(lengths),
        seq_lens_sum=sum(lengths),
        out_cache_loc=torch.cat(
            [slots[i, a:b] for i, a, b in zip(rows, prefixes, lengths, strict=True)]
        ),
        extend_seq_lens=torch.tensor(new),
        extend_seq_lens_cpu=new,
    )


def step(  # noqa: PLR0913, PLR0917 - a batch and its layer
    backend: FlashDistBackend,
    runner: Any,  # noqa: ANN401
    mode: ForwardMode,
    prefixes: list[int],
    inputs: Inputs,
    layer: RadixAttention | None = None,
    *,
    rows: list[int] | None = None,
    **options: Any,  # noqa: ANN401
) -> list[torch.Tensor]:
    """Attend as a layer of a model does: q has one axis for heads and columns."""
    new = [len(q) for q in inputs.q]
    batch = make_batch(runner, mode, rows or [*range(1, len(new) + 1)], prefixes, new)
    backend.init_forward_metadata(batch)
    k, v = (
        torch.cat([x[a : a + n] for x, a, n in zip(part, prefixes, new, strict=True)])
        for part in (inputs.k, inputs.v)
    )
    q = torch.cat(inputs.q).flatten(1)
    out = backend.forward(q, k, v, layer or make_layer(), batch, **options)
    return list(out.unflatten(1, (HEADS, HEAD_DIM)).split(new))


def fill(backend: FlashDistBackend, runner: Any, inputs: Inputs, prefixes: list[int]) -> None:  # noqa: ANN401
    begun = Inputs(
        [x.new_ones(n, HEADS, HEAD_DIM) for x, n in zip(inputs.k, prefixes, strict=True)],
        inputs.k,
        inputs.v,
    )
    step(backend, runner, ForwardMode.EXTEND, [0] * len(prefixes), begun)


def test_sglang_knows_the_backend_as_a_deterministic_one() -> None:
    register()
    register()
    for known in (
        choices.ATTENTION_BACKEND_CHOICES,
        choices.DETERMINISTIC_ATTENTION_BACKEND_CHOICES,
        choices.RADIX_SUPPORTED_DETERMINISTIC_ATTENTION_BACKEND,
    ):
        assert known.count(NAME) == 1
    assert type(ATTENTION_BACKENDS[NAME](make_runner())) is FlashDistBackend


def test_deterministic_inference_keeps_cached_prefixes(model: Path) -> None:
    register()
    arguments = ServerArgs(
        model_path=str(model),
        device="cpu",
        attention_backend=NAME,
        page_size=PAGE,
        enable_deterministic_inference=True,
    )
    chosen = resolved_view(arguments)
    assert chosen.attention_backend == NAME
    assert not chosen.disable_radix_cache


@pytest.mark.parametrize(
    ("options", "call", "arguments"),
    [
        ({}, {}, {}),
        ({"sliding_window_size": 4}, {}, {"window_size": (4, 0)}),
        ({"logit_cap": 2.0}, {}, {"softcap": 2.0}),
        (
            {},
            {"sinks": torch.linspace(-1, 1, HEADS)},
            {"learnable_sink": torch.linspace(-1, 1, HEADS)},
        ),
    ],
    ids=["plain", "window", "softcap", "sinks"],
)
def test_each_sequence_attends_to_its_own_pages(
    options: dict[str, Any], call: dict[str, Any], arguments: dict[str, Any]
) -> None:
    runner = make_runner()
    backend, layer = FlashDistBackend(runner), make_layer(**options)
    inputs = draw(NEW, [a + b for a, b in zip(PREFIXES, NEW, strict=True)])
    fill(backend, runner, inputs, PREFIXES)
    outs = step(backend, runner, ForwardMode.EXTEND, PREFIXES, inputs, layer, **call)
    for q, k, v, out in zip(*inputs, outs, strict=True):
        wanted = flash_attn_func(q[None], k[None], v[None], causal=True, **arguments)
        torch.testing.assert_close(out, wanted[0])


def test_an_encoder_attends_both_ways() -> None:
    runner = make_runner()
    layer = make_layer(attn_type=AttentionType.ENCODER_ONLY, sliding_window_size=3)
    inputs = draw(NEW, NEW)
    outs = step(FlashDistBackend(runner), runner, ForwardMode.EXTEND, [0, 0, 0], inputs, layer)
    for q, k, v, out in zip(*inputs, outs, strict=True):
        wanted = flash_attn_func(q[None], k[None], v[None], window_size=(3, 3))
        torch.testing.assert_close(out, wanted[0])


def test_a_sequence_has_the_same_bits_alone_and_in_a_batch() -> None:
    inputs = draw(NEW, [a + b for a, b in zip(PREFIXES, NEW, strict=True)])
    runner = make_runner()
    backend = FlashDistBackend(runner)
    fill(backend, runner, inputs, PREFIXES)
    together = step(backend, runner, ForwardMode.EXTEND, PREFIXES, inputs)
    for i, wanted in enumerate(together):
        alone = Inputs(*([x[i]] for x in inputs))
        (out,) = step(backend, runner, ForwardMode.EXTEND, [PREFIXES[i]], alone, rows=[i + 1])
        assert torch.equal(out, wanted)


def test_chunks_and_decoding_give_what_one_step_gives() -> None:
    """Compare values only: on a CPU, the bits of a matrix product depend on its number of rows."""
    inputs, runner = draw([50], [50]), make_runner()
    backend = FlashDistBackend(runner)
    (wanted,) = step(backend, runner, ForwardMode.EXTEND, [0], inputs)
    for begin, end, mode in (
        (0, 3, ForwardMode.EXTEND),
        (3, 49, ForwardMode.MIXED),
        (49, 50, ForwardMode.DECODE),
    ):
        part = inputs._replace(q=[inputs.q[0][begin:end]])
        (out,) = step(backend, runner, mode, [begin], part, rows=[4])
        torch.testing.assert_close(out, wanted[begin:end])


def test_what_cuda_graphs_read_gives_the_bits_of_a_plain_step() -> None:
    prefixes = [49, 21, 3]
    inputs = draw([1, 1, 1], [n + 1 for n in prefixes])
    runner = make_runner()
    backend = FlashDistBackend(runner)
    fill(backend, runner, inputs, prefixes)
    wanted = torch.stack(step(backend, runner, ForwardMode.DECODE, prefixes, inputs))
    backend.init_cuda_graph_state(4, 4)
    fewer = make_batch(runner, ForwardMode.DECODE, [0], [0], [1])
    backend.init_forward_metadata_out_graph(fewer, in_capture=True)  # a second graph
    batch = make_batch(runner, ForwardMode.DECODE, [1, 2, 3], prefixes, [1, 1, 1])
    backend.init_forward_metadata_out_graph(batch, in_capture=True)
    read = backend.forward_metadata
    batch.seq_lens.fill_(backend.get_cuda_graph_seq_len_fill_value())
    backend.init_forward_metadata_in_graph(batch)
    batch.seq_lens.copy_(torch.tensor(prefixes) + 1)  # as for a replay
    addresses = read.seq_lens.data_ptr(), read.block_table.data_ptr()
    backend.init_forward_metadata_in_graph(batch)
    assert (read.seq_lens.data_ptr(), read.block_table.data_ptr()) == addresses
    q = torch.cat(inputs.q).flatten(1)
    out = backend.forward(q, None, None, make_layer(), batch)
    assert torch.equal(out, wanted.reshape(3, -1))


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"use_mla_backend": True}, r"must not be latent"),
        ({"model_config": SimpleNamespace(is_encoder_decoder=True)}, r"no cross attention"),
        ({"spec_algorithm": SpeculativeAlgorithm.EAGLE}, r"must be None, got EAGLE"),
        ({"page_size": 1}, r"multiple of 16, got 1\n\nhint: .* `--page-size 64`"),
        ({"kv_cache_dtype": torch.float8_e4m3fn}, r"model's float32, got float8_e4m3fn\n\nhint"),
        ({"token_to_kv_pool": object()}, r"MHATokenToKVPool, got object\n\nhint"),
    ],
    ids=lambda x: next(iter(x)) if isinstance(x, dict) else "",
)
def test_a_server_that_is_not_supported_is_refused(changes: dict[str, Any], text: str) -> None:
    with pytest.raises(NotImplementedError, match=text):
        FlashDistBackend(make_runner(**changes))


def test_context_parallelism_is_refused() -> None:
    text = r"attn_cp_size and attn_dcp_size must be 1, got 1 and 2"
    with get_parallel().override(attn_dcp_size=2), pytest.raises(NotImplementedError, match=text):
        FlashDistBackend(make_runner())


@pytest.mark.parametrize(
    ("options", "call", "text"),
    [
        ({"is_cross_attention": True}, {}, r"is_cross_attention must be False, got True"),
        ({"attn_type": AttentionType.DECODER_BIDIRECTIONAL}, {}, r"attn_type must be .* or .* got"),
        ({"logit_capping_method": "sigmoid"}, {}, r"logit_capping_method must be tanh"),
        ({}, {"k_rope": torch.ones(1)}, r"k_rope must be None, got tensor.* in layer 0"),
    ],
)
def test_a_layer_that_is_not_supported_is_refused(
    options: dict[str, Any], call: dict[str, Any], text: str
) -> None:
    runner = make_runner()
    backend, layer, inputs = FlashDistBackend(runner), make_layer(**options), draw([4], [4])
    with pytest.raises(NotImplementedError, match=text):
        step(backend, runner, ForwardMode.EXTEND, [0], inputs, layer, **call)


def test_batches_of_speculative_decoding_are_refused() -> None:
    runner = make_runner()
    backend = FlashDistBackend(runner)
    batch = make_batch(runner, ForwardMode.TARGET_VERIFY, [1], [0], [4])
    with pytest.raises(NotImplementedError, match=r"DECODE or IDLE or EXTEND.* got TARGET_VERIFY"):
        backend.init_forward_metadata(batch)
    batch.forward_mode = ForwardMode.EXTEND
    with pytest.raises(NotImplementedError, match=r"must be DECODE or IDLE, got EXTEND"):
        backend.init_forward_metadata_out_graph(batch)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_llama(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def engine(model: Path) -> Iterator[sglang.Engine]:
    """Yield SGLang's engine, whose processes find the backend as a plug-in."""
    found = sglang.Engine(
        model_path=str(model),
        device="cpu",
        dtype="float32",
        attention_backend=NAME,
        page_size=PAGE,
        chunked_prefill_size=64,
        context_length=LONGEST,
        max_total_tokens=4096,
        skip_tokenizer_init=True,
        log_level="error",
    )
    yield found
    found.shutdown()


def draw_prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(0)
    lengths = (5, 100, 33, 1, 64)  # one prompt is prefilled in chunks
    return [torch.randint(0, 512, (n,), generator=generator).tolist() for n in lengths]


def generate(engine: sglang.Engine, prompts: list[list[int]]) -> list[dict[str, Any]]:
    sampling = {"max_new_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
    found: list[dict[str, Any]] = engine.generate(
        input_ids=prompts, sampling_params=sampling, return_logprob=True
    )
    return found


def test_the_engine_generates_the_tokens_of_transformers(
    engine: sglang.Engine, model: Path
) -> None:
    peer = LlamaForCausalLM.from_pretrained(model, attn_implementation="eager").eval()
    for prompt, found in zip(draw_prompts(), generate(engine, draw_prompts()), strict=True):
        ids = torch.tensor([prompt])
        wanted = peer.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=TOKENS, do_sample=False,
            pad_token_id=0, eos_token_id=None,
        )  # fmt: skip
        assert found["output_ids"] == wanted[0, len(prompt) :].tolist()


def test_a_sequence_generates_the_same_tokens_alone_and_after_a_cached_prefix(
    engine: sglang.Engine,
) -> None:
    """Log-probabilities are only close: on a CPU, bits of matrix products depend on the batch."""
    prompts = draw_prompts()
    together = generate(engine, prompts)
    for first, prompt in zip(together, prompts, strict=True):
        (alone,) = generate(engine, [prompt])
        assert alone["output_ids"] == first["output_ids"]
        logs, wanted = (
            [x for x, *_ in one["meta_info"]["output_token_logprobs"]] for one in (alone, first)
        )
        assert logs == pytest.approx(wanted, abs=1e-4)
        assert alone["meta_info"]["cached_tokens"] == (len(prompt) - 1) // PAGE * PAGE
