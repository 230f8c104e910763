"""`nox -l` is the manual. Requirements are the dependency groups of pyproject.toml."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import nox

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT))

from ci.choose import choose_sets, same_major, toolkits_of
from ci.cross import TARGETS, Target, require_tools
from ci.engine import find_engine
from ci.foreign import PYTHON
from ci.install_toolkit import install_foreign, install_toolkit
from ci.preflight import Preflight, check, read_host
from ci.project import ARCHSETS
from ci.toolchain import home_variable, named_home, release_of, tool_version
from flash_dist.archs import SESSIONS
from flash_dist.errors import FlashDistError
from flash_dist.published import load_archsets

if TYPE_CHECKING:
    from collections.abc import Mapping

nox.needs_version = ">=2025.10"
nox.options.default_venv_backend = "uv|virtualenv"
nox.options.reuse_venv = "yes"
nox.options.error_on_external_run = True
nox.options.sessions = ["lint", "typecheck", "unit_tests"]

PYPROJECT = nox.project.load_toml("pyproject.toml")
NATIVE = "--native"
SMALL_SET = "hopper"  # one target: what tests build
# After the wheels, in order.
RELEASED = ("fingerprint_check", "sdist", "conda", "index", "manifest", "install_test")

# uv does not read pip's settings; both look for local wheels in the same folders.
if os.environ.get("PIP_FIND_LINKS"):
    os.environ.setdefault("UV_FIND_LINKS", os.environ["PIP_FIND_LINKS"])


def install(session: nox.Session, *groups: str) -> None:
    """Install dependency groups of pyproject.toml."""
    session.install(*nox.project.dependency_groups(PYPROJECT, *groups))


def built_wheels() -> list[str]:
    """Return the wheels of all sets in dist/."""
    return sorted(str(path) for path in (ROOT / "dist").glob("*/*.whl"))


def run_preflight(
    session: nox.Session, *names: str, environ: Mapping[str, str] = os.environ
) -> list[Preflight]:
    """Stop, before anything is downloaded, on a machine or with arch sets that cannot be built.

    Returns what was found for each CUDA toolkit that the sets ask for.
    """
    try:
        sets, host = load_archsets(ARCHSETS), read_host(ROOT, environ)
        wanted = toolkits_of(names, environ, sets)
        own = own_release(wanted, environ)
        found = [
            check(host, wanted=one, cuda_home_version=own if own and same_major(one, own) else None)
            for one in wanted
        ]
        choose_sets(names, environ, sets, found[0].toolkit)
    except FlashDistError as error:
        session.error(str(error))
    session.log("\n".join(map(str, found)))
    return found


def own_release(wanted: list[str], environ: Mapping[str, str]) -> str | None:
    """Return the CUDA version that CUDA_HOME holds, and insist that some set asks for its major."""
    home = named_home(environ)
    if home is None:
        return None
    release = release_of(tool_version(home, "nvcc"))
    if not any(same_major(one, release) for one in wanted):
        check(read_host(ROOT, environ), wanted=wanted[0], cuda_home_version=release)
    return release


def install_toolchain(session: nox.Session, *names: str) -> None:
    """Install what compiles these arch sets; nvcc, too, unless CUDA_HOME names a toolkit.

    All sessions share one nvcc: the objects of a build folder are those of one path.
    """
    found = run_preflight(session, *names)
    install(session, "build", "audit")
    environments = Path(session.virtualenv.location).parent
    for one in reversed(found):  # CUDA_HOME is the newest in the end
        if named_home(os.environ) and one.is_own:
            home = str(named_home(os.environ))
        else:
            home = str(install_nvcc(session, one.toolkit, environments / f"cuda-{one.toolkit}"))
        session.env["CUDA_HOME"] = session.env[home_variable(one.toolkit)] = home


def install_nvcc(
    session: nox.Session, cuda: str, folder: Path, target: Target | None = None
) -> Path:
    """Install a CUDA toolkit once, and return its CUDA_HOME."""

    def install_into(place: Path, *words: str) -> None:
        session.install("--target", str(place), *words)

    try:
        if target:
            options = foreign_options(session, target)
            return install_foreign(cuda, folder, install_into, target, options)
        return install_toolkit(cuda, folder, install_into)
    except FlashDistError as error:
        session.error(str(error))


@nox.session
def build_wheels(session: nox.Session) -> None:
    """Build audited wheels into dist/<set>/: `-- [--native] SET ...`, default every published set.

    In a manylinux_2_28 container where podman or docker answers, else with this machine's compiler.
    """
    if is_native(session):
        names = set_names(session)
        install_toolchain(session, *names)
        session.run("python", "-m", "ci.build_wheels", *names)
    else:
        build_in_container(session)


@nox.session
def build_arm(session: nox.Session) -> None:
    """Cross-build audited aarch64 wheels into dist/<set>/: `-- [--native] SET ...`.

    In the container of `nox -s image`, else with this machine's cross compiler.
    """
    target = TARGETS["aarch64"]
    session.env.update(target.environ())
    if not is_native(session):
        build_in_container(session)
        return
    try:
        require_tools(target)
    except FlashDistError as error:
        session.error(str(error))
    names = set_names(session)
    environ = {**os.environ, **target.environ(), "CUDA_HOME": ""}  # its libraries are x86_64
    cuda = run_preflight(session, *names, environ=environ)[0].toolkit
    install(session, "build", "audit")
    folder = Path(session.virtualenv.location).parent / f"cuda-{cuda}"
    session.env["CUDA_HOME"] = str(install_nvcc(session, cuda, folder, target))
    session.run("python", "-m", "ci.build_wheels", *names)


def is_native(session: nox.Session) -> bool:
    """Whether this machine's compiler builds: asked for, or no container engine answers."""
    if NATIVE in session.posargs:
        return True
    try:
        engine = find_engine(os.environ)
    except FlashDistError as error:
        session.error(str(error))
    if engine is None:
        session.log("no container engine answers: built natively, for machines like this one")
    return engine is None


def set_names(session: nox.Session) -> list[str]:
    """Return what else a build was told: the sets."""
    return [arg for arg in session.posargs if arg != NATIVE]


def build_in_container(session: nox.Session) -> None:
    """Let cibuildwheel build the sets that were named."""
    install(session, "runtime", "audit", "container")
    session.run("python", "-m", "ci.portable", *set_names(session))


@nox.session
def arm_test(session: nox.Session) -> None:
    """Run the aarch64 wheels of dist/ in an emulator: `-- [--torch]` imports torch, too."""
    install(session, "runtime")
    options = foreign_options(session, TARGETS["aarch64"])
    needed = [*nox.project.dependency_groups(PYPROJECT, "runtime")]
    if "--torch" in session.posargs:  # the oldest: its package for aarch64 is without CUDA
        needed += [f"torch=={PYPROJECT['tool']['flash_dist']['torch_min']}.*", "numpy"]
    site = Path(session.create_tmp()) / "site"
    session.install("--target", str(site), f"--python-version={PYTHON}", *options, *needed)
    session.run("python", "-m", "ci.arm_test", "--site", str(site), *session.posargs)


def foreign_options(session: nox.Session, target: Target) -> tuple[str, ...]:
    """Return what lets the installer of this session take the packages of another CPU."""
    return target.uv_options if session.venv_backend == "uv" else target.pip_options


@nox.session
def build_cost(session: nox.Session) -> None:
    """Say what the last builds cost: minutes per target and kernel family. `-- LOG ...`."""
    install(session, "runtime")
    session.run("python", "-m", "ci.build_cost", *session.posargs)


@nox.session(venv_backend="none", default=False)
def image(session: nox.Session) -> None:
    """Make a local manylinux_2_28 image where no registry is reached; Debian, root, 6 minutes."""
    session.run(sys.executable, "-m", "ci.image", external=True)


@nox.session
def unit_tests(session: nox.Session) -> None:
    """Unit tests from the source tree: no GPU, no compiler, seconds. Arguments go to pytest."""
    install(session, "runtime", "test", "torch", "plot")
    session.run("python", "-m", "pytest", *session.posargs)


@nox.session
def small_wheel(session: nox.Session) -> None:
    """Build the one small wheel that wheel_tests installs."""
    install_toolchain(session, SMALL_SET)
    session.run("python", "-m", "ci.build_wheels", SMALL_SET)


@nox.session(requires=["small_wheel"])
def wheel_tests(session: nox.Session) -> None:
    """Install the small wheel into a fresh environment: import, CPU op, doctor what-if."""
    wheel = next((ROOT / "dist" / SMALL_SET).glob("*.whl"))
    install(session, "test", "torch")
    session.install("--force-reinstall", "--no-deps", str(wheel))
    session.install(str(wheel))
    session.chdir(session.create_tmp())  # the wheel, not the tree
    tests = str(ROOT / "tests" / "wheel")
    options = ["-c", str(ROOT / "pyproject.toml"), "--override-ini=pythonpath=", "--rootdir", tests]
    session.run("python", "-m", "pytest", *options, tests)


@nox.session(requires=["small_wheel"])
def reader_tests(session: nox.Session) -> None:
    """Compare inspect with NVIDIA's cuobjdump and nvdisasm on what nvcc makes and on our wheel."""
    install_toolchain(session, SMALL_SET)
    install(session, "runtime", "test", "referee")
    session.run("python", "-m", "tests.readers.tools")
    session.run("python", "-m", "pytest", "tests/readers", *session.posargs)


@nox.session(venv_backend="none", requires=["unit_tests", "wheel_tests", "reader_tests"])
def tests(session: nox.Session) -> None:
    """Everything that needs no GPU: unit_tests, wheel_tests and reader_tests."""
    session.log("unit_tests, wheel_tests and reader_tests passed")


@nox.session(venv_params=["--system-site-packages"])
def gpu_tests(session: nox.Session) -> None:
    """Run tests/gpu on this machine's GPUs from an installed wheel: `-- WHEEL [PYTEST ...]`."""
    wheel, *args = session.posargs or [str(next((ROOT / "dist" / "all").glob("*.whl")))]
    install(session, "test")
    session.install(str(Path(wheel).resolve()))
    work = Path(session.create_tmp()) / "gpu"  # without the source tree's own flash_dist
    shutil.rmtree(work, ignore_errors=True)
    for name in ("tests", "csrc"):
        shutil.copytree(ROOT / name, work / name)
    shutil.copy2(ROOT / "pyproject.toml", work)
    session.chdir(work)
    session.run("python", "-m", "pytest", "--override-ini=pythonpath=", "tests/gpu", *args)


@nox.session(venv_params=["--system-site-packages"])
def fingerprints(session: nox.Session) -> None:
    """Record what this machine's GPUs compute into flash_dist/fingerprints.json: `-- WHEEL`."""
    wheel = session.posargs[0] if session.posargs else next((ROOT / "dist" / "all").glob("*.whl"))
    session.install(str(Path(wheel).resolve()))
    session.chdir(session.create_tmp())  # the wheel, not the tree
    recorded = str(ROOT / "flash_dist" / "fingerprints.json")
    session.run("python", "-m", "flash_dist", "selftest", "--record", recorded)


@nox.session
def fingerprint_check(session: nox.Session) -> None:
    """Compare the recorded fingerprints with the kernels of the wheels in dist/; no GPU."""
    install(session, "runtime", "build")
    session.run("python", "-m", "ci.fingerprints", *built_wheels())


@nox.session
def lint(session: nox.Session) -> None:
    """Ruff with all rules, its formatter, and clang-format."""
    install(session, "lint")
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")
    suffixes = {".cpp", ".h", ".cuh", ".cu"}
    sources = [p for folder in ("csrc", "tests") for p in (ROOT / folder).rglob("*")]
    named = sorted(str(p) for p in sources if p.suffix in suffixes)
    session.run("clang-format", "--dry-run", "--Werror", *named)


@nox.session
def workflows(session: nox.Session) -> None:
    """Judge .github/workflows: actionlint whether they are right, zizmor whether they are safe."""
    install(session, "workflows")
    session.run("actionlint")
    options = ["--offline", "--no-progress", "--persona=pedantic"]
    session.run("zizmor", *options, str(ROOT / ".github" / "workflows"))


@nox.session
def typecheck(session: nox.Session) -> None:
    """Mypy, strict."""
    install(session, "runtime", "test", "torch", "clients", "typecheck")
    session.run("mypy")


@nox.session
def repro(session: nox.Session) -> None:
    """Make a release of some sets in two folders and compare the bytes: `-- [--native] SET ...`.

    Wheels, sources, conda channel, index and manifest; in containers where an engine answers.
    """
    install(session, "runtime")
    names = set_names(session) or [SMALL_SET]
    native = [NATIVE] if NATIVE in session.posargs else []
    published = load_archsets(ARCHSETS)
    dists = []
    for folder in ("one", "another-folder"):
        tree = Path(session.create_tmp()) / folder / "flash_dist"
        copy_tree(session, tree)
        for name in names:  # the session refuses an unknown one
            builder = published[name].session if name in published else "build_wheels"
            run_session(session, builder, *native, name, tree=tree)
        for made in ("sdist", "conda", "index", "manifest"):
            run_session(session, made, tree=tree)
        dists.append(str(tree / "dist"))
    try:
        session.run("python", "-m", "ci.repro", *dists)
    except nox.command.CommandFailed:
        install(session, "diffoscope")
        session.run("diffoscope", "--exclude-directory-metadata=yes", *dists)
        raise


def copy_tree(session: nox.Session, tree: Path) -> None:
    """Copy the files of this tree to a new one, as a commit that is the same each time."""
    shutil.rmtree(tree, ignore_errors=True)
    command = ["git", "ls-files", "-co", "--exclude-standard"]
    for name in str(session.run(*command, silent=True, external=True)).splitlines():
        if (ROOT / name).is_file():
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, tree / name)
    day = f"@{PYPROJECT['tool']['flash_dist']['source_date_epoch']} +0000"
    who = {"GIT_AUTHOR_NAME": "repro", "GIT_AUTHOR_EMAIL": "", "GIT_AUTHOR_DATE": day}
    who |= {name.replace("AUTHOR", "COMMITTER"): value for name, value in who.items()}
    git = ["git", "-C", str(tree), "-c", "core.excludesFile=", "-c", "commit.gpgSign=false"]
    for words in (["init", "--quiet"], ["add", "."], ["commit", "--quiet", "--message", "repro"]):
        session.run(*git, *words, env=who, external=True)


@nox.session
def audit(session: nox.Session) -> None:
    """Audit wheels that are already built: `-- WHEEL ...`."""
    install(session, "runtime")
    session.run("python", "-m", "flash_dist", "audit", *(session.posargs or built_wheels()))


@nox.session
def sdist(session: nox.Session) -> None:
    """Pack the sources into dist/flash_dist-X.tar.gz, the same bytes each time, and check it."""
    install(session, "backend", "sdist")
    session.run("python", "-m", "ci.sdist")


@nox.session
def index(session: nox.Session) -> None:
    """Make dist/index, a static package index of the wheels in dist/: `-- --url URL`."""
    install(session, "runtime", "index")
    session.run("python", "-m", "ci.index", *session.posargs)


@nox.session
def conda(session: nox.Session) -> None:
    """Make dist/conda, a conda channel of the wheels in dist/: the solver picks by the GPU."""
    install(session, "runtime", "index", "conda")
    session.run("python", "-m", "ci.conda", *session.posargs)


@nox.session
def manifest(session: nox.Session) -> None:
    """Verify the wheels in dist/; write manifest.json, SHA256SUMS and provenance/ beside them."""
    install(session, "runtime", "index")
    session.run("python", "-m", "ci.release_manifest", *session.posargs)


@nox.session
def install_test(session: nox.Session) -> None:
    """Install the wheels in dist/ with pip, uv, conda, and under every torch; 30 min, 8 GB."""
    install(session, "runtime", "audit", "index", "clients", "conda")
    session.run("python", "-m", "ci.install_test", *session.posargs)


@nox.session(default=False)
def release(session: nox.Session) -> None:
    """Make a release in dist/, or say why not: `-- [--check] [--no-build] [--url URL]`."""
    install(session, "runtime", "index")
    args = session.posargs
    session.run("python", "-m", "ci.release", "tree", *args)
    if "--check" in args:
        return
    if "--no-build" not in args:
        for name in sorted(SESSIONS.values()):
            run_session(session, name)
    session.run("python", "-m", "ci.release", "wheels", *args)
    for name in RELEASED:
        run_session(session, name, *(args_of_index(args) if name == "index" else ()))
    session.run("python", "-m", "ci.release", "publish", *args)


def run_session(session: nox.Session, name: str, *args: str, tree: Path = ROOT) -> None:
    """Run another session at this place: `requires` would go on to the next after a failure.

    Its environment is the one of this tree's, whatever tree it works on.
    """
    environments = str(Path(session.virtualenv.location).parent)
    command = [sys.executable, "-m", "nox", "-f", str(tree / "noxfile.py"), "-s", name]
    command += ["--envdir", environments]
    session.run(*command, *(["--", *args] if args else []), external=True)


def args_of_index(args: list[str]) -> list[str]:
    """Return what of the arguments of a release is for its index."""
    place = args.index("--url") if "--url" in args else len(args)
    return args[place : place + 2]


@nox.session
def root_test(session: nox.Session) -> None:
    """Import, CPU op and doctor on the newest Debian: `-- [WHEEL]`; root, mmdebstrap, 5 GB."""
    install(session, "runtime", "index", "clients")
    wheels = session.posargs or [str(next((ROOT / "dist" / "all").glob("*.whl")))]
    session.run("python", "-m", "ci.root_test", *wheels)


@nox.session
def sizes(session: nox.Session) -> None:
    """Measure the wheels in dist/ for the README's table: `-- --write` puts it there."""
    install(session, "runtime", "index", "clients", "torch")
    session.run("python", "-m", "ci.sizes", *session.posargs)


@nox.session
def fuzz(session: nox.Session) -> None:
    """Read 100,000 mutated binaries: `-- --cases N --seed N`. Only our own error may come out."""
    install(session, "runtime", "test")
    session.run("python", "-m", "tests.fuzz.readers", *session.posargs)


@nox.session
def docs(session: nox.Session) -> None:
    """Build dist/docs, an HTML site that needs no network, and check its links."""
    install(session, "docs", "runtime")
    session.run("python", "-m", "ci.docs", "dist/docs")
    session.log(f"open {ROOT / 'dist' / 'docs' / 'index.html'}")


@nox.session
def zipapp(session: nox.Session) -> None:
    """Build dist/flash_dist.pyz: inspect, audit and doctor's what-if in one file, without torch."""
    session.install("tomli; python_version < '3.11'")
    folder = Path(session.create_tmp()) / "dependencies"
    shutil.rmtree(folder, ignore_errors=True)
    session.install("--target", str(folder), "packaging", "rich")
    session.run("python", "-m", "ci.zipapp", str(folder), "dist/flash_dist.pyz")


@nox.session
def lock_headers(session: nox.Session) -> None:
    """Pin the torch headers that csrc/api.cpp includes: `-- 2.13.0`."""
    install(session, "build")
    session.run("python", "-m", "ci.torch_headers", "--lock", *(session.posargs or ["2.13.0"]))
