// Softmax attention of float32 queries over the visible slots of KV caches for XLA:CPU, called through jax.ffi.
//
// All sums run over a query's visible slots in order, without the slots between them. The bits of a result therefore
// depend only on the query and on the keys and values that it sees: not on other queries, on unused slots, on the
// number of threads, or on whether a prefix lies in another cache. A tree's node has the bits that it would have in a
// sequence.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

#include "threads.h"
#include "vectors.h"
#include "xla/ffi/api/ffi.h"

namespace jspec {

namespace ffi = xla::ffi;

// A KV cache, and the slots in it that each query sees.
struct Cache {
  const float* keys;    // [C, G, D, T]
  const float* values;  // [C, G, T, D]
  const int32_t* rows;  // [B], the batch's rows
  const bool* mask;     // [B, S, T]
  int64_t C, T;
};

struct Attention {
  const float* q;  // [B, H, S, D]
  float* out;      // [B, H, S, D]
  std::vector<Cache> caches;
  int64_t B, H, G, S, D;

  int64_t heads() const { return H / G; }
  int64_t slots() const {
    int64_t total = 0;
    for (const Cache& cache : caches) total += cache.T;
    return total;
  }
};

// The queries of the heads that share keys and values, and their part of a cache.
struct Queries {
  const float* q;     // [R, stride]
  float* out;         // [R, stride]
  float* weights;     // [R, room]
  int64_t stride, room, D;
};

struct View {
  const float* keys;    // [D, T]
  const float* values;  // [T, D]
  const bool* mask;     // [T]
  int64_t T;
  std::vector<int32_t> visible;  // the slots in which the mask is true
};

constexpr int LANES = 16, WIDTH = 2 * LANES;  // slots, or elements of values, that are computed together

// Loads the first count of 32 floats; the others are zero.
template <bool full>
inline void load_two(const float* p, int64_t count, V (&out)[2]) {
  if (full) {
    std::memcpy(out, p, 4 * WIDTH);
    return;
  }
  out[0] = out[1] = V{};
  std::memcpy(out, p, 4 * std::min<int64_t>(count, WIDTH));
}

template <int R, bool full>
inline void add_scores(const Queries& queries, const View& view, int64_t t, V (&sums)[R][2]) {
  for (int64_t d = 0; d < queries.D; d++) {
    V keys[2];
    load_two<full>(view.keys + d * view.T + t, view.T - t, keys);
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) {
      const V q = spread(queries.q[r * queries.stride + d]);
      sums[r][0] = fma(q, keys[0], sums[r][0]);
      sums[r][1] = fma(q, keys[1], sums[r][1]);
    }
  }
}

// Writes the scores of the visible slots to weights, from index first on.
template <int R>
void score(const Queries& queries, const View& view, int64_t first) {
  const V scale = spread(1 / std::sqrt((float)queries.D));
  const int64_t count = view.visible.size();
  for (int64_t i = 0; i < count;) {
    const int64_t t = view.visible[i] / WIDTH * WIDTH;
    V sums[R][2] = {};
    if (t + WIDTH <= view.T) {
      add_scores<R, true>(queries, view, t, sums);
    } else {
      add_scores<R, false>(queries, view, t, sums);
    }
    float scores[R][WIDTH];
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) {
      sums[r][0] *= scale, sums[r][1] *= scale;
      std::memcpy(scores[r], sums[r], sizeof scores[r]);
    }
    for (; i < count && view.visible[i] < t + WIDTH; i++) {
      for (int r = 0; r < R; r++) queries.weights[r * queries.room + first + i] = scores[r][view.visible[i] - t];
    }
  }
}

// Replaces scores by their exponentials, relative to the largest score, and returns the sum of these. The room after
// the scores is filled up to a whole vector. A score that is NaN makes the sum NaN.
float exponentials(float* scores, int64_t count) {
  const float lowest = -std::numeric_limits<float>::infinity();
  for (int64_t i = count; i % LANES; i++) scores[i] = lowest;
  V x, tops = spread(lowest), sums = {};
  for (int64_t i = 0; i < count; i += LANES) {
    std::memcpy(&x, scores + i, 64);
    tops = choose(x > tops, x, tops);
  }
  float largest = lowest, total = 0;
  for (int lane = 0; lane < LANES; lane++) largest = std::max(largest, tops[lane]);
  for (int64_t i = 0; i < count; i += LANES) {
    std::memcpy(&x, scores + i, 64);
    x = exponential(x - spread(largest));
    std::memcpy(scores + i, &x, 64);
    sums += x;
  }
  for (int lane = 0; lane < LANES; lane++) total += sums[lane];
  return total;
}

// Writes elements d to d + 32 of the weighted sums of the visible values.
template <int R, bool full>
void mix(const Queries& queries, const std::vector<View>& views, const float (&totals)[R], int64_t d) {
  V sums[R][2] = {};
  const float* weights = queries.weights;
  for (const View& view : views) {
    for (const int32_t slot : view.visible) {
      V values[2];
      load_two<full>(view.values + slot * queries.D + d, queries.D - d, values);
#pragma GCC unroll 8
      for (int r = 0; r < R; r++) {
        const V weight = spread(weights[r * queries.room]);
        sums[r][0] = fma(weight, values[0], sums[r][0]);
        sums[r][1] = fma(weight, values[1], sums[r][1]);
      }
      weights++;
    }
  }
  const size_t bytes = 4 * std::min<int64_t>(WIDTH, queries.D - d);
#pragma GCC unroll 8
  for (int r = 0; r < R; r++) {
    sums[r][0] /= spread(totals[r]), sums[r][1] /= spread(totals[r]);
    std::memcpy(queries.out + r * queries.stride + d, sums[r], bytes);
  }
}

template <int R>
void attend(const Queries& queries, const std::vector<View>& views) {
  int64_t count = 0;
  for (const View& view : views) {
    score<R>(queries, view, count);
    count += view.visible.size();
  }
  float totals[R];
  for (int r = 0; r < R; r++) {
    totals[r] = count ? exponentials(queries.weights + r * queries.room, count) : 1;  // without slots, the sum is zero
  }
  int64_t d = 0;
  for (; d + WIDTH <= queries.D; d += WIDTH) mix<R, true>(queries, views, totals, d);
  if (d < queries.D) mix<R, false>(queries, views, totals, d);
}

// The maximum number of heads whose sums fit into the registers.
#if defined(__AVX512F__)
constexpr int MOST = 8;
#else
constexpr int MOST = 3;
#endif

// Computes the given number of heads, R at a time, and then the remaining heads in a smaller group.
template <int R>
void heads(Queries queries, int64_t count, const std::vector<View>& views) {
  for (; count >= R; count -= R) {
    attend<R>(queries, views);
    queries.q += R * queries.stride, queries.out += R * queries.stride;
  }
  if constexpr (R > 1) {
    if (count > 0) heads<R - 1>(queries, count, views);
  }
}

// Computes the heads of the group g for the query s of row b.
void attend_group(const Attention& a, int64_t b, int64_t g, int64_t s, std::vector<View>& views,
                  std::vector<float>& weights) {
  for (size_t i = 0; i < views.size(); i++) {
    const Cache& cache = a.caches[i];
    const int64_t row = std::clamp<int64_t>(cache.rows[b], 0, cache.C - 1), size = a.D * cache.T;
    View& view = views[i];
    view.keys = cache.keys + (row * a.G + g) * size;
    view.values = cache.values + (row * a.G + g) * size;
    view.mask = cache.mask + (b * a.S + s) * cache.T;
    view.T = cache.T;
    view.visible.clear();
    for (int64_t t = 0; t < cache.T; t++) {
      if (view.mask[t]) view.visible.push_back(t);
    }
  }
  const int64_t first = ((b * a.H + g * a.heads()) * a.S + s) * a.D;
  const Queries queries{a.q + first, a.out + first, weights.data(), a.S * a.D, (int64_t)weights.size() / MOST, a.D};
  heads<MOST>(queries, a.heads(), views);
}

// A smaller number of multiplications takes less time than a thread needs to start.
constexpr int64_t LEAST_WORK = 1 << 20;

ffi::Error attend_all(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> q, ffi::RemainingArgs caches,
                      ffi::ResultBuffer<ffi::F32> out) {
  const auto shape = q.dimensions();
  Attention a{q.typed_data(), out->typed_data(), {}, shape[0], shape[1], 0, shape[2], shape[3]};
  for (size_t i = 0; i < caches.size(); i += 4) {
    const auto keys = caches.get<ffi::Buffer<ffi::F32>>(i), values = caches.get<ffi::Buffer<ffi::F32>>(i + 1);
    const auto rows = caches.get<ffi::Buffer<ffi::S32>>(i + 2);
    const auto mask = caches.get<ffi::Buffer<ffi::PRED>>(i + 3);
    a.G = keys->dimensions()[1];
    a.caches.push_back({keys->typed_data(), values->typed_data(), rows->typed_data(), mask->typed_data(),
                        keys->dimensions()[0], keys->dimensions()[3]});
  }
  const int64_t count = a.B * a.G * a.S, room = (a.slots() + LANES - 1) / LANES * LANES;
  const int64_t work = 2 * a.B * a.H * a.S * a.D * a.slots();
  const int64_t parts = work < LEAST_WORK ? 1 : 4 * std::max<int64_t>(1, pool.num_threads());
  parallel(pool, count, std::max<int64_t>(1, count / parts), [&](int64_t first, int64_t last) {
    std::vector<View> views(a.caches.size());
    std::vector<float> weights(MOST * room);
    for (int64_t i = first; i < last; i++) attend_group(a, i / a.S / a.G, i / a.S % a.G, i % a.S, views, weights);
  });
  return ffi::Error::Success();
}

}  // namespace jspec

XLA_FFI_DEFINE_HANDLER_SYMBOL(masked_attention, jspec::attend_all,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::ThreadPool>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::F32>>()
                                  .RemainingArgs()
                                  .Ret<xla::ffi::Buffer<xla::ffi::F32>>());
