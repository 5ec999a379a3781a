// Activations as integers of 8 * PLANES bits.
//
// A run of 32 values of x becomes integers n that share one step: x = step n. Signed bytes hold n, and byte
// instructions multiply these bytes without rounding. The sum over a group of codes is therefore exact. Only the scaled
// sums of groups are rounded. With 24 bits, the step is a power of two, and the largest value keeps about 23 bits. With
// fewer bits, the largest value becomes the largest integer.

#ifndef JSPEC_ACTIVATIONS_H_
#define JSPEC_ACTIVATIONS_H_

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

namespace jspec {

constexpr int RUN = 32;
constexpr int32_t LARGEST = 0x7f7f7f >> (24 - 8 * PLANES);  // the largest integer that PLANES signed bytes can hold

struct Run {
  int8_t bytes[PLANES][RUN];       // from the lowest byte to the highest
  int32_t sums[RUN / 16][PLANES];  // the sums of the bytes of 16 values each
  float step, sum;
};

struct Step {
  float size, inverse;
};

// The step has a lower bound, so runs of tiny values keep fewer bits.
inline Step step_for(float largest) {
  if (PLANES < 3) {
    largest = std::max(largest, 0x1p-97f);
    return {largest / LARGEST, LARGEST / largest};
  }
  int exponent = std::ilogb(std::max(largest, 0x1p-97f));
  if (largest * std::ldexp(1.0f, 22 - exponent) > LARGEST) exponent++;
  return {std::ldexp(1.0f, exponent - 22), std::ldexp(1.0f, 22 - exponent)};
}

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
  const Step step = step_for(magnitude);
  run.step = step.size;
  int32_t total = 0;
  std::memset(run.sums, 0, sizeof run.sums);
  for (int i = 0; i < RUN; i++) {
    const int32_t n = (int32_t)std::nearbyint(x[i] * step.inverse);
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
