"""Entries that explain messages of pip, uv, conda and auditwheel.

Sources: pip, uv and conda (their error texts); PEP 668; auditwheel.
"""

from __future__ import annotations

from typing import Final

from ..entry import Entry

WHEEL_NOT_SUPPORTED: Final = Entry(
    "The wheel is for another Python, system or processor",
    "The end of its name says what it is for: `cp310` is Python 3.10, `manylinux_2_34` is glibc "
    "2.34 or newer, `win_amd64` is Windows; `cp313t` is a free-threaded Python, which accepts "
    "`py3-none` beside its own, but no `abi3`.",
    "`python -m pip debug --verbose` lists the tags that this Python accepts. Choose the file "
    "that ends in one of them.",
    messages=(
        "{wheel} is not a supported wheel on this platform",
        "A URL dependency is incompatible with the current platform",
        "has no wheels with a matching {kind} tag",
    ),
    said="this Python or system does not accept this wheel: {wheel}",
)

NO_MATCHING_DISTRIBUTION: Final = Entry(
    "The index has no such version for this Python and system",
    "pip searched the given indexes. Either the version does not exist there, or its wheels are "
    "for other versions of Python (a free-threaded one counts as another), other processors or a "
    "newer glibc; `from versions: none` often means a wrong index.",
    "`python -m pip download --no-deps -v NAME` says why each file was skipped. A `+cu128` behind "
    "a version needs the index that has it, by `--index-url`.",
    messages=(
        "No matching distribution found for {requirement}",
        "Because only {requirement} is available",
        "Because there is no version of {requirement}",
        "Because there are no versions of {requirement}",
    ),
    said="no index that was asked has {requirement} for this Python and system",
)

EXTERNALLY_MANAGED: Final = Entry(
    "This Python belongs to the system, and pip may not install into it",
    "Distributions mark their Python this way (PEP 668), since pip could break programs of the "
    "system.",
    "Create a virtual environment and install there: `python3 -m venv .venv`, then `.venv/bin/pip "
    "install NAME`. uv: `uv venv && uv pip install NAME`.",
    messages=("externally-managed-environment",),
)

READ_ONLY: Final = Entry(
    "A folder is on a read-only file system",
    "NixOS, Fedora Silverblue and some container images have read-only folders, or the disk "
    "became read-only after an error.",
    "Create an environment in a writable folder: `python3 -m venv ~/.venv`. For caches set HOME "
    "or XDG_CACHE_HOME to such a folder.",
    messages=("Read-only file system",),
)

HASHES_DIFFER: Final = Entry(
    "A file has another hash than the requirements promise",
    "The download was cut short or altered on its way (a proxy, a damaged cache), the index has "
    "another file of that name, or the file was built again.",
    "Try again without the cache: `python -m pip install --no-cache-dir -r FILE`. If it still "
    "differs, do not install it: ask the author of the requirements or the publisher of the file "
    "which hash is right.",
    messages=(
        "THESE PACKAGES DO NOT MATCH THE HASHES FROM THE REQUIREMENTS FILE",
        "Hash mismatch for {package}",
    ),
)

CONDA_DRIVER: Final = Entry(
    "conda sees no driver that is new enough",
    "`__cuda` is the CUDA version of the driver here, as conda finds it. On a machine without a "
    "GPU, such as a login node or an image, there is none at all.",
    "For a machine with such a driver, from one without: `CONDA_OVERRIDE_CUDA=13.0 conda install "
    "NAME`. Otherwise install a newer driver, or a build for an older CUDA.",
    messages=("nothing provides __cuda",),
)

CONDA_PACKAGE_ABSENT: Final = Entry(
    "conda's channels do not have this package",
    "The name or version is not in them, or only for another platform. Packages of pip often have "
    "other names there, or are in no channel.",
    "`conda search NAME -c conda-forge` shows what there is; name the channel that has it by "
    "`-c`. Install a package that only PyPI has with `pip install NAME` in the same environment.",
    messages=("PackagesNotFoundError", "not available from current channels"),
)

WHEEL_TOO_RECENT: Final = Entry(
    "The wheel's libraries need a newer glibc than its tag promises",
    "They were linked on a newer system, and call versions of functions that older ones lack.",
    "Build on the system of the tag: an image such as `quay.io/pypa/manylinux_2_28_x86_64`. "
    "`auditwheel show FILE` names the lowest tag that is true for it as it is.",
    messages=("too-recent versioned symbols",),
)
