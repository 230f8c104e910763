"""Record the outputs of our commands in docs/outputs, and put them into the Markdown files.

    python -m ci.outputs tree wheel foreign --foreign FOLDER    commands that need no GPU
    python -m ci.outputs gpu --python .venv/bin/python          commands that need a GPU

Each file of docs/outputs names its origin in its first line; the other lines are copied into a
Markdown file. `nox -s outputs` and `nox -s gpu_outputs` prepare the environments. An output that
needs a GPU may be older than the tree: then its first line ends with `; stale: ` and what changed.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Final

from ci.places import read_table
from flash_dist.errors import FlashDistError
from flash_dist.proof.cases import Kernels, make_cases
from flash_dist.toolkit.builds.published import published_sets
from flash_dist.toolkit.make.command import command
from flash_dist.toolkit.make.project import ROOT, find_installed, read_pyproject

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from flash_dist.toolkit.make.kernels.table import Variant

RECORDS: Final = ROOT / "docs" / "outputs"
COLUMNS: Final = 100  # width of the terminal: pages show it without scrolling
NEEDS: Final = {
    "tree": "the sources alone",
    "wheel": "an installed wheel of the set `all`, and the same file in dist/all",
    "foreign": "an installed wheel, a CPU build of torch, and in --foreign the wheel of xformers",
    "gpu": "an installed wheel, torch and a GPU",
}
FOREIGN: Final = "xformers==0.0.32.post2"
_XFORMERS: Final = f"{FOREIGN.replace('==', '-')}-*.whl"
STALE: Final = "; stale: "  # appended to the first line of a record
_MULTIPROCESSORS: Final = 132  # of the GPU that made the records
_PROGRAM: Final = "python -m flash_dist"
_SEQUENCE: Final = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")  # terminal escape: colours, cursor
_BLOCK: Final = re.compile(r"^```console\n(\$ [^\n]*\n)(.*?)^```\n", re.DOTALL | re.MULTILINE)


class OutputError(FlashDistError):
    """An output cannot be recorded, or a Markdown file shows a command without a record."""


@dataclass(frozen=True)
class Output:
    """One command whose output the Markdown files show."""

    name: str  # name of the file in docs/outputs
    needs: str  # a key of NEEDS
    arguments: str  # after `python -m flash_dist`
    status: int = 0  # the expected exit status

    @property
    def command(self) -> str:
        """The command line that a reader types."""
        return f"{_PROGRAM} {self.arguments}"

    def read(self, folder: Path = RECORDS) -> str:
        """Return the record: the command after `$`, and its output."""
        _, _, text = self.path(folder).read_text(encoding="utf-8").partition("\n")
        return text

    def path(self, folder: Path = RECORDS) -> Path:
        """Return the path of the record."""
        return folder / f"{self.name}.txt"

    def mark(self, folder: Path = RECORDS) -> None:
        """Write into the record's first line how its numbers differ from those of this tree."""
        place, _, text = self.path(folder).read_text(encoding="utf-8").partition("\n")
        changes = ", ".join(find_changes(text))
        place = place.partition(STALE)[0] + (f"{STALE}{changes}" if changes else "")
        self.path(folder).write_text(f"{place}\n{text}", encoding="utf-8")

    def is_marked(self, folder: Path = RECORDS) -> bool:
        """Return True if the first line says that the record is stale."""
        return STALE in self.path(folder).read_text(encoding="utf-8").partition("\n")[0]


OUTPUTS: Final = (
    Output("doctor", "gpu", "doctor"),
    Output("select", "tree", 'select --gpu "RTX 3090" --driver 580'),
    Output("explain", "tree", 'explain "device kernel image is invalid"'),
    Output("verify", "wheel", "verify --manifest manifest.json flash_dist-*.whl"),
    Output("library", "foreign", f"doctor --wheel {_XFORMERS} --gpu 7.5,8.6 --driver 580"),
    Output("coverage", "foreign", "inspect --level coverage xformers/_C.so"),
    Output(
        "audit", "foreign", f"audit {_XFORMERS} --require '8.0;9.0a' --min-driver 525", status=1
    ),
)


def run_output(output: Output, folder: Path, environ: dict[str, str]) -> str:
    """Run a command in a terminal, and return the command with its stdout.

    Raises:
        OutputError: The command ended with an unexpected status.
    """
    reader, writer = os.openpty()
    with subprocess.Popen(
        ["sh", "-c", output.command],
        cwd=folder,
        env=environ,
        stdin=subprocess.DEVNULL,
        stdout=writer,
        stderr=subprocess.PIPE,
    ) as process:
        os.close(writer)
        printed = b"".join(_read_all(reader)).decode("utf-8")
        said = process.stderr.read().decode("utf-8") if process.stderr else ""
    if process.returncode != output.status:
        message = f"`{output.command}` ended with status {process.returncode}: {printed}{said}"
        raise OutputError(message)
    text = _SEQUENCE.sub("", printed).replace("\r\n", "\n").replace(f"{folder}", "~")
    lines = "".join(f"{line.rstrip()}\n" for line in text.strip().splitlines())
    return f"$ {output.command}\n{lines}"


def _read_all(reader: int) -> Iterator[bytes]:
    """Read a terminal to its end, which the system reports as an error."""
    with os.fdopen(reader, "rb", buffering=0) as stream:
        while True:
            try:
                part = stream.read(65536)
            except OSError:
                return
            if not part:
                return
            yield part


def make_environ(python: Path, folder: Path, *, tree: bool) -> dict[str, str]:
    """Return the variables of a plain terminal, with the folder of `python` first on PATH."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("FLASH_DIST_")}
    link = folder / ".venv"
    if not link.exists():
        link.symlink_to(python.parent.parent, target_is_directory=True)
    return {
        **kept,
        "COLUMNS": str(COLUMNS),
        "HOME": str(folder),
        "PATH": f"{link / 'bin'}{os.pathsep}{os.environ.get('PATH', '')}",
        "PYTHONPATH": str(ROOT) if tree else "",
        "TERM": "xterm",
        "NO_COLOR": "1",
    }


def prepare(needs: Sequence[str], folder: Path, dist: Path, foreign: Path | None) -> None:
    """Create the files that the commands name."""
    if "wheel" in needs:
        from flash_dist.toolkit.make.release.manifest import write_release  # noqa: PLC0415
        from flash_dist.toolkit.make.wheels.artefacts import find_artefacts  # noqa: PLC0415 - needed here only

        wheels = sorted((dist / "all").glob("*.whl"))
        if len(wheels) != 1:
            message = f"`{dist / 'all'}` must hold one wheel, it holds {len(wheels)}"
            raise OutputError(message, hint="`nox -s build_wheels -- all`")
        (folder / wheels[0].name).symlink_to(wheels[0])
        released = folder / "dist"
        (released / "all").mkdir(parents=True)
        (released / "all" / wheels[0].name).symlink_to(wheels[0])
        write_release(released, find_artefacts(released), None)
        (folder / "manifest.json").symlink_to(released / "manifest.json")
    if "foreign" in needs:
        found = sorted(foreign.glob(_XFORMERS)) if foreign else []
        if not found:
            message = f"--foreign must name a folder with `{_XFORMERS}`"
            raise OutputError(message, hint=f"`pip download --no-deps {FOREIGN}`")
        (folder / found[0].name).symlink_to(found[0])
        with zipfile.ZipFile(found[0]) as archive:
            archive.extract("xformers/_C.so", folder)


def describe_place(output: Output, environ: dict[str, str]) -> str:
    """Return the first line of a record: its date, its source and its GPU."""
    today = datetime.now(timezone.utc).date().isoformat()
    of = subprocess.run(
        ["python", "-m", "flash_dist", "--version"],
        check=True,
        capture_output=True,
        text=True,
        env=environ,
        cwd=environ["HOME"],
    ).stdout.strip()
    return f"# {today}, {of}, {_find_gpu() if output.needs == 'gpu' else 'no GPU'}"


def _find_gpu() -> str:
    asked = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    done = subprocess.run(asked, check=False, capture_output=True, text=True)
    return ", driver ".join(done.stdout.partition("\n")[0].split(", ")) or "no GPU"


def record(outputs: Sequence[Output], args: argparse.Namespace) -> None:
    """Run commands and record their outputs."""
    args.records.mkdir(parents=True, exist_ok=True)
    needs = [output.needs for output in outputs]
    with tempfile.TemporaryDirectory(prefix="flash_dist-") as name:
        folder = Path(name)
        prepare(needs, folder, args.dist.resolve(), args.foreign and args.foreign.resolve())
        for output in outputs:
            environ = make_environ(args.python, folder, tree=output.needs == "tree")
            text = run_output(output, folder, environ)
            if count_again(text) != text:
                message = f"`{output.command}` counts other files than a wheel of this tree has"
                raise OutputError(message, hint="build and install the wheel of this tree first")
            if output.path(args.records).is_file() and output.read(args.records) == text:
                print(f"{output.name}: as before")
                continue
            place = describe_place(output, environ)
            output.path(args.records).write_text(f"{place}\n{text}", encoding="utf-8")
            print(f"{output.name}: {place}")


def find_texts() -> list[Path]:
    """Return the Markdown files that may show outputs."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def show(text: str, outputs: Sequence[Output] = OUTPUTS, folder: Path = RECORDS) -> str:
    """Fill each console block of a Markdown text with the record of its command.

    Raises:
        OutputError: A block shows a command without a record.
    """
    recorded = {f"$ {output.command}\n": output for output in outputs}

    def replace(match: re.Match[str]) -> str:
        output = recorded.get(match[1])
        if output is None:
            message = f"`{match[1][2:-1]}` is shown with what it prints, and not recorded"
            raise OutputError(message, hint="it needs a line in OUTPUTS of ci/outputs.py")
        return f"```console\n{output.read(folder)}```\n"

    return _BLOCK.sub(replace, text)


def count_installed_files() -> int:
    """Count the files that pip installs from a wheel of this tree, as doctor counts them."""
    return count_wheel_files() + len(("INSTALLER", "REQUESTED", "direct_url.json"))


def count_wheel_files() -> int:
    """Count the entries of RECORD in a wheel of this tree, including RECORD itself."""
    package = ROOT / "flash_dist"
    modules = [path for path in find_installed(package) if path.suffix == ".py"]
    others = read_pyproject()["tool"]["setuptools"]["package-data"]["flash_dist"]
    built = ("_build.json", "_C.so", "libflash_dist_kernels.so")
    about = ("METADATA", "RECORD", "WHEEL", "entry_points.txt", "top_level.txt")
    more = ("LICENSE", "flash_dist.cdx.json")
    return len(modules) + len(others) + len(built) + len(about) + len(more)


def count_again(text: str) -> str:
    """Update the file counts in an output."""
    for pattern, count in COUNTS:
        text = pattern.sub(str(count()), text)
    return text


COUNTS: Final = (
    (re.compile(r"\d+(?= files as recorded)"), count_installed_files),
    (re.compile(r"\d+(?= files are those that RECORD lists)"), count_wheel_files),
)


def build_of(name: str) -> list[Variant]:
    """Return the kernel variants of a published arch set."""
    table = read_table()
    archset = next(one for one in published_sets() if one.name == name)
    return [variant for arch in archset.archs for variant in table.variants(arch)]


def count_variants() -> int:
    """Count the variants of the set `all`."""
    return len(build_of("all"))


def count_kernels() -> int:
    """Count the kernels for sm_90a."""
    return len({variant.key for variant in _variants_for_hopper()})


def count_cases() -> int:
    """Count the selftest cases for the GPU in the records."""
    sizes = {
        Kernels(one.words[0], *one.row.sizes)
        for one in _variants_for_hopper()
        if one.family.role in {"fwd", "mla"}
    }
    return len(make_cases(sorted(sizes), _MULTIPROCESSORS))


def _variants_for_hopper() -> list[Variant]:
    return [one for one in build_of("hopper") if one.target.suffix == "a"]


# Numbers in GPU records. A record with a number that this tree no longer has is marked as stale.
TOLD: Final = (
    ("variants", re.compile(r"(?<= in )\d+(?= variants\s+for)"), count_variants),
    ("kernels", re.compile(r"\d+(?=\s+kernels in)"), count_kernels),
    ("cases", re.compile(r"\d+(?= cases, 30 runs each)"), count_cases),
)


def find_changes(text: str) -> list[str]:
    """List the numbers of an output that differ in this tree: `404 cases instead of 403`."""
    changes = []
    for what, pattern, count in TOLD:
        now = count()
        told = sorted(set(pattern.findall(text)) - {str(now)})
        changes += [f"{now} {what} instead of {number}" for number in told]
    return changes


def update() -> None:
    """Update the file counts of records, mark stale GPU records, and put records into the texts."""
    for path in RECORDS.glob("*.txt"):
        path.write_text(count_again(path.read_text(encoding="utf-8")), encoding="utf-8")
    for output in OUTPUTS:
        if output.needs == "gpu":
            output.mark()
    for path in find_texts():
        path.write_text(show(path.read_text(encoding="utf-8")), encoding="utf-8")


def read_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m ci.outputs",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    needs = "; ".join(f"{name}: {what}" for name, what in NEEDS.items())
    parser.add_argument("needs", nargs="*", choices=[*NEEDS, []], metavar="NEED", help=needs)
    parser.add_argument("--python", type=Path, default=Path(sys.executable), help="has the wheel")
    parser.add_argument("--dist", type=Path, default=ROOT / "dist", help="folder of the wheels")
    parser.add_argument("--foreign", type=Path, help="folder with the wheels of others")
    parser.add_argument("--records", type=Path, default=RECORDS, help="where the outputs go")
    return parser.parse_args(argv)


@command
def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status."""
    args = read_arguments(argv)
    record([output for output in OUTPUTS if output.needs in args.needs], args)
    if args.records == RECORDS:
        update()
    return 0


if __name__ == "__main__":
    sys.exit(main())
