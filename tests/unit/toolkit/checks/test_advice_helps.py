"""Following doctor's advice helps: no step comes twice, and all paths end.

A state is a machine and a build. The test reads the advice from doctor's output and follows it:
each alternative, and each driver that `or newer` allows, leads to another state.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from functools import cache
from itertools import combinations, product
from typing import TYPE_CHECKING, Final

import pytest

from flash_dist.toolkit.builds.published import published_sets
from flash_dist.toolkit.checks.driver import check_driver
from flash_dist.toolkit.checks.gpus import check_all_gpus, check_gpu
from flash_dist.toolkit.indexes.selection import make_build
from flash_dist.toolkit.machine.host import Host
from flash_dist.toolkit.machine.installed import Installed
from flash_dist.toolkit.machine.libcuda import imagine_cuda
from flash_dist.toolkit.targets.archs import DEFAULT_TOOLKIT, ArchSet, require_supported
from flash_dist.toolkit.targets.devices import DRIVER_CUDA, DROPPED, Device, Driver
from flash_dist.toolkit.targets.gpus import CHIPS
from flash_dist.toolkit.targets.needs import serve
from flash_dist.toolkit.targets.verdict import FLOOR
from tests.unit.made.builds import make_what_if

if TYPE_CHECKING:
    from collections.abc import Iterator

    from flash_dist.toolkit.checks.environment import Environment
    from flash_dist.toolkit.targets.verdict import Build
    from tests.unit.made.command import Cli

_NEWEST: Final = tuple(branch for branch in sorted(DRIVER_CUDA) if branch > 610)
DRIVERS: Final = (450, 470, 520, 525, 536, 550, 570, 575, 580, 589, 590, 610, *_NEWEST, 700)
_FEW_DRIVERS: Final = (470, 535, 580, 700)
DEVICES: Final = tuple(Device(*chip.version) for chip in CHIPS)
TOO_OLD, ABLE = ([one for one in DEVICES if (one < FLOOR) is old] for old in (True, False))
SETS: Final = {one.name: one for one in published_sets()}
VARIABLES: Final = {
    "": DRIVERS,
    "CUDA_FORCE_PTX_JIT": _FEW_DRIVERS,
    "CUDA_DISABLE_PTX_JIT": _FEW_DRIVERS,
}
_MOST_STEPS: Final = 6


@dataclass(frozen=True)
class State:
    """A machine, and its installed build."""

    devices: tuple[Device, ...]
    driver: int | None
    archs: str
    toolkit: str = DEFAULT_TOOLKIT
    machine: str = "x86_64"
    variable: str = ""
    lacks_compiler: bool = False

    @property
    def build(self) -> Build:
        return _build(self.archs, self.toolkit, self.machine)

    def with_set(self, name: str) -> State:
        one = SETS[name]
        return replace(self, archs=str(one), toolkit=one.toolkit)

    def with_list(self, text: str) -> State:
        return replace(self, archs=compile_list(text), toolkit=DEFAULT_TOOLKIT)


@cache
def _build(archs: str, toolkit: str, machine: str) -> Build:
    made = make_build("flash_dist 0.1.0+cu130.test", ArchSet.parse(archs).archs, toolkit)
    return replace(made, archsets=tuple(one for one in SETS.values() if one.machine == machine))


def compile_list(text: str) -> str:
    """Check that our toolkit compiles a list."""
    return str(require_supported(ArchSet.parse(text), DEFAULT_TOOLKIT))


def make_environment(state: State) -> Environment:
    driver = Driver.parse(str(state.driver)) if state.driver else None
    lacking = Host(libcuda=f"/usr/lib/libcuda.so.{min(state.driver or 580, 615)}.65.06")
    assert lacking.lacks_jit_compiler
    return replace(
        make_what_if("9.0a", "9.0"),
        machine=state.machine,
        cuda=imagine_cuda(state.devices, driver),
        installed=Installed(state.build),
        variables={state.variable: "1"} if state.variable else {},
        host=lacking if state.lacks_compiler else None,
    )


@cache
def advise(state: State) -> frozenset[str]:
    """Return the advice of doctor."""
    environment = make_environment(state)
    gpus = environment.cuda.gpus
    found = [replace(check_gpu(environment, gpu), gpu=gpu.index) for gpu in gpus]
    steps = [check_driver(environment).fix, *(one.fix for one in found)]
    whole = check_all_gpus(environment, found)
    if whole is not None:
        steps += [whole.fix, *(one for one in whole.details if "nox" in one)]
    return frozenset(step for step in steps if step)


DRIVER: Final = (
    r"(?:NVIDIA driver (\d+) or newer(?:, up to (\d+), the last that supports [\d., ]+)?)"
)
PRESENT: Final = r" \(`nvidia-smi` shows the present one\)"
LIST: Final = r"`TORCH_CUDA_ARCH_LIST='(.+?)' nox -s build_\w+` builds a wheel for exactly these"
SET: Final = (
    r"`nox -s build_\w+ -- ([\w-]+)` builds the arch set `\1` \(label \w+\) into dist/\1/; "
    r"install that wheel"
)


def follow(step: str, state: State) -> Iterator[State]:
    """Yield the state after each alternative of a step.

    Raises:
        AssertionError: The test does not know a part of the step.
    """
    for words, take in _WAYS:
        found = re.match(words, step)
        if found is not None:
            behind = tuple(take(state, *found.groups()))
            rest = step[found.end() :]
            assert behind, step
            if rest.startswith(", and NVIDIA driver"):  # two steps
                taken = re.fullmatch(rf", and {DRIVER}", rest)
                assert taken, rest
                yield from (new for one in behind for new in _with_driver(one, *taken.groups()))
                return
            yield from behind
            if rest:
                assert re.match(", or |; or |; ", rest), rest
                yield from follow(re.sub("^(, or |; or |; )", "", rest), state)
            return
    raise AssertionError(step)


def _with_driver(state: State, first: str, last: str | None) -> Iterator[State]:
    """Install each driver that is named."""
    for branch in DRIVERS:
        if int(first) <= branch <= int(last or max(DRIVERS)):
            yield replace(state, driver=branch)


def _with_other_gpu(state: State) -> Iterator[State]:
    kept = tuple(one for one in state.devices if one >= FLOOR)
    for device in (FLOOR, Device(9, 0)):
        yield replace(state, devices=tuple(sorted({*kept, device})))


def _with_set_and_driver(state: State, first: str, last: str | None, name: str) -> Iterator[State]:
    yield from _with_driver(state.with_set(name), first, last)


_WAYS: Final = (
    (
        rf"(?:install )?{DRIVER} and the arch set `([\w-]+)`",
        _with_set_and_driver,
    ),
    (rf"install {DRIVER}{PRESENT}", _with_driver),
    (
        r"the arch set `([\w-]+)`: CUDA [\d.]+ runs on (?:a )?driver [^`]*\)$",
        lambda state, name: [state.with_set(name)],
    ),
    (SET, lambda state, name: [state.with_set(name)]),
    (LIST, lambda state, text: [state.with_list(text)]),
    (r"use a GPU of compute capability 7\.5 or newer: [^`]*$", _with_other_gpu),
    (
        r"`unset \w+`(?: lets the driver compile the PTX of this build)?",
        lambda state: [replace(state, variable="")],
    ),
    (
        r"install the whole driver, in a container with NVIDIA_DRIVER_CAPABILITIES=compute,utility",
        lambda state: [replace(state, lacks_compiler=False)],
    ),
    (r"`python -m flash_dist selftest` on it shows whether it does", lambda state: [state]),
    (
        r"`export CUDA_VISIBLE_DEVICES=([\d,]+)` hides the others",
        lambda state, names: [
            replace(state, devices=tuple(state.devices[int(one)] for one in names.split(",")))
        ],
    ),
)


def insist(state: State, done: tuple[State, ...] = (), known: set[State] | None = None) -> None:
    """Follow all advice to its end: no step repeats, and no path ends with a failure."""
    known = set() if known is None else known
    assert len(done) <= _MOST_STEPS, done
    if state in known:
        return
    for step in advise(state):
        for behind in follow(step, state):
            if behind == state:
                continue  # steps for testing change nothing
            assert step not in advise(behind), (step, state, behind)
            assert behind not in (*done, state), (step, done, behind)
            insist(behind, (*done, state), known)
    known.add(state)


@cache
def cases(machine: str) -> tuple[tuple[str, str], ...]:
    """Return the possible builds: the published ones, and lists of two toolkits."""
    sets = [(str(one), one.toolkit) for one in SETS.values() if one.machine == machine]
    lists = ("7.5", "8.0", "12.0+PTX", "compute_75")
    own = [(one, toolkit) for one in lists for toolkit in ("12.8", DEFAULT_TOOLKIT)]
    return (*sets, *own)


@pytest.mark.slow
@pytest.mark.parametrize("variable", VARIABLES, ids=lambda name: name or "nothing-set")
@pytest.mark.parametrize("device", [Device(6, 1), *ABLE, Device(13, 0)], ids=str)
def test_doctors_advice_helps_on_every_gpu_driver_and_build(device: Device, variable: str) -> None:
    for machine in ("x86_64", "aarch64"):
        known: set[State] = set()
        for driver, (archs, toolkit) in product((None, *VARIABLES[variable]), cases(machine)):
            insist(State((device,), driver, archs, toolkit, machine, variable), known=known)


@pytest.mark.parametrize("driver", [None, 470, 535, 575, 580, 615], ids=str)
@pytest.mark.parametrize("name", ["hopper", "all", "cuda12", "arm"])
def test_doctors_advice_helps_without_a_jit_compiler(name: str, driver: int | None) -> None:
    known: set[State] = set()
    for device in ABLE:
        start = State((device,), driver, "9.0a", machine=SETS[name].machine, lacks_compiler=True)
        insist(start.with_set(name), known=known)


@pytest.mark.slow
@pytest.mark.parametrize("driver", [470, 535, 580, 615, 700], ids=str)
@pytest.mark.parametrize("name", ["hopper", "cuda12", "all", "arm"])
def test_doctors_advice_helps_for_two_different_gpus(name: str, driver: int | None) -> None:
    known: set[State] = set()
    for pair in combinations([Device(6, 1), Device(7, 0), *ABLE], 2):
        insist(State(pair, driver, "9.0a", machine=SETS[name].machine).with_set(name), known=known)


def test_a_gpu_that_nothing_serves_is_not_told_to_get_a_driver() -> None:
    for device, driver in product(TOO_OLD, DRIVERS):
        for archs, toolkit in cases("x86_64"):
            advice = advise(State((device,), driver, archs, toolkit))
            assert advice
            assert not any("NVIDIA driver" in step for step in advice), advice


def test_a_driver_that_drops_a_gpu_of_the_machine_is_not_advised() -> None:
    state = State((Device(6, 1), Device(8, 6)), 575, "8.0")
    assert (6, 1) in DROPPED
    steps = [step for step in advise(state) if step.startswith("install NVIDIA")]
    assert steps
    for step in steps:
        assert re.search(r"driver 580 or newer, up to 580\b.* 6\.1", step)


def select(cli: Cli, *words: str) -> tuple[int, str]:
    status, out, _ = cli.run("select", *words)
    return status, out


@pytest.mark.slow
@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
@pytest.mark.parametrize("device", [*ABLE, Device(13, 0)], ids=str)
def test_selects_advice_helps_on_every_gpu_and_driver(
    device: Device, machine: str, cli: Cli
) -> None:
    words = ("--gpu", str(device), "--machine", machine)
    for branch in DRIVERS:
        status, out = select(cli, *words, "--driver", str(branch))
        step = re.search(r"^  fix: (.+)$", out, re.MULTILINE)
        assert (status == 1) == (step is not None), out
        if step is None:
            continue
        driver = re.search(DRIVER, step[1])
        if driver:
            allowed = [one for one in DRIVERS if one >= int(driver[1])]
            assert branch < int(driver[1])
        else:
            allowed = [branch]
        built = re.match(LIST, step[1])
        for one in allowed:
            if built:
                made = ArchSet.parse(compile_list(built[1]))
                assert serve(made, [device], Driver.parse(str(one))), (step[1], one)
            else:
                assert select(cli, *words, "--driver", str(one))[0] == 0, (step[1], one)


@pytest.mark.parametrize("device", [one for one in ABLE if one.arm_only], ids=str)
def test_the_command_for_arm_machines_that_select_names_chooses_a_set(
    device: Device, cli: Cli
) -> None:
    _, out = select(cli, "--gpu", str(device))
    named = re.search(r"`python -m flash_dist select (.+?)`", out)
    assert named, out
    status, out = select(cli, *named[1].split())
    assert (status, out.split(":")[0]) == (0, "arm")
    assert "Arm machines" not in out


@pytest.mark.parametrize(
    ("gpu", "driver", "needed"),
    [("8.6", "470", 525), ("7.5", "450", 525), ("9.0", "470", 525), ("12.0", "535", 580)],
)
def test_select_names_the_oldest_driver_with_which_a_set_serves(
    gpu: str, driver: str, needed: int, cli: Cli
) -> None:
    status, out = select(cli, "--gpu", gpu, "--driver", driver)
    assert status == 1
    assert f"needs driver {needed} or newer, not driver {driver}" in out
    assert f"fix: install NVIDIA driver {needed} or newer (`nvidia-smi`" in out
