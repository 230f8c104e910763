"""Tiny models on these kernels equal the same models in transformers' own eager attention.

They run on the CPU, where the operators are plain torch, or on a GPU (models.py). Features that a
version of transformers does not route through its interface are skipped by name.
"""

from __future__ import annotations

from dataclasses import replace
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
import torch
import transformers
from packaging.version import Version

from flash_dist.integrations.transformers import attention, once, register
from flash_dist.integrations.transformers.layer_mask import find_documents
from tests.integrations.transformers.generation import BATCH, IDS, LEFT, SEQLEN, generate
from tests.integrations.transformers.models import (
    DECODERS,
    DEVICE,
    ENCODERS,
    ESMC,
    GEMMA4,
    SEED,
    SIGLIP,
    VOCABULARY,
    WHISPER,
    Family,
)

if TYPE_CHECKING:
    from pathlib import Path

Tensor = torch.Tensor

NAME = register()
VERSION = Version(transformers.__version__)
TOLERANCE = 1e-5  # relative to the largest number
LARGE_TOLERANCE = 1e-4  # with scores of up to 512
HALF_TOLERANCE = 1e-3  # in addition to twice the error of eager attention
SPLIT = 7  # start of the second document

BOTH = LEFT.clone()
BOTH[1, 10:] = 0
GAPS = torch.ones_like(LEFT)
GAPS[0, 3:5] = GAPS[2, 0] = 0
PADDINGS = {"plain": None, "left": LEFT, "right": LEFT.flip(1), "both": BOTH, "gaps": GAPS}
POSITIONS = torch.cat([torch.arange(SPLIT), torch.arange(SEQLEN - SPLIT)])[None].to(DEVICE)
CU_SEQ_LENS = torch.tensor([0, SPLIT, SEQLEN], dtype=torch.int32, device=DEVICE)

since_5 = pytest.mark.skipif(
    Version("5.0") > VERSION, reason="before 5.0 these models have attention of their own"
)
since_5_4 = pytest.mark.skipif(Version("5.4") > VERSION, reason="5.4 made masks anew")


class Run(NamedTuple):
    """Results of a model."""

    out: Tensor
    gradients: dict[str, Tensor]


def run(model: Any, keep: Tensor | None = None, **inputs: Any) -> Run:  # noqa: ANN401
    """Return a model's first output, where `keep` is set, and the gradients of a weighted mean."""
    out = model(**inputs)[0]
    out = out if keep is None else out[keep.bool()]
    weights = torch.linspace(-1, 1, out.numel(), device=DEVICE).view(out.shape)
    (out.float() * weights).mean().backward()
    named = model.named_parameters()
    return Run(out.detach(), {n: x.grad for n, x in named if x.grad is not None})


def error(got: Tensor, want: Tensor, scale: Tensor | None = None) -> float:
    scale = want.abs().max() if scale is None else scale
    return ((got.float() - want.float()).abs().max() / scale).item()


def require_equal(got: Run, want: Run, tolerance: float = TOLERANCE) -> None:
    assert error(got.out, want.out) <= tolerance
    assert got.gradients.keys() == want.gradients.keys()
    largest = max(x.abs().max() for x in want.gradients.values())
    for name, gradient in want.gradients.items():
        assert error(got.gradients[name], gradient, largest) <= tolerance, name


@pytest.fixture(autouse=True)
def _ran(monkeypatch: pytest.MonkeyPatch) -> Any:  # noqa: ANN401
    """Check that our functions were called: a model that fell back to eager would be equal, too."""
    calls = []
    ours = "flash_attn_func", "flash_attn_varlen_func", "flash_attn_with_kvcache", "attend_once"
    for name in ours:
        function = getattr(attention, name)

        def spy(*args: Any, function: Any = function, **kwargs: Any) -> Any:  # noqa: ANN401
            calls.append(function)
            return function(*args, **kwargs)

        monkeypatch.setattr(attention, name, spy)
    yield
    assert calls


SINCE = {"bert": since_5, "roberta": since_5, "modernbert": since_5_4}  # first supported version
MODELS = {**DECODERS, **ENCODERS}
FAMILIES = [
    pytest.param(family, id=name, marks=SINCE.get(name, ())) for name, family in MODELS.items()
]


def inputs_of(family: Family, padding: Tensor | None) -> dict[str, Any]:
    inputs: dict[str, Any] = {"input_ids": IDS}
    if padding is not None:
        inputs["attention_mask"] = padding
        if family.causal:
            inputs["position_ids"] = (padding.cumsum(1) - 1).clamp(min=0)
    return inputs


@pytest.mark.parametrize("padding", PADDINGS.values(), ids=list(PADDINGS))
@pytest.mark.parametrize("family", FAMILIES)
def test_output_and_gradients_are_those_of_eager(family: Family, padding: Tensor | None) -> None:
    inputs = inputs_of(family, padding)
    want, got = (run(family.make(name), padding, **inputs) for name in ("eager", NAME))
    require_equal(got, want)


def with_all_experts(family: Family) -> Family:
    """Return a family that uses all experts, since one bit may change the choice."""
    options = dict(family.options)
    if "num_experts_per_tok" in options:
        experts = {"num_local_experts", "n_routed_experts"} & options.keys()
        options["num_experts_per_tok"] = options[experts.pop()]
    if "n_group" in options:
        options["topk_group"] = options["n_group"]
    return replace(family, options=options)


def require_no_worse(got: Run, eager: Run, exact: Run) -> None:
    """Check flash-attention's promise: at most twice the error of eager attention."""
    assert error(got.out, exact.out) <= 2 * error(eager.out, exact.out) + HALF_TOLERANCE
    largest = max(x.abs().max() for x in exact.gradients.values())

    def worst(run: Run) -> float:
        named = run.gradients.items()
        return max(error(gradient, exact.gradients[name], largest) for name, gradient in named)

    assert worst(got) <= 2 * worst(eager) + HALF_TOLERANCE


@pytest.mark.parametrize("padding", [None, LEFT], ids=["plain", "left"])
@pytest.mark.parametrize("family", FAMILIES)
def test_half_precision_errs_no_more_than_twice_as_much_as_eager(
    family: Family, padding: Tensor | None
) -> None:
    family, inputs = with_all_experts(family), inputs_of(family, padding)
    exact = run(family.make("eager", torch.bfloat16).float(), padding, **inputs)
    eager, got = (
        run(family.make(name, torch.bfloat16), padding, **inputs) for name in ("eager", NAME)
    )
    require_no_worse(got, eager, exact)


PACKINGS = {
    "position_ids": {"use_cache": False},
    "position_ids-and-cache": {"use_cache": True},
    "cu_seq_lens": {
        "use_cache": False,
        "cu_seq_lens_q": CU_SEQ_LENS,
        "cu_seq_lens_k": CU_SEQ_LENS,
        "max_length_q": SPLIT,
        "max_length_k": torch.tensor(SPLIT),
    },
}


def run_documents(model: Any) -> Run:  # noqa: ANN401
    """Return a model's concatenated results for separate documents."""
    parts = [IDS[:1, :SPLIT], IDS[:1, SPLIT:]]

    def both(**_: object) -> tuple[Tensor]:
        return (torch.cat([model(input_ids=x, use_cache=False)[0] for x in parts], 1),)

    both.named_parameters = model.named_parameters  # type: ignore[attr-defined]
    return run(both)


@pytest.mark.parametrize("packing", PACKINGS.values(), ids=list(PACKINGS))
@pytest.mark.parametrize("family", [pytest.param(x, id=n) for n, x in DECODERS.items()])
def test_packed_documents_are_what_each_is_alone(family: Family, packing: dict[str, Any]) -> None:
    want = run_documents(family.make("eager"))
    got = run(family.make(NAME), input_ids=IDS[:1], position_ids=POSITIONS, **packing)
    require_equal(got, want)


@pytest.mark.parametrize(
    "positions",
    [[*range(5), *range(20, SEQLEN + 15)], [0, *[1] * 6, *range(2, SEQLEN - 5)]],
    ids=["left out", "twice"],
)
@pytest.mark.parametrize("compiles", [False, True], ids=["eager", "compiled"])
def test_positions_that_do_not_start_again_are_of_one_document(
    positions: list[int],
    compiles: bool,  # noqa: FBT001
) -> None:
    inputs: dict[str, Any] = {
        "input_ids": IDS[:1],
        "position_ids": torch.tensor([positions], device=IDS.device),
        "use_cache": True,  # otherwise transformers takes position_ids for documents
    }
    want = DECODERS["llama"].make("eager")(**inputs).logits
    model = DECODERS["llama"].make(NAME)
    if compiles:
        model = torch.compile(model, backend="aot_eager")
    torch.testing.assert_close(model(**inputs).logits, want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("family", [pytest.param(x, id=n) for n, x in DECODERS.items()])
def test_packed_documents_in_half_precision_err_no_more_than_alone(family: Family) -> None:
    family = with_all_experts(family)
    exact = run_documents(family.make("eager", torch.bfloat16).float())
    eager = run_documents(family.make("eager", torch.bfloat16))
    inputs: dict[str, Any] = {"input_ids": IDS[:1], "position_ids": POSITIONS, "use_cache": False}
    require_no_worse(run(family.make(NAME, torch.bfloat16), **inputs), eager, exact)


since_5_static = pytest.mark.skipif(
    Version("5.0") > VERSION, reason="before 5.0 a static cache has one head_dim for all"
)
GENERATIONS = [
    pytest.param(
        family,
        cache,
        id=f"{name}-{cache or 'dynamic'}",
        marks=since_5_static if name == "deepseek_v3" and cache else (),
    )
    for name, family in DECODERS.items()
    for cache in (None, "static")
]


@pytest.mark.parametrize("padding", [torch.ones_like(LEFT), LEFT, GAPS], ids=["no", "left", "gaps"])
@pytest.mark.parametrize(("family", "cache"), GENERATIONS)
def test_generated_tokens_are_those_of_eager(
    family: Family, cache: str | None, padding: Tensor
) -> None:
    want, got = (
        generate(family, name, padding, cache_implementation=cache) for name in ("eager", NAME)
    )
    assert torch.equal(got[0], want[0])
    assert error(got[1], want[1]) <= TOLERANCE


def test_beams_are_those_of_eager() -> None:
    options: dict[str, Any] = {"num_beams": 3, "cache_implementation": "static"}
    want, got = (generate(DECODERS["gemma3"], name, LEFT, **options) for name in ("eager", NAME))
    assert torch.equal(got[0], want[0])


since_gemma4 = pytest.mark.skipif(not hasattr(transformers, GEMMA4.model), reason="a newer model")


@since_gemma4
@pytest.mark.parametrize("padding", [None, LEFT], ids=["plain", "left"])
def test_a_head_dim_of_512_equals_eager(padding: Tensor | None) -> None:
    """Uses float16 on a GPU, because the kernels for float32 end at 256."""
    inputs = inputs_of(GEMMA4, padding)
    exact = run(GEMMA4.make("eager", torch.float32), padding, **inputs)
    if DEVICE.type == "cpu":
        require_equal(run(GEMMA4.make(NAME), padding, **inputs), exact, LARGE_TOLERANCE)
        return
    eager, got = (
        run(GEMMA4.make(name, torch.float16), padding, **inputs) for name in ("eager", NAME)
    )
    require_no_worse(got, eager, exact)


@since_gemma4
@pytest.mark.parametrize("cache", [None, "static"], ids=["dynamic", "static"])
def test_logits_of_generated_tokens_with_a_head_dim_of_512(cache: str | None) -> None:
    """On a GPU, compares only the first tokens, in float16: later tokens may differ."""
    on_cpu = DEVICE.type == "cpu"
    dtype, steps, tolerance = (
        (torch.float32, slice(None), LARGE_TOLERANCE) if on_cpu else (torch.float16, slice(1), 2e-2)
    )
    want, got = (
        generate(GEMMA4, name, LEFT, dtype, cache_implementation=cache) for name in ("eager", NAME)
    )
    assert not on_cpu or torch.equal(got[0], want[0])
    assert error(got[1][steps], want[1][steps]) <= tolerance


def test_siglip_equals_eager() -> None:
    generator = torch.Generator().manual_seed(2)
    inputs = {
        "pixel_values": torch.randn(2, 3, 32, 32, generator=generator).to(DEVICE),
        "input_ids": torch.randint(3, VOCABULARY, (2, 16), generator=generator).to(DEVICE),
    }
    want, got = (SIGLIP.make(name)(**inputs) for name in ("eager", NAME))
    for name in ("image_embeds", "text_embeds"):
        assert error(got[name], want[name]) <= TOLERANCE


@pytest.mark.parametrize("family", [SIGLIP, WHISPER], ids=["siglip", "whisper"])
def test_towers_in_half_precision_err_no_more_than_twice_as_much(family: Family) -> None:
    generator = torch.Generator().manual_seed(2)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(DEVICE, torch.bfloat16)

    inputs: dict[str, Tensor] = {"input_ids": IDS[:2], "pixel_values": draw(2, 3, 32, 32)}
    if family is WHISPER:
        inputs = {"decoder_input_ids": IDS[:2, :7], "input_features": draw(2, 8, 40)}
    wide = {name: x.float() if x.is_floating_point() else x for name, x in inputs.items()}
    exact = run(family.make("eager", torch.bfloat16).float(), **wide)
    eager, got = (run(family.make(name, torch.bfloat16), **inputs) for name in ("eager", NAME))
    require_no_worse(got, eager, exact)


def test_whisper_equals_eager_and_generates_the_same() -> None:
    features = torch.randn(2, 8, 40, generator=torch.Generator().manual_seed(2)).to(DEVICE)
    inputs = {"input_features": features, "decoder_input_ids": IDS[:2, :7]}
    want, got = (run(WHISPER.make(name), **inputs) for name in ("eager", NAME))
    require_equal(got, want)
    for cache in (None, "static"):
        tokens = [
            WHISPER.make(name).generate(
                input_features=features,
                max_new_tokens=9,
                cache_implementation=cache,
                disable_compile=True,
            )
            for name in ("eager", NAME)
        ]
        assert torch.equal(*tokens)


@since_5_4
def test_an_encoder_whose_modules_say_that_they_are_causal_sees_everything() -> None:
    folder = "transformers.models.phi4_multimodal"
    make = import_module(f"{folder}.modeling_phi4_multimodal").Phi4MultimodalVisionModel
    names = import_module(f"{folder}.configuration_phi4_multimodal")
    sizes = {**SIGLIP.options["vision_config"], "crop_size": 32}
    pixels = torch.randn(1, 3, 32, 32, generator=torch.Generator().manual_seed(2)).to(DEVICE)
    outs = []
    for name in ("eager", NAME):
        torch.manual_seed(SEED)
        config = names.Phi4MultimodalVisionConfig(**sizes)
        model = make._from_config(config, attn_implementation=name).eval().to(DEVICE)
        seen = torch.ones(1, 4, 4, dtype=torch.bool, device=DEVICE)
        outs.append(model(pixel_values=pixels, patch_attention_mask=seen).last_hidden_state)
    assert error(outs[1], outs[0]) <= 1e-4  # 9e-6 on a CPU


@pytest.mark.skipif(not hasattr(transformers, ESMC.model), reason="this version has no ESMC")
def test_chains_of_proteins_that_come_back_are_one_chain() -> None:
    chains = torch.tensor([[0, 0, 0, 1, 1, 1, 0, 0, 1, 1, -1, -1]], device=DEVICE).expand(BATCH, -1)
    want, got = (run(ESMC.make(x), input_ids=IDS, sequence_id=chains) for x in ("eager", NAME))
    require_equal(got, want)


def test_a_mask_of_the_callers_own_is_served() -> None:
    family = DECODERS["llama"]
    tree = torch.ones(SEQLEN, SEQLEN, dtype=torch.bool, device=DEVICE).tril()
    tree[9:, 4:8] = False  # two branches
    lowest = torch.finfo(torch.float32).min
    added = torch.where(tree, 0.0, lowest)[None, None]
    want = run(family.make("eager"), input_ids=IDS, attention_mask=added)
    for mask in (added, tree[None, None]):
        require_equal(run(family.make(NAME), input_ids=IDS, attention_mask=mask), want)
    require_equal(run(family.make(NAME), input_ids=IDS, attention_mask=added + 0.5), want)


def test_layers_that_are_computed_again_give_the_same_gradients() -> None:
    inputs = {**inputs_of(DECODERS["gpt_oss"], BOTH), "use_cache": False}
    model = DECODERS["gpt_oss"].make(NAME)
    want = run(model, BOTH, **inputs)
    again = DECODERS["gpt_oss"].make(NAME).train()
    again.gradient_checkpointing_enable()
    got = run(again, BOTH, **inputs)
    assert torch.equal(got.out, want.out)
    for name, gradient in want.gradients.items():
        assert torch.equal(got.gradients[name], gradient), name


def test_inference_mode_and_autocast_are_served() -> None:
    family = with_all_experts(DECODERS["gpt_oss"])
    for inputs in (inputs_of(family, LEFT), {"input_ids": IDS[:1], "position_ids": POSITIONS}):
        keep = inputs.get("attention_mask", torch.ones_like(inputs["input_ids"])).bool()
        want = family.make(NAME)(**inputs)[0].detach()[keep]
        with torch.inference_mode():
            assert torch.equal(family.make(NAME)(**inputs)[0][keep], want)
        with torch.autocast(DEVICE.type, torch.bfloat16):
            got = family.make(NAME)(**inputs)[0][keep]
        assert error(got, want) <= 5e-2


@pytest.mark.skipif(find_spec("accelerate") is None, reason="accelerate's hooks copy inputs")
def test_a_model_whose_weights_come_from_the_disk_equals_eager(tmp_path: Path) -> None:
    accelerate = import_module("accelerate")
    inputs = inputs_of(DECODERS["gpt_oss"], LEFT)
    want = DECODERS["gpt_oss"].make("eager")(**inputs)[0].detach()
    model = DECODERS["gpt_oss"].make(NAME)
    accelerate.disk_offload(model, tmp_path, execution_device=DEVICE)
    with torch.no_grad():
        got = model(**inputs)[0]
    assert error(got[LEFT.bool()], want[LEFT.bool()]) <= TOLERANCE


def test_queries_that_are_learned_are_those_of_every_sequence() -> None:
    generator = torch.Generator().manual_seed(3)
    q = torch.randn(1, 4, 5, 16, generator=generator).to(DEVICE)
    k, v = torch.randn(2, BATCH, 4, 7, 16, generator=generator).to(DEVICE)
    module = torch.nn.Module()
    module.is_causal = False  # type: ignore[assignment]
    got, _ = attention.attention_forward(module, q, k, v, None)
    scores = (q @ k.transpose(2, 3)) / 4
    assert error(got.transpose(1, 2), scores.softmax(-1) @ v) <= TOLERANCE


def test_positions_are_read_once_a_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    model = DECODERS["gpt_oss"].make(NAME)
    read: list[Tensor] = []

    def find(positions: Tensor) -> object:
        read.append(positions)
        return find_documents(positions)

    monkeypatch.setattr(once, "find_documents", find)
    for positions in (POSITIONS.clone(), POSITIONS.clone()):
        model(input_ids=IDS[:1], position_ids=positions)
    assert len(read) == 2  # two forwards of two layers each
