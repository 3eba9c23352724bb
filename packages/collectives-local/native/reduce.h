// Combines the contributions of all ranks, element by element and in rank order.
#ifndef RANKWISE_REDUCE_H
#define RANKWISE_REDUCE_H

#include <stddef.h>

// The numbers that src/native-kernel.ts passes.
typedef enum { FLOAT32, FLOAT64, FLOAT16, BFLOAT16, INT32, DTYPES } dtype_t;
typedef enum { SUM, MAX, MIN, REDUCE_OPS } reduce_op_t;

// `target` may be one of `sources`, but must not overlap one in any other way. At least two ranks.
typedef void reduce_t(dtype_t dtype, reduce_op_t op, const void *const *sources, int ranks, void *target, size_t count);

// reduce.c as compiled for one instruction set. All give the same bits.
typedef struct {
  const char *instruction_set;
  reduce_t *reduce;
} variant_t;

// Those that this processor can run, the fastest first; returns their number.
enum { MAX_VARIANTS = 3 };
int reduce_variants(variant_t variants[MAX_VARIANTS]);

size_t item_size(dtype_t dtype);

#endif
