"""Names of flash_dist.compat.flash_attn, and errors for other names; nothing is compiled."""

from __future__ import annotations

import subprocess
import sys

import pytest

from flash_dist.compat import flash_attn
from flash_dist.toolkit.make.project import ROOT

HAS = "`flash_dist.compat.flash_attn` has no `_flash_attn_forward`: other versions have it with"


def test_importing_it_imports_no_torch() -> None:
    code = "import sys, flash_dist.compat.flash_attn; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True, cwd=ROOT)


def test_a_program_may_ask_whether_a_name_is_there() -> None:
    assert not hasattr(flash_attn, "_flash_attn_forward")
    assert getattr(flash_attn, "_flash_attn_forward", None) is None
    assert not hasattr(flash_attn.bert_padding, "IndexFirstAxis")
    assert {"flash_attn_func", "bert_padding", "__version__"} < set(dir(flash_attn))


def test_a_name_that_is_not_served_is_refused_in_a_sentence() -> None:
    with pytest.raises(AttributeError, match=HAS):
        flash_attn._flash_attn_forward  # noqa: B018
    with pytest.raises(AttributeError, match=r"has no `nothing`: there are .*flash_attn_func, "):
        flash_attn.nothing  # noqa: B018


def test_an_import_of_a_name_that_is_not_served_is_refused_in_the_same_sentence() -> None:
    with pytest.raises(ImportError, match=HAS):
        from flash_dist.compat.flash_attn import _flash_attn_forward  # noqa: F401, PLC0415
    with pytest.raises(ImportError, match=r"has no `IndexFirstAxis`: there are .*pad_input, "):
        from flash_dist.compat.flash_attn.bert_padding import IndexFirstAxis  # noqa: F401, PLC0415
