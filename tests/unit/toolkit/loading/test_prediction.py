"""Planted libraries: one for each reason not to load, and sound ones that look similar."""

from __future__ import annotations

import os
import struct
import sys
import sysconfig
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from flash_dist.toolkit.binaries.segments import Platform, read_platform
from flash_dist.toolkit.checks.environment import read_libc
from flash_dist.toolkit.errors import FatbinError
from flash_dist.toolkit.loading.linker import Linker, LoadHost, read_host
from flash_dist.toolkit.loading.prediction import predict_loading, predict_member
from flash_dist.toolkit.machine.loader_path import read_cache, split_library_path
from flash_dist.toolkit.machine.torch_install import Torch, read_torch
from tests.unit.made.dynamic_builder import make_shared
from tests.unit.made.library_builder import Lab, call, define, make_cache, needs_gcc

if TYPE_CHECKING:
    from flash_dist.toolkit.findings.result import Finding
pytestmark = needs_gcc

CPU_TORCH, CUDA_TORCH = Torch("ok", "2.11.0+cpu"), Torch("ok", "2.11.0", "13.0")
INIT = define("PyInit_m")
ERROR = "_ZN3c105ErrorC2ENS_14SourceLocationESs"  # c10::Error's constructor, old std::string


@pytest.fixture
def lab(tmp_path: Path) -> Lab:
    return Lab(tmp_path)


@pytest.fixture
def host(lab: Lab) -> LoadHost:
    """Return a machine with a small torch and little else."""
    lab.build("torch/lib/libc10.so", define("_ZN3c105ErrorC2Ev"))
    lab.build("torch/lib/libtorch.so", define("aoti_torch_get_data_ptr", "torch_call_dispatcher"))
    with Path(sys.executable).resolve().open("rb") as program:
        platform = read_platform(program.read(64))
    folder = lab.folder / "torch" / "lib"
    linker = Linker(platform, loaded=(folder,), folders=(lab.folder / "usr" / "lib",))
    suffixes = (".cpython-311-x86_64-linux-gnu.so", ".abi3.so", ".so")
    return LoadHost(linker, CUDA_TORCH, "glibc 2.36", "3.11", suffixes, folder, lab.folder)


def with_linker(host: LoadHost, **changes: Any) -> LoadHost:  # noqa: ANN401 - of any field
    """Return the same machine with a fresh linker and other variables."""
    return replace(host, linker=replace(host.linker, _opened={}, **changes))


def torch_library(lab: Lab, name: str = "libtorch.so") -> Path:
    return lab.folder / "torch" / "lib" / name


def only_cause(library: Path, host: LoadHost, torch_min: str = "") -> Finding:
    prediction = predict_loading(library, host, torch_min=torch_min)
    assert (prediction.status, bool(prediction)) == ("failed", False)
    (cause,) = prediction.causes
    assert prediction.to_json()["causes"][0]["id"] == cause.id
    return cause


def test_torchs_libraries_are_found_without_a_search_path(lab: Lab, host: LoadHost) -> None:
    path = lab.build("m.so", call("aoti_torch_get_data_ptr"), needs=(torch_library(lab),))
    prediction = predict_loading(path, host)
    assert (prediction.status, prediction.causes, prediction.unknown) == ("ok", (), ())


def test_a_module_that_is_loaded_after_torch_may_leave_torch_out(lab: Lab, host: LoadHost) -> None:
    path = lab.build("m.so", call("torch_call_dispatcher", "_ZN3c105ErrorC2Ev"))
    assert predict_loading(path, host).status == "ok"


def test_a_weak_symbol_may_be_absent(lab: Lab, host: LoadHost) -> None:
    source = (
        "void torch_new(void) __attribute__((weak));\nvoid f(void) { if (torch_new) torch_new(); }"
    )
    assert predict_loading(lab.build("m.so", source), host).status == "ok"


def test_a_symbol_of_the_stable_interface_asks_for_a_newer_torch(lab: Lab, host: LoadHost) -> None:
    path = lab.build("m.so", call("torch_list_push_back"), needs=(torch_library(lab),))
    cause = only_cause(path, host, torch_min="2.12")
    assert cause.id == "torch-symbol-missing"
    assert cause.summary == (
        "m.so is built for a newer torch: it needs `torch_list_push_back`, "
        "which torch 2.11.0 does not have"
    )
    assert cause.fix == "`pip install 'torch>=2.12'`"
    assert only_cause(path, host).fix.startswith("`pip install --upgrade torch`")


def test_a_symbol_of_another_torch_is_named_as_its_source_has_it(lab: Lab, host: LoadHost) -> None:
    names = (ERROR, *(f"_ZN2at3op{number}Ev" for number in range(6)))
    cause = only_cause(lab.build("m.so", call(*names)), host)
    assert cause.id == "torch-symbol-missing"
    assert "built for another torch: it needs `" in cause.summary
    assert "c10::Error::Error(c10::SourceLocation, std::string)" in " ".join(
        (cause.summary, *cause.details)
    )
    assert "install a build for torch 2.11" in cause.fix
    assert any("old C++ ABI" in line for line in cause.details)
    assert cause.details[-1] == "and 3 more symbols"


def test_a_symbol_without_a_known_library_is_left_open(lab: Lab, host: LoadHost) -> None:
    own = "_Z6launchRKN2at6TensorE"  # has a Tensor argument, but is not a function of torch
    prediction = predict_loading(lab.build("m.so", call(own, "mystery")), host)
    assert (prediction.status, len(prediction.unknown)) == ("unknown", 1)
    assert "and 1 more" in prediction.unknown[0]


def test_a_cuda_module_on_a_cpu_torch_says_so(lab: Lab, host: LoadHost) -> None:
    cuda = lab.build("elsewhere/libc10_cuda.so", define("f"))
    runtime = lab.build("elsewhere/libcudart.so.13", define("g"))
    path = lab.build("m.so", call("f"), needs=(runtime, cuda))
    cause = only_cause(path, replace(host, torch=CPU_TORCH))
    assert (cause.id, "torch 2.11.0+cpu is a build without CUDA" in cause.summary) == (
        "torch-cpu-build", True,
    )  # fmt: skip
    assert "`pip install torch==2.11.0 --index-url" in cause.fix


@pytest.mark.parametrize("name", ["aoti_torch_get_current_cuda_stream", "_ZN3c104cuda6streamEv"])
def test_a_symbol_of_torchs_cuda_part_tells_a_cpu_torch(
    lab: Lab, host: LoadHost, name: str
) -> None:
    path = lab.build("m.so", call(name))
    assert only_cause(path, replace(host, torch=CPU_TORCH)).id == "torch-cpu-build"
    assert only_cause(path, host).id == "torch-symbol-missing"


def test_without_torch_torch_is_what_is_missing(lab: Lab, host: LoadHost) -> None:
    path = lab.build("m.so", call("torch_call_dispatcher"), needs=(torch_library(lab),))
    linker = replace(host.linker, loaded=())
    bare = replace(host, linker=linker, torch=Torch("absent"), torch_folder=None)
    cause = only_cause(path, bare, torch_min="2.10")
    assert (cause.id, cause.fix) == ("torch-absent", "`pip install 'torch>=2.10'`")


@pytest.mark.parametrize(
    ("library", "needed", "has", "cause", "words"),
    [
        ("libc.so.6", "GLIBC_2.38", "GLIBC_2.36", "glibc-too-old", "needs glibc 2.38, this system"),
        (
            "libstdc++.so.6", "GLIBCXX_3.4.32", "GLIBCXX_3.4.9", "libstdcxx-too-old",
            "has up to GLIBCXX_3.4.9",
        ),
        ("libgomp.so.1", "GOMP_5.0", "GOMP_1.0", "library-too-old", "GOMP_5.0, which"),
    ],
)  # fmt: skip
def test_a_version_that_the_library_here_lacks_is_the_cause(  # noqa: PLR0913, PLR0917
    lab: Lab, host: LoadHost, library: str, needed: str, has: str, cause: str, words: str
) -> None:
    newer = lab.build(f"newer/{library}", define("work"), version=needed)
    path = lab.build("m.so", call("work"), needs=(newer,))
    lab.build(f"usr/lib/{library}", define("work"), version=has)
    found = only_cause(path, host)
    assert found.id == cause
    assert words in found.summary
    assert found.fix


@pytest.mark.parametrize(
    ("others", "command"),
    [("", "unset LD_LIBRARY_PATH"), (":/opt/a:/b", "export LD_LIBRARY_PATH=/opt/a:/b")],
    ids=["alone", "among others"],
)
@pytest.mark.parametrize("library", ["libstdc++.so.6", "libgomp.so.1"])
def test_an_old_library_that_a_variable_brings_is_that_variables_matter(
    lab: Lab, host: LoadHost, library: str, others: str, command: str
) -> None:
    newer = lab.build(f"usr/lib/{library}", define("work"), version="GLIBCXX_3.4.32")
    path = lab.build("m.so", call("work"), needs=(newer,))
    old = lab.build(f"old/{library}", define("work"), version="GLIBCXX_3.4.9").parent
    assert predict_loading(path, host)
    named = split_library_path({"LD_LIBRARY_PATH": f"{old}{others}"})
    found = only_cause(path, with_linker(host, library_path=named))
    assert f"{old}/{library} (from LD_LIBRARY_PATH)" in found.summary
    assert found.fix == f"`{command}`: it names {old}"


@pytest.mark.parametrize("kind", ["empty", "text", "cut short"])
def test_the_linker_stops_at_a_file_that_is_no_library(lab: Lab, host: LoadHost, kind: str) -> None:
    sound = lab.build("usr/lib/libstdc++.so.6", define("work") + "int big[99999] = {1};")
    path = lab.build("m.so", call("work"), needs=(sound,))
    data = sound.read_bytes()
    first = lab.folder / "first" / "libstdc++.so.6"
    first.parent.mkdir()
    first.write_bytes({"empty": b"", "text": b"INPUT(x)\n" * 99, "cut short": data[:9999]}[kind])
    found = only_cause(path, with_linker(host, library_path=(first.parent,)))
    assert found.id == "library-broken"
    assert (
        f"`libstdc++.so.6`, for which the loader takes {first} (from LD_LIBRARY_PATH): it is"
        in (found.summary)
    )
    assert found.fix == f"`unset LD_LIBRARY_PATH`: it names {first.parent}"
    preloaded = only_cause(path, with_linker(host, preloaded=(first,)))
    assert preloaded.fix == f"`unset LD_PRELOAD`: it names {first}"


def test_the_linker_passes_over_a_library_that_it_may_not_read_or_that_is_for_another_machine(
    lab: Lab, host: LoadHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    sound = lab.build("usr/lib/libwork.so", define("work"))
    path = lab.build("m.so", call("work"), needs=(sound,))
    first = lab.folder / "first" / "libwork.so"
    first.parent.mkdir()
    data = bytearray(sound.read_bytes())
    data[18] = 183
    first.write_bytes(data)
    named = with_linker(host, library_path=(first.parent,))
    assert predict_loading(path, named)
    opens = Path.open

    def refuse(place: Path, *args: Any, **options: Any) -> Any:  # noqa: ANN401 - as Path.open
        if place == first:
            raise PermissionError
        return opens(place, *args, **options)

    monkeypatch.setattr(Path, "open", refuse)
    assert predict_loading(path, with_linker(host, library_path=(first.parent,)))


def test_an_empty_name_in_the_search_path_is_the_folder_that_the_process_is_in() -> None:
    assert split_library_path({"LD_LIBRARY_PATH": ":/opt"}) == (Path(), Path("/opt"))
    assert split_library_path({"LD_LIBRARY_PATH": ""}) == split_library_path({}) == ()


def test_a_newer_libstdcxx_comes_from_conda_where_python_does(lab: Lab, host: LoadHost) -> None:
    newer = lab.build("newer/libstdc++.so.6", define("work"), version="GLIBCXX_3.4.32")
    path = lab.build("m.so", call("work"), needs=(newer,))
    lab.build("usr/lib/libstdc++.so.6", define("work"), version="GLIBCXX_3.4.30")
    assert "`conda install" in only_cause(path, host).fix
    assert "a newer distribution" in only_cause(path, replace(host, prefix=Path("/opt/conda"))).fix


def test_the_distributions_that_have_a_glibc_are_named(lab: Lab, host: LoadHost) -> None:
    newer = lab.build("newer/libc.so.6", define("work"), version="GLIBC_2.34")
    path = lab.build("m.so", call("work"), needs=(newer,))
    lab.build("usr/lib/libc.so.6", define("work"), version="GLIBC_2.31")
    fix = only_cause(path, replace(host, libc="glibc 2.31")).fix
    assert "glibc 2.34 or newer (Debian 12, Ubuntu 22.04, RHEL 9 or newer)" in fix


def test_another_c_library_is_named(lab: Lab, host: LoadHost) -> None:
    path = lab.build("m.so", call("work"), needs=(lab.build("x/libc.so.6", define("work")),))
    cause = only_cause(path, replace(host, libc="musl or unknown"))
    assert (cause.id, "musl" in cause.summary) == ("libc-unsupported", True)


def test_code_for_another_cpu_is_named(lab: Lab, host: LoadHost) -> None:
    path = lab.build("m.so", define("f"))
    data = bytearray(path.read_bytes())
    struct.pack_into("<H", data, 18, 22)
    path.write_bytes(data)
    cause = only_cause(path, host)
    assert cause.id == "wrong-architecture"
    assert cause.summary.startswith("m.so is compiled for s390x, this Python runs on ")
    data[4] = 1  # a 32-bit file is not read further
    path.write_bytes(data)
    assert only_cause(path, host).id == "wrong-architecture"


def test_a_module_for_another_python_is_named(lab: Lab, host: LoadHost) -> None:
    path = lab.build("m.cpython-310-x86_64-linux-gnu.so", INIT)
    cause = only_cause(path, host)
    assert (cause.id, cause.summary) == (
        "python-abi", "m.cpython-310-x86_64-linux-gnu.so is for CPython 3.10, this is Python 3.11",
    )  # fmt: skip
    free = lab.build("m.cpython-313t-x86_64-linux-gnu.so", INIT)
    assert "CPython 3.13t" in only_cause(free, host).summary
    lab.build("m.cpython-311-x86_64-linux-gnu.so", INIT)  # the package is for several Pythons
    assert predict_loading(path, host).status == "ok"


def test_a_module_for_all_pythons_is_none_for_a_free_threaded_one(lab: Lab, host: LoadHost) -> None:
    path = lab.build("m.abi3.so", INIT)
    assert predict_loading(path, host).status == "ok"
    suffixes = (".cpython-313t-x86_64-linux-gnu.so", ".so")
    cause = only_cause(path, replace(host, python="3.13t", suffixes=suffixes))
    assert (cause.id, cause.summary) == (
        "python-abi", "m.abi3.so is for abi3, this is Python 3.13t",
    )  # fmt: skip
    assert cause.fix.startswith("use Python 3.13, which has the GIL")


def test_the_tag_of_a_file_that_is_no_module_does_not_count(lab: Lab, host: LoadHost) -> None:
    path = lab.build("_C.cpython-310-x86_64-linux-gnu.so", define("only_loaded_by_ctypes"))
    assert predict_loading(path, host).status == "ok"
    assert predict_loading(lab.build("m.abi3.so", INIT), host).status == "ok"


def test_a_function_that_this_python_lacks_is_named(lab: Lab, host: LoadHost) -> None:
    program = lab.build("bin/python", define("PyObject_Call", "Py_IncRef"))
    path = lab.build("m.abi3.so", INIT + call("Py_IncRef", "PyObject_GetOptionalAttr"))
    cause = only_cause(path, replace(host, linker=replace(host.linker, program=program)))
    assert cause.summary == (
        "m.abi3.so needs `PyObject_GetOptionalAttr`, which Python 3.11 does not have"
    )
    assert predict_loading(path, host).status == "ok"  # without symbols nothing can be predicted


def test_a_library_that_nothing_provides_is_named_with_what_needs_it(
    lab: Lab, host: LoadHost
) -> None:
    deep = lab.build("x/libcudart.so.12", define("deep"))
    middle = lab.build("usr/lib/libmiddle.so", call("deep"), needs=(deep,))
    path = lab.build("m.so", define("f"), needs=(middle,))
    cause = only_cause(path, host)
    assert cause.summary == (
        "m.so needs `libcudart.so.12` (for libmiddle.so), which was not found by the dynamic linker"
    )
    assert cause.fix == "install a build for CUDA 13.0, which torch 2.11.0 comes with"


def test_a_missing_driver_is_the_containers_matter(lab: Lab, host: LoadHost) -> None:
    path = lab.build("m.so", call("f"), needs=(lab.build("x/libcuda.so.1", define("f")),))
    cause = only_cause(path, host)
    assert (cause.id, "docker run --gpus all" in cause.fix) == ("driver-absent", True)


@pytest.mark.parametrize("tags", ["--enable-new-dtags", "--disable-new-dtags"])
def test_a_library_beside_is_found_through_origin(lab: Lab, host: LoadHost, tags: str) -> None:
    beside = lab.build("pkg/libs/libbeside.so", define("f"))
    options = (f"-Wl,{tags}", "-Wl,-rpath,$ORIGIN/libs")
    path = lab.build("pkg/m.so", call("f"), *options, needs=(beside,))
    assert predict_loading(path, host).status == "ok"
    moved = path.rename(lab.folder / "m.so")
    assert only_cause(moved, host).id == "library-missing"
    named = replace(host, linker=replace(host.linker, library_path=(beside.parent,)))
    assert predict_loading(moved, named).status == "ok"


def test_origin_is_where_the_link_is_not_where_it_points(lab: Lab, host: LoadHost) -> None:
    beside = lab.build("site/libs/libbeside.so", define("f"))
    path = lab.build("cache/m.so", call("f"), "-Wl,-rpath,$ORIGIN/libs", needs=(beside,))
    (lab.folder / "site" / "m.so").symlink_to(path)
    assert predict_loading(lab.folder / "site" / "m.so", host).status == "ok"
    assert only_cause(path, host).id == "library-missing"


def test_a_pipe_in_the_search_path_does_not_block(lab: Lab, host: LoadHost) -> None:
    part = lab.build("x/libpart.so", define("f"))
    path = lab.build("m.so", call("f"), "-Wl,-rpath,$ORIGIN", needs=(part,))
    os.mkfifo(lab.folder / "libpart.so")
    assert only_cause(path, host).id == "library-missing"


def test_an_old_search_path_serves_the_libraries_of_a_library(lab: Lab, host: LoadHost) -> None:
    deep = lab.build("pkg/libs/libdeep.so", define("f"))
    middle = lab.build("pkg/libs/libmiddle.so", call("f"), needs=(deep,))
    for tags, status in (("--disable-new-dtags", "ok"), ("--enable-new-dtags", "failed")):
        options = (f"-Wl,{tags}", "-Wl,-rpath,$ORIGIN/libs")
        path = lab.build(f"pkg/{tags}.so", define("g"), *options, needs=(middle,))
        assert predict_loading(path, host).status == status


def test_a_library_with_a_new_search_path_has_no_use_for_the_old_one_above(
    lab: Lab, host: LoadHost
) -> None:
    deep = lab.build("pkg/libs/libdeep.so", define("f"))
    for tags, status in (("--enable-new-dtags", "failed"), ("--disable-new-dtags", "ok")):
        options = (f"-Wl,{tags}", "-Wl,-rpath,/nowhere")
        middle = lab.build("pkg/libs/libmiddle.so", call("f"), *options, needs=(deep,))
        above = ("-Wl,--disable-new-dtags", "-Wl,-rpath,$ORIGIN/libs")
        path = lab.build(f"pkg/{tags}.so", define("g"), *above, needs=(middle,))
        fresh = replace(host, linker=replace(host.linker, _opened={}))
        assert predict_loading(path, fresh).status == status


def test_a_version_that_is_weakly_needed_may_be_absent(lab: Lab, host: LoadHost) -> None:
    folder = lab.folder / "usr" / "lib"
    folder.mkdir(parents=True)
    (folder / "libneeded.so.1").write_bytes(make_shared(defined=("wanted",), flags=2))
    here = replace(host, linker=replace(host.linker, platform=Platform(62, 64)))
    path = lab.folder / "m.so"
    path.write_bytes(make_shared())
    assert only_cause(path, here).id == "library-too-old"
    path.write_bytes(make_shared(flags=2))
    assert predict_loading(path, here).status == "ok"


def test_a_library_that_the_package_may_load_itself_is_left_open(lab: Lab, host: LoadHost) -> None:
    part = lab.build("x/libpart-1234.so", define("_ZN2at3newEv"))
    path = lab.build("m.so", call("_ZN2at3newEv"), needs=(part,))
    assert only_cause(path, host).id == "library-missing"
    assert predict_loading(path, host, siblings=["m.so", "libpart-1234.so"]).status == "unknown"
    names = ("pkg/m.so", "pkg.libs/libpart-1234.so")
    assert predict_member("pkg/m.so", path.read_bytes(), names, host).status == "unknown"
    alone = predict_member("pkg/m.so", path.read_bytes(), names[:1], host)
    assert alone.causes[0].summary.startswith("pkg/m.so needs `libpart-1234.so`")


def test_a_file_that_is_no_library_is_an_error(lab: Lab, host: LoadHost) -> None:
    (lab.folder / "m.so").write_text("hello" * 100)
    with pytest.raises(FatbinError, match="not an ELF file"):
        predict_loading(lab.folder / "m.so", host)
    with pytest.raises(FatbinError, match="cannot read"):
        predict_loading(lab.folder / "absent.so", host)


def test_the_cache_of_the_linker_is_read(tmp_path: Path) -> None:
    newer = 1 << 62
    data = make_cache(
        ("libx.so.1", "/opt/fast/libx.so.1", newer),  # a variant for newer CPUs
        ("libx.so.1", "/opt/a/libx.so.1"),
        damaged=1 << 30,
    )
    path = tmp_path / "ld.so.cache"
    path.write_bytes(b"ld.so-1.7.0\0" + data)
    assert read_cache(path) == {"libx.so.1": (Path("/opt/a/libx.so.1"),)}
    path.write_bytes(data[:30])
    assert read_cache(path) == read_cache(tmp_path / "absent") == {}


def test_the_modules_of_this_python_load_as_they_do() -> None:
    host = read_host(read_torch(), read_libc())
    folder = Path(sysconfig.get_path("stdlib")) / "lib-dynload"
    modules = sorted(folder.glob("*.so"))
    wrong = {
        one.library: one.causes for path in modules if not (one := predict_loading(path, host))
    }
    assert not wrong
