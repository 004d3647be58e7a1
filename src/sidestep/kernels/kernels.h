// One pass of an optimizer over memory: gradient, master, moments and parameter are read and written once.
//
// A plain C interface, described in native.py. Formulas and their order of operations are those of reference.py, which
// are those of torch's fused optimizers on the CPU.

#pragma once

#include <algorithm>

#include "numbers.h"

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
  int32_t value_type;     // Type; of 16 bits only with a master, or a correction
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
  void* values;
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

template <class Lanes>
struct Float32Values {
  using Floats = typename Lanes::Floats;
  explicit Float32Values(const Piece& piece) : at(static_cast<float*>(piece.values)) {}
  SIDESTEP_INLINE Floats load(int64_t i) const { return Lanes::load(at + i); }
  SIDESTEP_INLINE void store(int64_t i, Floats value) const { Lanes::store(at + i, value); }
  float* at;
};

// The master, if it still rounds to the values, and else the values, as somebody has written them. If the master is NaN,
// it does not matter what it is compared with: its value is NaN, too.
template <class Lanes>
struct BFloat16Values {
  using Floats = typename Lanes::Floats;
  using Words = typename Lanes::Words;
  explicit BFloat16Values(const Piece& piece) : at(static_cast<uint16_t*>(piece.values)), master(piece.master) {}
  SIDESTEP_INLINE Floats load(int64_t i) const {
    const Words kept = Lanes::bits_of(Lanes::load(master + i)), written = Lanes::load(at + i) << 16;
    const Words difference = (Numbers<Lanes>::rounded(kept) ^ written) & 0xFFFF0000u;
    return Lanes::float_of(Lanes::select(difference == 0u, kept, written));
  }
  SIDESTEP_INLINE void store(int64_t i, Floats value) const {
    Lanes::store(master + i, value);
    Lanes::store(at + i, Numbers<Lanes>::to_bfloat16(value));
  }
  uint16_t* at;
  float* master;
};

template <class Lanes>
struct Float16Values {
  using Floats = typename Lanes::Floats;
  using Words = typename Lanes::Words;
  explicit Float16Values(const Piece& piece) : at(static_cast<uint16_t*>(piece.values)), master(piece.master) {}
  SIDESTEP_INLINE Floats load(int64_t i) const {
    const Floats kept = Lanes::load(master + i);
    const Words value = Lanes::load(at + i);
    return Lanes::select(Numbers<Lanes>::to_float16(kept) == value, kept, Numbers<Lanes>::from_float16(value));
  }
  SIDESTEP_INLINE void store(int64_t i, Floats value) const {
    Lanes::store(master + i, value);
    Lanes::store(at + i, Numbers<Lanes>::to_float16(value));
  }
  uint16_t* at;
  float* master;
};

// The values are the upper half of the master, rounded, and the correction is its lower half. Somebody may have written
// another upper half: to zero nothing rounds up, and from infinity nothing is left over.
template <class Lanes>
struct SplitValues {
  using Floats = typename Lanes::Floats;
  using Words = typename Lanes::Words;
  explicit SplitValues(const Piece& piece) : at(static_cast<uint16_t*>(piece.values)), lower(piece.correction) {}
  SIDESTEP_INLINE Floats load(int64_t i) const {
    const Words upper = Lanes::load(at + i), kept = Lanes::load(lower + i), none = Lanes::all(0u);
    const Words magnitude = upper & 0x7FFFu, sign = kept & 0x8000u;
    Words below = Lanes::select(magnitude == 0u, Lanes::select(sign == 0u, kept, none), kept);
    below = Lanes::select(magnitude == 0x7F80u, Lanes::select(sign == 0u, none, kept), below);
    return Lanes::float_of(((upper << 16) - ((below & 0x8000u) << 1)) | below);
  }
  SIDESTEP_INLINE void store(int64_t i, Floats value) const {
    Lanes::store(at + i, Numbers<Lanes>::to_upper_half(value));
    Lanes::store(lower + i, Lanes::bits_of(value));
  }
  uint16_t* at;
  uint16_t* lower;
};

template <class Lanes>
struct Float32Moment {
  using Floats = typename Lanes::Floats;
  Float32Moment(const Piece& piece, int which) : at(static_cast<float*>(piece.moments[which])) {}
  SIDESTEP_INLINE Floats load(int64_t i) const { return Lanes::load(at + i); }
  SIDESTEP_INLINE void store(int64_t i, Floats value) const { Lanes::store(at + i, value); }
  float* at;
};

template <class Lanes>
struct BFloat16Moment {
  using Floats = typename Lanes::Floats;
  using Words = typename Lanes::Words;
  BFloat16Moment(const Piece& piece, int which)
      : at(static_cast<uint16_t*>(piece.moments[which])), start(piece.start), key(piece.keys[which]) {}
  SIDESTEP_INLINE Floats load(int64_t i) const { return Numbers<Lanes>::from_bfloat16(Lanes::load(at + i)); }
  SIDESTEP_INLINE void store(int64_t i, Floats value) const {
    const Words index = Lanes::count_up() + static_cast<uint32_t>(start + i);
    const Words random = Numbers<Lanes>::random_bits(index, key);
    Lanes::store(at + i, Numbers<Lanes>::to_bfloat16_at_random(value, random));
  }
  uint16_t* at;
  int64_t start;
  uint32_t key;
};

// The rules. `step` updates as many elements as there are lanes, the first of which is `i`.

template <bool kAmsgrad, class Lanes, class Values, class Moment>
struct Adam {
  using Floats = typename Lanes::Floats;
  Adam(const Rule& rule, const Piece& piece)
      : rule(rule), piece(piece), p(piece), m(piece, 0), v(piece, 1), most(piece, kAmsgrad ? 2 : 1) {}

  SIDESTEP_INLINE void step(int64_t i, Floats gradient) const {
    const Floats before = p.load(i), first_before = m.load(i);
    if (has_decay) {  // or infinite values would become NaN
      gradient = Lanes::multiply_add(before, Lanes::all(rule.coupled_decay), gradient);
    }
    const Floats first = Lanes::multiply_add(Lanes::all(weight), gradient - first_before,
                                             is_small ? first_before : gradient);
    const Floats second =
        Lanes::multiply_add(gradient * rule.second_weight, gradient, v.load(i) * rule.second_decay);
    Floats largest = second;
    if (kAmsgrad) {
      const Floats largest_before = most.load(i);
      const auto stays = (largest_before > second) | (largest_before != largest_before);  // NaN does
      largest = Lanes::select(stays, largest_before, second);
      most.store(i, largest);
    }
    const Floats denominator = Lanes::sqrt(largest) / piece.second_scale + rule.epsilon;
    m.store(i, first);
    v.store(i, second);
    p.store(i, before * rule.decay + first * piece.step_size / denominator);
  }

  const Rule rule;
  const Piece piece;
  const bool has_decay = rule.coupled_decay != 0.0f, is_small = rule.first_weight < 0.5f;
  const float weight = is_small ? rule.first_weight : rule.first_weight - 1.0f;
  const Values p;
  const Moment m, v, most;
};

template <class Lanes, class Values, class Moment>
struct Sgd {
  using Floats = typename Lanes::Floats;
  Sgd(const Rule& rule, const Piece& piece) : rule(rule), piece(piece), p(piece), m(piece, 0) {}

  SIDESTEP_INLINE void step(int64_t i, Floats gradient) const {
    const Floats before = p.load(i);
    if (rule.coupled_decay != 0.0f) {
      gradient = Lanes::multiply_add(before, Lanes::all(rule.coupled_decay), gradient);
    }
    Floats direction = gradient;
    if (piece.moments[0] != nullptr) {
      Floats moment = gradient;
      if (!piece.is_first) {
        moment = Lanes::multiply_add(gradient, Lanes::all(rule.first_weight), m.load(i) * rule.first_decay);
      }
      direction = rule.is_nesterov ? Lanes::multiply_add(Lanes::all(rule.first_decay), moment, gradient) : moment;
      m.store(i, moment);
    }
    p.store(i, Lanes::multiply_add(direction, Lanes::all(piece.step_size), before));
  }

  const Rule rule;
  const Piece piece;
  const Values p;
  const Moment m;
};

template <class Lanes, class Values, class Moment>
struct Lion {
  using Floats = typename Lanes::Floats;
  Lion(const Rule& rule, const Piece& piece) : rule(rule), piece(piece), p(piece), m(piece, 0) {}

  SIDESTEP_INLINE void step(int64_t i, Floats gradient) const {
    const Floats before = p.load(i), moment = m.load(i), zero = Lanes::all(0.0f);
    const Floats direction = Lanes::multiply_add(Lanes::all(rule.first_weight), gradient, moment * rule.first_decay);
    Floats sign = Lanes::select(direction < zero, Lanes::all(-1.0f), direction);  // 0 and NaN stay
    sign = Lanes::select(direction > zero, Lanes::all(1.0f), sign);
    m.store(i, Lanes::multiply_add(Lanes::all(rule.second_weight), gradient, moment * rule.second_decay));
    p.store(i, before * rule.decay + sign * piece.step_size);
  }

  const Rule rule;
  const Piece piece;
  const Values p;
  const Moment m;
};

template <class Lanes, class Values, class Moment>
using PlainAdam = Adam<false, Lanes, Values, Moment>;

template <class Lanes, class Values, class Moment>
using Amsgrad = Adam<true, Lanes, Values, Moment>;

// As many steps as there are whole lanes. Returns where they end.
template <class Lanes, class Kind>
int64_t run(const Kind& kind, const Rule& rule, const Piece& piece, int64_t begin, int64_t end) {
  const float factor = rule.factor * piece.factor;
  const void* gradient = piece.gradient;
  const int32_t type = rule.gradient_type;
  int64_t i = begin;
  SIDESTEP_INDEPENDENT
  for (; i <= end - Lanes::kLanes; i += Lanes::kLanes) {
    kind.step(i, Numbers<Lanes>::load(gradient, type, i) * factor);
  }
  return i;
}

template <template <class, class, class> class Kind, template <class> class Values, template <class> class Moment>
void update_with(const Rule& rule, const Piece& piece, int64_t begin, int64_t end) {
  const Kind<Wide, Values<Wide>, Moment<Wide>> wide(rule, piece);
  const Kind<Single, Values<Single>, Moment<Single>> single(rule, piece);
  run<Single>(single, rule, piece, run<Wide>(wide, rule, piece, begin, end), end);
}

template <template <class, class, class> class Kind, template <class> class Values>
void update_values(const Rule& rule, const Piece& piece, int64_t begin, int64_t end) {
  if (rule.moment_type == kFloat32) {
    update_with<Kind, Values, Float32Moment>(rule, piece, begin, end);
  } else {
    update_with<Kind, Values, BFloat16Moment>(rule, piece, begin, end);
  }
}

template <template <class, class, class> class Kind>
void update(const Rule& rule, const Piece& piece, int64_t begin, int64_t end) {
  if (rule.value_type == kFloat32) {
    update_values<Kind, Float32Values>(rule, piece, begin, end);
  } else if (piece.correction != nullptr) {
    update_values<Kind, SplitValues>(rule, piece, begin, end);
  } else if (rule.value_type == kBFloat16) {
    update_values<Kind, BFloat16Values>(rule, piece, begin, end);
  } else {
    update_values<Kind, Float16Values>(rule, piece, begin, end);
  }
}

// Adds, and adds the squares of the sums to `squares`. Returns where whole lanes end.
template <class Lanes, int32_t kType>
int64_t add_of(void* total, const void* other, int64_t begin, int64_t end, double& squares) {
  using Floats = typename Lanes::Floats;
  using Words = typename Lanes::Words;
  typename Lanes::Doubles sums = {};
  int64_t i = begin;
  for (; i <= end - Lanes::kLanes; i += Lanes::kLanes) {
    Floats value = Numbers<Lanes>::load(total, kType, i) + Numbers<Lanes>::load(other, kType, i);
    if (kType == kFloat32) {
      Lanes::store(static_cast<float*>(total) + i, value);
    } else {
      const bool is_brain = kType == kBFloat16;
      const Words halves = is_brain ? Numbers<Lanes>::to_bfloat16(value) : Numbers<Lanes>::to_float16(value);
      Lanes::store(static_cast<uint16_t*>(total) + i, halves);
      value = is_brain ? Numbers<Lanes>::from_bfloat16(halves) : Numbers<Lanes>::from_float16(halves);
    }
    Lanes::add_squares(sums, value);
  }
  squares += Lanes::total(sums);
  return i;
}

template <int32_t kType>
double add(void* total, const void* other, int64_t begin, int64_t end) {
  double squares = 0.0;
  const int64_t rest = add_of<Wide, kType>(total, other, begin, end, squares);
  add_of<Single, kType>(total, other, rest, end, squares);
  return squares;
}

constexpr int64_t kSquares = 64 * 1024;  // elements of which squares are summed together

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
      sidestep::update<sidestep::Amsgrad>(*rule, piece, first, last);
    } else if (rule->kind == 0) {
      sidestep::update<sidestep::PlainAdam>(*rule, piece, first, last);
    } else if (rule->kind == 1) {
      sidestep::update<sidestep::Sgd>(*rule, piece, first, last);
    } else {
      sidestep::update<sidestep::Lion>(*rule, piece, first, last);
    }
  }
}

// `total` += `other`, elements [begin, end), of one type; and of each `kSquares` elements, in the order of memory, the
// sum of the squares of what `total` then has. `begin` is a multiple of `kSquares`.
SIDESTEP_EXPORT void sidestep_add(void* total, const void* other, int32_t type, int64_t begin, int64_t end,
                                  double* squares) {
  const sidestep::DefaultArithmetic arithmetic;
  for (int64_t start = begin; start < end; start += sidestep::kSquares) {
    const int64_t stop = std::min(start + sidestep::kSquares, end);
    double& sum = squares[start / sidestep::kSquares];
    if (type == sidestep::kFloat32) {
      sum = sidestep::add<sidestep::kFloat32>(total, other, start, stop);
    } else if (type == sidestep::kBFloat16) {
      sum = sidestep::add<sidestep::kBFloat16>(total, other, start, stop);
    } else {
      sum = sidestep::add<sidestep::kFloat16>(total, other, start, stop);
    }
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
