"""Names in readable form, including malicious ones."""

from __future__ import annotations

import os
import sys
import time
from typing import TYPE_CHECKING

import pytest

from flash_dist.toolkit.binaries import demangle as module
from flash_dist.toolkit.binaries.demangle import demangle, short_name

if TYPE_CHECKING:
    from collections.abc import Iterator

needs_libstdcxx = pytest.mark.skipif(
    not sys.platform.startswith("linux") or module.load()(b"_Z1fv") != b"f()",
    reason="needs libstdc++.so.6",
)


@pytest.fixture(autouse=True)
def child(monkeypatch: pytest.MonkeyPatch) -> Iterator[module._Child]:
    """Clear the cache and the failure count."""
    fresh = module._Child()
    monkeypatch.setattr(module, "_child", fresh)
    demangle.cache_clear()
    yield fresh
    fresh.stop()
    demangle.cache_clear()


def bomb(levels: int) -> str:
    """Return a mangled name in which each argument is twice as long as the one before."""
    digits = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZ"
    seqs = [
        (digits[n // 36] if n >= 36 else "") + digits[n % 36] for n in range(levels)
    ]  # of the substitutions S0_, S1_, ...
    return "_Z1f1PIiiE" + "".join(f"S_IS{seq}_S{seq}_E" for seq in seqs)


@needs_libstdcxx
@pytest.mark.parametrize(
    ("mangled", "readable"),
    [
        pytest.param("_Z4betaILi64EEvPf", "void beta<64>(float*)", id="template"),
        pytest.param("_Z5alphaPfi", "alpha(float*, int)", id="plain"),
        pytest.param(
            "_ZN12_GLOBAL__N_15gammaEv", "(anonymous namespace)::gamma()", id="anonymous-namespace"
        ),
    ],
)
def test_names_are_demangled(mangled: str, readable: str) -> None:
    assert demangle(mangled) == readable
    assert demangle(mangled) == readable


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("alpha", id="c-name"),
        pytest.param("", id="empty"),
        pytest.param("_Z", id="prefix-only"),
        pytest.param("_Znonsense!", id="odd-character"),
        pytest.param("_Z5alphaPfi\n_Z5alphaPfi", id="two-lines"),
        pytest.param("_Z5alphaPfi\0", id="zero-byte"),
        pytest.param("_Z5\u00e4lpha", id="not-ascii"),
        pytest.param("_Z99999999999999999999f", id="length-lies"),
        pytest.param("_Z1f" + "P" * module.MAX_NAME + "i", id="too-long"),
        pytest.param("_Z1f" + "P" * 60_000 + "i", id="too-deep"),
    ],
)
def test_a_text_that_is_no_name_is_unchanged(name: str) -> None:
    assert demangle(name) == name


@pytest.mark.slow
@needs_libstdcxx
def test_a_name_that_unpacks_without_end_stays_as_it_is() -> None:
    def spent() -> float:
        """Return the seconds of CPU time, including children that have ended."""
        return sum(os.times()[:4])

    started = spent()
    assert len(demangle(bomb(8))) > 4000
    assert demangle(bomb(40)) == bomb(40)
    assert spent() - started < module.PATIENCE
    assert demangle("_Z5alphaPfi") == "alpha(float*, int)"


@pytest.mark.slow
@needs_libstdcxx
def test_after_a_few_such_names_all_others_stay_as_they_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "MAX_FAILURES", 1)
    assert demangle(bomb(41)) == bomb(41)
    assert demangle("_Z5alphaPfi") == "_Z5alphaPfi"


def test_a_child_that_does_not_answer_is_given_up(
    monkeypatch: pytest.MonkeyPatch, child: module._Child
) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    assert demangle("_Z5alphaPfi") == "_Z5alphaPfi"
    assert child._failures == 1
    monkeypatch.setattr(sys, "executable", "/absent/python")
    assert demangle("_Z4betaPf") == "_Z4betaPf"
    assert child._failures == 2


def test_without_the_library_nothing_is_demangled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LIBRARY", "libabsent.so.6")
    assert module.load()(b"_Z5alphaPfi") == b""


@pytest.mark.parametrize(
    ("readable", "short"),
    [
        ("void beta<64>(float*)", "beta<64>"),
        ("alpha(float*, int)", "alpha"),
        ("alpha", "alpha"),
        ("_Z5alphaPfi", "_Z5alphaPfi"),
        ("", ""),
        ("(anonymous namespace)::gamma()", "(anonymous namespace)::gamma"),
        (
            "void a::(anonymous namespace)::k<f(int)::{lambda()#1}, (b)1>(int) [clone .x]",
            "a::(anonymous namespace)::k<f(int)::{lambda()#1}, (b)1>",
        ),
        ("void k<((3)>(2)), ((1)<(2)), x<int> >(x<int>)", "k<((3)>(2)), ((1)<(2)), x<int> >"),
        ("void k<decltype (a->b)>(int)", "k<decltype (a->b)>"),
        ("void k<x>y)>(", "k<x>y)>"),
        ("(", "("),
    ],
)
def test_a_short_name_has_no_return_type_and_no_arguments(readable: str, short: str) -> None:
    assert short_name(readable) == short


def test_short_names_of_nonsense_take_no_time() -> None:
    started = time.process_time()
    for nonsense in ("<" * 200_000 + ")" * 200_000, "<([{" * 100_000, "a " * 200_000 + "("):
        short_name(nonsense)
    assert time.process_time() - started < 5


@pytest.mark.parametrize(
    ("mangled", "name"),
    [
        ("_ZN7cutlass13device_kernelINS_4gemmEEvT_", "cutlass::device_kernel<...>"),
        ("_ZN12_GLOBAL__N_15alphaEv", "(anonymous namespace)::alpha"),
        ("_ZN7cutlass99xEv", "_ZN7cutlass99xEv"),
        ("_ZN7cutlassaSERKS_", "_ZN7cutlassaSERKS_"),
        ("_ZNK1a1bEv", "_ZNK1a1bEv"),
        ("_ZN", "_ZN"),
        ("_ZN1a", "_ZN1a"),
    ],
)
def test_the_plain_part_of_a_name_too_long_to_demangle_is_read(mangled: str, name: str) -> None:
    assert short_name(mangled) == name
