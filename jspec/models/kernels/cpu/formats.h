// Formats of quantised weights: blocks of BLOCK values, in groups of GROUP values that share a scale.
//
// `codes<inner>` returns, for each column, the codes for four consecutive k as unsigned bytes: the i-th four codes of
// the group `group(outer, inner)`. A weight is scale * (code - OFFSET), or scale * code - minimum. A block stores each
// field of GGUF's block for 16 columns side by side.

#ifndef JSPEC_FORMATS_H_
#define JSPEC_FORMATS_H_

#include "vectors.h"

namespace jspec {

constexpr uint32_t LOW_HALVES = 0x0f0f0f0f;

// A format with one group per block, which has a float16 scale and may have a minimum.
template <int bytes, int offset, bool has_minimum>
struct Small {
  static constexpr int BLOCK = 32, GROUP = 32, BYTES = 16 * bytes, OFFSET = offset, INNER = 1;
  static constexpr bool MINIMUM = has_minimum;
  V scale_, minimum_{};
  explicit Small(const uint8_t* block) : scale_(halves(block)) {
    if (has_minimum) minimum_ = -halves(block + 32);
  }
  static int group(int, int) { return 0; }
  V scale(int) const { return scale_; }
  V minimum(int) const { return minimum_; }
  // The 4-bit codes of a group: the low halves of 16 bytes, then their high halves.
  static U nibbles(const uint8_t* field, int i) { return (load(field + 64 * (i & 3)) >> (i & 4)) & LOW_HALVES; }
  // The fifth bits of four codes, each moved to bit 4 of its byte. Bit k of a word belongs to value k.
  static U fifth_bits(const uint8_t* field, int i) {
    return ((((load(field) >> 4 * i) & 15) * 0x00204081) & 0x01010101) << 4;
  }
};

struct Q4_0 : Small<18, 8, false> {
  using Small::Small;
  template <int>
  static U codes(const uint8_t* block, int, int i) { return nibbles(block + 32, i); }
};

struct Q4_1 : Small<20, 0, true> {
  using Small::Small;
  template <int>
  static U codes(const uint8_t* block, int, int i) { return nibbles(block + 64, i); }
};

struct Q5_0 : Small<22, 16, false> {
  using Small::Small;
  template <int>
  static U codes(const uint8_t* block, int, int i) { return nibbles(block + 96, i) | fifth_bits(block + 32, i); }
};

struct Q5_1 : Small<24, 0, true> {
  using Small::Small;
  template <int>
  static U codes(const uint8_t* block, int, int i) { return nibbles(block + 128, i) | fifth_bits(block + 64, i); }
};

struct Q8_0 : Small<34, 128, false> {
  using Small::Small;
  template <int>
  static U codes(const uint8_t* block, int, int i) { return load(block + 32 + 64 * i) ^ 0x80808080; }
};

struct Q4_K {
  static constexpr int BLOCK = 256, GROUP = 32, BYTES = 16 * 144, OFFSET = 0, INNER = 2;
  static constexpr bool MINIMUM = true;
  V scale_, minimum_;
  U scales_[2], minimums_[2];  // one byte for each of four groups
  explicit Q4_K(const uint8_t* block) : scale_(halves(block)), minimum_(halves(block + 32)) {
    const U first = load(block + 64), second = load(block + 128), third = load(block + 192);
    scales_[0] = first & 0x3f3f3f3f, scales_[1] = (third & LOW_HALVES) | ((first >> 2) & 0x30303030);
    minimums_[0] = second & 0x3f3f3f3f, minimums_[1] = ((third >> 4) & LOW_HALVES) | ((second >> 2) & 0x30303030);
  }
  static int group(int outer, int inner) { return 2 * outer + inner; }
  V scale(int group) const { return scale_ * byte(scales_[group >> 2], group & 3); }
  V minimum(int group) const { return minimum_ * byte(minimums_[group >> 2], group & 3); }
  template <int inner>
  static U codes(const uint8_t* block, int outer, int i) {
    return (load(block + 256 + 64 * (8 * outer + i)) >> 4 * inner) & LOW_HALVES;
  }
};

struct Q5_K : Q4_K {
  static constexpr int BYTES = 16 * 176;
  using Q4_K::Q4_K;
  template <int inner>
  static U codes(const uint8_t* block, int outer, int i) {
    const U low = load(block + 768 + 64 * (8 * outer + i)) >> 4 * inner;
    const U bits = (load(block + 256 + 64 * i) >> (2 * outer + inner)) & 0x01010101;
    return (low & LOW_HALVES) | (bits << 4);
  }
};

struct Q6_K {
  static constexpr int BLOCK = 256, GROUP = 16, BYTES = 16 * 210, OFFSET = 32, INNER = 4;
  static constexpr bool MINIMUM = false;
  V scale_;
  const uint8_t* scales_;
  explicit Q6_K(const uint8_t* block) : scale_(halves(block)), scales_(block + 32) {}
  static int group(int outer, int inner) { return 8 * (outer >> 1) + 2 * inner + (outer & 1); }
  V scale(int group) const {
    return scale_ * real((I)(load(scales_ + 64 * (group >> 2)) << (24 - 8 * (group & 3))) >> 24);
  }
  template <int inner>
  static U codes(const uint8_t* block, int outer, int i) {
    const int half = outer >> 1, at = 4 * (outer & 1) + i;
    const U low = load(block + 288 + 64 * (16 * half + 8 * (inner & 1) + at)) >> 4 * (inner >> 1);
    const U high = load(block + 288 + 64 * (32 + 8 * half + at));
    return (low & LOW_HALVES) | ((inner < 2 ? high << (4 - 2 * inner) : high >> (2 * inner - 4)) & 0x30303030);
  }
};

}  // namespace jspec

#endif  // JSPEC_FORMATS_H_
