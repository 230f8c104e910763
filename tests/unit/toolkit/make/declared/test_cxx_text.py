"""Kernels with C names, found in the text of a file."""

from __future__ import annotations

import pytest

from flash_dist.toolkit.make.declared.cxx_text import find_c_kernels


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ('extern "C" __global__ void f(int x) {}', ["f"]),
        ('extern "C" __global__ void __launch_bounds__(256) f(int x) {}', ["f"]),
        ('extern "C" __global__ __launch_bounds__(B * (2), 2) void f(int x) {}', ["f"]),
        ('extern "C" __global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(1) f() {}', ["f"]),
        ('extern "C" __attribute__((visibility("default"))) __global__ void f() {}', ["f"]),
        ('extern "C"\n__global__\nvoid\nf(\nint x\n)\n{\n}', ["f"]),
        ('extern"C" void __global__ f(int (*g)(int)) {}', ["f"]),
        ('extern "C" {\n__global__ void f() { if (1) { } }\n__global__ void g() {}\n}', ["f", "g"]),
        ('namespace n {\nextern "C" __global__ void f() {}\n}', ["f"]),
        ('extern "C" __global__ void f(); extern "C" __global__ void g() {}', ["g"]),
        ('extern "C" __global__ void f(int x);', []),
        ('extern "C" int f() { g<<<1, 1>>>(); }\n__global__ void g() {}', []),
        ('extern "C" {\nint f();\n}\n__global__ void g() {}', []),
        ("__global__ void f() {}", []),
        ("template <int N> __global__ void f() {}", []),
        ('// extern "C" __global__ void f() {}', []),
        ('/* extern "C" __global__ void f() {} */', []),
        ('/* not closed: extern "C" __global__ void f() {}', []),
        ('const char* s = R"(extern "C" __global__ void f() {})";', []),
        ('const char* s = "extern \\"C\\" __global__ void f() {}";', []),
        ("char c = '\"'; extern \"C\" __global__ void f() {} char d = '\"';", ["f"]),
        ('extern "C" __global__ void f(/* ) { */ int x) {}', ["f"]),
        ('extern "C" { static __global__ void f() {} __global__ void g() {} }', ["g"]),
        (
            'namespace {\nextern "C" __global__ void f() {}\n}\nextern "C" __global__ void g() {}',
            ["g"],
        ),
        ('#if 0\n#ifdef A\n#endif\nextern "C" __global__ void f() {}\n#endif', []),
        ('#pragma once\n#if A\n#else\n#endif\nextern "C" __global__ void f() {}', ["f"]),
        ('#define f g\nextern "C" __global__ void f() {}', []),
        ('#define K(name) \\\n  extern "C" __global__ void name() {}\nK(f)', []),
        ('extern "C" __global__ void NAME(f)(int x) {}', []),
        ('extern "C" __global__ void NAME(int x) {}', []),
        ('extern "C" __global__', []),
        ('extern "C" __global__ void f(', []),
        ('extern "C" {', []),
        ("", []),
    ],
)
def test_definitions_alone_are_found(text: str, names: list[str]) -> None:
    assert list(find_c_kernels(text)) == names


def test_a_long_file_takes_no_time() -> None:
    text = "__device__ int helper() { return 1; }\n" * 20_000
    assert list(find_c_kernels(f'extern "C" {{ {text} __global__ void f() {{}} }}')) == ["f"]
