"""Ids of messages of pip, uv, conda and auditwheel.

Sources: pip, uv and conda (their error texts); PEP 668; auditwheel.
"""

from __future__ import annotations

from typing import Final

from ..entry import Entry

WHEEL_NOT_SUPPORTED: Final = Entry(
    "wheel-not-supported",
    "The wheel is for another Python, system or processor",
    "The end of its name tells what it is for: `cp310` is Python 3.10, `manylinux_2_34` is glibc "
    "2.34 or newer, `win_amd64` is Windows; `cp313t` is a free-threaded Python, which takes no "
    "others, `abi3` included.",
    "`python -m pip debug --verbose` lists the tags that this Python takes. Choose the file that "
    "ends in one of them.",
    messages=(
        "{wheel} is not a supported wheel on this platform",
        "A URL dependency is incompatible with the current platform",
        "has no wheels with a matching {kind} tag",
    ),
    said="this Python or system takes no such wheel: {wheel}",
)

NO_MATCHING_DISTRIBUTION: Final = Entry(
    "no-matching-distribution",
    "The index has nothing of that version for this Python and system",
    "pip looked in the indexes that it was given. Either the version was never there, or its "
    "wheels are for other versions of Python (a free-threaded one counts as another), other "
    "processors or a newer glibc; `from versions: none` often means a wrong index.",
    "`python -m pip download --no-deps -v NAME` says of each file why it was passed over. "
    "A `+cu128` behind a version needs the index that has it, by `--index-url`.",
    messages=(
        "No matching distribution found for {requirement}",
        "Because only {requirement} is available",
        "Because there is no version of {requirement}",
        "Because there are no versions of {requirement}",
    ),
    said="no index that was asked has {requirement} for this Python and system",
)

EXTERNALLY_MANAGED: Final = Entry(
    "externally-managed",
    "This Python belongs to the system, and pip may not install into it",
    "Distributions mark their Python so (PEP 668), since pip could break programs of the system.",
    "Make an environment and install there: `python3 -m venv .venv`, then `.venv/bin/pip install "
    "NAME`. uv: `uv venv && uv pip install NAME`.",
    messages=("externally-managed-environment",),
)

READ_ONLY: Final = Entry(
    "read-only",
    "A folder may not be written: its file system is read-only",
    "A system of NixOS, Fedora Silverblue or a container's image is like that, or the disk was "
    "set so after an error.",
    "Make an environment where you may write: `python3 -m venv ~/.venv`. For caches set HOME or "
    "XDG_CACHE_HOME to such a folder.",
    messages=("Read-only file system",),
)

HASHES_DIFFER: Final = Entry(
    "hashes-differ",
    "A file has another hash than the requirements promise",
    "The download was cut short or altered on its way (a proxy, a damaged cache), the index has "
    "another file of that name, or the file was built again.",
    "Try again without the cache: `python -m pip install --no-cache-dir -r FILE`. If it stays, do "
    "not install it: ask whoever wrote the requirements or publishes the file which hash is "
    "right.",
    messages=(
        "THESE PACKAGES DO NOT MATCH THE HASHES FROM THE REQUIREMENTS FILE",
        "Hash mismatch for {package}",
    ),
)

CONDA_DRIVER: Final = Entry(
    "conda-driver",
    "conda sees no driver that is new enough",
    "`__cuda` is the CUDA version of the driver here, as conda finds it. On a machine without a "
    "GPU, such as a login node or an image, there is none at all.",
    "For a machine with such a driver, from one without: `CONDA_OVERRIDE_CUDA=13.0 conda install "
    "NAME`. Otherwise install a newer driver, or a build for an older CUDA.",
    messages=("nothing provides __cuda",),
)

CONDA_PACKAGE_ABSENT: Final = Entry(
    "conda-package-absent",
    "The channels that conda asks have no such package",
    "The name or version is not in them, or for another platform only. Packages of pip are often "
    "named otherwise, or are in no channel.",
    "`conda search NAME -c conda-forge` shows what there is; name the channel that has it by `-c`. "
    "What only PyPI has, `pip install NAME` brings into the same environment.",
    messages=("PackagesNotFoundError", "not available from current channels"),
)

WHEEL_TOO_RECENT: Final = Entry(
    "wheel-too-recent",
    "The wheel's libraries need a newer glibc than its tag promises",
    "They were linked on a newer system, and call versions of functions that older ones lack. "
    "The tag cannot repair that.",
    "Build on the system of the tag: an image such as `quay.io/pypa/manylinux_2_28_x86_64`. "
    "`auditwheel show FILE` names the lowest tag that is true for it as it is.",
    messages=("too-recent versioned symbols",),
)
