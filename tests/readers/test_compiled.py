"""nvcc's output of every kind is read as NVIDIA's own cuobjdump reads it."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from flash_dist.toolkit.gpucode.fatbin import read_fatbin
from flash_dist.toolkit.targets.archs import TOOLKIT_ARCHS, Arch
from tests.readers.compared import Ours, compare, names
from tests.readers.tools import compile_code, gencode, needs, run
from tests.unit.made.fatbin_reader import read_kernels

pytestmark = needs("nvcc", "cuobjdump")

SOURCE = """
extern "C" __global__ void __launch_bounds__(128) alpha(const float* a, float* b) {
  __shared__ float s[256];
  s[threadIdx.x] = a[threadIdx.x];
  __syncthreads();
  b[threadIdx.x] = s[threadIdx.x ^ 1];
}
template <int N> __global__ void beta(float* p) {
  float local[N];
  for (int i = 0; i < N; ++i) local[i] = p[i];
  for (int i = 0; i < N; ++i) p[i] = local[int(p[N + i]) % N];
}
template __global__ void beta<4>(float*);
template __global__ void beta<64>(float*);
"""
KERNELS = {"alpha", "_Z4betaILi4EEvPf", "_Z4betaILi64EEvPf"}
USER = """
extern "C" __device__ float twice(float x);
extern "C" __global__ void uses(float* p) { *p = twice(*p); }
"""
PROVIDER = """
extern "C" __device__ __noinline__ float twice(float x) { return 2 * x; }
extern "C" __global__ void provides(float* p) { *p = twice(*p) + 1; }
"""
MIXED = gencode("sm_80", "compute_80", "sm_90a")

# Expected codecs of PTX and SASS: in a device-linked image or bare fatbin, and in relocatable code
# or with -G, where nvcc compresses SASS like PTX.
MODES: dict[str, tuple[list[str], str, str]] = {
    "unset": ([], "zstd", "none"),
    "default": (["--compress-mode=default"], "zstd", "none"),
    "balance": (["--compress-mode=balance"], "zstd", "none"),
    "speed": (["--compress-mode=speed"], "lz4", "none"),
    "size": (["--compress-mode=size"], "zstd", "zstd"),
    "none": (["--compress-mode=none"], "none", "none"),
    "no-compress": (["--no-compress"], "none", "none"),
    "compress-all": (["-Xfatbin", "-compress-all"], "zstd", "zstd"),
}
FORMS = {"linked": [], "rdc": ["-rdc=true"], "debug": ["-G"]}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("mode", MODES)
def test_every_compression_of_every_form_is_read(tmp_path: Path, mode: str, form: str) -> None:
    options, ptx, sass = MODES[mode]
    built = compile_code(
        tmp_path / "k.fatbin", SOURCE, "-fatbin", *FORMS[form], *options, *gencode(*PAIR)
    )
    ours = compare(built, tmp_path)
    packed = sass if form == "linked" else ptx
    assert ours.codecs == {"ptx": {ptx}, "sass": {packed}}
    assert names(ours.kernels) == KERNELS


PAIR = ("sm_80", "compute_80")
# NOTE: nvcc rejects sm_100 and sm_100f in one build: the code is the same.
NVCC_ARCHS = TOOLKIT_ARCHS["13.0"]
FAMILY = [arch for arch in NVCC_ARCHS if arch.suffix == "f"]
OTHERS = [arch for arch in NVCC_ARCHS if arch.suffix != "f"]


@pytest.mark.parametrize("archs", [OTHERS, FAMILY], ids=["plain-and-a", "f"])
def test_every_target_is_read_with_its_suffix(tmp_path: Path, archs: list[Arch]) -> None:
    both = [
        arch for one in archs for arch in (one, Arch(one.major, one.minor, one.suffix, ptx=True))
    ]
    source = 'extern "C" __global__ void alpha(float* p) { *p *= 2; }'
    built = compile_code(tmp_path / "k.fatbin", source, "-fatbin", *gencode(*map(str, both)))
    ours = compare(built, tmp_path)
    assert [entry.arch for entry in ours.entries if entry.kind == "sass"] == archs
    assert read_fatbin(built).archs == tuple(sorted(both))


@pytest.mark.parametrize("arch", [arch for arch in NVCC_ARCHS if arch.suffix], ids=str)
def test_a_bare_cubin_is_read_with_its_suffix(tmp_path: Path, arch: Arch) -> None:
    source = "__global__ void alpha(float* p) { *p *= 2; }"
    report = read_fatbin(compile_code(tmp_path / "k.cubin", source, "-cubin", f"-arch={arch}"))
    assert report.archs == (arch,)
    assert [kernel.name for kernel in read_kernels(report)] == ["_Z5alphaPf"]


@pytest.mark.parametrize(
    ("options", "targets"),
    [
        (gencode("compute_80", "compute_90"), ["compute_80", "compute_90"]),
        (["-arch=sm_90a"], ["compute_90", "sm_90a", "compute_90a"]),
        (["-arch=sm_103a"], ["compute_103", "sm_103a", "compute_103a"]),
        (["-arch=sm_100f"], ["compute_100", "sm_100f", "compute_100f"]),
        (["-arch=sm_80"], ["sm_80", "compute_80"]),
        (
            ["-arch=all-major"],
            ["sm_75", "sm_80", "sm_90", "sm_100", "sm_110", "sm_120", "compute_120"],
        ),
    ],
    ids=["ptx-only", "90a", "103a", "100f", "80", "all-major"],
)
def test_the_short_options_embed_what_cuobjdump_lists(
    tmp_path: Path, options: list[str], targets: list[str]
) -> None:
    built = compile_code(tmp_path / "k.fatbin", SOURCE, "-fatbin", *options)
    compare(built, tmp_path)
    assert [str(arch) for arch in read_fatbin(built).archs] == targets


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Compile a library."""
    options = ["-shared", "-cudart=none", "-lineinfo", "-Xcompiler=-fPIC,-g"]
    folder = tmp_path_factory.mktemp("shared")
    return compile_code(folder / "k.so", SOURCE, *options, *gencode(*PAIR))


def test_a_library_is_read_with_the_source_file_that_lineinfo_records(
    tmp_path: Path, shared: Path
) -> None:
    ours = compare(shared, tmp_path)
    assert {entry.identifier for entry in ours.entries} == {str(shared.with_suffix(".cu"))}


@pytest.fixture(scope="module")
def objects(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Compile two objects that need device linking."""
    folder = tmp_path_factory.mktemp("objects")
    options = ["-c", "-rdc=true", "-Xcompiler=-fPIC", *MIXED]
    sources = {"user.o": USER, "provider.o": PROVIDER}
    return [compile_code(folder / name, text, *options) for name, text in sources.items()]


def link(folder: Path, objects: list[Path]) -> Path:
    """Link device code, then host code."""
    run("nvcc", "-dlink", "-Xcompiler=-fPIC", *MIXED, "-o", folder / "dlink.o", *objects)
    library = folder / "linked.so"
    subprocess.run(["g++", "-shared", "-o", library, *objects, folder / "dlink.o"], check=True)
    return library


def test_an_object_of_relocatable_code_is_read(tmp_path: Path, objects: list[Path]) -> None:
    ours = compare(objects[1], tmp_path)
    assert names(ours.kernels) == {"provides"}
    assert all(entry.relocatable for entry in ours.entries)


def test_an_archive_of_such_objects_is_read(tmp_path: Path, objects: list[Path]) -> None:
    archive = tmp_path / "both.a"
    subprocess.run(["ar", "rc", archive, *objects], check=True)
    ours = compare(archive, tmp_path)
    assert names(ours.kernels) == {"uses", "provides"}


def test_a_device_linked_library_holds_both_and_its_linked_code_counts(
    tmp_path: Path, objects: list[Path]
) -> None:
    library = link(tmp_path, objects)
    ours = compare(library, tmp_path)
    places = {(entry.kind, entry.relocatable) for entry in ours.entries}
    assert places == {("sass", False), ("sass", True), ("ptx", True)}
    report = read_fatbin(library)
    assert [str(arch) for arch in report.archs] == ["sm_80", "compute_80", "sm_90a"]
    assert sum(entry.kind == "sass" for entry in report.select()) == 2


def test_lto_code_is_listed_beside_what_can_be_read(tmp_path: Path) -> None:
    code = "-gencode=arch=compute_80,code=[lto_80,sm_80]"
    built = compile_code(tmp_path / "lto.o", PROVIDER, "-c", "-rdc=true", code)
    ours = compare(built, tmp_path)
    assert sorted(entry.kind for entry in ours.entries) == ["lto", "sass"]
    assert names(ours.kernels) == {"provides"}


def test_one_library_may_mix_codecs(tmp_path: Path) -> None:
    modes = {"a.o": "size", "b.o": "speed", "c.o": "none"}
    parts = [
        compile_code(
            tmp_path / name,
            SOURCE.replace("alpha", f"alpha_{name[0]}").replace("beta", f"beta_{name[0]}"),
            *("-c", "-Xcompiler=-fPIC", f"--compress-mode={mode}", *gencode(*PAIR)),
        )
        for name, mode in modes.items()
    ]
    library = tmp_path / "mixed.so"
    subprocess.run(["g++", "-shared", "-o", library, *parts], check=True)
    ours = compare(library, tmp_path)
    assert ours.codecs == {"ptx": {"zstd", "lz4", "none"}, "sass": {"zstd", "none"}}
    assert len({entry.container for entry in ours.entries}) == 3


@pytest.mark.skipif(shutil.which("objcopy") is None, reason="needs strip and objcopy")
@pytest.mark.parametrize(
    "command",
    ["strip", "strip --strip-all -R .comment", "objcopy --compress-debug-sections"],
    ids=["strip", "strip-all", "compressed-debug"],
)
def test_the_output_of_binutils_holds_the_same_code(
    tmp_path: Path, shared: Path, command: str
) -> None:
    copied = Path(shutil.copy(shared, tmp_path))
    subprocess.run([*command.split(), copied], check=True)
    before, after = Ours(shared), compare(copied, tmp_path)
    assert (after.images, after.digests) == (before.images, before.digests)


@pytest.mark.skipif(shutil.which("objcopy") is None, reason="needs objcopy")
def test_a_file_of_debug_information_only_is_said_to_be_stripped(
    tmp_path: Path, shared: Path
) -> None:
    debug = tmp_path / "k.debug"
    subprocess.run(["objcopy", "--only-keep-debug", shared, debug], check=True)
    report = read_fatbin(debug)
    assert report.entries == ()
    assert "stripped of its contents" in report.warnings[0]
