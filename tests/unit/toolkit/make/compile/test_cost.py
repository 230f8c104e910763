from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from flash_dist.toolkit.make.compile.cost import (
    BuildLogError,
    find_logs,
    main,
    make_table,
    read_log,
)

if TYPE_CHECKING:
    from pathlib import Path

PLACE = "CMakeFiles/{0}.dir/generated/targets/{0}/{1}.cu.o"
LINES = (
    (0, 60_000, PLACE.format("sm_90a", "fwd_d64")),
    (0, 30_000, PLACE.format("sm_90a", "bwd_delta")),
    (0, 90_000, PLACE.format("sm_90a", "bwd_dq_gemm_d192v128")),
    (0, 90_000, PLACE.format("compute_80", "bwd_dq_gemm_bf16_d64_smem163_compute80")),
    (0, 999_000, "CMakeFiles/flash_dist_kernels.dir/host/plan.cpp.o"),
    (0, 999_000, "libflash_dist_kernels.so"),
    (10_000, 130_000, PLACE.format("sm_90a", "fwd_d64")),  # compiled twice: the last time counts
)


def write_log(folder: Path, version: int = 7) -> Path:
    folder.mkdir(parents=True)
    path = folder / ".ninja_log"
    rows = (f"{begin}\t{end}\t1\t{output}\tabc\n" for begin, end, output in LINES)
    path.write_text("".join([f"# ninja log v{version}\n", *rows]))
    return path


def test_minutes_are_summed_by_target_and_family(tmp_path: Path) -> None:
    assert make_table(read_log(write_log(tmp_path / "native-13.0.88"))) == [
        "| minutes | compute_80 | sm_90a | all |",
        "| --- | --: | --: | --: |",
        "| bwd_delta |  | 0.5 | 0.5 |",
        "| bwd_dq_gemm | 1.5 | 1.5 | 3.0 |",
        "| fwd |  | 2.0 | 2.0 |",
        "| all | 1.5 | 4.0 | 5.5 |",
        "| objects | 1 | 3 | 4 |",
    ]


def test_logs_of_native_builds_and_of_containers_are_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FLASH_DIST_BUILD_DIR", str(tmp_path))
    assert main([]) == 1
    assert "no log of a build is in" in capsys.readouterr().err
    logs = [write_log(tmp_path / name / "native-13.0.88") for name in (".", "container")]
    assert set(find_logs(tmp_path)) == set(logs)
    assert main([]) == 0
    assert capsys.readouterr().out.count("| fwd |") == 2


@pytest.mark.parametrize("content", [b"", b"root:x:0", b"# ninja log v99\n", b"\xff"])
def test_a_file_that_is_no_log_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / ".ninja_log"
    path.write_bytes(content)
    with pytest.raises(BuildLogError, match=str(path)):
        read_log(path)
    assert main([str(path)]) == 1
