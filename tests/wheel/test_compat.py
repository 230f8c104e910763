"""A program written for flash_attn runs on the CPU after a change of its import."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
import torch

import flash_dist
from flash_dist.compat import flash_attn
from flash_dist.compat.flash_attn import flash_attn_func, flash_attn_varlen_func
from flash_dist.compat.flash_attn.bert_padding import pad_input, unpad_input

if TYPE_CHECKING:
    from pathlib import Path

Tensor = torch.Tensor


def test_the_functions_are_those_of_this_package() -> None:
    for name in flash_attn.__all__:
        assert getattr(flash_attn, name) is getattr(flash_dist, name)
        assert getattr(flash_attn.flash_attn_interface, name) is getattr(flash_dist, name)
    assert flash_attn_func is flash_dist.flash_attn_func


def test_the_interface_refuses_what_changes_with_every_version() -> None:
    with pytest.raises(
        ImportError, match=r"(?s)no `_flash_attn_forward`: .*hint: .*merge_attention"
    ):
        from flash_dist.compat.flash_attn.flash_attn_interface import (  # noqa: PLC0415
            _flash_attn_forward,  # noqa: F401
        )


def test_attention_without_padding_is_that_of_each_sequence() -> None:
    lengths = (3, 7, 1)
    generator = torch.Generator().manual_seed(0)
    qkv = torch.randn(3, 7, 3, 2, 16, dtype=torch.float64, generator=generator).requires_grad_()
    mask = torch.arange(7) < torch.tensor(lengths)[:, None]
    tokens, indices, cu_seqlens, longest, _ = unpad_input(qkv, mask)
    q, k, v = tokens.unbind(1)
    out = flash_attn_varlen_func(
        q, k, v, cu_seqlens, cu_seqlens, longest, longest, 0.0, causal=True
    )
    padded = pad_input(out, indices, 3, 7)
    want = torch.zeros_like(padded)
    for row, length in enumerate(lengths):
        q, k, v = qkv[row : row + 1, :length].unbind(2)
        want[row, :length] = flash_attn_func(q, k, v, 0.0, None, True)[0]  # noqa: FBT003
    torch.testing.assert_close(padded, want)
    upstream = torch.randn(padded.shape, dtype=torch.float64, generator=generator)
    torch.testing.assert_close(
        torch.autograd.grad(padded, qkv, upstream), torch.autograd.grad(want, qkv, upstream)
    )


INSTALLED = """
import sys
import flash_dist.compat

flash_dist.compat.install()
flash_dist.compat.install()  # changes nothing
import flash_attn
import flash_attn.flash_attn_interface
from flash_attn import bert_padding, flash_attn_func
from flash_attn.bert_padding import index_first_axis, pad_input, unpad_input
from flash_attn.flash_attn_interface import flash_attn_varlen_func

ours = flash_dist.compat.flash_attn
assert flash_attn is ours, flash_attn
assert bert_padding is ours.bert_padding is sys.modules["flash_attn.bert_padding"]
assert flash_attn_varlen_func is flash_dist.flash_attn_varlen_func
assert flash_attn_func is flash_attn.flash_attn_interface.flash_attn_func
assert pad_input is flash_dist.compat.flash_attn.bert_padding.pad_input
try:
    from flash_attn.flash_attn_interface import _flash_attn_forward
except ImportError as error:
    assert "merge_attention" in str(error)
else:
    raise AssertionError
try:
    import flash_attn.layers.rotary
except ModuleNotFoundError as error:
    assert error.name == "flash_attn.layers", error
else:
    raise AssertionError
"""
TOO_LATE = """
import sys
import flash_attn
import flash_dist.compat

before = dict(sys.modules)
try:
    flash_dist.compat.install()
except flash_dist.errors.FlashDistError as error:
    print(error)
assert sys.modules["flash_attn"] is before["flash_attn"]
assert flash_attn.mine
"""


def run(code: str, folder: Path) -> str:
    command = [
        sys.executable,
        "-W",
        "error",
        "-c",
        f"import sys; sys.path.insert(0, {str(folder)!r})",
    ]
    command[-1] += code
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return done.stdout


@pytest.mark.parametrize("has_another", [False, True], ids=["alone", "beside another"])
def test_a_program_keeps_its_imports_once_it_is_installed(
    tmp_path: Path, *, has_another: bool
) -> None:
    if has_another:
        (tmp_path / "flash_attn").mkdir()
        (tmp_path / "flash_attn" / "__init__.py").write_text("raise AssertionError")
    run(INSTALLED, tmp_path)


def test_installing_beside_another_that_is_imported_is_refused(tmp_path: Path) -> None:
    (tmp_path / "flash_attn.py").write_text("mine = True")
    said = run(TOO_LATE, tmp_path)
    assert said.startswith("no other flash_attn may be imported before `flash_dist.compat.install")
    assert f"got `flash_attn` from {tmp_path}" in said
    assert "hint: call it before the first `import flash_attn`" in said
