"""The error codes of CUDA, as the driver, the runtime and other programs write them.

`explain` finds a code in a text with this table, and doctor looks up the code that `cuInit`
returned. Entries name the codes that they explain; codes without an entry are found too. Source:
cuda.h and `cudaGetErrorString` of CUDA 13.0, without codes of textures, graphics and profilers.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Final

from .phrases import Place, Text, squeeze, unquote

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

_MANY: Final = 8  # maximum matches of a code in one text: a log repeats its messages

# Number, driver name, runtime name (`-`: none), text. A number may have several texts.
_TABLE: Final = """\
1 INVALID_VALUE InvalidValue invalid argument
2 OUT_OF_MEMORY MemoryAllocation out of memory
3 NOT_INITIALIZED InitializationError initialization error
4 DEINITIALIZED CudartUnloading driver shutting down
9 - InvalidConfiguration invalid configuration argument
13 - InvalidSymbol invalid device symbol
17 - InvalidDevicePointer invalid device pointer
21 - InvalidMemcpyDirection invalid copy direction for memcpy
32 - MemoryValueTooLarge memory size or pointer value too large to fit in 32 bit
34 STUB_LIBRARY StubLibrary CUDA driver is a stub library
35 - InsufficientDriver CUDA driver version is insufficient for CUDA runtime version
36 CALL_REQUIRES_NEWER_DRIVER CallRequiresNewerDriver API call is not supported in the installed
46 DEVICE_UNAVAILABLE DevicesUnavailable CUDA-capable device(s) is/are busy or unavailable
46 - - all CUDA-capable devices are busy or unavailable
98 - InvalidDeviceFunction invalid device function
100 NO_DEVICE NoDevice no CUDA-capable device is detected
101 INVALID_DEVICE InvalidDevice invalid device ordinal
102 DEVICE_NOT_LICENSED DeviceNotLicensed device doesn't have valid Grid license
103 - SoftwareValidityNotEstablished integrity checks failed
200 INVALID_IMAGE InvalidKernelImage device kernel image is invalid
201 INVALID_CONTEXT DeviceUninitialized invalid device context
202 CONTEXT_ALREADY_CURRENT - context already current
209 NO_BINARY_FOR_GPU NoKernelImageForDevice no kernel image is available for execution on the
214 ECC_UNCORRECTABLE ECCUncorrectable uncorrectable ECC error encountered
215 UNSUPPORTED_LIMIT UnsupportedLimit limit is not supported on this architecture
216 CONTEXT_ALREADY_IN_USE DeviceAlreadyInUse exclusive-thread device already in use by a different
217 PEER_ACCESS_UNSUPPORTED PeerAccessUnsupported peer access is not supported between these two
218 INVALID_PTX InvalidPtx a PTX JIT compilation failed
220 NVLINK_UNCORRECTABLE NvlinkUncorrectable uncorrectable NVLink error detected during the
221 JIT_COMPILER_NOT_FOUND JitCompilerNotFound PTX JIT compiler library not found
222 UNSUPPORTED_PTX_VERSION UnsupportedPtxVersion the provided PTX was compiled with an unsupported
223 JIT_COMPILATION_DISABLED JitCompilationDisabled PTX JIT compilation was disabled
224 UNSUPPORTED_EXEC_AFFINITY UnsupportedExecAffinity the provided execution affinity is not
225 UNSUPPORTED_DEVSIDE_SYNC UnsupportedDevSideSync the provided PTX contains unsupported call to
226 CONTAINED Contained Invalid access of peer GPU memory over nvlink or a hardware error
300 INVALID_SOURCE InvalidSource device kernel image is invalid
301 FILE_NOT_FOUND FileNotFound file not found
302 SHARED_OBJECT_SYMBOL_NOT_FOUND SharedObjectSymbolNotFound shared object symbol not found
303 SHARED_OBJECT_INIT_FAILED SharedObjectInitFailed shared object initialization failed
304 OPERATING_SYSTEM OperatingSystem OS call failed or operation not supported on this OS
400 INVALID_HANDLE InvalidResourceHandle invalid resource handle
401 ILLEGAL_STATE IllegalState the operation cannot be performed in the present state
500 NOT_FOUND SymbolNotFound named symbol not found
600 NOT_READY NotReady device not ready
700 ILLEGAL_ADDRESS IllegalAddress an illegal memory access was encountered
701 LAUNCH_OUT_OF_RESOURCES LaunchOutOfResources too many resources requested for launch
702 LAUNCH_TIMEOUT LaunchTimeout the launch timed out and was terminated
704 PEER_ACCESS_ALREADY_ENABLED PeerAccessAlreadyEnabled peer access is already enabled
705 PEER_ACCESS_NOT_ENABLED PeerAccessNotEnabled peer access has not been enabled
708 PRIMARY_CONTEXT_ACTIVE SetOnActiveProcess cannot set while device is active in this process
709 CONTEXT_IS_DESTROYED ContextIsDestroyed context is destroyed
710 ASSERT Assert device-side assert triggered
711 TOO_MANY_PEERS TooManyPeers peer mapping resources exhausted
712 HOST_MEMORY_ALREADY_REGISTERED HostMemoryAlreadyRegistered part or all of the requested memory
713 HOST_MEMORY_NOT_REGISTERED HostMemoryNotRegistered pointer does not correspond to a registered
714 HARDWARE_STACK_ERROR HardwareStackError hardware stack error
715 ILLEGAL_INSTRUCTION IllegalInstruction an illegal instruction was encountered
716 MISALIGNED_ADDRESS MisalignedAddress misaligned address
717 INVALID_ADDRESS_SPACE InvalidAddressSpace operation not supported on global/shared address
718 INVALID_PC InvalidPc invalid program counter
719 LAUNCH_FAILED LaunchFailure unspecified launch failure
720 COOPERATIVE_LAUNCH_TOO_LARGE CooperativeLaunchTooLarge too many blocks in cooperative launch
721 TENSOR_MEMORY_LEAK TensorMemoryLeak tensor memory not completely freed
800 NOT_PERMITTED NotPermitted operation not permitted
801 NOT_SUPPORTED NotSupported operation not supported
802 SYSTEM_NOT_READY SystemNotReady system not yet initialized
803 SYSTEM_DRIVER_MISMATCH SystemDriverMismatch system has unsupported display driver / cuda driver
804 COMPAT_NOT_SUPPORTED_ON_DEVICE CompatNotSupportedOnDevice forward compatibility was attempted
805 MPS_CONNECTION_FAILED MpsConnectionFailed MPS client failed to connect to the MPS control
806 MPS_RPC_FAILURE MpsRpcFailure the remote procedural call between the MPS server and the MPS
807 MPS_SERVER_NOT_READY MpsServerNotReady MPS server is not ready to accept new MPS client
808 MPS_MAX_CLIENTS_REACHED MpsMaxClientsReached the hardware resources required to create MPS
809 MPS_MAX_CONNECTIONS_REACHED MpsMaxConnectionsReached the hardware resources required to support
810 MPS_CLIENT_TERMINATED MpsClientTerminated the MPS client has been terminated by the server
811 CDP_NOT_SUPPORTED CdpNotSupported is using CUDA Dynamic Parallelism, but the current
812 CDP_VERSION_MISMATCH CdpVersionMismatch unsupported interaction between different versions of
900 STREAM_CAPTURE_UNSUPPORTED StreamCaptureUnsupported operation not permitted when stream is
901 STREAM_CAPTURE_INVALIDATED StreamCaptureInvalidated operation failed due to a previous error
902 STREAM_CAPTURE_MERGE StreamCaptureMerge operation would result in a merge of separate capture
903 STREAM_CAPTURE_UNMATCHED StreamCaptureUnmatched capture was not ended in the same stream as it
904 STREAM_CAPTURE_UNJOINED StreamCaptureUnjoined capturing stream has unjoined work
905 STREAM_CAPTURE_ISOLATION StreamCaptureIsolation dependency created on uncaptured work in
906 STREAM_CAPTURE_IMPLICIT StreamCaptureImplicit operation would make the legacy stream depend on
907 CAPTURED_EVENT CapturedEvent operation not permitted on an event last recorded in a capturing
908 STREAM_CAPTURE_WRONG_THREAD StreamCaptureWrongThread attempt to terminate a thread-local
909 TIMEOUT Timeout wait operation timed out
910 GRAPH_EXEC_UPDATE_FAILURE GraphExecUpdateFailure the graph update was not performed because it
911 EXTERNAL_DEVICE ExternalDevice an async error has occured in external entity outside of CUDA
912 INVALID_CLUSTER_SIZE InvalidClusterSize a kernel launch error has occurred due to cluster
912 - - cluster misconfiguration
913 FUNCTION_NOT_LOADED FunctionNotLoaded the function handle is not loaded when calling an API
914 INVALID_RESOURCE_TYPE InvalidResourceType one or more resources passed in are not valid
915 INVALID_RESOURCE_CONFIGURATION InvalidResourceConfiguration one or more resources are
916 KEY_ROTATION - a key rotation is required
999 UNKNOWN Unknown unknown error
"""


@dataclass(frozen=True)
class Code:
    """An error code with its names; a name is empty if the driver or the runtime has none."""

    number: int
    driver: str
    runtime: str
    text: str

    @classmethod
    def parse(cls, row: str) -> Code:
        """Read a row of the table."""
        number, driver, runtime, *words = row.split()
        return cls(int(number), driver.strip("-"), runtime.strip("-"), " ".join(words))

    @property
    def name(self) -> str:
        """The driver's name of the code, or else the runtime's name."""
        return f"CUDA_ERROR_{self.driver}" if self.driver else f"cudaError{self.runtime}"


ROWS: Final = tuple(map(Code.parse, _TABLE.splitlines()))
CODES: Final[Mapping[int, Code]] = {one.number: one for one in reversed(ROWS)}


def find_codes(text: Text) -> Iterator[tuple[Code, Place]]:
    """Find the codes in a text; if there are none, join words that line breaks split."""
    found = list(_find_in(text.spaced.lower()))
    if not found and text.glued != text.spaced:
        found = list(_find_in(text.glued.lower()))
    counts: dict[int, int] = {}
    for code, place in found:
        counts[code.number] = counts.get(code.number, 0) + 1
        if counts[code.number] <= _MANY:
            yield code, place


def _find_in(text: str) -> Iterator[tuple[Code, Place]]:
    if "cu" not in text and "error" not in text:
        return
    passed, spaces = 0, 0
    for match in _pattern().finditer(text):
        code = _read(match)
        spaces += text.count(" ", passed, match.start())
        passed = match.start()
        size = len("".join(match.group().split()))
        if code is not None:
            words = {"number": str(code.number), "name": code.name, "text": code.text}
            yield code, Place(passed - spaces, passed - spaces + size, size, words)


def _read(match: re.Match[str]) -> Code | None:
    """Return the code of a match. Prefer its text to its number: CUDA 10.1 changed numbers."""
    found = match.groupdict()
    for kind in ("text", "after", "told"):
        if found[kind]:
            return _named()[squeeze(found[kind])]
    if found["name"]:
        return _named()[found["name"]]
    number = found["number"] or found["called"] or found["returned"]
    return CODES.get(int(number))


@cache
def _named() -> Mapping[str, Code]:
    """Map names and texts, lower-case without spaces, to codes."""
    named = {squeeze(unquote(one.text)): CODES[one.number] for one in reversed(ROWS)}
    named |= {f"cuda_error_{one.driver.lower()}": one for one in ROWS if one.driver}
    return named | {f"cudaerror{one.runtime.lower()}": one for one in ROWS if one.runtime}


@cache
def _pattern() -> re.Pattern[str]:
    """Compile a pattern for codes in lower-case text, in the ways that programs write them.

    Examples are `cudaErrorAssert`, `CUDA error: ...`, `CUDA error 700`, `cuda runtime error (46) :
    ...`, `Triton Error [CUDA]: ...`, `Error 802: ...`, `[34] Call to cuInit` and `cuInit failed
    with error 34`.
    """
    names = "|".join(sorted((one for one in _named() if one.startswith("cuda")), reverse=True))
    texts = "|".join(
        r"\s*".join(map(re.escape, unquote(one.text).lower().split()))
        for one in sorted(ROWS, key=lambda row: -len(row.text))
    )
    digits = r"[0-9]{1,3}(?![0-9a-z])"
    return re.compile(
        rf"(?P<name>{names})"
        r"|(?:cuda\s*(?:runtime\s*|driver\s*)?(?:api\s*)?(?:error|failure|failed\s*with\s*error)"
        r"|triton\s*error\s*\[cuda\])\s*[:=(]?\s*"
        rf"(?:(?P<text>{texts})|(?P<number>{digits})\)?(?:\s*[:,]\s*(?P<after>{texts}))?)"
        rf"|\berror\s*[0-9]+\s*:\s*(?P<told>{texts})"
        rf"|\[(?P<called>{digits})\]\s*call\s*to\s*cu"
        rf"|\bcu[a-z]\w*(?:\(\))?\s*(?:failed\s*with\s*error|returned)\s*(?P<returned>{digits})"
    )
