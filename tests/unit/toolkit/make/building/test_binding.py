from __future__ import annotations

import time
from typing import TYPE_CHECKING

import pytest

from ci.places import INCLUDES, SOURCES
from flash_dist.toolkit.errors import KernelsError
from flash_dist.toolkit.make.building.binding import PAGE, BindingError, read_code, require_stable
from flash_dist.toolkit.make.project import NATIVE, ROOT

if TYPE_CHECKING:
    from pathlib import Path

STABLE = "#include <torch/csrc/stable/library.h>\nSTABLE_TORCH_LIBRARY(mine, m) {}\n"
PATIENCE = 20  # CPU seconds; reading a text repeatedly would take minutes


def write(folder: Path, **texts: str) -> None:
    """Write headers, named without their suffix."""
    for name, text in texts.items():
        (folder / f"{name}.h").write_text(text, encoding="utf-8")


def find(folder: Path, text: str | bytes, *include: Path) -> str:
    """Return the part of the error message that lists the findings in a source; empty if none."""
    source = folder / "a.cpp"
    source.write_bytes(text if isinstance(text, bytes) else text.encode())
    try:
        require_stable([source], include)
    except BindingError as error:
        return error.message.partition(": ")[2].partition("; ")[0].replace(f"{folder}/", "")
    return ""


REPORTED = {
    "extension": ("#include <torch/extension.h>", "includes `torch/extension.h`"),
    "all": ("#include <torch/all.h>", "includes `torch/all.h`"),
    "torch": ("#include <torch/torch.h>", "includes `torch/torch.h`"),
    "library": ("#include <torch/library.h>", "includes `torch/library.h`"),
    "ATen": ("#include <ATen/ATen.h>", "includes `ATen/ATen.h`"),
    "ATen-cuda": ("#include <ATen/cuda/CUDAContext.h>", "includes `ATen/cuda/CUDAContext.h`"),
    "c10": ("#include <c10/cuda/CUDAGuard.h>", "includes `c10/cuda/CUDAGuard.h`"),
    "pybind11": ("#include <pybind11/stl.h>", "includes `pybind11/stl.h`"),
    "helpers-of-aoti": (
        "#include <torch/csrc/inductor/aoti_torch/utils.h>",
        "includes `torch/csrc/inductor/aoti_torch/utils.h`",
    ),
    "quoted": ('#include "torch/extension.h"', "includes `torch/extension.h`"),
    "spaces": ("  #  include<ATen/ATen.h>", "includes `ATen/ATen.h`"),
    "comment-within": ("#include/* */<ATen/ATen.h>", "includes `ATen/ATen.h`"),
    "comment-before": ("/* */ #include <ATen/ATen.h>", "includes `ATen/ATen.h`"),
    "digraph": ("%:include <ATen/ATen.h>", "includes `ATen/ATen.h`"),
    "import": ("#import <ATen/ATen.h>", "includes `ATen/ATen.h`"),
    "dots": ("#include <torch/../ATen/ATen.h>", "includes `torch/../ATen/ATen.h`"),
    "module": ("PYBIND11_MODULE(_C, m) {}", "has `PYBIND11_MODULE`"),
    "module-comment": ("PYBIND11_MODULE /* */ (_C, m)", "has `PYBIND11_MODULE`"),
    "registration": ("TORCH_LIBRARY(mine, m) {}", "has `TORCH_LIBRARY`"),
    "implementation": ("TORCH_LIBRARY_IMPL(mine, CUDA, m) {}", "has `TORCH_LIBRARY_IMPL`"),
    "fragment": ("TORCH_LIBRARY_FRAGMENT(mine, m) {}", "has `TORCH_LIBRARY_FRAGMENT`"),
    "tensor": ("at::Tensor x;", "has `at::Tensor`"),
    "tensor-spaced": ("f(const ::at :: Tensor& x);", "has `at::Tensor`"),
    "torch-tensor": ("std::vector<torch::Tensor> f();", "has `torch::Tensor`"),
    "character-before": ("case 'a': at::Tensor x;", "has `at::Tensor`"),
    "number-before": ("int n = 1'000; at::Tensor x;", "has `at::Tensor`"),
    "string-before": ('auto s = "\\\\"; at::Tensor x;', "has `at::Tensor`"),
}


@pytest.mark.parametrize(("line", "found"), REPORTED.values(), ids=REPORTED)
def test_names_outside_of_the_stable_abi_are_reported_with_their_line(
    tmp_path: Path, line: str, found: str
) -> None:
    text = f"{STABLE}\n{line}\n"
    assert find(tmp_path, text) == f"a.cpp:4 {found}"
    assert find(tmp_path, text.replace("\n", "\r\n")) == f"a.cpp:4 {found}"


IGNORED = {
    "line-comment": "// PYBIND11_MODULE(_C, m)",
    "joined-line-comment": "// joined \\\n#include <ATen/ATen.h>",
    "joined-behind-blanks": "// joined \\  \n#include <ATen/ATen.h>",
    "include-in-a-comment": "/*\n#include <torch/extension.h>\n*/",
    "comments-in-comments": "/* // */ // /*\nint x; // */ at::Tensor",
    "comment-without-end": "/* at::Tensor",
    "string": 'auto s = "at::Tensor";',
    "string-with-quote": 'auto s = "\\"at::Tensor";',
    "quotes": 'auto s = u8"at::Tensor", c = \'"\', t = "at::Tensor";',
    "raw-string": 'auto s = R"(" at::Tensor ")";',
    "raw-string-of-lines": 'auto s = u8R"x()" )y" at::Tensor\n)x";',
    "raw-string-without-end": 'auto s = R"x(at::Tensor',
    "include-in-a-string": 'auto s = "#include <ATen/ATen.h>";',
    "text-of-a-macro": '#define SHOW(include) #include "ATen/ATen.h"',
    "macro-without-arguments": "#ifdef TORCH_LIBRARY\n#endif",
    "has-include": "#if __has_include(<ATen/ATen.h>)\n#endif",
    "namespace-of-others": "my::at::Tensor x; Of<int>::at::Tensor y;",
    "names-alike": "torch::stable::Tensor x; at::TensorList y; cat::Tensor z;",
    "macros-alike": "MY_TORCH_LIBRARY(x); xPYBIND11_MODULE(x);",
    "headeronly": "#include <torch/headeronly/core/ScalarType.h>",
    "doubled-slash": "#include <torch//headeronly/core/Dispatch_v2.h>",
    "shim": "#include <torch/csrc/inductor/aoti_torch/c/shim.h>",
    "generated": "#include <torch/csrc/inductor/aoti_torch/generated/c_shim_aten.h>",
    "header-alike": "#include <torchvision.h>",
    "include-without-end": "#include <ATen/ATen.h\n",
    "include-of-a-macro": "#include HEADER",
    "macro-of-their-own": "#define TORCH_LIBRARY(a, b) STABLE_TORCH_LIBRARY(a, b)\n"
    "TORCH_LIBRARY(x, m) {}",
}


@pytest.mark.parametrize("line", IGNORED.values(), ids=IGNORED)
def test_comments_literals_and_names_alike_do_not_count(tmp_path: Path, line: str) -> None:
    assert find(tmp_path, f"{STABLE}{line}\n") == ""
    assert find(tmp_path, f"{STABLE}{line}\n".replace("\n", "\r\n")) == ""


ENCODED = {
    "BOM": (b"\xef\xbb\xbf#include <ATen/ATen.h>", "a.cpp:1 includes"),
    "not-UTF-8": (b"// \xff\xfe\n// \xc3\nat::Tensor x;", "a.cpp:3 has"),
    "joined-lines": (b"// \xe9\\\nat::Tensor\nat::Tensor", "a.cpp:3 has"),
    "joined-name": (b"int a\\\n;\\\r\n\nPYBIND11_\\\nMODULE(", "a.cpp:4 has"),
    "NUL": (b"\0\0at::Tensor", "a.cpp:1 has"),
    "apostrophe": (b"#error don't: at::Tensor\nat::Tensor", "a.cpp:2 has"),
    "empty": (b"", ""),
    "backslash": (b"\\", ""),
    "hash": (b"#", ""),
    "open-string": (b'"\\', ""),
}


@pytest.mark.parametrize(("data", "found"), ENCODED.values(), ids=ENCODED)
def test_bytes_of_any_encoding_are_read(tmp_path: Path, data: bytes, found: str) -> None:
    told = find(tmp_path, data)
    assert told.startswith(found)
    assert bool(told) == bool(found)


def test_a_header_of_the_project_is_read_in_the_order_of_include_folders(tmp_path: Path) -> None:
    for name in ("one", "two", "src"):
        (tmp_path / name).mkdir()
    write(tmp_path / "one", util="\n#include <ATen/ATen.h>\n")
    write(tmp_path / "two", util="", angled='#include "util.h"\n')
    folders = tmp_path / "one", tmp_path / "two"
    text = f'{STABLE}#include "util.h"\n'
    assert find(tmp_path, text) == ""
    found = f"one/util.h:2 (included by {tmp_path}/a.cpp) includes `ATen/ATen.h`"
    assert find(tmp_path, text, *folders) == found.replace(f"{tmp_path}/", "")
    assert find(tmp_path, text, *reversed(folders)) == ""
    assert find(tmp_path, f"{STABLE}#include <angled.h>\n", *reversed(folders)) == ""
    write(tmp_path, util="")  # next to the source: found first
    assert find(tmp_path, text, *folders) == ""


def test_a_header_is_found_through_others_and_beside_the_file_that_includes_it(
    tmp_path: Path,
) -> None:
    (tmp_path / "deep").mkdir()
    write(tmp_path, first='#include "deep/second.h"\n')
    write(tmp_path / "deep", second='#include "third.h"\n', third='#include "../fourth.h"\n')
    write(tmp_path, fourth="#include <pybind11/pybind11.h>\n")
    found = find(tmp_path, f'{STABLE}#include "first.h"\n')
    assert found == "deep/../fourth.h:1 (included by a.cpp) includes `pybind11/pybind11.h`"


def test_a_header_of_the_project_may_have_the_name_of_a_folder_of_torch(tmp_path: Path) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "binding.h").write_text("\n", encoding="utf-8")
    assert find(tmp_path, f'{STABLE}#include "torch/binding.h"\n') == ""
    assert find(tmp_path, f"{STABLE}#include <torch/binding.h>\n", tmp_path).startswith("a.cpp:3")


def test_a_disabled_include_is_not_followed(tmp_path: Path) -> None:
    write(tmp_path, old="#include <ATen/ATen.h>\n")
    assert find(tmp_path, f'{STABLE}// #include "old.h"\n/* #include "old.h" */\n') == ""


def test_headers_that_include_each_other_are_read_once(tmp_path: Path) -> None:
    write(tmp_path, one='#include "two.h"\n#include "one.h"\n', two='#include "one.h"\n')
    assert find(tmp_path, f'{STABLE}#include "one.h"\n#include "a.cpp"\n') == ""
    write(tmp_path, two='#include "one.h"\nat::Tensor f();\n')
    found = find(tmp_path, f'{STABLE}#include "one.h"\n#include "a.cpp"\n')
    assert found == "two.h:2 (included by a.cpp) has `at::Tensor`"


def test_symlinks_are_followed_and_circles_of_them_end(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    write(tmp_path / "elsewhere", real="at::Tensor f();\n")
    (tmp_path / "link.h").symlink_to(tmp_path / "elsewhere" / "real.h")
    (tmp_path / "circle.h").symlink_to(tmp_path / "circle.h")
    (tmp_path / "same").symlink_to(tmp_path)
    text = f'{STABLE}#include "circle.h"\n#include "same/deep.h"\n'
    write(tmp_path, deep='#include "same/deep.h"\n#include "same/same/deep.h"\n')
    assert find(tmp_path, text) == ""
    found = find(tmp_path, f'{text}#include "link.h"\n')
    assert found == "link.h:1 (included by a.cpp) has `at::Tensor`"


@pytest.mark.parametrize(
    "name", ["a" * 5000, "\0", "..", ".", "", "a.cpp/x.h", "/", "\ufffd", "no/such.h"]
)
def test_a_name_that_is_no_file_is_left_to_the_compiler(tmp_path: Path, name: str) -> None:
    assert find(tmp_path, f'{STABLE}#include "{name}"\n#include <{name}>\n', tmp_path) == ""


def test_several_findings_share_one_sentence_with_a_hint(tmp_path: Path) -> None:
    source, other = tmp_path / "a.cu", tmp_path / "b.cpp"
    source.write_text("at::Tensor f();\nat::Tensor g();\n#include <torch/extension.h>\n")
    other.write_text("#include <ATen/ATen.h>\nPYBIND11_MODULE(_C, m) {}\n")
    with pytest.raises(BindingError) as caught:
        require_stable([source, other])
    assert isinstance(caught.value, KernelsError)
    assert caught.value.message == (
        f"the sources are not on torch's stable ABI: {source}:1 has `at::Tensor`, {source}:3 "
        f"includes `torch/extension.h`, {other}:1 includes `ATen/ATen.h` and 1 more; of torch they "
        "may include torch/csrc/stable, torch/headeronly and torch/csrc/inductor/aoti_torch/c alone"
    )
    assert caught.value.hint == f"`{PAGE}` says what to write instead"


def test_the_hint_leads_to_a_page_of_the_documentation() -> None:
    assert (ROOT / PAGE.partition(" in the sources of ")[0]).is_file()


def test_a_name_cannot_steer_the_terminal_or_fill_it(tmp_path: Path) -> None:
    found = find(tmp_path, f"#include <torch/\x1b[2J{'x' * 10_000}>\n")
    assert "\x1b" not in found
    assert len(found) < 200


UNREGISTERED = {
    "registered": ([STABLE], ""),
    "second-file": (["int x;", "STABLE_TORCH_LIBRARY_IMPL(x, CUDA, m) {}"], ""),
    "fragment": (["STABLE_TORCH_LIBRARY_FRAGMENT(x, m) {}"], ""),
    "in-a-comment": (["// STABLE_TORCH_LIBRARY(x, m)"], "0.cpp"),
    "two": (["", ""], "0.cpp, 1.cpp"),
    "many": ([""] * 5, "0.cpp, 1.cpp, 2.cpp and 2 more"),
    "none": ([], ""),
}


@pytest.mark.parametrize(("texts", "lacking"), UNREGISTERED.values(), ids=UNREGISTERED)
def test_sources_that_register_no_operators_are_a_warning(
    tmp_path: Path, texts: list[str], lacking: str
) -> None:
    paths = [tmp_path / f"{number}.cpp" for number in range(len(texts))]
    for path, text in zip(paths, texts, strict=True):
        path.write_text(text, encoding="utf-8")
    told = require_stable(paths).replace(f"{tmp_path}/", "")
    expected = (
        f"STABLE_TORCH_LIBRARY is not in {lacking}: loading them registers no torch operators"
    )
    assert told == (expected if lacking else "")


def test_operators_that_a_header_registers_count(tmp_path: Path) -> None:
    write(tmp_path, ops=STABLE)
    source = tmp_path / "a.cpp"
    source.write_text('#include "ops.h"\n', encoding="utf-8")
    assert require_stable([source]) == ""


def test_a_source_that_is_not_there_is_an_error_of_the_system(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        require_stable([tmp_path / "absent.cpp"])


def test_our_own_binding_is_on_the_stable_abi() -> None:
    paths = [*SOURCES.glob("binding/*.cpp"), *NATIVE.glob("binding/*.cpp")]
    assert len(paths) > 2
    assert require_stable(paths, INCLUDES) == ""


PIECES = {
    "quotes": '"',
    "apostrophes": "'",
    "escapes": '\\"',
    "slashes": "/",
    "open-comments": "/*",
    "hashes": "#",
    "comments-in-directives": "#/* */x",
    "open-includes": "#include <",
    "includes": "#include <a.h>\n",
    "open-raw-strings": 'R"x(',
    "open-delimiters": 'R"xxxxxxxxxxxxxxxx',
    "numbers": "1'",
    "names": "at ",
    "colons": "::",
    "backslashes": "\\ ",
    "joined-lines": "\\\n",
    "macros": "TORCH_LIBRARY/**/",
    "types": "torch::Tensor\n",
    "one-word": "x",
}


@pytest.mark.slow
@pytest.mark.parametrize("piece", PIECES.values(), ids=PIECES)
def test_a_megabyte_of_anything_takes_seconds(piece: str) -> None:
    data = (piece * (1_000_000 // len(piece))).encode()
    start = time.process_time()
    read_code(data + b"\n*/ at::Tensor")
    assert time.process_time() - start < PATIENCE


@pytest.mark.slow
def test_the_line_at_the_end_of_a_large_file_is_reported(tmp_path: Path) -> None:
    lines = "// at::Tensor\nauto s = \"at::Tensor\"; /* ' */ int n = 1'000;\n"
    count = 5_000_000 // len(lines)
    text = f"{lines * count}at::Tensor x;\n"
    assert find(tmp_path, text) == f"a.cpp:{2 * count + 1} has `at::Tensor`"
