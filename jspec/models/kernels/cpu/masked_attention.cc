// Softmax attention of float32 queries over the visible slots of KV caches for XLA:CPU, called through jax.ffi.
//
// A query's visible slots are listed first. The order of every sum depends only on the length of this list. It does not
// depend on other queries, unused slots, the number of threads, or whether a prefix is in a separate cache. The bits of
// a result therefore depend only on the query and on the keys and values that it sees. A tree node gets the same bits
// as the same token in a sequence.

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
  const int32_t* rows;  // [B], the cache row of each batch row
  const bool* mask;     // [B, S, T]
  int64_t C, T;
};

struct Attention {
  const float* q;  // [B, H, S, D]
  float* out;      // [B, H, S, D]
  std::vector<Cache> caches;
  int64_t B, H, G, S, D;
};

// The queries of heads that share keys and values.
struct Queries {
  const float* q;  // [R, stride]
  float* out;      // [R, stride]
  float* weights;  // [R, room]
  int64_t stride, room, D;
};

// The part of a cache that these queries read.
struct View {
  const float* keys;    // [D, T]
  const float* values;  // [T, D]
  int64_t T;
  std::vector<int32_t> visible;  // slots, in ascending order
};

constexpr int LANES = 16, WIDTH = 2 * LANES;  // slots, or elements of values, that are computed together

// Loads 32 floats if full. Otherwise, loads the first count floats, at most 32, and sets the rest to zero.
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

// Writes the scores of the visible slots to weights, starting at index first.
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

// Replaces scores by their softmax. Pads them with zeros to a multiple of 16. If any score is NaN, all results are NaN.
void softmax(float* scores, int64_t count) {
  const float lowest = -std::numeric_limits<float>::infinity();
  for (int64_t i = count; i % LANES; i++) scores[i] = lowest;
  V x, tops = spread(lowest), sums = {};
  for (int64_t i = 0; i < count; i += LANES) {
    std::memcpy(&x, scores + i, 64);
    tops = select(x > tops, x, tops);
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
  for (int64_t i = 0; i < count; i += LANES) {
    std::memcpy(&x, scores + i, 64);
    x /= spread(total);
    std::memcpy(scores + i, &x, 64);
  }
}

// Writes elements [d, min(d + 32, D)) of the weighted sums of the visible values.
template <int R, bool full>
void mix(const Queries& queries, const std::vector<View>& views, int64_t d) {
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
  for (int r = 0; r < R; r++) std::memcpy(queries.out + r * queries.stride + d, sums[r], bytes);
}

template <int R>
void attend(const Queries& queries, const std::vector<View>& views) {
  int64_t count = 0;
  for (const View& view : views) {
    score<R>(queries, view, count);
    count += view.visible.size();
  }
  for (int r = 0; r < R; r++) softmax(queries.weights + r * queries.room, count);
  int64_t d = 0;
  for (; d + WIDTH <= queries.D; d += WIDTH) mix<R, true>(queries, views, d);
  if (d < queries.D) mix<R, false>(queries, views, d);
}

// The maximum number of heads that are computed together. With AVX-512 or AVX2, their sums fit in the vector registers.
#if defined(__AVX512F__)
constexpr int MAX_HEADS = 8;
#else
constexpr int MAX_HEADS = 3;
#endif

// Computes the given number of heads, R at a time, and then the remaining heads in a smaller group.
template <int R>
void attend_heads(Queries queries, int64_t count, const std::vector<View>& views) {
  for (; count >= R; count -= R) {
    attend<R>(queries, views);
    queries.q += R * queries.stride, queries.out += R * queries.stride;
  }
  if constexpr (R > 1) {
    if (count > 0) attend_heads<R - 1>(queries, count, views);
  }
}

// Lists the slots in which the mask is true. Skips blocks of eight slots in which the mask is false.
void list_visible(const bool* mask, int64_t T, std::vector<int32_t>& visible) {
  visible.clear();
  for (int64_t first = 0; first < T; first += 8) {
    uint64_t any = 0;
    const int64_t last = std::min(first + 8, T);
    std::memcpy(&any, mask + first, last - first);
    for (int64_t t = first; any && t < last; t++) {
      if (mask[t]) visible.push_back(t);
    }
  }
}

// Working memory for one chunk of work.
struct Scratch {
  std::vector<View> views;
  std::vector<float> weights;
  int64_t query = -1, room = 0;  // the query whose visible slots views holds, and these slots, rounded up
};

// Computes heads [head, head + count), which share a group, for query s of row b.
void attend_group(const Attention& a, int64_t b, int64_t s, int64_t head, int64_t count, Scratch& scratch) {
  const int64_t group = head / (a.H / a.G), query = b * a.S + s;
  if (scratch.query != query) {
    int64_t total = 0;
    for (size_t i = 0; i < a.caches.size(); i++) {
      list_visible(a.caches[i].mask + query * a.caches[i].T, a.caches[i].T, scratch.views[i].visible);
      total += scratch.views[i].visible.size();
    }
    scratch.query = query, scratch.room = (total + LANES - 1) / LANES * LANES;
    if ((int64_t)scratch.weights.size() < MAX_HEADS * scratch.room) scratch.weights.resize(MAX_HEADS * scratch.room);
  }
  for (size_t i = 0; i < a.caches.size(); i++) {
    const Cache& cache = a.caches[i];
    const int64_t row = std::clamp<int64_t>(cache.rows[b], 0, cache.C - 1), size = a.D * cache.T;
    View& view = scratch.views[i];
    view.keys = cache.keys + (row * a.G + group) * size;
    view.values = cache.values + (row * a.G + group) * size;
    view.T = cache.T;
  }
  const int64_t first = ((b * a.H + head) * a.S + s) * a.D;
  attend_heads<MAX_HEADS>({a.q + first, a.out + first, scratch.weights.data(), a.S * a.D, scratch.room, a.D}, count,
                     scratch.views);
}

// With fewer multiplications, waking other threads takes longer than the work itself.
constexpr int64_t MIN_PARALLEL_WORK = 1 << 20;

ffi::Error attend_all(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> q, ffi::RemainingArgs caches,
                      ffi::ResultBuffer<ffi::F32> out) {
  const auto shape = q.dimensions();
  Attention a{q.typed_data(), out->typed_data(), {}, shape[0], shape[1], 0, shape[2], shape[3]};
  int64_t slots = 0;
  for (size_t i = 0; i < caches.size(); i += 4) {
    const auto keys = caches.get<ffi::Buffer<ffi::F32>>(i), values = caches.get<ffi::Buffer<ffi::F32>>(i + 1);
    const auto rows = caches.get<ffi::Buffer<ffi::S32>>(i + 2);
    const auto mask = caches.get<ffi::Buffer<ffi::PRED>>(i + 3);
    a.G = keys->dimensions()[1];
    a.caches.push_back({keys->typed_data(), values->typed_data(), rows->typed_data(), mask->typed_data(),
                        keys->dimensions()[0], keys->dimensions()[3]});
    slots += keys->dimensions()[3];
  }
  const int64_t work = 2 * a.B * a.H * a.S * a.D * slots;
  const int64_t threads = work < MIN_PARALLEL_WORK ? 1 : std::max<int64_t>(1, pool.num_threads());
  // Split a group's heads among threads only if there are too few groups to occupy all threads. Each of these threads
  // reads the group's keys and values again.
  const int64_t shared = a.H / a.G, groups = a.B * a.S * a.G;
  const int64_t pieces = std::clamp<int64_t>(threads / std::max<int64_t>(1, groups), 1, shared);
  const int64_t each = (shared + pieces - 1) / pieces, per_group = (shared + each - 1) / each;
  const int64_t count = groups * per_group;
  const int64_t chunk = std::max<int64_t>(1, threads == 1 ? count : count / (4 * threads));
  parallel(pool, count, chunk, [&](int64_t i, int64_t end) {
    Scratch scratch;
    scratch.views.resize(a.caches.size());
    for (; i < end; i++) {
      const int64_t query = i / (a.G * per_group), group = i / per_group % a.G, first = i % per_group * each;
      const int64_t heads = std::min(each, shared - first);
      attend_group(a, query / a.S, query % a.S, group * shared + first, heads, scratch);
    }
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
