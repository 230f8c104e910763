"""Reads the GPU code inside a library without a CUDA toolkit.

Opening a library finds its images and reads their headers; kernels are read on demand.
"""

from __future__ import annotations

import os
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import IO, TYPE_CHECKING, Final, TypeVar

from ..binaries.budget import Budget
from ..binaries.codecs import MAX_IMAGE_BYTES, Codec, decompress
from ..binaries.files import DAMAGED_HINT, open_file, unreadable
from ..binaries.view import FileView
from ..errors import FatbinError
from .containers.scan import scan
from .cubin import Cubin, KernelInfo, read_cubin_kernels, read_ptx_kernels, read_toolkit
from .image_target import check_image
from .sass import Body, read_cubin_bodies, read_ptx_bodies

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from .images import FatbinEntry, FatbinReport

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")

AHEAD: Final = 3  # results computed ahead of the current one


def read_fatbin(path: str | os.PathLike[str]) -> FatbinReport:
    """Read the headers of all GPU code in a library, or in a bare `.fatbin`.

    Raises:
        FatbinError: The file cannot be read, or has another format. Damaged containers and images
            only cause warnings in the report.
    """
    with open_fatbin(path) as fatbin:
        return fatbin.report


@contextmanager
def open_fatbin(
    path: str | os.PathLike[str],
    file: IO[bytes] | None = None,
    *,
    archive: str = "",
    budget: Budget | None = None,
) -> Iterator[Fatbin]:
    """Open a library for reading headers and kernels.

    Args:
        path: Path of the library. If `file` is given, it is only a name for messages.
        file: An open file, such as a wheel's member in a temporary file.
        archive: Path of the wheel or conda package that contains it, for messages.
        budget: Limit on the work. None: a limit that depends on the size of the library.
    """
    name = os.fspath(path)
    if file is None:
        with open_file(name) as opened:
            view = FileView(opened)
    else:
        view = FileView(file)
    with closing(view):
        yield Fatbin(view, name, archive, budget)


class Fatbin:
    """An open library. It has a report; images and kernels are read on demand."""

    def __init__(
        self, data: FileView, name: str, archive: str = "", budget: Budget | None = None
    ) -> None:
        self.data = data
        self._archive = archive
        self._budget = budget or Budget(len(data))
        self._stream = -1, b""  # offset of the last unpacked stream, and its bytes
        if not len(data):
            raise unreadable(name, "it is empty", archive=archive)
        try:
            self.report = scan(data, name, self._budget)
        except FatbinError as error:
            raise self._unreadable(name, error) from error

    def payload(self, entry: FatbinEntry) -> bytes:
        """Return the unpacked image."""
        stream = entry.stream
        if stream is None:
            where = entry.payload_offset, entry.compressed_size, entry.uncompressed_size
            return self._unpack(entry.codec, *where)
        if self._stream[0] != stream.offset:
            whole = self._unpack(stream.codec, stream.offset, stream.packed, stream.unpacked)
            self._stream = stream.offset, whole
        return self._stream[1][stream.start : stream.start + entry.uncompressed_size]

    def _unpack(self, codec: Codec, offset: int, packed: int, size: int) -> bytes:
        if offset + packed > len(self.data) or packed > MAX_IMAGE_BYTES:
            most = min(MAX_IMAGE_BYTES, max(0, len(self.data) - offset))
            message = f"image in `{self.report.path}` must have at most {most} bytes, got {packed}"
            raise FatbinError(message)
        self._budget.spend("bytes", size)
        return decompress(codec, self.data[offset : offset + packed], size)

    def kernels(
        self, entry: FatbinEntry, unpack: Callable[[], bytes] | None = None
    ) -> tuple[KernelInfo, ...]:
        """Return the kernels of an image; none for LTO-IR and unknown images.

        Args:
            entry: The image.
            unpack: Function that returns the payload, if another thread unpacks the image.
        """
        with self._explained(entry):
            unpack = unpack or partial(self.payload, entry)
            if entry.kind == "sass":
                found = read_cubin_kernels(unpack(), entry.arch, self._budget)
            elif entry.kind == "ptx":
                found = read_ptx_kernels(unpack(), entry.arch, self._budget)
            else:
                return ()
        return tuple(replace(kernel, container=entry.container) for kernel in found)

    def check(
        self, entry: FatbinEntry, unpack: Callable[[], bytes] | None = None
    ) -> tuple[FatbinEntry, tuple[KernelInfo, ...]]:
        """Return an image, with the target that is found in its contents, and its kernels.

        NOTE: LTO-IR and unknown images are returned unread, because their formats are undocumented.

        Raises:
            FatbinError: The image is damaged, or contradicts its header.
        """
        if entry.kind not in {"sass", "ptx"}:
            return entry, ()
        with self._explained(entry):
            data = (unpack or partial(self.payload, entry))()
            entry = replace(entry, arch=check_image(entry, data, self._budget))
        return entry, self.kernels(entry, lambda: data)

    def told(self) -> FatbinReport:
        """Return the report with the toolkit of each SASS image, read from one image per group."""
        toolkits: dict[int, str] = {}
        for images in self.report.groups().values():
            sass = [entry for entry in images if entry.kind == "sass"]
            if not sass:
                continue
            smallest = min(sass, key=lambda entry: entry.uncompressed_size)
            with suppress(FatbinError):  # the toolkit of a damaged image stays unknown
                toolkit = read_toolkit(Cubin(self.payload(smallest), self._budget))
                if toolkit:
                    toolkits[smallest.container] = ".".join(toolkit.split(".")[:2])
        return self.report.with_toolkits(toolkits)

    def bodies(
        self, entry: FatbinEntry, unpack: Callable[[], bytes] | None = None
    ) -> tuple[Body, ...]:
        """Return the bodies of the kernels of an image; the arguments are as in `kernels`."""
        with self._explained(entry):
            unpack = unpack or partial(self.payload, entry)
            if entry.kind == "sass" and entry.arch is not None:
                return read_cubin_bodies(unpack(), entry.arch, self._budget)
            if entry.kind == "ptx":
                return read_ptx_bodies(unpack(), self._budget)
        return ()

    @contextmanager
    def _explained(self, entry: FatbinEntry) -> Iterator[None]:
        """Add the image's target and offset to errors that the `with` block raises."""
        try:
            yield
        except FatbinError as error:
            where = f"{entry.arch} image at offset {entry.payload_offset:#x}: "
            raise self._unreadable(self.report.path, error, where) from error

    def _unreadable(self, name: str, error: FatbinError, where: str = "") -> FatbinError:
        hint = error.hint or DAMAGED_HINT
        reason = f"{where}{error.message}"
        return unreadable(name, reason, archive=self._archive, hint=hint, kind=type(error))


@contextmanager
def run_ahead(
    function: Callable[[_Item], _Result], items: Iterable[_Item]
) -> Iterator[Iterator[tuple[_Item, Callable[[], _Result]]]]:
    """Yield an iterator over pairs: an item, and a function without arguments.

    The function in the pair returns the result of `function(item)`, or raises its error.

    One thread calls `function` for the items in order. This helps if `function` releases the GIL.
    A single item gets no thread, because archives hold thousands of objects with one image each:
    `function` then runs when the result is requested.

    NOTE: the thread ends with the `with` block. If a traceback kept the pool until garbage
    collection, another pool's new thread could collect it, and both threads would wait forever.
    """
    items = tuple(items)
    if len(items) == 1:
        yield iter([(items[0], partial(function, items[0]))])
        return
    with ThreadPoolExecutor(max_workers=1) as pool:
        try:
            yield _walk(pool, function, items)
        finally:
            pool.shutdown(cancel_futures=True)  # the remaining results are not needed


def _walk(
    pool: ThreadPoolExecutor, function: Callable[[_Item], _Result], items: Iterable[_Item]
) -> Iterator[tuple[_Item, Callable[[], _Result]]]:
    waiting: deque[tuple[_Item, Callable[[], _Result]]] = deque()
    for item in items:
        waiting.append((item, pool.submit(function, item).result))
        if len(waiting) > AHEAD:
            yield waiting.popleft()
    yield from waiting
