"""A model compiles as one graph for all lengths, with the results of eager attention."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch._dynamo.testing
import transformers
from packaging.version import Version

from flash_dist.integrations.transformers import register
from tests.integrations.transformers.generation import IDS, LEFT, SEQLEN
from tests.integrations.transformers.models import DECODERS, DEVICE

if TYPE_CHECKING:
    from collections.abc import Callable

Tensor = torch.Tensor

pytestmark = pytest.mark.skipif(
    Version(transformers.__version__) < Version("5.4"), reason="5.4 made masks anew"
)

NAME = register()
TOLERANCE = 1e-5  # relative to the largest number
SPLIT = 7  # start of the second document
GAPS = torch.ones_like(IDS)
GAPS[0, 3:5] = 0
POSITIONS = torch.cat([torch.arange(SPLIT), torch.arange(SEQLEN - SPLIT)])[None].to(DEVICE)


def make(name: str, attention: str) -> Any:  # noqa: ANN401
    """Return a model that compiles: the default experts on a CPU cannot be in a graph."""
    model = DECODERS[name].make(attention)
    if name == "gpt_oss" and hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("batched_mm")
    return model


def error(got: Tensor, want: Tensor, scale: Tensor | None = None) -> float:
    scale = want.abs().max() if scale is None else scale
    return ((got - want).abs().max() / scale).item()


FORWARDS: dict[str, Callable[[Tensor], dict[str, Tensor]]] = {
    "plain": lambda _: {},
    "padded": lambda mask: {
        "attention_mask": mask,
        "position_ids": (mask.cumsum(1) - 1).clamp(min=0),
    },
}


@pytest.mark.parametrize("kind", [*FORWARDS, "packed", "cu_seq_lens"])
@pytest.mark.parametrize("name", ["llama", "gemma2", "gemma3", "gpt_oss"])
def test_a_compiled_forward_is_one_graph_for_all_lengths(name: str, kind: str) -> None:
    torch._dynamo.reset()
    counter: Any = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    eager, model = make(name, "eager"), make(name, NAME)
    compiled: Any = torch.compile(model, backend=counter, fullgraph=True)
    for seqlen in (12, 10, 9):
        ids, mask = IDS[:, :seqlen], LEFT[:, :seqlen]
        if kind in FORWARDS:
            inputs = {"input_ids": ids, **FORWARDS[kind](mask), "use_cache": False}
            keep = mask.bool() if kind == "padded" else torch.ones_like(mask).bool()
            want, got = (x(**inputs)[0][keep] for x in (eager, compiled))
        else:
            parts = (ids[:1, :SPLIT], ids[:1, SPLIT:])
            want = torch.cat([eager(input_ids=x, use_cache=False)[0] for x in parts], 1)
            inputs = {"input_ids": ids[:1], "position_ids": POSITIONS[:, :seqlen]}
            if kind == "cu_seq_lens":
                bounds = torch.tensor([0, SPLIT, seqlen], dtype=torch.int32, device=DEVICE)
                inputs |= {"cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds}
                inputs |= {"max_length_q": SPLIT, "max_length_k": SPLIT}
            got = compiled(**inputs, use_cache=False)[0]
        assert error(got, want) <= TOLERANCE
        for x in (want, got):
            (x * torch.linspace(-1, 1, x.numel(), device=DEVICE).view(x.shape)).mean().backward()
    assert counter.frame_count <= 2  # one size, then dynamic sizes
    for graph in counter.graphs:
        assert "flash_dist" in graph.print_readable(print_output=False)
    wanted = dict(eager.named_parameters())
    largest = max(x.grad.abs().max() for x in wanted.values() if x.grad is not None)
    for parameter, x in model.named_parameters():
        if x.grad is not None:
            assert error(x.grad, wanted[parameter].grad, largest) <= TOLERANCE, parameter


@pytest.mark.parametrize("kind", FORWARDS)
def test_a_program_that_is_exported_without_dynamo_serves_all_sizes(kind: str) -> None:
    eager, model = (DECODERS["mistral"].make(name) for name in ("eager", NAME))
    program: Any = None
    for batch, seqlen in ((3, 12), (2, 9)):
        ids, mask = IDS[:batch, :seqlen], LEFT[:batch, :seqlen]
        inputs = {"input_ids": ids, **FORWARDS[kind](mask), "use_cache": False}
        if program is None:
            sizes = dict.fromkeys(range(2), torch.export.Dim.AUTO)
            shapes = {k: sizes if isinstance(x, Tensor) else None for k, x in inputs.items()}
            exported = torch.export.export(model, (), inputs, dynamic_shapes=shapes, strict=False)
            assert "flash_dist" in exported.graph_module.print_readable(print_output=False)
            program = exported.module()
        keep = mask.bool() if kind == "padded" else torch.ones_like(mask).bool()
        want, got = (x(**inputs).logits[keep] for x in (eager, program))
        assert error(got, want) <= TOLERANCE


@pytest.mark.skipif(DEVICE.type != "cpu", reason="an assertion on a GPU ends the process")
def test_a_mask_that_no_graph_holds_is_found_when_the_graph_runs() -> None:
    torch._dynamo.reset()
    model: Any = torch.compile(DECODERS["llama"].make(NAME), backend="aot_eager", fullgraph=True)
    with pytest.raises(RuntimeError, match=r"a mask in a graph of torch\.compile"):
        model(input_ids=IDS, attention_mask=GAPS, use_cache=False)


def test_generate_compiles_one_query_with_a_static_cache() -> None:
    config = transformers.CompileConfig(fullgraph=True, backend="aot_eager", mode=None)
    config._compile_all_devices = True  # the CPU, too
    torch._dynamo.reset()
    tokens = [
        DECODERS["gemma3"]
        .make(name)
        .generate(
            input_ids=IDS,
            attention_mask=LEFT,
            max_new_tokens=6,
            cache_implementation="static",
            compile_config=compile_config,
            disable_compile=compile_config is None,  # a GPU would compile
        )
        for name, compile_config in (("eager", None), (NAME, config))
    ]
    assert torch.equal(*tokens)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] >= 1


@pytest.mark.skipif(DEVICE.type == "cpu", reason="transformers compiles by itself on a GPU alone")
@pytest.mark.skipif(shutil.which("cc") is None, reason="inductor needs a compiler")
def test_generate_with_a_static_cache_compiles_by_itself_and_replays_cuda_graphs() -> None:
    torch._dynamo.reset()
    model, options = DECODERS["llama"].make(NAME), {"max_new_tokens": 8, "do_sample": False}
    want = DECODERS["llama"].make("eager").generate(IDS, attention_mask=LEFT, **options)
    for _ in range(2):  # the first call captures, the second replays
        got = model.generate(IDS, attention_mask=LEFT, cache_implementation="static", **options)
        assert torch.equal(got, want)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] >= 1
