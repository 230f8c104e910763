"""Judges from a library's headers whether its GPU code fits a GPU. Pure functions.

The driver loads the best image of each container, so each container gets a verdict. Containers that
are not registered with the CUDA runtime count as one, because the library chooses among them.
Relocatable objects (`-rdc=true`) count only if no linked code fits: then the driver compiles and
links their PTX, if every object has PTX (nvcc documentation, "JIT Linking Support").
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from ..product import NAME
from ..targets.compatibility import PREFERENCE, How, RunVerdict, judge
from ..targets.verdict import Situation
from ..targets.wording import count

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ..gpucode.images import FatbinEntry, FatbinReport
    from ..targets.archs import Arch


NOT_UNDERSTOOD: Final = "not understood"  # used instead of a target


@dataclass(frozen=True)
class ContainerVerdict:
    """The image that a GPU loads from one container; arch is None if none fits or is understood."""

    how: How
    reason: str
    arch: Arch | None = None
    fits_hardware: bool = True  # whether the GPU can run it, apart from driver and variables


@dataclass(frozen=True)
class LibraryVerdict:
    """Verdict for one library on one GPU, with the verdict for each of its containers."""

    situation: Situation
    archs: tuple[Arch, ...]  # the library's targets, oldest first
    containers: tuple[ContainerVerdict, ...]

    def __bool__(self) -> bool:
        return self.how != "no"

    @property
    def how(self) -> How:
        """The best of the containers' verdicts; "no" if no code can run in this situation."""
        hows = {one.how for one in self.containers}
        return min(hows, key=PREFERENCE.index, default="no")

    @property
    def unfit(self) -> tuple[ContainerVerdict, ...]:
        """The containers without code that can run in this situation."""
        return tuple(one for one in self.containers if one.how == "no")

    @property
    def obstacle(self) -> str:
        """The reason why the driver refuses code that the GPU itself could run; empty if none."""
        return next((one.reason for one in self.unfit if one.fits_hardware), "")

    @property
    def counts(self) -> dict[tuple[How, str], int]:
        """Number of containers by (how the GPU runs their code, target), the best first."""
        able = (one for one in self.containers if one.how != "no")
        found = Counter((one.how, str(one.arch or NOT_UNDERSTOOD)) for one in able)
        return dict(sorted(found.items(), key=lambda item: PREFERENCE.index(item[0][0])))

    def to_json(self) -> dict[str, Any]:
        """Return the verdict as plain data."""
        return {
            "compute_capability": str(self.situation.device),
            "how": self.how,
            "archs": [str(arch) for arch in self.archs],
            "containers": len(self.containers),
            "unfit": len(self.unfit),
            "obstacle": self.obstacle or None,
            "ways": [
                {"how": how, "target": target, "containers": number}
                for (how, target), number in self.counts.items()
            ],
        }


def judge_library(report: FatbinReport, situation: Situation) -> LibraryVerdict:
    """Judge every container on one GPU."""
    groups = report.groups()
    linked = [images for (of_objects, _), images in groups.items() if not of_objects]
    relocatable = [images for (of_objects, _), images in groups.items() if of_objects]
    objects = [_judge_container(images, situation) for images in relocatable]
    verdicts = [_judge_container(images, situation) for images in linked]
    if not verdicts:
        verdicts = objects
    elif objects and all(one.how != "no" for one in objects):
        worst = max(objects, key=lambda one: PREFERENCE.index(one.how))
        verdicts = [
            worst if one.how == "no" and _is_of_objects(report, images, len(linked)) else one
            for images, one in zip(linked, verdicts, strict=True)
        ]
    return LibraryVerdict(situation, report.archs, tuple(verdicts))


def _is_of_objects(report: FatbinReport, images: Sequence[FatbinEntry], linked: int) -> bool:
    """Tell if a container is device-linked, so that relocatable objects may hold its code.

    If this is not known, the container counts as device-linked if it is the only linked one.
    """
    if report.device_linked is None:
        return linked == 1
    return images[0].container in report.device_linked


def _judge_container(images: Sequence[FatbinEntry], situation: Situation) -> ContainerVerdict:
    """Choose the image that fits best; if no image fits, say why the closest one does not."""
    judged = [(entry, _judge_image(entry, situation)) for entry in images if entry.arch]
    best = min(judged, key=lambda pair: pair[1].rank, default=None)
    if best is not None and best[1].how != "no":
        return ContainerVerdict(best[1].how, best[1].reason, best[0].arch)
    alone = Situation(situation.device)
    for entry, verdict in judged:
        if _judge_image(entry, alone).how != "no":
            return ContainerVerdict("no", verdict.reason)
    unclear = sum(entry.kind == "unknown" for entry in images)
    if unclear:
        told = count(unclear, "image")
        reason = f"it holds {told} that this version of {NAME} does not understand"
        return ContainerVerdict("unverified", reason)
    reason = best[1].reason if best else "it holds neither SASS nor PTX"
    return ContainerVerdict("no", reason, fits_hardware=False)


def _judge_image(entry: FatbinEntry, situation: Situation) -> RunVerdict:
    if entry.arch is None:
        return RunVerdict("no", "its target is not known")
    return judge(entry.arch, situation.device, situation.driver, entry.origin, jit=situation.jit)
