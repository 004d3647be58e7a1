// Numbers side by side: as many as a register has, or one.
//
// Loops are written once, over `Wide` for all but the last few elements and over `Single` for these. Every operation
// gives each lane what it gives a number alone, so that no result depends on where an element lies or how work is cut.
// Compilers vectorise loops over numbers of several sizes with more shuffles than arithmetic, hence `Wide`; where there
// is none, they must do with the loop over `Single`.

#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(__AVX2__) && (defined(__GNUC__) || defined(__clang__))
#include <immintrin.h>
#define SIDESTEP_WIDE 1
#endif

#if defined(_MSC_VER)
#define SIDESTEP_INLINE __forceinline
#else
#define SIDESTEP_INLINE inline __attribute__((always_inline))
#endif

namespace sidestep {

struct Single {
  static constexpr int64_t kLanes = 1;
  using Floats = float;
  using Words = uint32_t;
  using Doubles = double;

  SIDESTEP_INLINE static Floats load(const float* from) { return *from; }
  SIDESTEP_INLINE static void store(float* to, Floats value) { *to = value; }
  SIDESTEP_INLINE static Words load(const uint16_t* from) { return *from; }
  SIDESTEP_INLINE static void store(uint16_t* to, Words value) { *to = static_cast<uint16_t>(value); }  // lower halves

  SIDESTEP_INLINE static Words bits_of(Floats value) {
    Words bits;
    std::memcpy(&bits, &value, sizeof bits);
    return bits;
  }
  SIDESTEP_INLINE static Floats float_of(Words bits) {
    Floats value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
  }
  template <class Mask, class Value>
  SIDESTEP_INLINE static Value select(Mask mask, Value yes, Value no) {
    return mask ? yes : no;
  }
  SIDESTEP_INLINE static Floats all(float value) { return value; }
  SIDESTEP_INLINE static Words all(uint32_t value) { return value; }
  SIDESTEP_INLINE static Words count_up() { return 0; }
  SIDESTEP_INLINE static void add_squares(Doubles& sums, Floats value) {
    sums += static_cast<double>(value) * value;  // which is exact
  }
  SIDESTEP_INLINE static double total(Doubles sums) { return sums; }
  SIDESTEP_INLINE static Floats sqrt(Floats value) { return std::sqrt(value); }

  // One rounding where the instruction set has it, two elsewhere.
  SIDESTEP_INLINE static Floats multiply_add(Floats a, Floats b, Floats c) {
#if defined(__FMA__) || defined(__AVX2__) || defined(__aarch64__) || defined(_M_ARM64)
    return std::fma(a, b, c);
#else
    return a * b + c;
#endif
  }
};

#ifdef SIDESTEP_WIDE
struct Wide {
#ifdef __AVX512F__
  static constexpr int64_t kLanes = 16;
#else
  static constexpr int64_t kLanes = 8;
#endif
  typedef float Floats __attribute__((vector_size(4 * kLanes)));
  typedef uint32_t Words __attribute__((vector_size(4 * kLanes)));
  typedef double HalfOfDoubles __attribute__((vector_size(4 * kLanes)));
  struct Doubles {
    HalfOfDoubles low, high;
  };

  SIDESTEP_INLINE static Floats load(const float* from) { return copied<Floats>(from); }
  SIDESTEP_INLINE static void store(float* to, Floats value) { std::memcpy(to, &value, sizeof value); }
  SIDESTEP_INLINE static Words bits_of(Floats value) { return copied<Words>(&value); }
  SIDESTEP_INLINE static Floats float_of(Words bits) { return copied<Floats>(&bits); }
  template <class Mask, class Value>
  SIDESTEP_INLINE static Value select(Mask mask, Value yes, Value no) {
    return mask ? yes : no;
  }
  SIDESTEP_INLINE static Floats all(float value) { return Floats{} + value; }
  SIDESTEP_INLINE static Words all(uint32_t value) { return Words{} + value; }
  SIDESTEP_INLINE static Words count_up() {
    Words counted = {};
    for (int64_t lane = 0; lane < kLanes; ++lane) counted[lane] = static_cast<uint32_t>(lane);
    return counted;
  }
  SIDESTEP_INLINE static double total(Doubles sums) {
    const HalfOfDoubles both = sums.low + sums.high;
    double total = 0.0;
    for (int64_t lane = 0; lane < kLanes / 2; ++lane) total += both[lane];
    return total;
  }
#ifdef __AVX512F__
  SIDESTEP_INLINE static Words load(const uint16_t* from) {
    return reinterpret_cast<Words>(_mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from))));
  }
  SIDESTEP_INLINE static void store(uint16_t* to, Words value) {
    const __m256i halves = _mm512_cvtepi32_epi16(reinterpret_cast<__m512i>(value));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), halves);
  }
  SIDESTEP_INLINE static void add_squares(Doubles& sums, Floats value) {
    const __m512d low = _mm512_cvtps_pd(_mm512_castps512_ps256(value));
    const __m512d high = _mm512_cvtps_pd(_mm512_extractf32x8_ps(value, 1));
    sums.low += low * low;
    sums.high += high * high;
  }
  SIDESTEP_INLINE static Floats sqrt(Floats value) { return _mm512_sqrt_ps(value); }
  SIDESTEP_INLINE static Floats multiply_add(Floats a, Floats b, Floats c) { return _mm512_fmadd_ps(a, b, c); }
#else
  SIDESTEP_INLINE static Words load(const uint16_t* from) {
    return reinterpret_cast<Words>(_mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from))));
  }
  SIDESTEP_INLINE static void store(uint16_t* to, Words value) {
    const __m256i words = reinterpret_cast<__m256i>(value & 0xFFFFu);
    const __m256i halves = _mm256_permute4x64_epi64(_mm256_packus_epi32(words, words), 0xD8);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm256_castsi256_si128(halves));
  }
  SIDESTEP_INLINE static void add_squares(Doubles& sums, Floats value) {
    const __m256d low = _mm256_cvtps_pd(_mm256_castps256_ps128(value));
    const __m256d high = _mm256_cvtps_pd(_mm256_extractf128_ps(value, 1));
    sums.low += low * low;
    sums.high += high * high;
  }
  SIDESTEP_INLINE static Floats sqrt(Floats value) { return _mm256_sqrt_ps(value); }
  SIDESTEP_INLINE static Floats multiply_add(Floats a, Floats b, Floats c) { return _mm256_fmadd_ps(a, b, c); }
#endif

 private:
  template <class Vector>
  SIDESTEP_INLINE static Vector copied(const void* from) {
    Vector value;
    std::memcpy(&value, from, sizeof value);
    return value;
  }
};
#else
using Wide = Single;
#endif

}  // namespace sidestep
