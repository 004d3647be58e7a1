// Numbers as they lie in memory, a block at a time: conversions, rounding, and stores that pass the caches by.
//
// A block fits into the first-level cache, so that a loop may do one simple thing, which compilers vectorise, and memory
// is still passed over once. Each element is treated alike wherever it lies: no result depends on how work is cut.

#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(__SSE2__) || defined(_M_X64)
#include <emmintrin.h>
#define SIDESTEP_STREAMS 1
#endif

// What is called for each element, in loops that are vectorised only if nothing in them is a call.
#if defined(_MSC_VER)
#define SIDESTEP_INLINE __forceinline
#else
#define SIDESTEP_INLINE inline __attribute__((always_inline))
#endif

namespace sidestep {

constexpr int64_t kBlock = 1024;  // elements
constexpr int64_t kLine = 64;     // bytes
constexpr int64_t kSquares = 64 * kBlock;  // elements of which squares are summed together

enum Type : int32_t { kFloat32 = 0, kBFloat16 = 1, kFloat16 = 2 };

SIDESTEP_INLINE uint32_t bits_of(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

SIDESTEP_INLINE float float_of(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

// One rounding where the instruction set has it, two elsewhere.
SIDESTEP_INLINE float multiply_add(float a, float b, float c) {
#if defined(__FMA__) || defined(__AVX2__) || defined(__aarch64__) || defined(_M_ARM64)
  return std::fma(a, b, c);
#else
  return a * b + c;
#endif
}

SIDESTEP_INLINE float from_bfloat16(uint16_t value) { return float_of(static_cast<uint32_t>(value) << 16); }

// To the nearest, ties to even; NaN stays NaN.
SIDESTEP_INLINE uint16_t to_bfloat16(float value) {
  const uint32_t bits = bits_of(value);
  const uint32_t rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16;
  const bool is_nan = (bits & 0x7FFFFFFF) > 0x7F800000;
  return static_cast<uint16_t>(is_nan ? 0x7FC0 : rounded);
}

// To the nearest, ties away from zero: of all ways to round, the one that 16 more bits can undo.
SIDESTEP_INLINE uint16_t to_upper_half(float value) {
  const uint32_t bits = bits_of(value);
  const bool is_finite = (bits & 0x7F800000) != 0x7F800000;
  return static_cast<uint16_t>((bits + (is_finite ? 0x8000 : 0)) >> 16);
}

// 1.m × 2^e from the exponent and mantissa moved into place, and the exponent's bias mended by a multiplication, which
// is exact also for denormals.
SIDESTEP_INLINE float from_float16(uint16_t value) {
  const uint32_t magnitude = value & 0x7FFF;
  const float finite = float_of(magnitude << 13) * 0x1p112f;
  const uint32_t special = 0x7F800000 | (magnitude << 13);
  const uint32_t bits = magnitude >= 0x7C00 ? special : bits_of(finite);
  return float_of(bits | (static_cast<uint32_t>(value & 0x8000) << 16));
}

// To the nearest, ties to even, by an addition that leaves the wanted bits at the end of the mantissa.
SIDESTEP_INLINE uint16_t to_float16(float value) {
  const uint32_t bits = bits_of(value);
  const uint32_t magnitude = bits & 0x7FFFFFFF;
  const uint32_t denormal = bits_of(float_of(magnitude) + 0.5f) - bits_of(0.5f);
  const uint32_t normal = (magnitude + 0xFFF + ((magnitude >> 13) & 1) - (112u << 23)) >> 13;
  uint32_t rounded = magnitude < (113u << 23) ? denormal : normal;
  rounded = magnitude >= (143u << 23) ? 0x7C00 : rounded;     // 2^16 and more
  rounded = magnitude > 0x7F800000 ? 0x7E00 : rounded;         // NaN
  rounded = rounded > 0x7C00 && magnitude <= 0x7F800000 ? 0x7C00 : rounded;
  return static_cast<uint16_t>(rounded | ((bits >> 16) & 0x8000));
}

// 16 random bits of element `index` under `key`; sidestep.engine.codecs says where this comes from.
SIDESTEP_INLINE uint32_t random_bits(uint32_t index, uint32_t key) {
  uint32_t bits = index ^ key;
  bits = (bits ^ (bits >> 16)) * 0x7FEB352Du;
  bits = (bits ^ (bits >> 15)) * 0x846CA68Bu;
  return (bits ^ (bits >> 16)) & 0xFFFF;
}

// Up or down with the probabilities that keep the mean; what is not finite stays as it is.
SIDESTEP_INLINE uint16_t to_bfloat16_at_random(float value, uint32_t random) {
  const uint32_t bits = bits_of(value);
  const bool is_finite = (bits & 0x7F800000) != 0x7F800000;
  const bool is_nan = (bits & 0x7FFFFFFF) > 0x7F800000;
  const uint32_t rounded = (bits + (is_finite ? random : 0)) >> 16;
  return static_cast<uint16_t>(is_nan ? 0x7FC0 : rounded);
}

inline void load(float* to, const void* from, int32_t type, int64_t start, int64_t count) {
  const uint16_t* halves = static_cast<const uint16_t*>(from) + start;
  if (type == kFloat32) {
    std::memcpy(to, static_cast<const float*>(from) + start, count * sizeof(float));
  } else if (type == kBFloat16) {
    for (int64_t i = 0; i < count; ++i) to[i] = from_bfloat16(halves[i]);
  } else {
    for (int64_t i = 0; i < count; ++i) to[i] = from_float16(halves[i]);
  }
}

inline void store(void* to, const float* from, int32_t type, int64_t start, int64_t count) {
  uint16_t* halves = static_cast<uint16_t*>(to) + start;
  if (type == kFloat32) {
    std::memcpy(static_cast<float*>(to) + start, from, count * sizeof(float));
  } else if (type == kBFloat16) {
    for (int64_t i = 0; i < count; ++i) halves[i] = to_bfloat16(from[i]);
  } else {
    for (int64_t i = 0; i < count; ++i) halves[i] = to_float16(from[i]);
  }
}

// For memory that nobody here reads soon: its lines are not fetched first.
inline void stream(void* to, const void* from, int64_t byte_count) {
#ifdef SIDESTEP_STREAMS
  char* target = static_cast<char*>(to);
  const char* source = static_cast<const char*>(from);
  const int64_t head = (kLine - reinterpret_cast<uintptr_t>(target) % kLine) % kLine;
  if (head < byte_count) {
    std::memcpy(target, source, head);
    int64_t done = head;
    for (; done + kLine <= byte_count; done += kLine) {
      for (int part = 0; part < kLine; part += 16) {
        const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(source + done + part));
        _mm_stream_si128(reinterpret_cast<__m128i*>(target + done + part), bytes);
      }
    }
    std::memcpy(target + done, source + done, byte_count - done);
    return;
  }
#endif
  std::memcpy(to, from, byte_count);
}

// Denormals are numbers, and rounding is to the nearest, whatever the thread is set to: it differs between threads.
class DefaultArithmetic {
 public:
#ifdef SIDESTEP_STREAMS
  DefaultArithmetic() : before_(_mm_getcsr()) { _mm_setcsr(0x1F80); }
  ~DefaultArithmetic() { _mm_setcsr(before_); }

 private:
  unsigned int before_;
#else
  DefaultArithmetic() {}
#endif
};

inline void finish_streams() {
#ifdef SIDESTEP_STREAMS
  _mm_sfence();
#endif
}

inline int64_t size_of(int32_t type) { return type == kFloat32 ? 4 : 2; }

}  // namespace sidestep
