// Numbers as they lie in memory: conversions and rounding.

#pragma once

#include "lanes.h"

#if defined(__SSE2__) || defined(_M_X64)
#include <emmintrin.h>
#define SIDESTEP_SSE 1
#endif

namespace sidestep {

enum Type : int32_t { kFloat32 = 0, kBFloat16 = 1, kFloat16 = 2 };

// Of `Lanes`, which are `Single` or `Wide`. What has 16 bits is in the lower halves of words.
template <class Lanes>
struct Numbers {
  using Floats = typename Lanes::Floats;
  using Words = typename Lanes::Words;

  SIDESTEP_INLINE static Floats from_bfloat16(Words value) { return Lanes::float_of(value << 16); }

  // To the nearest, ties to even, in the upper half; of NaN, anything.
  SIDESTEP_INLINE static Words rounded(Words bits) { return bits + 0x7FFFu + ((bits >> 16) & 1u); }

  // The same; NaN stays NaN.
  SIDESTEP_INLINE static Words to_bfloat16(Floats value) {
    const Words bits = Lanes::bits_of(value);
    return Lanes::select(value != value, Lanes::all(0x7FC0u), rounded(bits) >> 16);
  }

  // To the nearest, ties away from zero: of all ways to round, the one that 16 more bits can undo.
  SIDESTEP_INLINE static Words to_upper_half(Floats value) { return upper_half_of_sum(value, Lanes::all(0x8000u)); }

  // Up or down with the probabilities that keep the mean.
  SIDESTEP_INLINE static Words to_bfloat16_at_random(Floats value, Words random) {
    return upper_half_of_sum(value, random);
  }

  // 16 random bits of an element by its index and a key; sidestep.engine.codecs says where this comes from.
  SIDESTEP_INLINE static Words random_bits(Words index, uint32_t key) {
    Words bits = (index + key) & 0xFFFFFu;
    bits = (bits ^ (bits >> 16)) * 0x7FEB352Du;
    bits = (bits ^ (bits >> 15)) * 0x846CA68Bu;
    return (bits ^ (bits >> 16)) & 0xFFFFu;
  }

  // 1.m × 2^e from the exponent and mantissa moved into place, and the exponent's bias mended by a multiplication,
  // which is exact also for denormals.
  SIDESTEP_INLINE static Floats from_float16(Words value) {
    const Words magnitude = value & 0x7FFFu;
    const Floats finite = Lanes::float_of(magnitude << 13) * 0x1p112f;
    const Words special = (magnitude << 13) | 0x7F800000u;
    const Words bits = Lanes::select(magnitude >= 0x7C00u, special, Lanes::bits_of(finite));
    return Lanes::float_of(bits | ((value & 0x8000u) << 16));
  }

  // To the nearest, ties to even, by an addition that leaves the wanted bits at the end of the mantissa.
  SIDESTEP_INLINE static Words to_float16(Floats value) {
    const Words bits = Lanes::bits_of(value);
    const Words magnitude = bits & 0x7FFFFFFFu;
    const Words denormal = Lanes::bits_of(Lanes::float_of(magnitude) + 0.5f) - Single::bits_of(0.5f);
    const Words normal = (magnitude + 0xFFFu + ((magnitude >> 13) & 1u) - (112u << 23)) >> 13;
    Words half = Lanes::select(magnitude < (113u << 23), denormal, normal);
    half = Lanes::select(half > 0x7C00u, Lanes::all(0x7C00u), half);
    half = Lanes::select(magnitude >= (143u << 23), Lanes::all(0x7C00u), half);  // 2^16 and more
    half = Lanes::select(magnitude > 0x7F800000u, Lanes::all(0x7E00u), half);    // NaN
    return half | ((bits >> 16) & 0x8000u);
  }

  SIDESTEP_INLINE static Floats load(const void* from, int32_t type, int64_t i) {
    if (type == kFloat32) return Lanes::load(static_cast<const float*>(from) + i);
    const Words halves = Lanes::load(static_cast<const uint16_t*>(from) + i);
    return type == kBFloat16 ? from_bfloat16(halves) : from_float16(halves);
  }

 private:
  // Of the bits and 16 more; infinity stays what it is, as there is nothing to carry, and NaN is kept from carrying.
  SIDESTEP_INLINE static Words upper_half_of_sum(Floats value, Words more) {
    const Words sum = Lanes::bits_of(value) + more;
    return Lanes::select(value != value, Lanes::all(0x7FC0u), sum >> 16);
  }
};

// Denormals are numbers, and rounding is to the nearest, whatever the thread is set to: it differs between threads.
class DefaultArithmetic {
 public:
#ifdef SIDESTEP_SSE
  DefaultArithmetic() : before_(_mm_getcsr()) { _mm_setcsr(0x1F80); }
  ~DefaultArithmetic() { _mm_setcsr(before_); }

 private:
  unsigned int before_;
#else
  DefaultArithmetic() {}
#endif
};

}  // namespace sidestep
