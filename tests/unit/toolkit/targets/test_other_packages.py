"""A build of another package is judged and explained by its own manifest."""

from __future__ import annotations

from dataclasses import replace

from flash_dist.toolkit.builds.manifest import Manifest, declare_build
from flash_dist.toolkit.product import PLACEHOLDER
from flash_dist.toolkit.targets.advice import explain_refusal
from flash_dist.toolkit.targets.archs import Arch, ArchSet
from flash_dist.toolkit.targets.axes import Axes
from flash_dist.toolkit.targets.devices import ANY_GPU, Device, Driver
from flash_dist.toolkit.targets.verdict import Situation, judge_device
from tests.unit.toolkit.builds.test_plain_kernels import make_plain, record

INDEX = "https://wheels.my-norms.dev/"
SETS = (
    ArchSet.parse("8.0+PTX;9.0a", name="all", label="all"),
    ArchSet.parse("9.0a", name="hopper", label="hopper"),
)
HOPPER = replace(
    make_plain(record("scale_kernel", "scale", "sm_90a"), archs="9.0a"),
    package_version="0.1.0+cu130.hopper",
    axes=Axes(()),
    archsets=SETS,
    index=INDEX,
    oldest_gpu=Device(8, 0),
    fallbacks=None,
)


def explain(manifest: Manifest, device: str, driver: str = "580") -> tuple[str, str, str]:
    build = declare_build(manifest)
    verdict = judge_device(build, Situation(Device.parse(device), Driver.parse(driver)))
    assert not verdict
    return verdict.cause, *explain_refusal(verdict, build)


def test_a_gpu_below_the_declared_one_gets_no_set_and_no_build_named() -> None:
    assert explain(HOPPER, "7.5") == (
        "hardware-too-old",
        (
            "compute capability 7.5 cannot use this build: my_norms needs compute capability 8.0 "
            "or newer, not 7.5"
        ),
        "use a GPU of compute capability 8.0 or newer: my_norms starts at 8.0",
    )


def test_targets_that_the_toolkit_cannot_compile_are_named_beside_it() -> None:
    _, _, fix = explain(HOPPER, "7.0")
    assert fix == (
        "use a GPU of compute capability 8.0 or newer: CUDA 13.0 cannot compile for 7.0 and "
        "my_norms starts at 8.0"
    )


def test_a_set_is_one_of_its_own_and_installed_from_its_own_index() -> None:
    cause, sentence, fix = explain(HOPPER, "8.6")
    assert (cause, sentence.rpartition("; ")[2]) == (
        "no-matching-code",
        "install the arch set `all`",
    )
    assert fix == (
        f'`pip install "my_norms==0.1.0+cu130.all" --extra-index-url {INDEX}all/` installs the '
        "arch set `all`"
    )


def test_without_a_set_its_own_sources_are_built() -> None:
    _, sentence, fix = explain(replace(HOPPER, archsets=SETS[1:]), "8.6")
    assert sentence.endswith("; no published arch set serves it")
    assert fix == (
        "`TORCH_CUDA_ARCH_LIST='8.6' pip install my_norms-0.1.0.tar.gz` builds and installs a "
        "wheel for exactly these from the sources of the release"
    )


def test_a_target_of_one_chip_is_named_where_its_sets_have_it() -> None:
    kernels = (record("scale_kernel", "scale", "sm_80"),)
    sets = (ArchSet.parse("9.0a", name="cuda14", label="cuda14"),)
    ampere = replace(HOPPER, kernels=kernels, archsets=sets)
    assert declare_build(ampere).own_targets == (Arch(9, 0, "a"),)
    both = declare_build(ampere)
    verdict = judge_device(both, Situation(Device(9, 0), Driver.parse("580")))
    _, fix = explain_refusal(verdict, both, others=[Device(8, 6)])
    assert "TORCH_CUDA_ARCH_LIST='8.6;9.0a' " in fix
    plain = replace(both, archsets=())
    _, fix = explain_refusal(verdict, plain, others=[Device(8, 6)])
    assert "TORCH_CUDA_ARCH_LIST='8.6;9.0' " in fix


def test_a_package_that_names_no_floor_and_no_index_has_none() -> None:
    data = HOPPER.to_json()
    assert data["product"]["oldest_gpu"] == "8.0"
    for key in ("oldest_gpu", "index"):
        del data["product"][key]
    found = Manifest.from_json(data)
    assert (found.oldest_gpu, found.index) == (ANY_GPU, f"{PLACEHOLDER}my_norms/")
    assert explain(found, "7.5")[0] == "no-matching-code"


def test_the_manifest_round_trips() -> None:
    assert Manifest.from_text(HOPPER.to_text(), source="_build.json") == HOPPER
