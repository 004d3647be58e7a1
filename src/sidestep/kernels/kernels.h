// One pass of an optimizer over memory: gradient, master, moments and parameter are read and written once.
//
// A plain C interface, described in native.py. Formulas and their order of operations are those of reference.py, which
// are those of torch's fused optimizers on the CPU.

#pragma once

#include <algorithm>

#include "blocks.h"

#if defined(__clang__)
#define SIDESTEP_INDEPENDENT _Pragma("clang loop vectorize(assume_safety)")
#elif defined(__GNUC__)
#define SIDESTEP_INDEPENDENT _Pragma("GCC ivdep")
#elif defined(_MSC_VER)
#define SIDESTEP_INDEPENDENT __pragma(loop(ivdep))
#else
#define SIDESTEP_INDEPENDENT
#endif

#if defined(_WIN32)
#define SIDESTEP_EXPORT extern "C" __declspec(dllexport)
#else
#define SIDESTEP_EXPORT extern "C" __attribute__((visibility("default")))
#endif

namespace sidestep {

// What all pieces of one call have in common.
struct Rule {
  int32_t kind;           // 0 Adam, 1 SGD, 2 Lion
  int32_t gradient_type;  // Type
  int32_t value_type;     // Type, of `values` and `outgoing`
  int32_t moment_type;    // Type, fp32 or bf16
  int32_t is_amsgrad;
  int32_t is_nesterov;
  float factor;           // of the gradient, before all else; negative to maximize
  float coupled_decay;    // added to the gradient, times the value
  float decay;            // of the value: 1 - lr × weight decay
  float first_weight;     // Adam, Lion: 1 - beta1; SGD: 1 - dampening
  float first_decay;      // Lion: beta1; SGD: momentum
  float second_decay;     // Adam, Lion: beta2
  float second_weight;    // Adam, Lion: 1 - beta2
  float epsilon;
};

// One piece of one parameter. Null where there is no such thing.
struct Piece {
  int64_t count;         // elements
  int64_t start;         // index of the first of them in its parameter
  const void* gradient;
  void* values;          // read; written unless there is `outgoing`
  void* outgoing;        // where the new values go instead
  float* master;         // of the values
  uint16_t* correction;  // the lower half of the master of which the values are the upper half, rounded
  void* moments[3];
  uint32_t keys[3];      // for rounding moments at random
  float step_size;       // negative
  float second_scale;    // Adam: square root of the second moment's bias correction
  int32_t is_first;      // SGD: there is no momentum yet
  float factor;          // of the gradient, beside the rule's
};

namespace {

// How a piece's values lie in memory: `load` gives them in fp32, `store` writes what has become of them.

struct Float32Values {
  explicit Float32Values(const Piece& piece, void* to, int64_t start)
      : from(static_cast<const float*>(piece.values) + start), to(static_cast<float*>(to)) {}
  SIDESTEP_INLINE float load(int64_t i) const { return from[i]; }
  SIDESTEP_INLINE void store(int64_t i, float value) const { to[i] = value; }
  const float* from;
  float* to;
};

struct BFloat16 {
  SIDESTEP_INLINE static float decode(uint16_t value) { return from_bfloat16(value); }
  SIDESTEP_INLINE static uint16_t encode(float value) { return to_bfloat16(value); }
};

struct Float16 {
  SIDESTEP_INLINE static float decode(uint16_t value) { return from_float16(value); }
  SIDESTEP_INLINE static uint16_t encode(float value) { return to_float16(value); }
};

template <class Short>
struct ShortValues {
  explicit ShortValues(const Piece& piece, void* to, int64_t start)
      : from(static_cast<const uint16_t*>(piece.values) + start), to(static_cast<uint16_t*>(to)) {}
  SIDESTEP_INLINE float load(int64_t i) const { return Short::decode(from[i]); }
  SIDESTEP_INLINE void store(int64_t i, float value) const { to[i] = Short::encode(value); }
  const uint16_t* from;
  uint16_t* to;
};

// The master, if it still rounds to the values, and else the values, as somebody has written them.
template <class Short>
struct MasteredValues {
  explicit MasteredValues(const Piece& piece, void* to, int64_t start)
      : from(static_cast<const uint16_t*>(piece.values) + start),
        to(static_cast<uint16_t*>(to)),
        master(piece.master + start) {}
  SIDESTEP_INLINE float load(int64_t i) const {
    const float kept = master[i];
    const uint16_t value = from[i];
    const float written = Short::decode(value);
    return Short::encode(kept) == value ? kept : written;
  }
  SIDESTEP_INLINE void store(int64_t i, float value) const {
    master[i] = value;
    to[i] = Short::encode(value);
  }
  const uint16_t* from;
  uint16_t* to;
  float* master;
};

// The values are the upper half of the master, rounded, and the correction is its lower half.
struct SplitValues {
  explicit SplitValues(const Piece& piece, void* to, int64_t start)
      : from(static_cast<const uint16_t*>(piece.values) + start),
        to(static_cast<uint16_t*>(to)),
        lower(piece.correction + start) {}
  SIDESTEP_INLINE float load(int64_t i) const {
    const uint32_t rounded_up = (lower[i] & 0x8000u) << 1;
    return float_of(((static_cast<uint32_t>(from[i]) << 16) - rounded_up) | lower[i]);
  }
  SIDESTEP_INLINE void store(int64_t i, float value) const {
    to[i] = to_upper_half(value);
    lower[i] = static_cast<uint16_t>(bits_of(value));
  }
  const uint16_t* from;
  uint16_t* to;
  uint16_t* lower;
};

struct Float32Moment {
  explicit Float32Moment(const Piece& piece, int which, int64_t start)
      : at(static_cast<float*>(piece.moments[which]) + start) {}
  SIDESTEP_INLINE float load(int64_t i) const { return at[i]; }
  SIDESTEP_INLINE void store(int64_t i, float value) const { at[i] = value; }
  float* at;
};

struct BFloat16Moment {
  explicit BFloat16Moment(const Piece& piece, int which, int64_t start)
      : at(static_cast<uint16_t*>(piece.moments[which]) + start),
        first(static_cast<uint32_t>(piece.start + start)),
        key(piece.keys[which]) {}
  SIDESTEP_INLINE float load(int64_t i) const { return from_bfloat16(at[i]); }
  SIDESTEP_INLINE void store(int64_t i, float value) const {
    at[i] = to_bfloat16_at_random(value, random_bits(first + static_cast<uint32_t>(i), key));
  }
  uint16_t* at;
  uint32_t first;
  uint32_t key;
};

// The rules. Each has the gradient in fp32, and updates elements [0, count) of a block.

template <bool kAmsgrad>
struct Adam {
  template <class Values, class Moment>
  static void run(const Values p, const float* g, const Rule& rule, const Piece& piece, int64_t start, int64_t count) {
    const Moment m(piece, 0, start), v(piece, 1, start), most(piece, kAmsgrad ? 2 : 1, start);
    const bool is_small = rule.first_weight < 0.5f;
    const float weight = is_small ? rule.first_weight : rule.first_weight - 1.0f;
    const float decay = rule.decay, coupled_decay = rule.coupled_decay;
    const bool has_decay = coupled_decay != 0.0f;  // or infinite values would become NaN
    const float second_decay = rule.second_decay, second_weight = rule.second_weight;
    const float scale = piece.second_scale, epsilon = rule.epsilon, step_size = piece.step_size;
    SIDESTEP_INDEPENDENT
    for (int64_t i = 0; i < count; ++i) {
      const float before = p.load(i), first_before = m.load(i);
      const float gradient = has_decay ? multiply_add(before, coupled_decay, g[i]) : g[i];
      const float first = multiply_add(weight, gradient - first_before, is_small ? first_before : gradient);
      const float second = multiply_add(second_weight * gradient, gradient, v.load(i) * second_decay);
      float largest = second;
      if (kAmsgrad) {
        const float largest_before = most.load(i);
        largest = largest_before > second || largest_before != largest_before ? largest_before : second;  // NaN stays
        most.store(i, largest);
      }
      const float denominator = std::sqrt(largest) / scale + epsilon;
      m.store(i, first);
      v.store(i, second);
      p.store(i, before * decay + step_size * first / denominator);
    }
  }
};

struct Sgd {
  template <class Values, class Moment>
  static void run(const Values p, const float* g, const Rule& rule, const Piece& piece, int64_t start, int64_t count) {
    const float coupled_decay = rule.coupled_decay, step_size = piece.step_size;
    const bool has_decay = coupled_decay != 0.0f;
    if (piece.moments[0] == nullptr) {
      SIDESTEP_INDEPENDENT
      for (int64_t i = 0; i < count; ++i) {
        const float before = p.load(i);
        const float gradient = has_decay ? multiply_add(before, coupled_decay, g[i]) : g[i];
        p.store(i, multiply_add(gradient, step_size, before));
      }
      return;
    }
    const Moment m(piece, 0, start);
    const bool is_first = piece.is_first != 0, is_nesterov = rule.is_nesterov != 0;
    const float momentum = rule.first_decay, weight = rule.first_weight;
    SIDESTEP_INDEPENDENT
    for (int64_t i = 0; i < count; ++i) {
      const float before = p.load(i);
      const float gradient = has_decay ? multiply_add(before, coupled_decay, g[i]) : g[i];
      const float moment = is_first ? gradient : multiply_add(gradient, weight, m.load(i) * momentum);
      const float direction = is_nesterov ? multiply_add(momentum, moment, gradient) : moment;
      m.store(i, moment);
      p.store(i, multiply_add(direction, step_size, before));
    }
  }
};

struct Lion {
  template <class Values, class Moment>
  static void run(const Values p, const float* g, const Rule& rule, const Piece& piece, int64_t start, int64_t count) {
    const Moment m(piece, 0, start);
    const float decay = rule.decay, step_size = piece.step_size;
    const float first_decay = rule.first_decay, first_weight = rule.first_weight;
    const float second_decay = rule.second_decay, second_weight = rule.second_weight;
    SIDESTEP_INDEPENDENT
    for (int64_t i = 0; i < count; ++i) {
      const float before = p.load(i), moment = m.load(i), gradient = g[i];
      const float direction = multiply_add(first_weight, gradient, moment * first_decay);
      const float sign = direction > 0.0f ? 1.0f : (direction < 0.0f ? -1.0f : direction);  // 0 and NaN stay
      m.store(i, multiply_add(second_weight, gradient, moment * second_decay));
      p.store(i, before * decay + step_size * sign);
    }
  }
};

struct Buffers {
  alignas(64) float gradient[kBlock];
  alignas(64) char outgoing[kBlock * sizeof(float)];
};

// The block's gradient in fp32, times its factors: as it lies, if there is nothing to do.
const float* gradient_of(Buffers& buffers, const Rule& rule, const Piece& piece, int64_t start, int64_t count) {
  const float factor = rule.factor * piece.factor;
  if (rule.gradient_type == kFloat32 && factor == 1.0f) return static_cast<const float*>(piece.gradient) + start;
  load(buffers.gradient, piece.gradient, rule.gradient_type, start, count);
  if (factor != 1.0f) {
    for (int64_t i = 0; i < count; ++i) buffers.gradient[i] *= factor;
  }
  return buffers.gradient;
}

template <class Kind, class Values, class Moment>
void update(const Rule& rule, const Piece& piece, int64_t begin, int64_t end) {
  Buffers buffers;
  const int64_t size = size_of(rule.value_type);
  for (int64_t start = begin; start < end; start += kBlock) {
    const int64_t count = std::min(kBlock, end - start);
    char* values = static_cast<char*>(piece.values) + start * size;
    const float* gradient = gradient_of(buffers, rule, piece, start, count);
    const Values p(piece, piece.outgoing != nullptr ? buffers.outgoing : values, start);
    Kind::template run<Values, Moment>(p, gradient, rule, piece, start, count);
    if (piece.outgoing != nullptr) {
      stream(static_cast<char*>(piece.outgoing) + start * size, buffers.outgoing, count * size);
    }
  }
}

template <class Kind, class Values>
void update_with(const Rule& rule, const Piece& piece, int64_t begin, int64_t end) {
  if (rule.moment_type == kFloat32) {
    update<Kind, Values, Float32Moment>(rule, piece, begin, end);
  } else {
    update<Kind, Values, BFloat16Moment>(rule, piece, begin, end);
  }
}

template <class Kind, class Short>
void update_short(const Rule& rule, const Piece& piece, int64_t begin, int64_t end) {
  if (piece.master != nullptr) {
    update_with<Kind, MasteredValues<Short>>(rule, piece, begin, end);
  } else {
    update_with<Kind, ShortValues<Short>>(rule, piece, begin, end);
  }
}

template <class Kind>
void update_piece(const Rule& rule, const Piece& piece, int64_t begin, int64_t end) {
  if (rule.value_type == kFloat32) {
    update_with<Kind, Float32Values>(rule, piece, begin, end);
  } else if (piece.correction != nullptr) {
    update_with<Kind, SplitValues>(rule, piece, begin, end);
  } else if (rule.value_type == kBFloat16) {
    update_short<Kind, BFloat16>(rule, piece, begin, end);
  } else {
    update_short<Kind, Float16>(rule, piece, begin, end);
  }
}

// Adds, and returns the sum of the squares of the sums. Eight lanes, whatever the instruction set has, so that they are
// added up in one order; squares of fp32 numbers are exact in double precision, with a fused multiply-add or without.
double add(void* total, const void* other, int32_t type, int64_t begin, int64_t count) {
  constexpr int64_t kLanes = 8;
  alignas(64) float sum[kBlock], more[kBlock];
  double lanes[kLanes] = {};
  for (int64_t start = begin; start < begin + count; start += kBlock) {
    const int64_t length = std::min(kBlock, begin + count - start);
    load(sum, total, type, start, length);
    load(more, other, type, start, length);
    for (int64_t i = 0; i < length; ++i) sum[i] += more[i];
    store(total, sum, type, start, length);
    if (type != kFloat32) load(sum, total, type, start, length);  // as they were rounded
    std::fill(sum + length, sum + kBlock, 0.0f);
    for (int64_t i = 0; i < kBlock; i += kLanes) {
      for (int64_t lane = 0; lane < kLanes; ++lane) {
        const double value = sum[i + lane];
        lanes[lane] += value * value;
      }
    }
  }
  return ((lanes[0] + lanes[4]) + (lanes[2] + lanes[6])) + ((lanes[1] + lanes[5]) + (lanes[3] + lanes[7]));
}

}  // namespace
}  // namespace sidestep

// Update elements [begin, end) of the pieces laid end to end. Several threads may have a part each.
SIDESTEP_EXPORT void sidestep_update(const sidestep::Rule* rule, const sidestep::Piece* pieces, int64_t piece_count,
                                     int64_t begin, int64_t end) {
  const sidestep::DefaultArithmetic arithmetic;
  int64_t offset = 0;
  for (int64_t k = 0; k < piece_count && offset < end; ++k) {
    const sidestep::Piece& piece = pieces[k];
    const int64_t first = std::max<int64_t>(0, begin - offset), last = std::min(piece.count, end - offset);
    offset += piece.count;
    if (first >= last) continue;
    if (rule->kind == 0 && rule->is_amsgrad) {
      sidestep::update_piece<sidestep::Adam<true>>(*rule, piece, first, last);
    } else if (rule->kind == 0) {
      sidestep::update_piece<sidestep::Adam<false>>(*rule, piece, first, last);
    } else if (rule->kind == 1) {
      sidestep::update_piece<sidestep::Sgd>(*rule, piece, first, last);
    } else {
      sidestep::update_piece<sidestep::Lion>(*rule, piece, first, last);
    }
  }
  sidestep::finish_streams();
}

// `total` += `other`, elements [begin, end), of one type; and of each `kSquares` elements, in the order of memory, the sum of
// the squares of what `total` then has. `begin` is a multiple of `kSquares`.
SIDESTEP_EXPORT void sidestep_add(void* total, const void* other, int32_t type, int64_t begin, int64_t end,
                                  double* squares) {
  const sidestep::DefaultArithmetic arithmetic;
  for (int64_t start = begin; start < end; start += sidestep::kSquares) {
    const int64_t count = std::min(sidestep::kSquares, end - start);
    squares[start / sidestep::kSquares] = sidestep::add(total, other, type, start, count);
  }
}

// Of the structures' sizes: a library that was built from other sources does not fit.
SIDESTEP_EXPORT int32_t sidestep_layout(void) {
  return static_cast<int32_t>(sizeof(sidestep::Rule) * 1000 + sizeof(sidestep::Piece));
}

// The best instruction set of this machine for which there are builds: 0 any, 1 AVX2 with FMA, 2 AVX-512.
SIDESTEP_EXPORT int32_t sidestep_level(void) {
#if (defined(__x86_64__) || defined(__i386__)) && (defined(__GNUC__) || defined(__clang__))
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
      __builtin_cpu_supports("avx512dq")) {
    return 2;
  }
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return 1;
#endif
  return 0;
}
