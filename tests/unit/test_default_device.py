"""No tensor of the package lands on torch's default device by accident."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Final

import pytest
import torch
from torch.utils._device import _device_constructors

import flash_dist
from flash_dist.masks import BlockMask
from tests.default_device import default_device

PACKAGE: Final = Path(flash_dist.__file__).parent
# Calls without a device argument: torch.Tensor(2, 3), torch.FloatTensor([1.0]) and so on.
WITHOUT_DEVICE: Final = frozenset({"Tensor", "normal"}) | {
    f"{kind}Tensor" for kind in ("Float", "Double", "Half", "BFloat16", "Long", "Int", "Bool")
}
MAKERS: Final = frozenset(maker.__name__ for maker in _device_constructors()) | WITHOUT_DEVICE


def find_homeless(source: str) -> list[str]:
    """Find the calls of torch, and imports from it, that make tensors on the default device."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and node.module == "torch":
            found += [
                f"{node.lineno}: from torch import {alias.name}"
                for alias in node.names
                if alias.name in MAKERS - {"Tensor"}
            ]
        if isinstance(node, ast.Call) and _is_homeless(node):
            found.append(f"{node.lineno}: {ast.unparse(node.func)}")
    return found


def _is_homeless(call: ast.Call) -> bool:
    function = call.func
    if not isinstance(function, ast.Attribute) or ast.unparse(function.value) != "torch":
        return False
    if function.attr in WITHOUT_DEVICE:
        return True
    return function.attr in MAKERS and not any(word.arg == "device" for word in call.keywords)


def test_every_new_tensor_names_its_device() -> None:
    sources = {path: path.read_text(encoding="utf-8") for path in PACKAGE.rglob("*.py")}
    assert any("torch.arange(" in source for source in sources.values())
    found = [f"{path}:{one}" for path, text in sources.items() for one in find_homeless(text)]
    assert not found, "without `device=`:\n" + "\n".join(found)


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("torch.zeros(2)", ["1: torch.zeros"]),
        ("torch.as_tensor(x, dtype=y)", ["1: torch.as_tensor"]),
        ("torch.arange(2, **options)", ["1: torch.arange"]),
        ("torch.Tensor(2, 3)", ["1: torch.Tensor"]),
        ("from torch import Tensor, full", ["1: from torch import full"]),
        ("torch.zeros(2, device=x.device)", []),
        ("torch.zeros_like(x) + x.new_zeros(2)", []),
        ("numpy.zeros(2)", []),
    ],
)
def test_a_tensor_without_a_device_is_found(source: str, found: list[str]) -> None:
    assert find_homeless(source) == found


def test_under_a_default_device_tests_make_tensors_on_the_cpu_and_others_do_not() -> None:
    with default_device("meta"):
        mine = torch.zeros(2)
        others = eval(compile("torch.zeros(2)", "elsewhere.py", "eval"), {"torch": torch})  # noqa: S307
    assert mine.device.type == "cpu"
    assert others.device.type == "meta"


def test_tensors_that_users_make_on_the_default_device_are_refused_if_they_have_no_values() -> None:
    message = "lengths must be a tensor with values, got one on the meta device"
    with torch.device("meta"), pytest.raises(ValueError, match=message):
        BlockMask.padding(torch.tensor([3, 4]))
