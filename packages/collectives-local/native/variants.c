#include "reduce.h"

reduce_t reduce_baseline;
#if defined(__x86_64__)
reduce_t reduce_avx2;
reduce_t reduce_avx512;
#endif

int reduce_variants(variant_t variants[MAX_VARIANTS]) {
  int count = 0;
#if defined(__x86_64__)
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("f16c")) {
    variants[count++] = (variant_t){"avx512", reduce_avx512};
  }
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c")) {
    variants[count++] = (variant_t){"avx2", reduce_avx2};
  }
#endif
  variants[count++] = (variant_t){"baseline", reduce_baseline};
  return count;
}

size_t item_size(dtype_t dtype) {
  if (dtype == FLOAT64) return 8;
  return dtype == FLOAT16 || dtype == BFLOAT16 ? 2 : 4;
}
