from __future__ import annotations

import json
import zipfile
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from flash_dist.toolkit.audit.own import audit_contents, audit_wheel, describe_failure
from flash_dist.toolkit.builds.contents import (
    MANIFEST,
    Image,
    Linked,
    WheelContents,
    read_linked,
)
from flash_dist.toolkit.builds.linkage import RUNTIME_PATH
from flash_dist.toolkit.builds.manifest import ToolkitInfo
from flash_dist.toolkit.cli import main
from flash_dist.toolkit.errors import AuditError, FatbinError
from flash_dist.toolkit.gpucode.cubin import KernelInfo
from flash_dist.toolkit.gpucode.images import FatbinEntry
from flash_dist.toolkit.targets.archs import Arch
from flash_dist.toolkit.targets.fallbacks import Fallbacks
from tests.unit.made.dynamic_builder import make_linked
from tests.unit.made.names import BINDING, BINDING_NEEDS, KERNELS
from tests.unit.toolkit.builds.test_manifest import make_kernel, make_manifest

if TYPE_CHECKING:
    from pathlib import Path

NAME = "flash_dist-0.1.0+cu130.hopper-py3-none-manylinux_2_34_x86_64.whl"
FACTS = Fallbacks({"bwd_fused": ("bwd_dkdv", "bwd_dq_recompute")}, frozenset())
LINKAGE = {
    KERNELS: Linked(("libc.so.6",), (), ("flash_dist_variants_json",)),
    BINDING: Linked((*BINDING_NEEDS, "libc.so.6"), ("$ORIGIN",), ()),
}


def make_image(target: str, **changes: Any) -> Image:  # noqa: ANN401
    arch = Arch.parse(target)
    entry = FatbinEntry(
        kind="ptx" if arch.ptx else "sass",
        arch=arch,
        codec="zstd",
        ptx_isa=None,
        payload_offset=64,
        compressed_size=100,
        uncompressed_size=400,
        section=".nv_fatbin",
        container=0,
        identifier="",
        raw_kind=2,
        raw_version=0x101,
        raw_number=arch.number,
        raw_flags=0,
    )
    record = make_kernel(target)
    numbers = (None, None, None, None, None) if arch.ptx else (168, 0, 0, 4096, 128)
    kernel = KernelInfo(record.symbol, arch, *numbers)
    return Image(replace(entry, **changes), (kernel,), KERNELS)


def make_contents(**changes: Any) -> WheelContents:  # noqa: ANN401
    values: dict[str, Any] = {
        "path": f"dist/{NAME}",
        "size": 1000,
        "libraries": (KERNELS, BINDING),
        "metadata_version": "0.1.0+cu130.hopper",
        "manifest": make_manifest(),
        "images": tuple(make_image(one) for one in ("sm_80", "compute_80", "sm_90a")),
        "linkage": LINKAGE,
    }
    return WheelContents(**{**values, **changes})


def test_a_wheel_that_is_what_it_declares_passes() -> None:
    result = audit_contents(make_contents(), budget_bytes=1000)
    assert result
    assert result.problems == ()


def _without(target: str) -> tuple[Image, ...]:
    return tuple(i for i in make_contents().images if str(i.entry.arch) != target)


def _kernel(**changes: Any) -> dict[str, Any]:  # noqa: ANN401
    image = make_image("sm_90a")
    changed = Image(image.entry, (replace(image.kernels[0], **changes),), KERNELS)
    return {"images": (*_without("sm_90a"), changed)}


def _linkage(name: str, **changes: Any) -> dict[str, Any]:  # noqa: ANN401
    return {"linkage": {**LINKAGE, name: replace(LINKAGE[name], **changes)}}


FAULTS: dict[str, tuple[dict[str, Any], str]] = {
    "missing kernel": ({"images": _without("sm_90a")}, "is declared but not embedded"),
    "kernel nobody declared": (_kernel(name="stray"), "stray for sm_90a is embedded but not"),
    "kernel twice": (
        {"images": (*make_contents().images, make_image("sm_90a"))},
        "is embedded 2 times",
    ),
    "other registers": (_kernel(registers=255), "has 255 registers, the manifest says 168"),
    "other stack": (_kernel(stack=8), "has 8 bytes of stack, the manifest says 0"),
    "other launch bound": (_kernel(max_threads=256), "has 256 threads at most"),
    "target outside the set": (
        {"images": (*make_contents().images, make_image("sm_75"))},
        "(sass, sm_75) is not of the arch set",
    ),
    "not compressed": (
        {"images": (*_without("sm_90a"), make_image("sm_90a", codec="none"))},
        "is stored as none",
    ),
    "LTO": (
        {"images": (*make_contents().images, make_image("sm_90a", kind="lto", arch=None))},
        "(lto, None) is not of the arch set",
    ),
    "two kernels in one PTX module": (
        {
            "images": (
                *_without("compute_80"),
                Image(make_image("compute_80").entry, make_image("compute_80").kernels * 2),
            )
        },
        "holds 2 kernels",
    ),
    "flags of another set": (
        {"manifest": replace(make_manifest(), flags=make_manifest("8.0;9.0").flags)},
        "the manifest's flags are for other targets than its arch set: -gencode=arch=compute_80,",
    ),
    "PTX never assembled": (
        {
            "manifest": make_manifest(
                kernels=(
                    make_kernel("sm_80"),
                    make_kernel("compute_80", assembled_for=()),
                    make_kernel("sm_90a"),
                )
            )
        },
        "was not assembled offline for its own number",
    ),
    "target without kernels": (
        {"manifest": make_manifest(kernels=(make_kernel("sm_80"), make_kernel("compute_80")))},
        "no kernel is declared for sm_90a",
    ),
    "kernel declared twice": (
        {"manifest": make_manifest(kernels=(*make_manifest().kernels, make_kernel("sm_80")))},
        "is declared 2 times",
    ),
    "another role": (
        {"manifest": make_manifest(kernels=(make_kernel("sm_80", role="bwd_dkdv"),))},
        "is declared for the role bwd_dkdv, its family is for fwd",
    ),
    "nothing to fall back on": (
        {
            "manifest": make_manifest(
                kernels=(make_kernel("sm_90a", family="fwd_sm90", role="fwd"),),
                fallbacks=FACTS,
            )
        },
        "has no kernel of the family fwd to fall back on",
    ),
    "no chain to fall back on": (
        {
            "manifest": make_manifest(
                kernels=(make_kernel("sm_90a", family="bwd_fused_sm90", role="bwd_fused"),),
                fallbacks=FACTS,
            )
        },
        "has no kernel of the family bwd_dq_recompute to fall back on",
    ),
    "nothing to fall back on, of an earlier build": (
        {"manifest": make_manifest(kernels=(make_kernel("sm_90a", family="fwd_sm90"),))},
        "has no kernel of the family of another role to fall back on",
    ),
    "METADATA": ({"metadata_version": "0.1.0"}, "have different versions"),
    "label": (
        {
            "manifest": make_manifest(package_version="0.1.0+cu130.all"),
            "metadata_version": "0.1.0+cu130.all",
            "path": NAME.replace("hopper", "all"),
        },
        "the version's label is `all`, the arch set's is `hopper`",
    ),
    "tag": ({"path": NAME.replace("manylinux_2_34", "linux")}, "the tag is py3-none-linux"),
    "stray library": (
        {"libraries": (KERNELS, BINDING, "flash_dist.libs/libgomp.so.1")},
        "`flash_dist.libs/libgomp.so.1` is a library that is not declared",
    ),
    "shared cudart": (
        _linkage(KERNELS, needed=("libcudart.so.13", "libc.so.6")),
        "needs libcudart.so.13",
    ),
    "no libtorch": (
        _linkage(BINDING, needed=("libflash_dist_kernels.so", "libtorch_cpu.so")),
        "does not need libtorch.so",
    ),
    "RPATH of the build folder": (_linkage(KERNELS, search_path=("/tmp/b",)), "searches"),  # noqa: S108
    "binding without $ORIGIN": (_linkage(BINDING, search_path=()), "expected ['$ORIGIN']"),
    "export of a C++ symbol": (_linkage(KERNELS, exports=("_ZN3foo",)), "exports ['_ZN3foo']"),
    "fat binary not understood": ({"warnings": ("junk at 0x40",)}, "junk at 0x40"),
    "over budget": ({"size": 1001}, "the wheel has 1,001 bytes, the budget is 1,000"),
}


@pytest.mark.parametrize(("changes", "sentence"), FAULTS.values(), ids=FAULTS.keys())
def test_a_fault_is_found(changes: dict[str, Any], sentence: str) -> None:
    result = audit_contents(make_contents(**changes), budget_bytes=1000)
    assert not result
    assert sentence in describe_failure(result)


def test_a_wheel_of_packed_sources_has_their_version() -> None:
    result = audit_contents(
        make_contents(
            manifest=make_manifest(package_version="0.1.0"),
            metadata_version="0.1.0",
            path=NAME.replace("+cu130.hopper", ""),
        )
    )
    assert result, describe_failure(result)


FUSED = (make_kernel("sm_90a", family="bwd_fused_sm90"), make_kernel("sm_90a"))


@pytest.mark.parametrize(
    ("stand_in", "said"),
    [("fwd", ""), ("bwd_dkdv", "has no kernel of the family bwd_dkdv to fall back on"), (None, "")],
)
def test_the_manifest_names_the_stand_ins_of_a_role(stand_in: str | None, said: str) -> None:
    facts = Fallbacks({"bwd_fused": (stand_in,)}, frozenset()) if stand_in else None
    manifest = make_manifest(kernels=FUSED, fallbacks=facts)
    text = describe_failure(audit_contents(make_contents(manifest=manifest)))
    assert said in text
    assert bool(said) == ("to fall back on" in text)


def test_sizes_are_summed_by_target_old_to_new() -> None:
    sizes = audit_contents(make_contents()).target_sizes()
    assert [(size.target, size.kernels, size.packed) for size in sizes] == [
        ("compute_80", 1, 100),
        ("sm_80", 1, 100),
        ("sm_90a", 1, 100),
    ]


def test_the_result_is_plain_data() -> None:
    document = json.loads(json.dumps(audit_contents(make_contents()).to_json()))
    assert document["version"] == 1
    assert document["passed"] is True
    assert len(document["kernels"]) == 3


def test_a_wheel_without_a_manifest_cannot_be_audited(tmp_path: Path) -> None:
    path = tmp_path / NAME
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("flash_dist/__init__.py", "")
    with pytest.raises(AuditError, match=MANIFEST):
        audit_wheel(path)
    assert main(["audit", str(path)]) == 2


def test_needed_libraries_search_path_and_exports_are_read() -> None:
    needed = ("libtorch.so", "libc.so.6")
    data = make_linked(needed=needed, path=("$ORIGIN:/opt",), exports=("f",))
    assert read_linked(data) == Linked(needed, ("$ORIGIN", "/opt"), ("f",))


@pytest.mark.parametrize("size", [0, 4, 63, 64, 100, 200, 300])
def test_a_truncated_library_is_an_error(size: int) -> None:
    data = make_linked(needed=("libc.so.6",), exports=("f",))
    assert size < len(data)
    with pytest.raises(FatbinError):
        read_linked(data[:size])


def make_older() -> WheelContents:
    """Return a wheel of CUDA 12.4: libcudart from another package, LZ4."""
    toolkit = ToolkitInfo("12.4", "12.4.131", "12.9.86", "525", "8.4")
    whole = make_contents(manifest=replace(make_manifest(), toolkit=toolkit))
    images = tuple(replace(one, entry=replace(one.entry, codec="lz4")) for one in whole.images)
    linkage = {
        **whole.linkage,
        KERNELS: replace(
            whole.linkage[KERNELS],
            needed=("libcudart.so.12", "libc.so.6"),
            search_path=RUNTIME_PATH,
        ),
    }
    return replace(whole, images=images, linkage=linkage)


def test_each_toolkit_has_its_own_linkage_and_compression() -> None:
    good = make_older()
    assert audit_contents(good), describe_failure(audit_contents(good))
    newer = make_contents()
    packed = audit_contents(replace(good, images=newer.images))
    assert "is stored as zstd, expected lz4" in describe_failure(packed)
    linked = audit_contents(replace(good, linkage=newer.linkage))
    assert "does not need libcudart.so.12" in describe_failure(linked)
    foreign = replace(newer.manifest, arch_set=replace(newer.manifest.arch_set, machine="aarch64"))
    loader = replace(newer.linkage[KERNELS], needed=("ld-linux-x86-64.so.2", "libc.so.6"))
    result = audit_contents(
        replace(newer, manifest=foreign, linkage={**newer.linkage, KERNELS: loader})
    )
    assert "needs ld-linux-x86-64.so.2, which is not expected" in describe_failure(result)
