// The largest element of each row, and the log of the sum of exp(x - largest), for XLA:CPU, called through jax.ffi.
//
// Each row is divided into pieces of a fixed size, and each piece is summed in a fixed order. The bits of a result
// therefore depend only on the row, and not on the number of rows or threads.

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

constexpr int LANES = 16;
constexpr int64_t PIECE = 2048;  // short, so that few rounding errors add up
constexpr float LOWEST = -std::numeric_limits<float>::infinity();

struct Sum {
  float largest;
  float total;  // the sum of e^(x - largest)
};

// Calls run on each vector of x. The last vector is padded with -inf.
template <class Run>
inline void each_vector(const float* x, int64_t count, const Run& run) {
  V values;
  int64_t i = 0;
  for (; i + LANES <= count; i += LANES) {
    std::memcpy(&values, x + i, 64);
    run(values);
  }
  if (i == count) return;
  values = spread(LOWEST);
  std::memcpy(&values, x + i, 4 * (count - i));
  run(values);
}

// Sums a piece. If all its elements are -inf, the total is zero. If any element is NaN, the total is NaN.
Sum sum_piece(const float* x, int64_t count) {
  V tops = spread(LOWEST), sums = {};
  each_vector(x, count, [&](V values) { tops = select(values > tops, values, tops); });
  Sum found{LOWEST, 0};
  for (int lane = 0; lane < LANES; lane++) found.largest = std::max(found.largest, tops[lane]);
  const V largest = spread(found.largest == LOWEST ? 0 : found.largest);
  each_vector(x, count, [&](V values) { sums += exponential(values - largest); });
  for (int lane = 0; lane < LANES; lane++) found.total += sums[lane];
  return found;
}

ffi::Error log_sum_exp_rows(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> x, ffi::ResultBuffer<ffi::F32> largest,
                            ffi::ResultBuffer<ffi::F32> log_sum) {
  const int64_t rows = x.dimensions()[0], size = x.dimensions()[1], pieces = (size + PIECE - 1) / PIECE;
  std::vector<Sum> sums(rows * pieces);
  parallel(pool, rows * pieces, 4, [&](int64_t i, int64_t end) {
    for (; i < end; i++) {
      const int64_t first = i % pieces * PIECE;
      sums[i] = sum_piece(x.typed_data() + i / pieces * size + first, std::min(PIECE, size - first));
    }
  });
  for (int64_t row = 0; row < rows; row++) {
    const Sum* first = &sums[row * pieces];
    float top = LOWEST;
    double total = 0;
    for (int64_t i = 0; i < pieces; i++) top = std::max(top, first[i].largest);
    for (int64_t i = 0; i < pieces; i++) {
      total += first[i].largest == LOWEST ? first[i].total : first[i].total * std::exp((double)first[i].largest - top);
    }
    largest->typed_data()[row] = top;
    log_sum->typed_data()[row] = std::log(total);
  }
  return ffi::Error::Success();
}

}  // namespace jspec

XLA_FFI_DEFINE_HANDLER_SYMBOL(log_sum_exp, jspec::log_sum_exp_rows,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::ThreadPool>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::F32>>()
                                  .Ret<xla::ffi::Buffer<xla::ffi::F32>>()
                                  .Ret<xla::ffi::Buffer<xla::ffi::F32>>());
