// Vectors of 16 lanes, for any instruction set.

#ifndef JSPEC_VECTORS_H_
#define JSPEC_VECTORS_H_

#include <cmath>
#include <cstdint>
#include <cstring>
#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace jspec {

typedef float V __attribute__((vector_size(64)));
typedef uint32_t U __attribute__((vector_size(64)));
typedef int32_t I __attribute__((vector_size(64)));
typedef uint16_t H __attribute__((vector_size(32)));
typedef int8_t B __attribute__((vector_size(16)));

inline U load(const uint8_t* p) {
  U out;
  std::memcpy(&out, p, 64);
  return out;
}
inline V spread(float x) { return x - V{}; }
inline I spread(int32_t x) { return x - I{}; }
inline V real(I x) { return __builtin_convertvector(x, V); }

#if defined(__AVX512F__)
// Rounds to the nearest integer. Of two equally near integers, the even one is chosen.
inline I nearest(V x) { return (I)_mm512_cvtps_epi32((__m512)x); }
inline int32_t sum(I x) { return _mm512_reduce_add_epi32((__m512i)x); }
inline V fma(V a, V b, V c) { return (V)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c); }
inline V halves(const uint8_t* p) { return (V)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p)); }
#else
inline I nearest(V x) {
  I out;
  for (int i = 0; i < 16; i++) out[i] = (int32_t)std::nearbyint(x[i]);
  return out;
}
inline int32_t sum(I x) {
  int32_t total = 0;
  for (int i = 0; i < 16; i++) total += x[i];
  return total;
}
#if defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
inline V fma(V a, V b, V c) {
  __m256 in[3][2], out[2];
  std::memcpy(in[0], &a, 64), std::memcpy(in[1], &b, 64), std::memcpy(in[2], &c, 64);
  for (int i = 0; i < 2; i++) out[i] = _mm256_fmadd_ps(in[0][i], in[1][i], in[2][i]);
  std::memcpy(&c, out, 64);
  return c;
}
inline V halves(const uint8_t* p) {
  __m256 out[2];
  for (int i = 0; i < 2; i++) out[i] = _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p + i));
  V floats;
  std::memcpy(&floats, out, 64);
  return floats;
}
#else
inline V fma(V a, V b, V c) { return a * b + c; }
// Moves the bits of float16 into those of float32, and multiplies by 2^112, the ratio of the smallest exponents.
inline V halves(const uint8_t* p) {
  uint16_t bits[16];
  std::memcpy(bits, p, 32);
  uint32_t moved[16];
  for (int i = 0; i < 16; i++) moved[i] = (uint32_t)(bits[i] & 0x8000) << 16 | (uint32_t)(bits[i] & 0x7fff) << 13;
  V floats;
  std::memcpy(&floats, moved, 64);
  return floats * 0x1p112f;
}
#endif
#endif

// Adds to each lane of sums the dot product of the lane's four unsigned codes and the four signed bytes, which are the
// same for all lanes.
inline I dot(I sums, U codes, uint32_t bytes) {
#if defined(__AVX512VNNI__)
  return (I)_mm512_dpbusd_epi32((__m512i)sums, (__m512i)codes, _mm512_set1_epi32(bytes));
#else
  const int8_t x[4] = {(int8_t)bytes, (int8_t)(bytes >> 8), (int8_t)(bytes >> 16), (int8_t)(bytes >> 24)};
#if defined(__AVX2__)
  // The even and the odd bytes are widened to 16 bits. One instruction multiplies pairs of these and adds the products.
  const __m256i even = _mm256_set1_epi32((uint16_t)x[0] | (uint32_t)(uint16_t)x[2] << 16);
  const __m256i odd = _mm256_set1_epi32((uint16_t)x[1] | (uint32_t)(uint16_t)x[3] << 16);
  const U low = codes & 0x00ff00ff, high = (codes >> 8) & 0x00ff00ff;
  __m256i lows[2], highs[2], out[2];
  std::memcpy(lows, &low, 64), std::memcpy(highs, &high, 64);
  for (int i = 0; i < 2; i++) {
    out[i] = _mm256_add_epi32(_mm256_madd_epi16(lows[i], even), _mm256_madd_epi16(highs[i], odd));
  }
  I products;
  std::memcpy(&products, out, 64);
  return sums + products;
#else
  for (int b = 0; b < 4; b++) sums += (I)((codes >> 8 * b) & 255) * x[b];
  return sums;
#endif
#endif
}

// Returns, in each lane, a where the condition is -1, and b where it is 0.
inline V select(I condition, V a, V b) { return (V)((condition & (I)a) | (~condition & (I)b)); }

// Returns e^x for x <= 0 with a relative error of about 1e-7, and 0 for x < -87. NaN stays NaN.
inline V exponential(V x) {
  const V bounded = select(x < spread(-87.0f), spread(-87.0f), x);
  const I power = nearest(select(x == x, bounded, V{}) * spread(1.44269504f));
  // x - power * ln 2, where ln 2 = 0.693359375 - 2.12194440e-4. The product power * 0.693359375 is exact.
  const V rest = fma(real(power), spread(2.12194440e-4f), fma(real(power), spread(-0.693359375f), bounded));
  V sum = spread(1.9875691500e-4f);
  for (float term : {1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f, 5.0000001201e-1f}) {
    sum = fma(sum, rest, spread(term));
  }
  sum = fma(sum, rest * rest, rest + spread(1.0f));
  return select(x < spread(-87.0f), V{}, sum * (V)((power + 127) << 23));
}

// Byte b of every lane, as a float.
inline V byte(U x, int b) { return real((I)((x >> 8 * b) & 255)); }

}  // namespace jspec

#endif  // JSPEC_VECTORS_H_
