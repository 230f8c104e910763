"""The score modification of Hopper's kernels, run for each lane, compared with double precision.

This machine's C++ compiler compiles csrc/sm90/score_mod.cuh, with headers of HEADERS in place of
those that need a GPU: for the lane's number, approximations and shared memory.
"""

from __future__ import annotations

import subprocess
from typing import TYPE_CHECKING, Final

import pytest

from tests.unit.made.planner import compile_program

if TYPE_CHECKING:
    from pathlib import Path

HEADERS: Final = {
    "cuda_runtime_api.h": """
#pragma once
#include <cmath>
#include <cstdint>
#define __device__
#define __host__
#define __forceinline__ inline
struct int2 { int x, y; };
struct int4 { int x, y, z, w; };
struct uint2 { uint32_t x, y; };
struct float2 { float x, y; };
struct Dim { int x; };
inline Dim threadIdx{0};
inline bool __any_sync(uint32_t, bool x) { return x; }
""",
    "ptx/convert.cuh": """
#pragma once
#include "cuda_runtime_api.h"
namespace flash_dist {
constexpr float LOG2_E = 1.4426950408889634f;
constexpr float LN_2 = 0.6931471805599453f;
template <class Target, class T>
uint32_t pack(float, float);  // of other functions
inline float exp2_approx(float x) { return std::exp2(x); }
inline float log2_approx(float x) { return std::log2(x); }
inline float reciprocal_approx(float x) { return 1.0f / x; }
inline float fma_saturated(float x, float y, float z) {
  const float r = std::fma(x, y, z);
  return r > 0.0f ? std::fmin(r, 1.0f) : 0.0f;
}
inline float __fsub_rn(float x, float y) { return x - y; }
inline float __fadd_rn(float x, float y) { return x + y; }
inline float __fmul_rn(float x, float y) { return x * y; }
inline float __fdiv_rn(float x, float y) { return x / y; }
}  // namespace flash_dist
""",
    "ptx/elements.h": """
#pragma once
namespace flash_dist {
struct Fp16 {};
struct Bf16 {};
}  // namespace flash_dist
""",
    "ptx/registers.cuh": """
#pragma once
#include "cuda_runtime_api.h"
namespace flash_dist {
inline int fresh_thread() { return threadIdx.x; }
}  // namespace flash_dist
""",
    "ptx/copy.cuh": """
#pragma once
#include "cuda_runtime_api.h"
namespace flash_dist {
inline float shared[64];
inline float2 load_shared_8(uint32_t at) { return {shared[at / 4], shared[at / 4 + 1]}; }
}  // namespace flash_dist
""",
}

# Prints three largest errors: of the forward's scores (infinite if a score depends on other
# scores), of P, and of the factors of dS.
PROGRAM: Final = """
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include "host/scores.h"
#include "sm90/score_mod.cuh"
using namespace flash_dist;

struct Params {
  float softmax_scale;
  ScoreParams scores;
};
constexpr double INF = INFINITY;
constexpr int ROW0 = 300, SHIFT = 8;
const int KEYS[] = {192, 64};  // tiles of a list; of the backward the first

float SCALE;
double product(int i, int j) {  // q . k: with any scale scores of up to 25
  return static_cast<float>(((i * 37 + j * 101) % 401 - 200) * 0.125 / SCALE);
}
bool hides(int i, int j) { return (i + j) % 5 == 0; }
double tanh_of(double cap, int i, int j) { return std::tanh(product(i, j) * SCALE / cap); }
double score(double cap, double slope, int i, int j) {
  const double s = cap == 0 ? product(i, j) * SCALE : cap * tanh_of(cap, i, j);
  return s - slope * std::abs(i - j);
}

int main(int, char** arguments) {
  const float cap = std::atof(arguments[1]), slope = std::atof(arguments[2]);
  SCALE = std::atof(arguments[3]);
  Params p{SCALE, {}};
  p.scores.softcap = cap;
  p.scores.alibi = slope == 0 ? nullptr : &slope;
  p = with_scores(p);
  const ScoreModParams bent = make_score_mod(p);
  const float alibi = minus_alibi_slope(p.scores, 0, 0);
  double forward = 0, weights = 0, products = 0;
  for (int n = 0; n < 64; ++n) shared[n] = (40 + n % 7) * LOG2_E;
  shared[63] = INF;  // a query that sees no key
  for (threadIdx.x = 0; threadIdx.x < 32; ++threadIdx.x) {
    const int down = threadIdx.x / 4, right = threadIdx.x % 4 * 2;

    Accumulator<1, 16> s;
    const auto query = [&](int i) { return ROW0 + down + i / 2 * 8; };
    const auto key = [&](int n, int i) { return KEYS[n / 8] + n % 8 * 8 + right + i % 2; };
    const bool has_alibi = slope != 0 || cap == 0;  // a call has one of the two
    for (const auto& one : {make_fwd_score_mod<Bf16>(p), make_fwd_score_mod<Fp16>(p)}) {
      const auto apply = [&](float first) {
        for (int n = 0; n < 16; ++n)
          for (int i = 0; i < 4; ++i) s.x[0][n][i] = product(query(i), key(n, i));
        s.x[0][0][0] = first;
        apply_score_mod(s, one, has_alibi, alibi, ROW0, [](int n) { return KEYS[n / 8]; });
      };
      apply(INF);
      const Accumulator<1, 16> beside_infinity = s;
      apply(product(query(0), key(0, 0)));
      for (int n = 0; n < 16; ++n)
        for (int i = n == 0; i < 4; ++i)
          if (s.x[0][n][i] != beside_infinity.x[0][n][i]) forward = INF;
      for (int n = 0; n < 16; ++n)
        for (int i = 0; i < 4; ++i) {
          const double found = (double{s.x[0][n][i]} + one.top) * LN_2;
          forward = std::max(forward, std::abs(found - score(cap, slope, query(i), key(n, i))));
        }
    }

    Accumulator<1, 8> t;  // keys along the rows
    const auto query_of = [&](int n, int i) { return ROW0 + n * 8 + right + i % 2; };
    const auto key_of = [&](int i) { return KEYS[0] + down + i / 2 * 8; };
    for (int n = 0; n < 8; ++n)
      for (int i = 0; i < 4; ++i) t.x[0][n][i] = product(query_of(n, i), key_of(i));
    begin_softcap(t, bent);
    for (int n = 0; n < 8; ++n)
      for (int i = 0; i < 4; ++i)
        if (hides(query_of(n, i), key_of(i))) t.x[0][n][i] = -INFINITY;
    weigh<SHIFT>(t, 0, bent, AlibiBias<true>(alibi, ROW0, KEYS[0]),
                 [&](int k, const auto& weight, const auto& share) {
      for (int n = 0; n < 2; ++n)
        for (int i = 0; i < 4; ++i) {
          const int row = query_of(2 * k + n, i), column = key_of(i);
          const double lse = (row - ROW0 == 63) ? INF : 40 + (row - ROW0) % 7;
          const double x = cap == 0 ? 0 : tanh_of(cap, row, column);
          const double wanted =
              hides(row, column) ? 0 : std::exp(score(cap, slope, row, column) - lse);
          const double size = std::max(wanted, 1e-30) * (1 << SHIFT);
          weights = std::max(weights, std::abs(weight.x[0][n][i] - wanted * (1 << SHIFT)) / size);
          products = std::max(products, std::abs(share.x[0][n][i] -
                                                 wanted * (1 - x * x) * (1 << SHIFT)) / size);
          if (wanted == 0 && (weight.x[0][n][i] != 0 || share.x[0][n][i] != 0)) weights = INF;
        }
    });
  }
  std::printf("%g %g %g\\n", forward, weights, products);
}
"""


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("score_mod")
    return compile_program(folder, PROGRAM, "-w", headers=HEADERS)


def check(program: Path, cap: float, slope: float, scale: float) -> None:
    done = subprocess.run(
        [str(program), str(cap), str(slope), str(scale)],
        check=True,
        capture_output=True,
        text=True,
    )
    forward, weights, products = map(float, done.stdout.split())
    assert forward < 2e-5  # of scores up to 50: float32
    assert weights < 2e-5
    assert products < 2e-5


@pytest.mark.parametrize("slope", [0.0, 0.0625, -0.03125], ids=["flat", "falling", "rising"])
@pytest.mark.parametrize("cap", [0.0, 3.0, 20.0, 60.0])
def test_modified_scores_and_their_derivatives_are_those_of_the_formula(
    program: Path, cap: float, slope: float
) -> None:
    check(program, cap, slope, 0.125)


@pytest.mark.parametrize("inside", [-1e4, 1e-5, 1.0, 1e4])
@pytest.mark.parametrize("cap", [3.0, 60.0])
def test_the_polynomial_holds_for_every_scale_that_the_kernels_take(
    program: Path, cap: float, inside: float
) -> None:
    check(program, cap, 0.0, inside * cap)
