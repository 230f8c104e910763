"""Our signatures, compared with those that other packages published, in signatures.json."""

from __future__ import annotations

import ast
import inspect
import json
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any, Final

import pytest
import torch

from ci.docs.pages import find_definition
from flash_dist.attention.arguments import choose_band
from flash_dist.attention.scores import SINKS
from flash_dist.attention.unsupported import ALLOWED, REASONS, Others, refuse_unsupported
from flash_dist.compat import flash_attn
from flash_dist.compat.flash_attn import bert_padding
from flash_dist.toolkit.make.project import ROOT

PUBLISHED: Final = json.loads(Path(__file__).with_name("signatures.json").read_text("utf-8"))
PACKAGE: Final = ROOT / "flash_dist"
BERT_PADDING: Final = "flash_attn.bert_padding"
RENAMED: Final = {  # names in torch's varlen_attn
    "query": "q",
    "key": "k",
    "value": "v",
    "cu_seq_q": "cu_seqlens_q",
    "cu_seq_k": "cu_seqlens_k",
    "max_q": "max_seqlen_q",
    "max_k": "max_seqlen_k",
}


@dataclass(frozen=True)
class Signature:
    """Names, each with the text of its default, or None if it has no default."""

    positional: tuple[tuple[str, str | None], ...]
    named: tuple[tuple[str, str | None], ...]  # keyword-only

    @classmethod
    def of(cls, arguments: ast.arguments) -> Signature:
        defaults = [None] * (len(arguments.args) - len(arguments.defaults)) + arguments.defaults
        return cls(
            _pair(arguments.args, defaults), _pair(arguments.kwonlyargs, arguments.kw_defaults)
        )

    @classmethod
    def parse(cls, text: str) -> Signature:
        node = ast.parse(f"def f{text}: ...").body[0]
        assert isinstance(node, ast.FunctionDef)
        return cls.of(node.args)

    @property
    def all(self) -> dict[str, str | None]:
        return dict(self.positional + self.named)


def _pair(names: list[ast.arg], defaults: Any) -> tuple[tuple[str, str | None], ...]:  # noqa: ANN401
    texts = [None if one is None else ast.unparse(one) for one in defaults]
    return tuple((one.arg, text) for one, text in zip(names, texts, strict=True))


@cache
def ours(name: str, file: str = "__init__.py") -> Signature:
    """Return the signature of our function, read from the source without importing it."""
    node = find_definition(PACKAGE / file, name)
    assert isinstance(node, ast.FunctionDef)
    return Signature.of(node.args)


def published(peer: str) -> list[Any]:
    """Return pytest parameters: module, name and signature of each function in a peer's data."""
    return [
        pytest.param(module["module"], name, Signature.parse(text), id=f"{module['module']}.{name}")
        for module in PUBLISHED
        if module["peer"] == peer
        for name, text in module["functions"].items()
    ]


@pytest.mark.parametrize(("module", "name", "theirs"), published("flash-attention 2"))
def test_flash_attention_2s_arguments_are_ours_in_order(
    module: str, name: str, theirs: Signature
) -> None:
    file = "compat/flash_attn/bert_padding.py" if module == BERT_PADDING else "__init__.py"
    assert ours(name, file).positional == theirs.positional
    assert not theirs.named


@pytest.mark.parametrize(
    ("module", "name", "theirs"), published("flash-attention 3") + published("flash-attention 4")
)
def test_what_newer_flash_attentions_take_is_taken_by_name(
    module: str, name: str, theirs: Signature
) -> None:
    own = ours(name).all
    for argument, default in theirs.all.items():
        assert argument in own or argument in Others.__annotations__, module
        if argument in own and own[argument] == default:
            continue
        value: Any = None if default is None else ast.literal_eval(default)
        if argument == "window_size":
            assert choose_band(value, causal=False) == choose_band((-1, -1), causal=False)
        elif argument in Others.__annotations__:
            refuse_unsupported(**{argument: value})
        else:  # cu_seqlens and max_seqlen: not None here
            assert own[argument] is None, module


def test_others_are_arguments_that_a_peer_published_with_a_reason_each() -> None:
    known = {
        argument
        for module in PUBLISHED
        for text in module["functions"].values()
        for argument in Signature.parse(text).all
    }
    vllm = {"s_aux"}  # vLLM's own name of sinks; transformers uses it, too
    assert set(Others.__annotations__) <= known | vllm
    assert set(Others.__annotations__) - set(REASONS) == set(SINKS)  # sinks are supported
    assert set(ALLOWED) <= set(REASONS)
    assert list(Others.__annotations__) == sorted(Others.__annotations__)


@pytest.mark.parametrize("name", ["scaled_dot_product_attention", "flex_attention"])
def test_torchs_signatures_are_ours(name: str) -> None:
    theirs = next(one.values[2] for one in published("torch") if one.values[1] == name)
    assert ours(name) == theirs


def test_torchs_packed_sequences_come_in_the_order_of_ours() -> None:
    theirs = next(one.values[2] for one in published("torch") if one.values[1] == "varlen_attn")
    assert isinstance(theirs, Signature)
    leading = [RENAMED[name] for name, default in theirs.positional if default is None]
    assert [name for name, _ in ours("flash_attn_varlen_func").positional[:7]] == leading


@pytest.mark.parametrize(("module", "name", "theirs"), published("torch"))
def test_the_data_is_what_the_torch_at_hand_has(module: str, name: str, theirs: Signature) -> None:
    versions = {one["version"] for one in PUBLISHED if one["peer"] == "torch"}
    if torch.__version__.partition("+")[0] not in versions:
        pytest.skip(f"the data is of torch {versions}, this is {torch.__version__}")
    function = getattr(import_module(module), name)
    if name == "scaled_dot_product_attention":  # compiled: its help has the signature
        text = " ".join((function.__doc__ or "").partition(" -> ")[0].split())
        assert Signature.parse(text.removeprefix(name)) == theirs
        return
    found = inspect.signature(function).parameters
    defaults = {one.name: one.default for one in found.values()}
    empty = inspect.Parameter.empty
    assert list(defaults) == list(theirs.all)
    assert {
        key: None if value is empty else repr(value) for key, value in defaults.items()
    } == theirs.all


def test_the_names_of_compat_are_those_of_the_data() -> None:
    modules = {one["module"]: one for one in PUBLISHED}
    functions = modules["flash_attn.flash_attn_interface"]
    assert sorted(flash_attn.__all__) == sorted(functions["functions"])
    assert flash_attn.__version__ == functions["version"]
    assert sorted(bert_padding.__all__) == sorted(modules[BERT_PADDING]["functions"])
