"""Puts verdicts into words: the arch set or driver to install, the variable to unset.

Pure functions.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from ..errors import hint_to_build
from ..product import NAME, PROGRAM
from .archs import DEFAULT_MACHINE, SESSIONS, Arch, ArchSet, unsupported
from .compatibility import ALLOWED, JitPolicy, order_of_sets
from .devices import Device, Driver, toolkit_driver
from .index_address import INDEX, explain_placeholder, index_of_set
from .needs import first_branch_of_build, first_branch_of_set, last_branch_of, list_targets, serve
from .verdict import FLOOR, SMEM_VARIABLE, Build, Cause, DeviceVerdict, Situation, judge_device

if TYPE_CHECKING:
    from collections.abc import Iterable


GET_GLIBC = "use a glibc distribution such as Debian, Ubuntu or Rocky Linux"
GET_DRIVER = (
    "on a GPU machine install the driver; in a container start it with the GPU runtime "
    "(`docker run --gpus all`)"
)
ARM = "aarch64"
TORCH_MIN = "2.10"  # oldest torch with the stable ABI that we use, if no manifest states it

HOW_WORDS = {
    "native": "native code",
    "family": "code of its family",
    "same-major": "code of the same major",
    "jit": "PTX through the JIT",
    "unverified": "code that NVIDIA does not guarantee to run there",
}


def describe_archs(archs: Iterable[Arch]) -> str:
    """List targets for a reader: `SASS sm_80, sm_90a; no PTX`."""
    archs = tuple(archs)
    sass = ", ".join(str(arch) for arch in archs if not arch.ptx)
    ptx = ", ".join(str(arch) for arch in archs if arch.ptx)
    return f"{f'SASS {sass}' if sass else 'no SASS'}; {f'PTX {ptx}' if ptx else 'no PTX'}"


def describe_device(device: Device, name: str = "") -> str:
    """Name a GPU for a reader: `NVIDIA H200 (compute capability 9.0)`."""
    return f"{name} (compute capability {device})" if name else f"compute capability {device}"


def sets_for(devices: Iterable[Device], archsets: Iterable[ArchSet]) -> tuple[ArchSet, ...]:
    """Return the arch sets that serve all of these GPUs best, the smallest first.

    A set that needs the JIT is left out if another set has SASS; see `order_of_sets`.
    """
    devices = tuple(devices)
    ranked = [(serve(archset, devices), archset) for archset in archsets]
    serving = [(order_of_sets(hows), archset) for hows, archset in ranked if hows is not None]
    best = min((key for key, _ in serving), default=None)
    equal = [archset for key, archset in serving if key == best]
    sized = all(archset.wheel_bytes for archset in equal)
    return tuple(
        sorted(equal, key=lambda one: (one.wheel_bytes if sized else 0, len(one.archs), one.name))
    )


def describe_covering(
    devices: Iterable[Device], covering: ArchSet | None, floor: Device = FLOOR
) -> str:
    """Say which set `covering_set` found for these GPUs, and which of the GPUs no build serves."""
    devices = tuple(devices)
    able, distinct = _servable(devices, floor), sorted(set(devices))
    name = covering.name if covering else "none"
    left = [device for device in distinct if device not in able]
    if not left:
        return f"the published arch set for all of them: {name}"
    return f"the published arch set for {_list(able)}: {name}; none serves {_list(left)}"


def arm_note(devices: Iterable[Device], machine: str, archsets: Iterable[ArchSet]) -> str:
    """Name the GPUs that exist only with Arm CPUs, and the set for them.

    Empty if there are no such GPUs, or if `machine` is Arm.

    Args:
        devices: All requested GPUs.
        machine: The CPU, in the form of `uname -m`.
        archsets: All published sets, for all CPUs.
    """
    if machine == ARM:
        return ""
    found = sorted({device for device in devices if device.arm_only})
    if not found:
        return ""
    verb = "comes" if len(found) == 1 else "come"
    listed = ",".join(map(str, found))
    covering = covering_set(found, [one for one in archsets if one.machine == ARM])
    which = f", whose set is `{covering.name}`" if covering else ""
    return (
        f"{_list(found)} {verb} only in Arm machines{which}: "
        f"`{PROGRAM} select --gpu {listed} --machine aarch64`"
    )


def _list(devices: Iterable[Device]) -> str:
    return ", ".join(map(str, devices))


def covering_set(
    devices: Iterable[Device], archsets: Iterable[ArchSet], floor: Device = FLOOR
) -> ArchSet | None:
    """Return the best arch set for the GPUs, or None. Ignore GPUs that no build can serve."""
    able = _servable(devices, floor)
    return next(iter(sets_for(able, archsets)), None) if able else None


def explain_refusal(
    verdict: DeviceVerdict, build: Build, *, name: str = "", others: Iterable[Device] = ()
) -> tuple[str, str]:
    """Return the reason why a GPU cannot use a build, and the step that helps (may be empty).

    `doctor` prints both and the operators raise them, so that users can search for the words.

    Args:
        verdict: The verdict on the GPU, which must be false.
        build: The judged build.
        name: Name of the GPU.
        others: Other GPUs of the machine, which a suggested arch set must serve, too.
    """
    situation = verdict.situation
    device, driver = situation.device, situation.driver
    devices = [device, *others]
    if verdict.cause == "no-matching-code":
        partly = bool(verdict.targets)
        loaded = _only_loaded(build, driver, devices)
        sentence = unsupported_sentence(device, loaded, name=name, others=others, partly=partly)
        return sentence, code_fix(devices, build, driver)
    sentence = f"{describe_device(device, name)} cannot use this build: {verdict.reason}"
    if verdict.cause == "driver-too-old":
        with_any_driver = judge_device(build, replace(situation, driver=None))
        if with_any_driver.cause == "no-matching-code":
            return f"{sentence}; nor has it code for {device}", code_fix(devices, build, driver)
    fixes: dict[Cause, str] = {
        "driver-too-old": driver_fix(build, driver, devices, situation.jit),
        "hardware-too-old": hardware_fix(device, build),
        "jit-compiler-absent": jit_fix(devices, build, driver),
        "jit-variable": f"`unset {' '.join(situation.jit.variables)}`",
        "smem-limit": f"`unset {SMEM_VARIABLE}`" if situation.smem_lowered else "",
    }
    return sentence, fixes.get(verdict.cause, "")


def _only_loaded(build: Build, driver: Driver | None, devices: Iterable[Device]) -> Build:
    """Keep only the arch sets that serve the GPUs with this driver; if there are none, keep all."""
    if driver is None:
        return build
    able = _servable(devices, build.floor)
    loaded = tuple(one for one in build.archsets if serve(one, able, driver) is not None)
    covering = covering_set(devices, loaded, build.floor)
    return replace(build, archsets=loaded) if covering else build


def name_driver(branch: int | None, devices: Iterable[Device] = ()) -> str:
    """Name the suitable drivers: `NVIDIA driver 580 or newer`.

    Args:
        branch: The oldest suitable branch; None if no known branch is suitable.
        devices: All GPUs of the machine; newer drivers may not support some of them.
    """
    if branch is None:
        return "a newer NVIDIA driver"
    devices = sorted(set(devices))
    last = last_branch_of(devices)
    if last is None or last < branch:
        return f"NVIDIA driver {branch} or newer"
    dropped = _list(one for one in devices if one.dropped_by is not None)
    return f"NVIDIA driver {branch} or newer, up to {last}, the last that supports {dropped}"


def unsupported_sentence(
    device: Device,
    build: Build,
    *,
    name: str = "",
    others: Iterable[Device] = (),
    partly: bool = False,
) -> str:
    """Say in one sentence that a build has no code for a GPU, and which arch sets have code.

    The sentence names published sets that also serve `others`, first the one that `unsupported_fix`
    names, or says that there are none. If `partly`, the build has code for only some kernels.
    """
    gpu = describe_device(device, name)
    contents = describe_archs(build.archs).replace("; ", " and ")
    lack = "has code for some kernels only" if partly else "has no matching code"
    sentence = f"{gpu} {lack} in {build.name}, built for {contents}"
    devices = _servable([device, *others], build.floor)
    serving = sets_for(devices, build.archsets)
    if not serving:
        all_of_them = "it" if len(devices) == 1 else f"all of {', '.join(map(str, devices))}"
        return f"{sentence}; no published arch set serves {all_of_them}"
    also = "".join(f" or `{archset.name}`" for archset in serving[1:])
    return f"{sentence}; install the arch set `{serving[0].name}`{also}"


def unsupported_fix(devices: Iterable[Device], build: Build) -> str:
    """Return the step to take for these GPUs: install an arch set, or build a list of targets."""
    devices = _servable(devices, build.floor)
    serving = sets_for(devices, build.archsets)
    if serving:
        best, placeholder = serving[0], explain_placeholder(build.index)
        return _hint_to_build(
            build,
            f"`nox -s {best.session} -- {best.name}` builds the arch set `{best.name}` "
            f"(label {best.label}) into dist/{best.name}/; install that wheel",
            f"`{pip_install(best, build.release, build.project, build.index)}` installs the arch "
            f"set `{best.name}`"
            f"{f' ({placeholder})' if placeholder else ''}",
        )
    chosen = f"TORCH_CUDA_ARCH_LIST='{_list_targets(devices, build)}'"
    machine = build.archsets[0].machine if build.archsets else DEFAULT_MACHINE
    session = SESSIONS[machine]
    return _hint_to_build(
        build,
        f"`{chosen} nox -s {session}` builds a wheel for exactly these",
        f"`{chosen} pip install {sources(build.release, build.project)}` builds and installs a "
        "wheel for exactly these from the sources of the release"
        if machine == DEFAULT_MACHINE
        else f"in a clone on {DEFAULT_MACHINE} `{chosen} nox -s {session}` builds a wheel for "
        "exactly these",
    )


def _list_targets(devices: Iterable[Device], build: Build) -> ArchSet:
    return list_targets(devices, build.own_targets, build.floor)


def _hint_to_build(build: Build, hint: str, otherwise: str) -> str:
    """Return `hint`, which names nox, if the sources of the package are here; else `otherwise`."""
    return hint_to_build(hint, otherwise) if build.project == NAME else otherwise


def pip_install(archset: ArchSet, release: str, project: str = NAME, index: str = INDEX) -> str:
    """Return the command that installs a published set from the index of a package."""
    address = index_of_set(archset.name, index)
    return f'pip install "{archset.pin(release, project)}" --extra-index-url {address}'


def sources(release: str, project: str = NAME) -> str:
    """Return the file name of a release's source distribution."""
    return f"{project}-{release}.tar.gz"


def code_fix(devices: Iterable[Device], build: Build, driver: Driver | None) -> str:
    """Return the step of `unsupported_fix`, with an arch set that the driver loads.

    If no such set serves the GPUs, the step names a newer driver, too.

    Args:
        devices: GPUs without code in the build, or without the best code.
        build: The judged build.
        driver: The present driver, if known.
    """
    every = tuple(devices)
    devices = _servable(every, build.floor)
    build = _only_loaded(build, driver, devices)
    step = unsupported_fix(devices, build)
    best = covering_set(devices, build.archsets, build.floor) or _list_targets(devices, build)
    if driver is None or serve(best, devices, driver) is not None:
        return step
    return f"{step}, and {name_driver(first_branch_of_set(best, devices), every)}"


def _servable(devices: Iterable[Device], floor: Device) -> tuple[Device, ...]:
    """Return the GPUs that some build can serve, oldest first."""
    return tuple(sorted({device for device in devices if device >= floor}))


def hardware_fix(device: Device, build: Build) -> str:
    """Return the step for a GPU that no build can serve."""
    alone = ArchSet("one", "one", (Arch(device.major, device.minor),))
    refused = build.toolkit and unsupported(alone, build.toolkit)
    compiler = f"CUDA {build.toolkit} cannot compile for {device}" if refused else ""
    starts = f"{build.project} starts at {build.floor}"
    reasons = " and ".join(reason for reason in (compiler, starts) if reason)
    return f"use a GPU of compute capability {build.floor} or newer: {reasons}"


def torch_fix(oldest: str = "") -> str:
    """Return the step for a torch that is absent or too old."""
    return f"`pip install 'torch>={oldest or TORCH_MIN}'`"


def jit_fix(devices: Iterable[Device], build: Build, driver: Driver | None = None) -> str:
    """Return the step for a driver without its JIT compiler: install it, or a build with SASS."""
    step = (
        "install the whole driver, in a container with NVIDIA_DRIVER_CAPABILITIES=compute,utility"
    )
    devices = _servable(devices, build.floor)
    compiled = tuple(one for one in build.archsets if _is_compiled(one, devices))
    if not compiled and not _is_compiled(_list_targets(devices, build), devices):
        return step  # no build has SASS for them
    return f"{step}; or {code_fix(devices, replace(build, archsets=compiled), driver)}"


def _is_compiled(archset: ArchSet, devices: Iterable[Device]) -> bool:
    """Tell if a set serves all of these GPUs without the JIT."""
    hows = serve(archset, devices)
    return hows is not None and "jit" not in hows


def driver_fix(
    build: Build,
    driver: Driver | None = None,
    devices: Iterable[Device] = (),
    jit: JitPolicy = ALLOWED,
) -> str:
    """Say what to do if the driver is too old: install a newer driver, or a set that it loads.

    Args:
        build: The build that the driver does not load.
        driver: The present driver, if known.
        devices: The GPUs; another set must serve all of them.
        jit: Variables that change what the driver does with embedded code.
    """
    every = tuple(devices)
    devices = _servable(every, build.floor)
    if every and not devices:
        return hardware_fix(max(every), build)
    able = _find_able(build, devices, jit)
    if devices and not able:  # no driver would help
        return code_fix(every, build, driver)
    needed = first_branch_of_build(build, able)
    if not able and build.toolkit:  # the GPUs are unknown
        needed = toolkit_driver(build.toolkit)
    step = f"install {name_driver(needed, every)} (`nvidia-smi` shows the present one)"
    if driver is None or not devices:
        return step
    loaded = [one for one in build.archsets if serve(one, devices, driver) is not None]
    other = covering_set(devices, loaded, build.floor)
    if other is not None:
        return f"{step}, or the arch set `{other.name}`: CUDA {other.toolkit} runs on {driver}"
    return f"{step}{_older_driver(needed, every, build)}"


def _find_able(build: Build, devices: Iterable[Device], jit: JitPolicy) -> list[Situation]:
    """For each GPU that the build can serve, return a situation that names no driver.

    If `jit` rules out all GPUs, it is ignored.
    """
    for policy in (jit, ALLOWED):
        alone = [Situation(device, jit=policy) for device in devices]
        able = [one for one in alone if judge_device(build, one)]
        if able:
            return able
    return []


def _older_driver(needed: int | None, devices: Iterable[Device], build: Build) -> str:
    """Name the set that needs the oldest driver; empty if `needed` is not newer than that."""
    every = tuple(devices)
    able = _servable(every, build.floor)
    asked = [(first_branch_of_set(one, able), one) for one in build.archsets]
    known = [(branch, one) for branch, one in asked if branch is not None]
    least = min((branch for branch, _ in known), default=None)
    if least is None or (needed is not None and least >= needed):
        return ""
    other = covering_set(able, [one for branch, one in known if branch == least], build.floor)
    return f", or {name_driver(least, every)} and the arch set `{other.name}`" if other else ""


def describe_how(verdict: DeviceVerdict) -> str:
    """Say what kind of code this GPU runs: `code of the same major (sm_80)`."""
    ways: dict[str, set[str]] = {}
    for kernel in verdict.kernels:
        if kernel.variant:
            ways.setdefault(kernel.how, set()).add(str(kernel.variant.arch))
    return ", ".join(
        f"{HOW_WORDS[how]} ({', '.join(sorted(ways[how]))})" for how in HOW_WORDS if how in ways
    )
