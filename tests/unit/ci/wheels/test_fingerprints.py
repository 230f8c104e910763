"""The gate that recorded fingerprints are of the kernels built."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

from ci.compile.decisions import hash_decisions
from ci.wheels.fingerprints import RECORDED, find_stale
from flash_dist.builds.published import published_sets
from flash_dist.selftest.fingerprints import read_references
from flash_dist.targets.archs import DEFAULT_TOOLKIT


def test_what_is_recorded_is_of_this_planner() -> None:
    references = read_references(RECORDED)
    kernels: defaultdict[str, set[str]] = defaultdict(set)
    for one in references:
        for name, code in one.kernels.items():
            kernels[name].add(code)
    # Of what has changed since nothing is kept: doctor says that nothing is recorded.
    toolkits = {one.toolkit for one in references}
    assert DEFAULT_TOOLKIT in toolkits
    assert toolkits <= {one.toolkit for one in published_sets()}
    assert find_stale(references, kernels, hash_decisions()) == []
    assert all(len(print_.digests) == 5 for one in references for print_ in one.fingerprints)


def test_a_changed_kernel_or_planner_is_found() -> None:
    references = read_references(RECORDED)[:1]
    kernels = {name: {code} for name, code in references[0].kernels.items()}
    name = min(kernels)
    (problem,) = find_stale(references, {**kernels, name: {"other"}}, hash_decisions())
    assert name in problem
    assert "1 of" in problem
    del kernels[name]
    assert len(find_stale(references, kernels, hash_decisions())) == 1
    setting = replace(references[0].setting, planner="old")
    kernels = {name: {code} for name, code in references[0].kernels.items()}
    (problem,) = find_stale((replace(references[0], setting=setting),), kernels, hash_decisions())
    assert problem.endswith("of another planner")
