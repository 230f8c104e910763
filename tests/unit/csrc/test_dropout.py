"""The dropout code of kernels, run for each lane of a warp, compared with torch.

This machine's C++ compiler compiles csrc/core/dropout.cuh and csrc/sm90/dropout.cuh, with headers
of HEADERS in place of those that need a GPU. A lane is a thread.
"""

from __future__ import annotations

import subprocess
from typing import TYPE_CHECKING, Final

import pytest
import torch

from flash_dist.kernels.dropout.philox import dropped, philox
from flash_dist.kernels.dropout.state import Dropout, count_kept
from tests.unit.made.planner import compile_program

if TYPE_CHECKING:
    from pathlib import Path

HEADERS: Final = {
    "cuda_runtime_api.h": """
#pragma once
#include <cstdint>
#define __device__
#define __forceinline__ inline
struct int2 { int x, y; };
struct int4 { int x, y, z, w; };
struct uint2 { uint32_t x, y; };
""",
    "ptx/convert.cuh": """
#pragma once
#include "cuda_runtime_api.h"
namespace flash_dist {
template <class Target, class T>
uint32_t pack(float, float);  // of other functions
}  // namespace flash_dist
""",
    "core/panels.cuh": """
#pragma once
#include "cuda_runtime_api.h"
namespace flash_dist {
inline uint32_t uniform(uint32_t x) { return x; }
}  // namespace flash_dist
""",
    "sm90/steps.cuh": "",
    "ptx/permute.cuh": """
#pragma once
#include "cuda_runtime_api.h"
namespace flash_dist {
inline uint32_t permute(uint32_t x, uint32_t y, uint32_t selector) {
  const uint64_t bytes = uint64_t{y} << 32 | x;
  uint32_t r = 0;
  for (int i = 0; i < 4; ++i) {
    const int digit = selector >> 4 * i & 15;
    const uint32_t byte = bytes >> 8 * (digit & 7) & 255;
    r |= (digit < 8 ? byte : byte < 128 ? 0u : 255u) << 8 * i;
  }
  return r;
}
}  // namespace flash_dist
""",
    "ptx/registers.cuh": """
#pragma once
#include <atomic>
#include <barrier>
#include "cuda_runtime_api.h"
namespace flash_dist {
inline thread_local int own_lane;
inline int fresh_thread() { return own_lane; }
inline void forget(uint32_t&, uint32_t&) {}
inline std::barrier warp(32);
inline uint32_t given[32];
inline uint32_t __shfl_xor_sync(unsigned, uint32_t x, int mask) {
  given[own_lane] = x;
  warp.arrive_and_wait();
  const uint32_t other = given[own_lane ^ mask];
  warp.arrive_and_wait();
  return other;
}
inline int __float_as_int(float x) {
  union { float number; int bits; } both{x};
  return both.bits;
}
}  // namespace flash_dist
""",
}

# Prints which weights of several tiles are dropped, a line of 0 and 1 for each query. Tiles of S
# and S^T come first, then an A operand of S, then the operand of S and a tile of S^T on Hopper.
PROGRAM: Final = """
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <thread>
#include <vector>
#include "host/scores.h"
#include "sm90/dropout.cuh"
using namespace flash_dist;

DropoutParams p;
DropoutPlace at;
std::vector<std::string> tile;

template <bool TRANSPOSED, int MT, int NT>
void store(const Accumulator<MT, NT>& s) {
  for (int m = 0; m < MT; ++m)
    for (int n = 0; n < NT; ++n)
      for (int i = 0; i < 4; ++i) {
        const int row = m * 16 + i / 2 * 8 + own_lane / 4;
        const int column = n * 8 + own_lane % 4 * 2 + i % 2;
        (TRANSPOSED ? tile[column][row] : tile[row][column]) = s.x[m][n][i] > 0 ? '0' : '1';
      }
}

template <int MT, int NT>
void fill(Accumulator<MT, NT>& s) {
  for (auto& m : s.x)
    for (auto& n : m)
      for (float& x : n) x = 2;
}

template <class Lane>
void run(int queries, int keys, const Lane& lane) {
  tile.assign(queries, std::string(keys, '?'));
  std::vector<std::thread> lanes;
  for (int i = 0; i < 32; ++i) lanes.emplace_back([&, i] { own_lane = i; lane(); });
  for (std::thread& one : lanes) one.join();
  for (const std::string& row : tile) std::puts(row.c_str());
}

template <int MT, int NT>
void run_both() {
  run(MT * 16, NT * 8, [] {
    Accumulator<MT, NT> s;
    fill(s);
    drop(s, p, at, 3.0f);
    store<false>(s);
  });
  run(NT * 8, MT * 16, [] {
    Accumulator<MT, NT> st, marked, x;
    fill(st), fill(marked), fill(x);
    drop<true>(st, p, at);
    mark_dropped(marked, p, at);
    drop_marked(x, marked, 1.0f);
    for (int m = 0; m < MT; ++m)
      for (int n = 0; n < NT; ++n)
        for (int i = 0; i < 4; ++i)
          if ((x.x[m][n][i] == 0) != (st.x[m][n][i] == 0)) std::abort();
    store<true>(st);
  });
}

int main(int, char** words) {
  const int64_t state[] = {std::atoll(words[1]), std::atoll(words[2])};
  p = make_dropout(std::atof(words[3]), state);
  at = {static_cast<uint32_t>(std::atoll(words[4])), std::atoi(words[5]), std::atoi(words[6])};
  run_both<1, 2>();
  run_both<2, 4>();
  run_both<1, 1>();
  const auto run_operand = [](const auto& drop) {
    run(16, 16, [&] {
      uint32_t a[1][4] = {{0x3f803f80, 0x3f803f80, 0x3f803f80, 0x3f803f80}};
      drop(a);
      Accumulator<1, 2> s;
      for (int i = 0; i < 8; ++i) s.x[0][i / 4][i % 4] = a[0][i / 2] >> i % 2 * 16 & 0xffff;
      store<false>(s);
    });
  };
  run_operand([](auto& a) { drop_operand(a, p, at); });
  const int row0 = at.row0 / 16 * 16, key0 = at.key0 / 16 * 16;  // Hopper's tiles are aligned
  run_operand([&](auto& a) { QueryDropout(p, at.sequence_head, row0).drop(a[0], key0); });
  run(64, 16, [&] {
    Accumulator<1, 8> st;
    fill(st);
    KeyDropout(p, key0).mark(st, at.sequence_head, row0);
    store<true>(st);
  });
  uint32_t marks[1][4] = {{0xbf803f80, 0x3f80bf80, 0xbf80bf80, 0x3f803f80}};
  drop_marked(marks);
  std::printf("%08x%08x%08x%08x\\n", marks[0][0], marks[0][1], marks[0][2], marks[0][3]);
}
"""
TILES: Final = ((16, 16), (16, 16), (32, 32), (32, 32), (16, 8), (8, 16), *[(16, 16)] * 2, (64, 16))


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dropout")
    return compile_program(folder, PROGRAM, "-std=c++20", "-w", "-pthread", headers=HEADERS)


@pytest.mark.parametrize("p", [0.1, 0.5, 1e-9, 0.99999])
@pytest.mark.parametrize("place", [(0, 0, 0), (7, 208, 48), (5, 24, 40)], ids=str)
def test_fragments_of_all_layouts_drop_what_torch_drops(
    program: Path, place: tuple[int, int, int], p: float
) -> None:
    state = (1 << 62) + 987654321987654321, (1 << 40) + 4000000000
    words = [*map(str, state), repr(p), *map(str, place)]
    if count_kept(p) == 1 << 16:
        words[2] = repr(1.0 / (1 << 16))
        p = 1.0 / (1 << 16)
    done = subprocess.run([str(program), *words], check=True, capture_output=True, text=True)
    lines = done.stdout.split()
    head, row0, key0 = place
    whole = dropped(Dropout(p, torch.tensor(state)), 1, range(head, head + 1), 300, 300)[0, 0]
    for rows, columns in TILES:
        found, lines = lines[:rows], lines[rows:]
        first_row, first_column = row0, key0
        if rows != 8:
            first_row = row0 // 16 * 16
        if columns != 8:
            first_column = key0 // 16 * 16
        part = whole[first_row : first_row + rows, first_column : first_column + columns].int()
        assert found == ["".join(map(str, row)) for row in part.tolist()], (rows, columns)
    assert lines == ["00003f803f800000000000003f803f80"]


def test_philox_gives_the_numbers_of_its_authors() -> None:
    """The expected numbers are from kat_vectors of Random123."""
    ones = 0xFFFFFFFF
    for counter, key, wanted in (
        ([0] * 4, [0] * 2, "5f6fb709 0d893f64 4f121f81 4f730a48"),
        ([ones] * 4, [ones] * 2, "5207ddc2 45165e59 4d8ee751 8c52f662"),
    ):
        numbers = philox([torch.tensor(x) for x in counter], [torch.tensor(x) for x in key])
        assert " ".join(f"{int(x):08x}" for x in numbers) == wanted
