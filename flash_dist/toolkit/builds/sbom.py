"""Compares the bill of materials in a wheel with its `_build.json` and its libraries.

The bill is a CycloneDX document in `dist-info/sboms` (PEP 770).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..binaries.json_text import parse_json

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from .manifest import Manifest


def bill_name(package: str) -> str:
    """Return the file name of a package's bill of materials."""
    return f"{package}.cdx.json"


def find_differences(text: str, manifest: Manifest, files: Mapping[str, str]) -> Iterator[str]:
    """Describe in sentences where the bill contradicts the wheel.

    Args:
        text: The bill of materials.
        manifest: The wheel's manifest.
        files: SHA-256 of the wheel's libraries, by path in the wheel.
    """
    try:
        bill = _Bill(parse_json(text), manifest.product)
    except (ValueError, RecursionError) as error:
        yield f"the bill of materials is not JSON: {error}"
        return
    except (AttributeError, KeyError, TypeError) as error:
        yield f"the bill of materials is no CycloneDX: {type(error).__name__} {error}"
        return
    if bill.version != manifest.package_version:
        yield f"the bill is of version {bill.version}, _build.json of {manifest.package_version}"
    targets = " ".join(map(str, manifest.arch_set.archs))
    if bill.targets != targets:
        yield f"the bill names the targets `{bill.targets}`, _build.json `{targets}`"
    parts = {(one.name, one.version, one.how, one.sha256) for one in manifest.parts}
    if not parts:
        yield "_build.json names no parts that the bill could be compared with"
    for name, version, how, _ in sorted(parts ^ bill.parts):
        yield f"the bill and _build.json differ in {name} {version} ({how})"
    for name in sorted(files.keys() | bill.files.keys()):
        if files.get(name) != bill.files.get(name):
            found, told = files.get(name, "no such file"), bill.files.get(name, "nothing")
            yield f"the bill says of {name} {told}, the wheel holds {found}"


class _Bill:
    """The compared fields of a CycloneDX document."""

    def __init__(self, data: dict[str, Any], product: str) -> None:
        if data["bomFormat"] != "CycloneDX":
            message = f"bomFormat {data['bomFormat']!r}"
            raise TypeError(message)
        package = data["metadata"]["component"]
        self.version = str(package["version"])
        self.targets = _property(package, f"{product}:targets")
        self.files: dict[str, str] = {}
        self.parts: set[tuple[str, str, str, str]] = set()
        for one in data["components"]:
            if one["type"] == "file":
                self.files[str(one["name"])] = _sha256(one)
            else:
                how = _property(one, f"{product}:how")
                self.parts.add((str(one["name"]), str(one["version"]), how, _sha256(one)))


def _property(component: dict[str, Any], name: str) -> str:
    told = {one["name"]: str(one["value"]) for one in component.get("properties", [])}
    return told.get(name, "")


def _sha256(component: dict[str, Any]) -> str:
    told = {one["alg"]: str(one["content"]) for one in component.get("hashes", [])}
    return told.get("SHA-256", "")
