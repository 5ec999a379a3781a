// Activations as integers of 8 * PLANES bits.
//
// A run of 32 values of x becomes integers n that share one step: x = step n. Signed bytes hold n, and byte
// instructions multiply these bytes without rounding. The sum over a group of codes is therefore exact. Only the scaled
// sums of groups are rounded. With 24 bits, the step is a power of two, and the largest value keeps about 23 bits. With
// fewer bits, the largest value becomes the largest integer.

#ifndef JSPEC_ACTIVATIONS_H_
#define JSPEC_ACTIVATIONS_H_

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <limits>

#include "vectors.h"

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

inline float power_of_two(int exponent) {
  const uint32_t bits = (uint32_t)(exponent + 127) << 23;
  float power;
  std::memcpy(&power, &bits, 4);
  return power;
}

// The step has a lower bound, so runs of tiny values keep fewer bits.
inline Step step_for(float largest) {
  if (PLANES < 3) {
    largest = std::max(largest, 0x1p-97f);
    return {largest / LARGEST, LARGEST / largest};
  }
  uint32_t bits;
  largest = std::max(largest, 0x1p-97f);
  std::memcpy(&bits, &largest, 4);
  int exponent = (int)(bits >> 23) - 127;
  if (largest * power_of_two(22 - exponent) > LARGEST) exponent++;
  return {power_of_two(exponent - 22), power_of_two(22 - exponent)};
}

inline Run split(const float* x) {
  Run run;
  uint32_t largest = 0;
  for (int i = 0; i < RUN; i++) {
    uint32_t bits;
    std::memcpy(&bits, x + i, 4);
    largest = std::max(largest, bits & 0x7fffffff);
  }
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
  for (int half = 0; half < RUN / 16; half++) {
    V values;
    std::memcpy(&values, x + 16 * half, 64);
    const I n = nearest(values * spread(step.inverse));
    const U digits = ((U)n + 0x808080) ^ 0x808080;
    total += sum(n);
    for (int plane = 0; plane < PLANES; plane++) {
      const B bytes = __builtin_convertvector(digits >> 8 * plane, B);
      std::memcpy(run.bytes[plane] + 16 * half, &bytes, 16);
      run.sums[half][plane] = sum((I)(digits << (24 - 8 * plane)) >> 24);
    }
  }
  run.sum = run.step * (float)total;
  return run;
}

}  // namespace jspec

#endif  // JSPEC_ACTIVATIONS_H_
