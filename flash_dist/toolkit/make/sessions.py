"""Steps that several nox sessions share."""

from __future__ import annotations

import os
import shutil
import sys
from functools import partial, wraps
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, overload

import nox

from ..builds.published import load_archsets
from ..errors import KernelsError, explain_os_error
from .building.choose import choose_sets, same_major, toolkits_of
from .container.engine import find_engine
from .container.tree import copy_project
from .locks import BESIDE, NOT_COVERED, UNLOCKED, flatten, is_covered, locked
from .project import ARCHSETS, EMBEDDED, ROOT, load_groups, load_project
from .release.channels import CHANNELS
from .toolchain.cross import require_tools
from .toolchain.install import install_toolkit
from .toolchain.nvcc import home_variable, named_home, release_of, tool_version
from .toolchain.preflight import Preflight, check, read_host
from .wheels.artefacts import PURE

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from .release.channels import Row
    from .toolchain.cross import Target

    Session = Callable[[nox.Session], None]

GROUPS: Final = load_groups()
NATIVE: Final = "--native"
_KEY: Final = "dependency-groups"
# Load only xdist: other plugins of a machine's torch environment may warn (pytest-benchmark does).
PLUGINS: Final = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTEST_PLUGINS": "xdist.plugin"}


@overload
def session_of(function: Session, /, **options: Any) -> Session: ...  # noqa: ANN401 - as nox


@overload
def session_of(function: None = None, /, **options: Any) -> Callable[[Session], Session]: ...  # noqa: ANN401


def session_of(function: Session | None = None, /, **options: Any) -> Any:
    """Register a session as `nox.session` does; print expected errors without a traceback."""
    if function is None:
        return partial(session_of, **options)

    @wraps(function)
    def run(session: nox.Session) -> None:
        try:
            function(session)
        except KernelsError as error:
            session.error(str(error))
        except OSError as error:
            session.error(str(explain_os_error(error)))

    return nox.session(**options)(run)


def install(session: nox.Session, *groups: str) -> None:
    """Install dependency groups: first the locked groups by hash, then torch and other groups."""
    distinct = dict.fromkeys(BESIDE if name == UNLOCKED else name for name in groups)
    own = [] if EMBEDDED else [name for name in distinct if name not in load_groups(own=False)]
    unlocked = [*own, *({UNLOCKED} & set(groups))]
    more = _read_groups(session, unlocked)
    session.install(*words_of(session, *(name for name in distinct if name not in own)))
    if more:
        session.install(*more)


def _read_groups(session: nox.Session, names: Sequence[str]) -> tuple[str, ...]:
    """Return the requirements of groups in the project's pyproject.toml."""
    try:
        return nox.project.dependency_groups({_KEY: GROUPS}, *names)
    except (LookupError, TypeError, ValueError) as error:
        hint = f'for example `{names[0]} = ["pytest"]` in [{_KEY}] of pyproject.toml'
        reason = " ".join(str(error).split())
        session.error(f"{' and '.join(names)} cannot be installed: {reason}\n\nhint: {hint}")


def words_of(session: nox.Session, *groups: str) -> list[str]:
    """Return the installer's arguments for groups: lock files, or requirements without hashes."""
    if not is_covered():
        session.log(f"{NOT_COVERED}: installed without hashes")
        return list(nox.project.dependency_groups({_KEY: GROUPS}, *groups))
    return locked({name: flatten(GROUPS, name) for name in groups})


def install_wheel(session: nox.Session, wheel: str | Path) -> None:
    """Install a wheel and its requirements, even if the same version is installed."""
    path = str(Path(wheel).resolve())
    session.install("--force-reinstall", "--no-deps", path)
    session.install(path)


def install_beside_torch(session: nox.Session, wheel: str | Path, *groups: str) -> None:
    """Install groups and a wheel; use the machine's torch, but no pytest plugins beside it."""
    see_torch(session)
    install(session, *groups)
    install_wheel(session, wheel)
    session.env.update(PLUGINS)


def see_torch(session: nox.Session) -> None:
    """Let a session import torch, and the packages next to it, from nox's Python.

    Write a .pth file, because `--system-site-packages` gives a session only the system's packages
    and not those of a virtual environment that runs nox.
    """
    torch = find_spec("torch")
    if torch is None or torch.origin is None:
        return
    ask = "import sysconfig; print(sysconfig.get_path('purelib'))"
    site = Path(str(session.run("python", "-c", ask, silent=True)).strip())
    (site / "beside_torch.pth").write_text(f"{Path(torch.origin).parents[1]}\n", encoding="utf-8")


def built_wheels() -> list[str]:
    """Return the wheels of all sets in dist/, without pure ones such as the toolkit's wheel."""
    found = (ROOT / "dist").glob("*/*.whl")
    return sorted(str(path) for path in found if not path.name.endswith(PURE))


def require_wheels(session: nox.Session, *names: str) -> None:
    """Stop before any installation if a named set has no wheel in dist/, or dist/ has no wheel."""
    sets = load_archsets(ARCHSETS)
    lacking = [name for name in names if not any((ROOT / "dist" / name).glob("*.whl"))]
    if not lacking and (names or built_wheels()):
        return
    of_sets = f" of {', '.join(lacking)}" if lacking else ""
    commands: dict[str, list[str]] = {}
    for name in lacking:
        commands.setdefault(sets[name].session, []).append(name)
    lines = [f"nox -s {one} -- {' '.join(of)}" for one, of in commands.items()]
    hint = "`, `".join(lines or ["nox -s build_wheels"])
    session.error(f"dist/ holds no wheel{of_sets}\n\nhint: `{hint}` builds it")


def set_names(session: nox.Session) -> list[str]:
    """Return the names of sets among the arguments of a build session."""
    return [arg for arg in session.posargs if arg != NATIVE]


def is_native(session: nox.Session) -> bool:
    """Tell if this machine's compiler builds the wheels: on request, or if no engine answers."""
    if NATIVE in session.posargs:
        return True
    engine = find_engine(os.environ)
    if engine is None:
        session.log("no container engine answers: built natively, for machines like this one")
    return engine is None


def build(session: nox.Session) -> None:
    """Build the named sets, in a container or with this machine's compiler."""
    if not is_native(session):
        build_in_container(session)
        return
    names = set_names(session)
    install_toolchain(session, *names)
    build_natively(session, names)


def build_for(session: nox.Session, target: Target) -> None:
    """Build the named sets for another CPU, in a container or with a cross compiler."""
    session.env.update(target.environ())
    if not is_native(session):
        build_in_container(session)
        return
    require_tools(target)
    names = set_names(session)
    # This machine's CUDA_HOME has only libraries for x86_64, so install a toolkit for the target.
    environ = {**os.environ, **target.environ(), "CUDA_HOME": ""}
    cuda = run_preflight(session, *names, environ=environ)[0].toolkit
    install(session, "build", "audit")
    folder = Path(session.virtualenv.location).parent / f"cuda-{cuda}"
    session.env["CUDA_HOME"] = str(install_nvcc(session, cuda, folder, target))
    build_natively(session, names)


def build_in_container(session: nox.Session) -> None:
    """Let cibuildwheel build the named sets."""
    install(session, "runtime", "audit", "container")
    session.run("python", "-m", f"{__package__}.container.portable", *set_names(session))


def build_natively(session: nox.Session, names: Sequence[str]) -> None:
    """Build sets with the packages in the session's environment."""
    session.run("python", "-m", f"{__package__}.building.build_wheels", *names)


def run_preflight(
    session: nox.Session, *names: str, environ: Mapping[str, str] = os.environ
) -> list[Preflight]:
    """Stop before any download if this machine cannot build these arch sets.

    Return the result for each CUDA toolkit that the sets need.
    """
    sets, host = load_archsets(ARCHSETS), read_host(environ)
    wanted = toolkits_of(names, environ, sets)
    own = own_release(wanted, environ)
    found = [
        check(host, wanted=one, cuda_home_version=own if own and same_major(one, own) else None)
        for one in wanted
    ]
    choose_sets(names, environ, sets, found[0].toolkit)
    session.log("\n".join(map(str, found)))
    return found


def own_release(wanted: list[str], environ: Mapping[str, str]) -> str | None:
    """Return the release of CUDA_HOME, None if unset; raise if no set needs this major version."""
    home = named_home(environ)
    if home is None:
        return None
    release = release_of(tool_version(home, "nvcc"))
    if not any(same_major(one, release) for one in wanted):
        check(read_host(environ), wanted=wanted[0], cuda_home_version=release)
    return release


def install_toolchain(session: nox.Session, *names: str) -> None:
    """Install the packages that build these arch sets, and each CUDA toolkit except CUDA_HOME's.

    All sessions share one toolkit per CUDA version.
    """
    found = run_preflight(session, *names)
    install(session, "build", "audit")
    environments = Path(session.virtualenv.location).parent
    for one in reversed(found):  # reversed, so that CUDA_HOME is the newest
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

    options = foreign_options(session, target) if target else ()
    return install_toolkit(cuda, folder, install_into, target, options)


def foreign_options(session: nox.Session, target: Target) -> tuple[str, ...]:
    """Return the installer options for packages of another CPU."""
    return target.uv_options if session.venv_backend == "uv" else target.pip_options


def copy_tree(session: nox.Session, tree: Path) -> None:
    """Copy the project's files to a new tree and commit them; equal files give the same commit."""
    shutil.rmtree(tree, ignore_errors=True)
    copy_project(tree)
    day = f"@{load_project().source_date_epoch} +0000"
    who = {"GIT_AUTHOR_NAME": "repro", "GIT_AUTHOR_EMAIL": "", "GIT_AUTHOR_DATE": day}
    who |= {name.replace("AUTHOR", "COMMITTER"): value for name, value in who.items()}
    git = ["git", "-C", str(tree), "-c", "core.excludesFile=", "-c", "commit.gpgSign=false"]
    for words in (["init", "--quiet"], ["add", "."], ["commit", "--quiet", "--message", "repro"]):
        session.run(*git, *words, env=who, external=True)


def run_session(session: nox.Session, name: str, *args: str, tree: Path = ROOT) -> None:
    """Run another session with its own arguments, and stop if it fails.

    The session uses the environments of this tree, even if it works on another tree.
    """
    environments = str(Path(session.virtualenv.location).parent)
    command = [sys.executable, "-m", "nox", "-f", str(tree / "noxfile.py"), "-s", name]
    command += ["--envdir", environments]
    session.run(*command, *(["--", *args] if args else []), external=True)


def args_of(name: str, args: list[str]) -> list[str]:
    """Return those arguments of `nox -s release`, options and values, that a channel accepts."""
    taken = CHANNELS[name].options if name in CHANNELS else ()
    places = [args.index(option) for option in taken if option in args]
    return [word for place in places for word in args[place : place + 2]]


def add_channels(prepare: Session) -> None:
    """Add the session of each channel, such as `sdist` or `index`, which writes into dist/.

    Args:
        prepare: Function that each session calls first.
    """
    for row in CHANNELS.values():
        _add_channel(row, prepare)


def _add_channel(row: Row, prepare: Session) -> None:
    def write(session: nox.Session) -> None:
        prepare(session)
        write_channel(session, row)

    write.__doc__ = row.summary
    session_of(name=row.name)(write)


def share_links() -> None:
    """Let uv search pip's folders of local wheels: uv does not read pip's settings."""
    links = os.environ.get("PIP_FIND_LINKS", "").split()
    if links:
        os.environ.setdefault("UV_FIND_LINKS", ",".join(links))


def write_channel(session: nox.Session, row: Row) -> None:
    """Write a channel into dist/; the packages that it packs are first installed into a folder."""
    install(session, *row.groups)
    words = []
    if row.packed:
        folder = Path(session.create_tmp()) / "packed"
        shutil.rmtree(folder, ignore_errors=True)
        session.install("--target", str(folder), *words_of(session, *row.packed))
        words = [str(folder)]
    session.run("python", "-m", row.module, *words, *session.posargs)
