// Products of float32 rows and packed matrices for XLA:CPU, called through jax.ffi. `convert.blocks` describes the
// layout.
//
// A tile holds the weights of 16 outputs. Every vector has one lane per output, so no sum crosses lanes. The terms of
// each sum are always added in the same order, whatever the number of rows or threads. The bits of a row of the result
// therefore depend only on that row of x and on the weights.

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>
#include <vector>

#include "activations.h"
#include "formats.h"
#include "threads.h"
#include "vectors.h"
#include "xla/ffi/api/ffi.h"

namespace jspec {

namespace ffi = xla::ffi;

struct Product {
  const float* x;    // [M, K]
  const Run* runs;   // [M, K / RUN]
  const uint8_t* w;  // [T, tile_bytes]
  float* y;          // [M, N]
  int64_t M, N, K, tile_bytes;
};

// Weights are prefetched into the second-level cache this many bytes before their use. With several rows, the
// processor's own prefetching is too late. The first-level cache also holds the rows' runs, so these bytes do not fit.
constexpr int AHEAD = 12288;

template <int lines>
inline void prefetch(const uint8_t* w) {
  for (int i = 0; i < lines; i++) __builtin_prefetch(w + AHEAD + 64 * i, 0, 2);
}

template <int R>
void store(const Product& p, int64_t r0, int64_t tile, const V (&total)[R]) {
  const size_t bytes = 4 * std::min<int64_t>(16, p.N - 16 * tile);
  for (int r = 0; r < R; r++) std::memcpy(p.y + (r0 + r) * p.N + 16 * tile, &total[r], bytes);
}

// Adds the terms of one group of k to the sums of R rows.
template <class F, int R, int inner>
inline void add_group(const uint8_t* block, const F& format, int outer, const Run* runs, int64_t stride,
                      V (&total)[R]) {
  const int group = F::group(outer, inner), part = group * F::GROUP % RUN;
  runs += group * F::GROUP / RUN;
  constexpr int SHARE = F::BYTES / (F::BLOCK / F::GROUP);
  prefetch<(SHARE + 63) / 64>(block + (outer * F::INNER + inner) * SHARE);
  I sums[R][PLANES];
#pragma GCC unroll 8
  for (int r = 0; r < R; r++) {
#pragma GCC unroll 3
    for (int plane = 0; plane < PLANES; plane++) {
      int32_t offset = runs[r * stride].sums[part / 16][plane];
      if (F::GROUP == RUN) offset += runs[r * stride].sums[1][plane];
      sums[r][plane] = F::OFFSET ? spread(-F::OFFSET * offset) : I{};
    }
  }
#pragma GCC unroll 8
  for (int i = 0; i < F::GROUP / 4; i++) {
    const U codes = F::template codes<inner>(block, outer, i);
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) {
#pragma GCC unroll 3
      for (int plane = 0; plane < PLANES; plane++) {
        uint32_t bytes;
        std::memcpy(&bytes, runs[r * stride].bytes[plane] + part + 4 * i, 4);
        sums[r][plane] = dot(sums[r][plane], codes, bytes);
      }
    }
  }
  const V scale = format.scale(group);
#pragma GCC unroll 8
  for (int r = 0; r < R; r++) {
    const Run& run = runs[r * stride];
    V sum = real(sums[r][0]);
#pragma GCC unroll 3
    for (int plane = 1; plane < PLANES; plane++) sum = fma(real(sums[r][plane]), spread((float)(1 << 8 * plane)), sum);
    total[r] = fma(scale * spread(run.step), sum, total[r]);
    if constexpr (F::MINIMUM) total[r] = fma(-format.minimum(group), spread(run.sum), total[r]);
  }
}

template <class Body, int... i>
void each(std::integer_sequence<int, i...>, const Body& body) {
  (body(std::integral_constant<int, i>()), ...);
}

// Computes rows r0 to r0 + R of the product with one tile of integer codes.
template <class F, int R>
void quantised(const Product& p, int64_t r0, int64_t tile) {
  V total[R] = {};
  const int64_t stride = p.K / RUN;
  const uint8_t* block = p.w + tile * p.tile_bytes;
  const Run* runs = p.runs + r0 * stride;
  for (int64_t k = 0; k < p.K; k += F::BLOCK, block += F::BYTES, runs += F::BLOCK / RUN) {
    const F format(block);
    for (int outer = 0; outer < F::BLOCK / F::GROUP / F::INNER; outer++) {
      each(std::make_integer_sequence<int, F::INNER>(),
           [&](auto inner) { add_group<F, R, inner>(block, format, outer, runs, stride, total); });
    }
  }
  store(p, r0, tile, total);
}

struct BF16 {
  static V load(const uint8_t* p) {
    H values;
    std::memcpy(&values, p, 32);
    return (V)(__builtin_convertvector(values, U) << 16);
  }
};
struct F16 {
  static V load(const uint8_t* p) { return halves(p); }
};

// Does the same for 16-bit weights, stored as [K, 16] in each tile and widened to float32. Adding up sums of 32 terms
// causes smaller rounding errors than one long sum.
template <class F, int R>
void sixteen(const Product& p, int64_t r0, int64_t tile) {
  V total[R] = {};
  const float* x = p.x + r0 * p.K;
  const uint8_t* w = p.w + tile * p.tile_bytes;
  for (int64_t first = 0; first < p.K; first += RUN) {
    V sums[R] = {};
    const int64_t last = std::min(p.K, first + RUN);
    for (int64_t k = first; k < last; k++) {
      prefetch<1>(w + 32 * k);
      const V value = F::load(w + 32 * k);
#pragma GCC unroll 8
      for (int r = 0; r < R; r++) sums[r] = fma(value, spread(x[r * p.K + k]), sums[r]);
    }
    for (int r = 0; r < R; r++) total[r] += sums[r];
  }
  store(p, r0, tile, total);
}

template <class F>
constexpr bool IS_FLOAT = std::is_same_v<F, BF16> || std::is_same_v<F, F16>;
// The maximum number of rows whose sums fit into the registers.
template <class F>
#if defined(__AVX512F__)
constexpr int MOST = IS_FLOAT<F> || PLANES == 1 ? 8 : 6;
#else
constexpr int MOST = IS_FLOAT<F> ? 4 : 2;
#endif

// Computes all rows from row r0 on, R at a time, and then the remaining rows in smaller groups.
template <class F, int R>
void rows(const Product& p, int64_t r0, int64_t tile) {
  for (; p.M - r0 >= R; r0 += R) {
    if constexpr (IS_FLOAT<F>) {
      sixteen<F, R>(p, r0, tile);
    } else {
      quantised<F, R>(p, r0, tile);
    }
  }
  if constexpr (R > 1) {
    if (r0 < p.M) rows<F, R - 1>(p, r0, tile);
  }
}

template <class F>
ffi::Error multiply(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> x, ffi::Buffer<ffi::U8> w,
                    ffi::ResultBuffer<ffi::F32> y) {
  const int64_t M = x.dimensions()[0], K = x.dimensions()[1], N = y->dimensions()[1];
  const int64_t num_tiles = w.dimensions()[0], tile_bytes = w.dimensions()[1];
  std::vector<Run> runs;
  if (!IS_FLOAT<F>) {
    runs.resize(M * K / RUN);
    for (size_t i = 0; i < runs.size(); i++) runs[i] = split(x.typed_data() + i * RUN);
  }
  const Product product{x.typed_data(), runs.data(), w.typed_data(), y->typed_data(), M, N, K, tile_bytes};
  // Long chunks keep the reads of a thread in order; short matrices need a chunk for every thread.
  const int64_t chunk = std::clamp<int64_t>(num_tiles / (2 * std::max<int64_t>(1, pool.num_threads())), 1, 16);
  parallel(pool, num_tiles, chunk, [&](int64_t first, int64_t last) {
    for (int64_t tile = first; tile < last; tile++) rows<F, MOST<F>>(product, 0, tile);
  });
  return ffi::Error::Success();
}

}  // namespace jspec

// Each library holds the kernel for one format and one number of bytes per activation, because compiling a kernel takes
// seconds: g++ -DFORMAT=Q4_K -DPLANES=3.
XLA_FFI_DEFINE_HANDLER_SYMBOL(product, jspec::multiply<jspec::FORMAT>,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::ThreadPool>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::F32>>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::U8>>()
                                  .Ret<xla::ffi::Buffer<xla::ffi::F32>>());
