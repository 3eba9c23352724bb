// Compiled once per instruction set, as VARIANT. The loops are plain C for the compiler to vectorise: the order of the
// additions is fixed, so no option that lets it reorder or fuse them may be used.
#include "reduce.h"

#include <stdint.h>
#include <string.h>
#if defined(__F16C__)
#include <immintrin.h>
#endif

#ifndef VARIANT
#define VARIANT reduce_baseline
#endif

// Elements that are combined before the next ones are touched: 8 KiB of floats, a quarter of a first-level cache.
#define BLOCK 2048

// Elements do not depend on each other, even where the target is a source. Without this the compiler would check at
// run time whether the arrays overlap, and combine one element at a time where they are the same.
#if defined(__clang__)
#define INDEPENDENT _Pragma("clang loop vectorize(assume_safety)")
#else
#define INDEPENDENT _Pragma("GCC ivdep")
#endif

#define EACH(n, statement)                  \
  do {                                      \
    INDEPENDENT                             \
    for (size_t i = 0; i < (n); i++) {      \
      statement;                            \
    }                                       \
  } while (0)

static inline uint32_t bits_of_float(float value) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof bits);
  return bits;
}

static inline float float_of_bits(uint32_t bits) {
  float value;
  memcpy(&value, &bits, sizeof value);
  return value;
}

static inline uint64_t bits_of_double(double value) {
  uint64_t bits;
  memcpy(&bits, &value, sizeof bits);
  return bits;
}

static inline double double_of_bits(uint64_t bits) {
  double value;
  memcpy(&value, &bits, sizeof value);
  return value;
}

// Which NaN an addition gives differs between processors and kernels: all write this one.
static inline float canonical_float(float value) {
  return value == value ? value : float_of_bits(0x7fc00000u);
}

static inline double canonical_double(double value) {
  return value == value ? value : double_of_bits(0x7ff8000000000000ull);
}

static inline int32_t canonical_int(int32_t value) {
  return value;
}

static inline float sum_float(float a, float b) {
  return a + b;
}

static inline double sum_double(double a, double b) {
  return a + b;
}

static inline int32_t sum_int(int32_t a, int32_t b) {
  return (int32_t)((uint32_t)a + (uint32_t)b);
}

// As Math.max and Math.min: NaN if one is NaN, and -0 is less than 0. Equal numbers differ in the sign of a zero at most.
#define EXTREMES(type, name, bits, of_bits, quiet)                                  \
  static inline type max_##name(type a, type b) {                                      \
    type larger = a > b ? a : b;                                                       \
    type ordered = a == b ? of_bits(bits(a) & bits(b)) : larger;                       \
    return (a == a) & (b == b) ? ordered : of_bits(quiet);                             \
  }                                                                                    \
  static inline type min_##name(type a, type b) {                                      \
    type smaller = a < b ? a : b;                                                      \
    type ordered = a == b ? of_bits(bits(a) | bits(b)) : smaller;                      \
    return (a == a) & (b == b) ? ordered : of_bits(quiet);                             \
  }

EXTREMES(float, float, bits_of_float, float_of_bits, 0x7fc00000u)
EXTREMES(double, double, bits_of_double, double_of_bits, 0x7ff8000000000000ull)

static inline int32_t max_int(int32_t a, int32_t b) {
  return a > b ? a : b;
}

static inline int32_t min_int(int32_t a, int32_t b) {
  return a < b ? a : b;
}

// Two ranks need one pass. With more, the partial result stays in `partial`, and the target, which may be a source that
// is still to be read, is written last.
#define REDUCE_BLOCK(type, name, op)                                                                          \
  static void op##_block_##name(const type *const *sources, int ranks, size_t start, type *target, size_t n) { \
    type partial[BLOCK];                                                                                      \
    const type *first = sources[0] + start;                                                                   \
    for (int rank = 1; rank < ranks - 1; rank++) {                                                            \
      const type *next = sources[rank] + start;                                                               \
      EACH(n, partial[i] = op##_##name(first[i], next[i]));                                                   \
      first = partial;                                                                                        \
    }                                                                                                         \
    const type *last = sources[ranks - 1] + start;                                                            \
    EACH(n, target[i] = canonical_##name(op##_##name(first[i], last[i])));                                    \
  }

#define REDUCE_BLOCKS(type, name)                                                                           \
  REDUCE_BLOCK(type, name, sum)                                                                             \
  REDUCE_BLOCK(type, name, max)                                                                             \
  REDUCE_BLOCK(type, name, min)                                                                             \
  static void reduce_##name(reduce_op_t op, const type *const *sources, int ranks, type *target, size_t count) { \
    for (size_t start = 0; start < count; start += BLOCK) {                                                 \
      size_t n = count - start < BLOCK ? count - start : BLOCK;                                             \
      if (op == SUM) sum_block_##name(sources, ranks, start, target + start, n);                            \
      else if (op == MAX) max_block_##name(sources, ranks, start, target + start, n);                       \
      else min_block_##name(sources, ranks, start, target + start, n);                                      \
    }                                                                                                       \
  }

REDUCE_BLOCKS(float, float)
REDUCE_BLOCKS(double, double)
REDUCE_BLOCKS(int32_t, int)

static inline float decode_bfloat16(uint16_t half) {
  return float_of_bits((uint32_t)half << 16);
}

// Rounds to nearest, ties to even; the value is no NaN but the canonical one.
static inline uint16_t encode_bfloat16(float value) {
  uint32_t bits = bits_of_float(value);
  uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  return (uint16_t)(value == value ? rounded : 0x7fc0u);
}

static void decode_bfloat16s(const uint16_t *halves, float *floats, size_t n) {
  EACH(n, floats[i] = decode_bfloat16(halves[i]));
}

static void encode_bfloat16s(const float *floats, uint16_t *halves, size_t n) {
  EACH(n, halves[i] = encode_bfloat16(floats[i]));
}

// The exponent moves from bias 15 to bias 127 by a multiplication, which also normalises subnormal halves; it is exact.
static inline float decode_float16(uint16_t half) {
  uint32_t magnitude = (uint32_t)(half & 0x7fffu) << 13;
  uint32_t finite = bits_of_float(float_of_bits(magnitude) * 0x1p112f);
  uint32_t bits = magnitude >= 0x0f800000u ? magnitude | 0x7f800000u : finite;
  return float_of_bits(bits | ((uint32_t)(half & 0x8000u) << 16));
}

// As float32ToFloat16 in packages/core/src/dtype.ts, without branches.
static inline uint16_t encode_float16(float value) {
  uint32_t bits = bits_of_float(value);
  uint32_t sign = (bits >> 16) & 0x8000u;
  uint32_t magnitude = bits & 0x7fffffffu;
  uint32_t normal = (magnitude - 0x38000000u + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;
  uint32_t subnormal = bits_of_float(float_of_bits(magnitude) + 0.5f) - 0x3f000000u;
  uint32_t result = magnitude < 0x38800000u ? subnormal : normal;
  result = magnitude >= 0x477ff000u ? 0x7c00u : result;
  return (uint16_t)(magnitude > 0x7f800000u ? 0x7e00u : result | sign);
}

static void decode_float16s(const uint16_t *halves, float *floats, size_t n) {
  size_t done = 0;
#if defined(__F16C__)
  for (; done + 8 <= n; done += 8) {
    __m128i packed = _mm_loadu_si128((const __m128i *)(halves + done));
    _mm256_storeu_ps(floats + done, _mm256_cvtph_ps(packed));
  }
#endif
  for (; done < n; done++) floats[done] = decode_float16(halves[done]);
}

// The floats are canonical: the instruction keeps sign and payload of a NaN.
static void encode_float16s(const float *floats, uint16_t *halves, size_t n) {
  size_t done = 0;
#if defined(__F16C__)
  for (; done + 8 <= n; done += 8) {
    __m128i packed = _mm256_cvtps_ph(_mm256_loadu_ps(floats + done), _MM_FROUND_TO_NEAREST_INT);
    _mm_storeu_si128((__m128i *)(halves + done), packed);
  }
#endif
  for (; done < n; done++) halves[done] = encode_float16(floats[done]);
}

typedef void decode_t(const uint16_t *halves, float *floats, size_t n);
typedef void encode_t(const float *floats, uint16_t *halves, size_t n);

// Widens the ranks' halves one after the other and rounds once, at the end.
static void reduce_halves(decode_t *decode, encode_t *encode, reduce_op_t op, const uint16_t *const *sources, int ranks,
                          uint16_t *target, size_t count) {
  float total[BLOCK];
  float next[BLOCK];
  const float *const pair[2] = {total, next};
  for (size_t start = 0; start < count; start += BLOCK) {
    size_t n = count - start < BLOCK ? count - start : BLOCK;
    decode(sources[0] + start, total, n);
    for (int rank = 1; rank < ranks; rank++) {
      decode(sources[rank] + start, next, n);
      reduce_float(op, pair, 2, total, n);
    }
    encode(total, target + start, n);
  }
}

void VARIANT(dtype_t dtype, reduce_op_t op, const void *const *sources, int ranks, void *target, size_t count) {
  switch (dtype) {
    case FLOAT32:
      reduce_float(op, (const float *const *)sources, ranks, target, count);
      break;
    case FLOAT64:
      reduce_double(op, (const double *const *)sources, ranks, target, count);
      break;
    case INT32:
      reduce_int(op, (const int32_t *const *)sources, ranks, target, count);
      break;
    case FLOAT16:
      reduce_halves(decode_float16s, encode_float16s, op, (const uint16_t *const *)sources, ranks, target, count);
      break;
    case BFLOAT16:
      reduce_halves(decode_bfloat16s, encode_bfloat16s, op, (const uint16_t *const *)sources, ranks, target, count);
      break;
    default:
      break;
  }
}
