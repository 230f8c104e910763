"""Ids of `verify`: why a wheel is not the one that was released."""

from __future__ import annotations

from typing import Final

from .entry import Entry

VERIFY_UNREAD: Final = Entry(
    "verify-unread",
    "The wheel cannot be read",
    "Nothing passes that could not be looked at: a damaged archive, a file that is missing "
    "from it, or one of another package.",
    "Download the wheel again. `python -m flash_dist inspect FILE` shows what can be read of it.",
)

VERIFY_NOT_LISTED: Final = Entry(
    "verify-not-listed",
    "The release does not list this file",
    "The manifest names every file of a release, and none has this name: the wheel is of "
    "another release, was renamed, or was never released.",
    "Take the manifest.json that lies beside the wheel's own release.",
)

VERIFY_CHECKSUM: Final = Entry(
    "verify-checksum",
    "The file is not the one that was released",
    "Its SHA-256 or size differs from the manifest's. The download was cut short, or somebody "
    "put another file in its place.",
    "Do not install it. Download it again; if it still differs, tell who published the release.",
)

VERIFY_ARCHIVE: Final = Entry(
    "verify-archive",
    "The archive is not what its list says",
    "The download was cut short, so that the list at the end is not there; or bytes lie before, "
    "between or behind the members of the zip archive, or the header before a member tells "
    "something else than the list: two programs would see two archives. Or a member is a link, a "
    "device, or has permissions that no build gives.",
    "Do not install it; download it again. Nothing that builds this package packs so.",
)

VERIFY_FOREIGN_FILE: Final = Entry(
    "verify-foreign-file",
    "The wheel holds files that are not of this package",
    "A wheel of this package holds the folder `flash_dist` and one dist-info, and an installer "
    "puts whatever else it finds beside other packages: a `.pth` file runs with every Python, a "
    "folder `torch` replaces torch's files, `*.data` reaches `bin`. Or a file is not among those "
    "that the build itself listed in `_build.json`, or one that it listed is missing.",
    "Do not install it, and tell whoever gave it to you. `python -m zipfile -l FILE` lists it.",
)

VERIFY_METADATA: Final = Entry(
    "verify-metadata",
    "Name, METADATA, WHEEL and _build.json tell of different wheels",
    "Version, tags, Python, requirements and glibc are told by the file name, the dist-info and "
    "`_build.json`, and must be one: installers believe each of them somewhere. A requirement "
    "that is not ours would be installed, too.",
    "Do not install it, and do not rename wheels; download it again, or build it again: in a "
    "clone by `nox -s build_wheels`.",
)

VERIFY_PACKAGE: Final = Entry(
    "verify-package",
    "The conda package tells clients what does not follow from its wheel",
    "Clients run scripts, write prefixes into files and install dependencies because `info/` of a "
    "package says so. Name, build, dependencies and GPUs of this package follow from the wheel "
    "that it holds, and nothing else may be told.",
    "Do not install it; download it again. In a clone `nox -s conda` makes packages of wheels.",
)

VERIFY_RECORD: Final = Entry(
    "verify-record",
    "Files in the wheel are not those of its RECORD",
    "RECORD lists a SHA-256 and a size for every file of a wheel. A file was changed, added or "
    "removed after the wheel was made.",
    "Do not install it; download it again. Whoever builds must not edit wheels.",
)

VERIFY_AUDIT: Final = Entry(
    "verify-audit",
    "The code in the wheel is not what it declares",
    "Kernels, targets or libraries differ from `_build.json` in the wheel; each line names the "
    "finding of the audit.",
    "`python -m flash_dist audit FILE` lists everything, and `python -m flash_dist explain ID` "
    "says what a finding means. Download it again, or build it again: in a clone by "
    "`nox -s build_wheels`.",
)

VERIFY_SBOM_MISSING: Final = Entry(
    "verify-sbom-missing",
    "The wheel has no bill of materials",
    "Every wheel of this package carries one (CycloneDX, in `dist-info/sboms`), which names "
    "the toolkit and what of others is in the libraries. This one is older, or it was removed.",
    "Download it again, or build it again: in a clone by `nox -s build_wheels`.",
)

VERIFY_SBOM_DIFFERS: Final = Entry(
    "verify-sbom-differs",
    "The bill of materials is not that of this wheel",
    "Version, targets, parts or the SHA-256 of a library differ from what the wheel holds: the "
    "bill is of another build, or a library was changed.",
    "Do not install it; download it again, or build it again: in a clone by `nox -s build_wheels`.",
)
