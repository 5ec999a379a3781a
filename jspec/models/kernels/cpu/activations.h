// Activations as integers.
//
// A run of 32 values of x becomes 24-bit integers n that share one step, a power of two: x = step n. The largest value
// keeps about 23 bits. Three signed bytes hold n, and byte instructions multiply these bytes without rounding. The sum
// over a group of codes is therefore exact. Only the scaled sums of groups are rounded.

#ifndef JSPEC_ACTIVATIONS_H_
#define JSPEC_ACTIVATIONS_H_

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

namespace jspec {

constexpr int RUN = 32, PLANES = 3;
constexpr int32_t LARGEST = 0x7f7f7f;  // the largest integer that three signed bytes can hold

struct Run {
  int8_t bytes[PLANES][RUN];       // from the lowest byte to the highest
  int32_t sums[RUN / 16][PLANES];  // the sums of the bytes of 16 values each
  float step, sum;
};

inline Run split(const float* x) {
  Run run;
  uint32_t bits[RUN], largest = 0;
  std::memcpy(bits, x, sizeof bits);
  for (int i = 0; i < RUN; i++) largest = std::max(largest, bits[i] & 0x7fffffff);
  if (largest >= 0x7f800000) {  // a value that is not finite makes the row's result NaN
    std::memset(&run, 0, sizeof run);
    run.step = run.sum = std::numeric_limits<float>::quiet_NaN();
    return run;
  }
  float magnitude;
  std::memcpy(&magnitude, &largest, 4);
  // The exponent of the largest value, clamped from below. Runs of even smaller values keep fewer bits.
  int exponent = std::max<int>(largest >> 23, 30) - 127;
  if (magnitude * std::ldexp(1.0f, 22 - exponent) > LARGEST) exponent++;
  const float inverse = std::ldexp(1.0f, 22 - exponent);
  run.step = std::ldexp(1.0f, exponent - 22);
  int32_t total = 0;
  std::memset(run.sums, 0, sizeof run.sums);
  for (int i = 0; i < RUN; i++) {
    const int32_t n = (int32_t)std::nearbyint(x[i] * inverse);
    const uint32_t digits = ((uint32_t)n + 0x808080) ^ 0x808080;
    total += n;
    for (int p = 0; p < PLANES; p++) {
      run.bytes[p][i] = (int8_t)(digits >> 8 * p);
      run.sums[i / 16][p] += run.bytes[p][i];
    }
  }
  run.sum = run.step * (float)total;
  return run;
}

}  // namespace jspec

#endif  // JSPEC_ACTIVATIONS_H_
