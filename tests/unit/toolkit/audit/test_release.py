"""The audit of anybody's release: requirements, shortfalls and messages."""

from __future__ import annotations

import errno
import json
import os
import random
import struct
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from flash_dist.toolkit.audit.options import AuditOptions, parse_size, read_options
from flash_dist.toolkit.audit.release import audit_release
from flash_dist.toolkit.cli import main
from flash_dist.toolkit.errors import UsageError
from flash_dist.toolkit.gpucode.images import UNREGISTERED
from flash_dist.toolkit.targets.archs import Arch
from tests.unit.made.fatbin_builder import (
    FOR_ONE_CHIP,
    LTO,
    PTX,
    SASS,
    TILE,
    Kernel,
    Part,
    container,
    cubin,
    entry,
    library,
    ptx,
    stream,
    zstd,
)

if TYPE_CHECKING:
    from tests.unit.made.command import Cli

ALPHA = cubin(Kernel("alpha"), Kernel("beta"))
BOTH = container(
    entry(SASS, 80, ALPHA), entry(SASS, 90, ALPHA, suffix="a"), entry(PTX, 80, ptx("alpha", "beta"))
)


def cubin_for(number: int, compat: bytes = b"") -> bytes:
    """Return a cubin that states its target itself, as nvcc 13 writes it."""
    more = (Part(".nv.compat", compat),) if compat else ()
    data = bytearray(cubin(Kernel("alpha"), Kernel("beta"), more=more))
    data[8] = 8  # ABI version
    data[48:52] = struct.pack("<I", number << 8)
    return bytes(data)


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave the folder whose pyproject.toml would be read."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def lib(tmp_path: Path) -> Path:
    path = tmp_path / "lib.so"
    path.write_bytes(library(BOTH))
    return path


def problems(path: Path, **options: str | bool) -> tuple[str, ...]:
    asked = AuditOptions(**options)  # type: ignore[arg-type] # each test names its own
    found = audit_release(path, asked.parse(), baseline=asked.baseline).problems
    return tuple(map(str, found))


def test_a_release_that_has_all_passes(lib: Path) -> None:
    assert problems(lib) == ()
    assert problems(lib, require="8.0+PTX;9.0a", forbid_extra=True) == ()
    assert problems(lib, max_size="1MB", min_driver="580", no_stubs="alpha|beta") == ()


def test_fatbins_that_a_library_loads_itself_count_as_one_with_a_warning(
    tmp_path: Path, cli: Cli
) -> None:
    """As in cuFFT, where each of 18 000 fatbins is for one target and the library chooses one."""
    path = tmp_path / "libcufft.so"
    each = b"".join(container(entry(SASS, one, cubin_for(one))) for one in (80, 90))
    path.write_bytes(library(extra=(Part(".data", each, flags=3),)))
    assert problems(path, require="8.0;9.0") == ()
    assert problems(path, require="12.0") == (f"{path}: no code for sm_120, which is required",)
    out = cli("audit", "--require", "9.0", path).out
    said = UNREGISTERED.format("2 fatbins and cubins")
    assert f"[warn]  {path}: {said}\n[ok]    all requirements are met" in out
    assert json.loads(cli("audit", "--json", path).out)["warnings"] == [f"{path}: {said}"]
    assert said in cli("inspect", path).out


def test_fatbins_that_nothing_registers_have_a_name_of_their_own(tmp_path: Path) -> None:
    path = tmp_path / "libcublasLt.so"
    own = Part(".resource", container(entry(SASS, 90, cubin_for(90))), flags=2)
    path.write_bytes(library(container(entry(SASS, 80, cubin_for(80))), extra=(own,)))
    said = "no code for sm_80, which is required, in 1 of 2 fatbins: those that nothing registers"
    assert problems(path, require="8.0") == (f"{path}: {said}",)
    assert problems(path, require="8.0", allow_missing="nothing registers") == ()


def test_a_target_that_is_missing_or_too_much_is_named(lib: Path) -> None:
    assert problems(lib, require="8.0;12.0") == (f"{lib}: no code for sm_120, which is required",)
    assert problems(lib, require="8.0", forbid_extra=True) == (
        f"{lib}: code for compute_80, which is not required",
        f"{lib}: code for sm_90a, which is not required",
    )


def test_every_library_with_gpu_code_needs_every_target(lib: Path) -> None:
    (lib.parent / "other.so").write_bytes(library(container(entry(SASS, 80, ALPHA))))
    (lib.parent / "plain.so").write_bytes(library())
    (problem,) = problems(lib.parent, require="8.0;9.0a")
    assert problem == f"{lib.parent / 'other.so'}: no code for sm_90a, which is required"


def test_code_for_other_gpus_beside_it_is_no_problem_and_alone_no_release(
    lib: Path, cli: Cli
) -> None:
    rocm = lib.parent / "rocm.so"
    rocm.write_bytes(library(extra=(Part(".hip_fatbin", b"x" * 64),)))
    assert problems(lib.parent) == ()
    assert "[skip]  1 library with code for AMD GPUs (ROCm)" in cli("audit", lib.parent).out
    assert problems(rocm) == ("no GPU code for NVIDIA inside",)


def test_a_release_without_gpu_code_fails(tmp_path: Path) -> None:
    path = tmp_path / "pkg-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("pkg/plain.so", library())
    assert problems(path) == ("no GPU code for NVIDIA inside",)


def test_unknown_formats_fail(tmp_path: Path) -> None:
    path = tmp_path / "lib.so"
    path.write_bytes(library(BOTH + b"junkjunk"))
    (problem,) = problems(path)
    assert "not a container" in problem
    (tmp_path / "broken.so").write_bytes(b"\x7fELF")
    assert any("broken.so cannot be read" in problem for problem in problems(tmp_path))


def test_a_required_kernel_must_be_real_for_every_required_target(tmp_path: Path) -> None:
    path, names = tmp_path / "lib.so", tmp_path / "kernels.txt"
    names.write_text("# ours\nalpha\n\nbeta\ngamma\n")
    one = cubin(Kernel("alpha"))
    path.write_bytes(library(container(entry(SASS, 80, ALPHA), entry(SASS, 90, one))))
    assert problems(path, require_kernels=str(names)) == (
        f"{path}: beta: missing for sm_90",
        "no kernel is named like `gamma`, which is required",
    )
    names.write_text("beta\n")
    assert problems(path, require_kernels=str(names), require="8.0") == ()


def test_kernels_that_may_be_no_stubs_are_none(tmp_path: Path) -> None:
    path = tmp_path / "lib.so"
    whole = cubin(Kernel("alpha", code=b"\x01" * 16 * 400))
    stub = cubin(Kernel("alpha", code=b"\x01" * 16 * 10, externs=("vprintf",)))
    path.write_bytes(library(container(entry(SASS, 80, whole), entry(SASS, 90, stub))))
    assert problems(path, no_stubs="alp") == (f"{path}: alpha: stub:printf for sm_90",)
    assert problems(path, no_stubs="beta") == ()


def test_a_driver_that_cannot_load_all_of_it_is_a_shortfall(tmp_path: Path) -> None:
    path = tmp_path / "lib.so"
    packed = entry(SASS, 80, cubin(Kernel("alpha", cuda=128)), codec="zstd")
    images = (packed, entry(PTX, 80, ptx("alpha"), isa=(9, 0)))
    path.write_bytes(library(container(*images)))
    found = problems(path, min_driver="525")
    assert len(found) == 2
    assert "zstd needs driver 550" in found[0]
    assert "PTX ISA 9.0 needs driver 580" in found[1]
    assert problems(path, min_driver="580") == ()


def test_targets_and_kernels_of_a_baseline_must_still_be_there(lib: Path, tmp_path: Path) -> None:
    newer = tmp_path / "new.so"
    newer.write_bytes(library(container(entry(SASS, 80, cubin(Kernel("alpha"))))))
    assert problems(newer, baseline=str(lib)) == (
        f"{lib}: compute_80 was in the baseline and is gone",
        f"{lib}: sm_90a was in the baseline and is gone",
        f"{lib}: beta for sm_80: in the baseline, and gone",
    )
    assert problems(lib, baseline=str(newer)) == ()


def test_a_file_that_is_too_large_fails(lib: Path) -> None:
    size = lib.stat().st_size
    assert problems(lib, max_size=str(size)) == ()
    (problem,) = problems(lib, max_size=str(size - 1))
    assert problem == f"the file has {size:,} bytes, allowed are {size - 1:,}"


@pytest.mark.parametrize(
    ("text", "size"),
    [("100MB", 10**8), ("1.5 GiB", 3 << 29), ("12", 12), ("2kB", 2000), ("3KiB", 3072)],
)
def test_sizes_are_read_as_people_write_them(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"max_size": "large"}, "a size must be like 100MB"),
        ({"max_size": "9" * 400}, "a size must be like 100MB, 95MiB or 100000000, got `9999"),
        ({"require": "fast"}, "fast"),
        ({"no_stubs": "("}, "must be a regular expression, got `(`"),
        ({"min_driver": "old"}, "old"),
        ({"require_kernels": "absent.txt"}, "cannot read required kernels from `absent.txt`"),
        ({"require_kernels": os.devnull}, "names no kernel that is required"),
        ({"no_stubs": ""}, "got an empty one, which all names match"),
        ({"allow_missing": "", "require": "8.0"}, "got an empty one, which all names match"),
        ({"forbid_extra": True}, "--forbid-extra must come with --require"),
    ],
)
def test_options_that_mean_nothing_are_refused(
    options: dict[str, str | bool], sentence: str
) -> None:
    with pytest.raises(UsageError) as caught:
        AuditOptions(**options).parse()  # type: ignore[arg-type] # on purpose
    assert sentence in str(caught.value)


def test_options_may_stand_in_pyproject_toml(lib: Path, tmp_path: Path, cli: Cli) -> None:
    project = tmp_path / "pyproject.toml"
    project.write_text('[tool.flash_dist.audit]\nrequire = "12.0"\nforbid-extra = true\n')
    assert "no code for sm_120, which is required" in cli("audit", lib, status=1).out
    assert main(["audit", str(lib), "--require", "8.0+PTX;9.0a"]) == 0
    project.write_text("[tool.flash_dist]\nversion = '1'\n")
    assert read_options(project) == AuditOptions()


@pytest.fixture
def two(tmp_path: Path) -> Path:
    """Return a folder with one library for each CUDA: PTX of 12.4 and of 13.0."""
    folder = tmp_path / "pkg"
    folder.mkdir()
    for name, isa in (("cuda124", (8, 4)), ("cuda130", (9, 0))):
        text = ptx("alpha", "beta", version=f"{isa[0]}.{isa[1]}")
        images = (entry(SASS, 80, ALPHA), entry(PTX, 80, text, isa=isa))
        (folder / f"libx_{name}.so").write_bytes(library(container(*images)))
    return folder


def test_libraries_of_some_names_have_requirements_of_their_own(
    two: Path, tmp_path: Path, cli: Cli
) -> None:
    project = tmp_path / "pyproject.toml"
    asked = 'require = "8.0+PTX"\nforbid-extra = true\nmin-driver = "{}"\n'
    general = f"[tool.flash_dist.audit]\n{asked}"
    project.write_text(general.format(550))
    assert "libx_cuda130.so: PTX ISA 9.0 needs driver 580" in cli("audit", two, status=1).out
    own = '[tool.flash_dist.audit."*cuda13*.so"]\nmin-driver = "580"\n'
    project.write_text(general.format(550) + own)
    assert main(["audit", str(two)]) == 0
    project.write_text(general.format(525) + own)
    out = cli("audit", two, status=1).out
    assert "libx_cuda124.so: PTX ISA 8.4 needs driver 550" in out
    assert "libx_cuda130.so" not in out.partition("[fail]")[2]
    project.write_text('[tool.flash_dist.audit."pkg/*"]\nno-stubs = "alpha"\nrequire = "9.0a"\n')
    assert cli("audit", "pkg", status=1).out.count("no code for sm_90a, which is required") == 2


def test_a_table_for_absent_libraries_is_reported(lib: Path, tmp_path: Path, cli: Cli) -> None:
    (tmp_path / "pyproject.toml").write_text('[tool.flash_dist.audit."*cuda9*"]\nrequire = "8.0"\n')
    assert "no library is named like `*cuda9*`" in cli("audit", lib).out


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("['*.so']\nmax-size = '1MB'", """."*.so"] in `pyproject.toml` has no `max-size`"""),
        ("['*.so']\nforbid-extra = true", "must come with --require"),
        ("requires = '8.0'", "has no `requires`"),
        ("require = ['8.0']", "`require` of [tool.flash_dist.audit]"),
        ("forbid-extra = 'yes'", "must be a bool, got 'yes'"),
        ("require = ", "is no TOML"),
    ],
)
def test_a_wrong_table_is_refused(line: str, sentence: str, tmp_path: Path, cli: Cli) -> None:
    text = f"[tool.flash_dist.audit]\n{line}\n".replace("]\n[", ".")
    (tmp_path / "pyproject.toml").write_text(text)
    assert sentence in cli("audit", "lib.so", status=2).err


def test_a_required_target_that_is_none_names_its_option(lib: Path, cli: Cli) -> None:
    err = cli("audit", lib, "--require", "99", status=2).err
    assert "unknown architecture `99` in arch set `--require`" in err


@pytest.mark.parametrize("reason", ["'utf-8' codec can't decode", "Permission denied"])
def test_a_pyproject_toml_that_cannot_be_read_is_refused(
    reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cli: Cli
) -> None:
    (tmp_path / "pyproject.toml").write_bytes(b"authors = 'J\xf6rg'")
    if reason == "Permission denied":  # the tests may run as root, which can read everything

        def refuse(*_: object, **__: object) -> str:
            raise PermissionError(errno.EACCES, reason, "pyproject.toml")

        monkeypatch.setattr(Path, "read_text", refuse)
    assert f"error: cannot read `pyproject.toml`: {reason}" in cli("audit", "lib.so", status=2).err


def test_json_and_annotations_say_the_same(lib: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["audit", str(lib), "--require", "12.0"]
    assert main([*argv, "--json"]) == 1
    document = json.loads(capsys.readouterr().out)
    assert document["passed"] is False
    assert document["libraries"][0]["archs"] == ["sm_80", "compute_80", "sm_90a"]
    assert main([*argv, "--format", "github"]) == 1
    (problem,) = document["problems"]
    assert capsys.readouterr().out == f"::error file={lib}::{problem}\n"


def test_each_shortfall_has_an_id_that_is_named_once(lib: Path, cli: Cli) -> None:
    argv = ["audit", str(lib), "--require", "8.6;12.0", "--max-size", "10"]
    out = cli(*argv, status=1).out
    assert out.count("[fail]") == 3
    ids = ("audit-target-missing", "audit-too-large")
    commands = ", ".join(f"`python -m flash_dist explain {name}`" for name in ids)
    assert out.endswith(f"\n(more: {commands})\n")
    document = json.loads(cli(*argv, "--json", status=1).out)
    assert [one["summary"] for one in document["findings"]] == document["problems"]
    assert document["findings"][-1]["id"] == "audit-too-large"
    assert document["findings"][-1]["docs"] == "findings.html#audit-too-large"


def test_a_release_that_passes_is_reported(lib: Path, cli: Cli) -> None:
    out = cli("audit", lib).out
    assert f"{lib}: 1 library, sm_80, compute_80, sm_90a" in out
    assert "[ok]    all requirements are met, and all code is understood" in out


# --- Claims are checked ---------------------------------------------------------------------------


def overwrite(data: bytes, start: bytes, size: int) -> bytes:
    """Overwrite a payload that begins with `start` by random bytes."""
    place = data.index(start)
    noise = random.Random(1).randbytes(size)  # noqa: S311 - no secret
    return data[:place] + noise + data[place + size :]


@pytest.mark.parametrize("codec", ["none", "zstd"])
def test_a_library_whose_images_are_noise_fails(
    tmp_path: Path, codec: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "lib.so"
    images = (entry(SASS, 80, ALPHA, codec=codec), entry(PTX, 80, ptx("alpha"), codec=codec))
    whole = library(container(*images))
    path.write_bytes(whole)
    assert main(["audit", str(path)]) == 0
    said = "[ok]    all requirements are met, and all code is understood: 2 images opened\n"
    assert capsys.readouterr().out.endswith(said)
    for payload in (ALPHA, ptx("alpha")):
        packed = zstd.compress(payload) if codec == "zstd" else payload
        path.write_bytes(overwrite(whole, packed[:24], len(packed)))
        (problem,) = problems(path)
        assert "80 image at offset" in problem
        assert main(["audit", str(path)]) == 1
        assert main(["audit", "--headers-only", str(path)]) == 0
        assert "by the headers: no image was opened" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("images", "words"),
    [
        ([entry(SASS, 90, cubin_for(80))], "number 80, its header declares 90"),
        ([entry(PTX, 90, ptx("alpha"))], "number 80, its header declares 90"),
        ([entry(PTX, 80, ptx("alpha"), isa=(8, 0))], "ISA 9.0, its header declares 8.0"),
        ([entry(PTX, 80, b"nothing at all")], "lacks .version or .target"),
        ([entry(PTX, 80, ptx(version=f"{'9' * 5000}.0"))], "lacks .version or .target"),
        ([entry(PTX, 80, ptx(target=f"sm_{'9' * 5000}"))], "lacks .version or .target"),
        ([entry(SASS, 80, b"nothing at all" * 8)], "only 64-bit little-endian ELF"),
    ],
    ids=["cubin", "target", "isa", "text", "long-isa", "long-target", "no-elf"],
)
def test_an_image_that_is_not_what_its_header_says_fails(
    tmp_path: Path, images: list[bytes], words: str
) -> None:
    path = tmp_path / "lib.so"
    path.write_bytes(library(container(*images)))
    (problem,) = problems(path)
    assert words in problem
    assert problems(path, headers_only=True) == ()


def test_relocatable_images_are_opened_too(tmp_path: Path) -> None:
    path = tmp_path / "lib.so"
    path.write_bytes(library(BOTH, container(entry(PTX, 80, b"noise" * 9))))
    (problem,) = problems(path)
    assert "lacks .version or .target" in problem


def test_lto_ir_is_said_to_be_unopened(tmp_path: Path, cli: Cli) -> None:
    path = tmp_path / "lib.so"
    path.write_bytes(library(container(entry(SASS, 80, ALPHA), entry(LTO, 80, b"secret" * 9))))
    said = cli("audit", path).out
    assert "1 image opened and understood; 1 image of LTO-IR could not be" in said
    assert "all of it" not in said


def test_lto_ir_alone_is_no_code_for_any_gpu(tmp_path: Path) -> None:
    path = tmp_path / "lib.so"
    path.write_bytes(library(container(entry(LTO, 80, b"secret" * 9), entry(LTO, 90, b"x" * 9))))
    nothing = f"{path}: 2 images of LTO-IR and no other: it was not judged"
    (problem,) = problems(path)
    assert problem.startswith(nothing)
    found = problems(path, require="8.0;9.0")
    assert found[1:] == tuple(
        f"{path}: no code for sm_{number}, which is required" for number in (80, 90)
    )


@pytest.mark.parametrize(
    ("require", "passes"), [("12.0a", True), ("12.0", False), ("12.0f", False)]
)
def test_an_image_counts_as_what_it_says_itself(
    tmp_path: Path, require: str, *, passes: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    """A header of CUDA Tile has sm_120 for a cubin of sm_120a, which is for 12.0 alone."""
    path = tmp_path / "lib.so"
    path.write_bytes(library(container(entry(SASS, 120, cubin_for(120, FOR_ONE_CHIP)))))
    assert main(["audit", "--require", require, "--forbid-extra", str(path)]) == int(not passes)
    said = capsys.readouterr().out
    assert "1 image of which the header says sm_120 and the image sm_120a: judged as" in said
    assert "1 library, sm_120a" in said


@pytest.mark.parametrize(
    ("suffix", "number", "require", "missed"),
    [
        ("a", 90, "9.0", ""),  # no other GPU runs sm_90
        ("f", 100, "10.0", ""),
        ("a", 100, "10.0", "10.3, 10.7"),
        ("a", 120, "12.0", "12.1"),
        ("f", 120, "12.0", ""),
    ],
)
def test_code_with_a_suffix_replaces_plain_code_where_it_runs_on_the_same_gpus(
    tmp_path: Path, suffix: str, number: int, require: str, missed: str
) -> None:
    path = tmp_path / "lib.so"
    code = cubin_for(number, FOR_ONE_CHIP if suffix == "a" else struct.pack("<BBH", 2, 9, 0))
    path.write_bytes(library(container(entry(SASS, number, code, suffix=suffix))))
    found = problems(path, require=require)
    assert bool(found) == bool(missed)
    assert all(f"sm_{number}{suffix} does not run on" in one and missed in one for one in found)


def test_a_header_that_promises_more_than_its_cubin_satisfies_nothing(tmp_path: Path) -> None:
    path = tmp_path / "lib.so"
    code = cubin_for(90, struct.pack("<BBH", 2, 9, 0))
    path.write_bytes(library(container(entry(SASS, 90, code, suffix="a"))))
    assert problems(path, require="9.0") == ()
    assert problems(path, require="9.0a") == (f"{path}: no code for sm_90a, which is required",)


def test_code_that_no_known_driver_loads_is_not_promised_for_the_oldest(tmp_path: Path) -> None:
    path = tmp_path / "lib.so"
    path.write_bytes(library(container(entry(PTX, 80, ptx("alpha", version="9.9"), isa=(9, 9)))))
    for driver in ("580", "620", "700"):
        (problem,) = problems(path, min_driver=driver)
        assert "PTX ISA 9.9" in problem


def test_cubins_in_a_stream_are_not_promised_for_a_driver_older_than_its_tool(
    tmp_path: Path,
) -> None:
    path = tmp_path / "lib.so"
    path.write_bytes(library(container(stream(entry(SASS, 80, ALPHA), entry(SASS, 90, ALPHA)))))
    assert problems(path, require="8.0;9.0", min_driver="615") == ()
    assert len(problems(path, min_driver="580")) == 2


def test_bytecode_of_cuda_tile_is_said_not_to_be_understood(tmp_path: Path) -> None:
    path = tmp_path / "lib.so"
    path.write_bytes(library(container(entry(SASS, 90, ALPHA), entry(TILE, 90, b"tile" * 9))))
    (problem,) = problems(path)
    assert "image of kind 128 (CUDA Tile IR), version 0x101, number 90" in problem


def test_a_path_that_cannot_be_read_does_not_end_the_audit(lib: Path, cli: Cli) -> None:
    out, err = cli("audit", lib.parent / "absent.so", lib, status=2)
    assert "absent.so`: No such file" in err
    assert "[ok]" in out


# --- Each fatbin by its own images ----------------------------------------------------------------


def write_files(path: Path, *targets: str) -> None:
    """Write a library of several source files, each with one kernel for some targets."""
    containers = []
    for number, listed in enumerate(targets):
        image = cubin(Kernel(f"kernel_{number}"))
        archs = [Arch.parse(one) for one in listed.split()]
        images = (entry(SASS, one.number, image, suffix=one.suffix) for one in archs)
        containers.append(container(*images))
    path.write_bytes(library(b"".join(containers)))


def test_a_source_file_that_lost_a_target_is_found(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "lib.so"
    write_files(path, "8.0 9.0a", "8.0 9.0a", "8.0", "8.0")
    assert problems(path, require="8.0;9.0a") == (
        f"{path}: no code for sm_90a, which is required, in 2 of 4 fatbins: kernel_2, kernel_3",
    )
    assert problems(path, require="8.0;9.0a", headers_only=True) == (
        f"{path}: no code for sm_90a, which is required, in 2 of 4 fatbins: number 2, number 3",
    )
    assert problems(path, require="8.0;9.0a", allow_missing="_[23]$") == ()
    assert problems(path, require="8.0;9.0a", allow_missing="kernel_2") == (
        f"{path}: no code for sm_90a, which is required, in 1 of 4 fatbins: kernel_3",
    )
    assert main(["audit", "--require", "8.0;9.0a", "--allow-missing", "_[23]$", str(path)]) == 0
    said = f"[warn] {path}: no code for sm_90a in 2 of 4 fatbins, as --allow-missing allows"
    assert said in " ".join(capsys.readouterr().out.split())


def write_variants(path: Path, *files: str) -> None:
    """Write a library with a fatbin for each target of a kernel: `sm_80: a_sm80 b_sm80`."""
    containers = []
    for each in files:
        target, _, names = each.partition(": ")
        arch = Arch.parse(target)
        if arch.ptx:
            images = entry(PTX, arch.number, ptx(*names.split(), target=f"sm_{arch.number}"))
        else:
            image = cubin(*map(Kernel, names.split()))
            images = entry(SASS, arch.number, image, suffix=arch.suffix)
        containers.append(container(images))
    path.write_bytes(library(b"".join(containers)))


OURS = (
    "sm_75: fwd_fp16_d64_smem64_sm75",
    "sm_90a: fwd_fp16_d64_smem64_sm90a fwd_bf16_d64_smem64_sm90a fwd_bf16_d64_smem227_sm90a",
    "compute_80: fwd_bf16_d64_smem64_compute80",
)


def test_fatbins_of_one_target_that_their_kernels_name_are_judged_together(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The library itself, not the driver, selects the variant named after the GPU, as ours does."""
    path = tmp_path / "lib.so"
    write_variants(path, *OURS)
    assert problems(path, require="7.5;8.0+PTX;9.0a") == (
        f"{path}: no code for sm_80, which is required",
    )
    assert problems(path, require="7.5;9.0a") == ()
    assert main(["audit", "--require", "7.5;9.0a", str(path)]) == 0
    said = f"[warn] {path}: 3 fatbins have one target, which their kernels are named after"
    assert said in " ".join(capsys.readouterr().out.split())
    assert main(["audit", "--json", "--require", "7.5;9.0a", str(path)]) == 0
    (warning,) = json.loads(capsys.readouterr().out)["warnings"]
    assert "those of one kernel count as one" in warning
    assert main(["audit", str(path)]) == 0
    assert "[warn]" not in capsys.readouterr().out
    said = "no code for sm_75, which is required, in 2 of 3 fatbins: number 1, number 2"
    assert problems(path, require="7.5", headers_only=True) == (f"{path}: {said}",)


def test_kernels_that_name_their_target_twice_are_meant_for_it_alone(tmp_path: Path) -> None:
    path = tmp_path / "lib.so"
    write_variants(path, *OURS, "sm_90a: fwd_sm90_bf16_d64_sm90a")
    assert problems(path, require="7.5;9.0a") == ()
    write_variants(path, *OURS, "sm_90a: fwd_sm90_bf16_d64_sm90a copy_sm90a")
    said = "no code for sm_75, which is required, in 1 of 4 fatbins: fwd_sm90_bf16_d64_sm90a"
    assert problems(path, require="7.5;9.0a") == (f"{path}: {said}",)
    write_variants(path, "sm_90a: fwd_sm90_bf16_d64_sm90a")
    assert problems(path, require="7.5") == (f"{path}: no code for sm_75, which is required",)


def test_a_variant_that_was_lost_among_those_of_other_kernels_is_found(tmp_path: Path) -> None:
    path = tmp_path / "lib.so"
    write_variants(path, *OURS, "sm_75: bwd_fp16_d64_sm75", "sm_75: copy", "sm_90a: copy_sm80")
    said = "no code for {}, which is required, in {} of 6 fatbins: {}"
    assert problems(path, require="7.5;9.0a") == (
        f"{path}: {said.format('sm_75', 1, 'copy_sm80')}",
        f"{path}: {said.format('sm_90a', 2, 'bwd_fp16_d64_sm75, copy')}",
    )
    assert problems(path, require="7.5;9.0a", allow_missing="copy|bwd") == ()


def test_a_name_says_nothing_of_a_fatbin_with_several_targets(tmp_path: Path) -> None:
    """In torch, fmha_cutlassF_f16_aligned_64x64_rf_sm80 is in fatbins for all GPUs."""
    path = tmp_path / "lib.so"
    both, lost = cubin(Kernel("fmha_rf_sm75")), cubin(Kernel("fmha_rf_sm80"))
    whole = container(entry(SASS, 80, both), entry(SASS, 90, both))
    path.write_bytes(library(whole + container(entry(SASS, 80, lost))))
    assert problems(path, require="8.0;9.0") == (
        f"{path}: no code for sm_90, which is required, in 1 of 2 fatbins: fmha_rf_sm80",
    )


def test_a_fatbin_without_a_kernel_lacks_nothing(tmp_path: Path) -> None:
    """In cuBLASLt, 944 of 2,639 fatbins hold a few constants, or nothing."""
    path = tmp_path / "lib.so"
    kernels = container(entry(SASS, 80, ALPHA), entry(SASS, 90, ALPHA))
    nothing = container(entry(SASS, 80, cubin(Kernel("helper", entry=False))))
    path.write_bytes(library(kernels + nothing))
    assert problems(path, require="8.0;9.0") == ()
    assert problems(path, require="12.0") == (f"{path}: no code for sm_120, which is required",)
    assert problems(path, require="9.0", headers_only=True) == (
        f"{path}: no code for sm_90, which is required, in 1 of 2 fatbins: number 1",
    )
    path.write_bytes(library(nothing))
    assert problems(path, require="8.0;9.0") == (f"{path}: no code for sm_90, which is required",)


def test_names_in_c_plus_plus_are_compared_as_their_source_has_them(tmp_path: Path) -> None:
    """The length of a mangled name changes with its target."""
    path = tmp_path / "lib.so"
    write_variants(path, "sm_80: _Z8gemm_s80Pf", "sm_90a: _Z9gemm_sm90Pf", "sm_80: _Z9gemm_sm80Pf")
    assert problems(path, require="8.0;9.0a") == (
        f"{path}: no code for sm_90a, which is required, in 1 of 3 fatbins: _Z8gemm_s80Pf",
    )


def test_code_that_runs_as_well_as_the_required_code_is_accepted(tmp_path: Path) -> None:
    path = tmp_path / "lib.so"
    write_files(path, "10.0f 9.0a 8.0")
    assert problems(path, require="10.0;10.3;9.0;8.0", forbid_extra=True) == ()
    assert problems(path, require="10.0a") == (f"{path}: no code for sm_100a, which is required",)
    assert problems(path, require="8.6") == (f"{path}: no code for sm_86, which is required",)
    assert problems(path, require="12.0") == (f"{path}: no code for sm_120, which is required",)


def test_ptx_before_device_linking_counts_where_every_object_has_it(tmp_path: Path) -> None:
    path = tmp_path / "lib.so"
    with_ptx = container(entry(SASS, 80, ALPHA), entry(PTX, 80, ptx("alpha")))
    linked = container(entry(SASS, 80, ALPHA))
    path.write_bytes(library(linked, with_ptx + with_ptx))
    assert problems(path, require="8.0+PTX") == ()
    path.write_bytes(library(linked, with_ptx + linked))
    assert problems(path, require="8.0+PTX") == (
        f"{path}: no code for compute_80, which is required",
    )


@pytest.mark.parametrize(
    "options",
    [
        {"allow_missing": "a"},
        {"allow_missing": "(", "require": "8.0"},
        {"allow_missing": "a", "require": "8.0", "headers_only": True},
        {"no_stubs": "a", "headers_only": True},
    ],
    ids=["alone", "pattern", "headers", "stubs"],
)
def test_options_that_cannot_work_are_wrong_usage(options: dict[str, str | bool]) -> None:
    with pytest.raises(UsageError):
        AuditOptions(**options).parse()  # type: ignore[arg-type]
