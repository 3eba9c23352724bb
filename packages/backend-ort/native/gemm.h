// y[m, n] = x[m, k] @ w[n, k]^T, in float32; w is bfloat16 as torch stores it and may lie in a mapped file.
//
// gemm-variants.json has the options that gemm-kernel.c is compiled with, once per instruction set; gemm.c needs none.
#ifndef RANKWISE_GEMM_H
#define RANKWISE_GEMM_H

#include <stddef.h>

// Columns of x that lie together.
typedef struct {
  const float *data;
  size_t columns;
  size_t stride;
} gemm_part_t;

// All matrices are row-major. A stride is the distance of two rows in elements, at least the length of a row. Any
// number may be 0. Nothing outside of the rows is read or written. `y` must not overlap the others, and need not be
// initialised.
typedef struct {
  size_t m, n, k;
  const gemm_part_t *x;  // side by side, as many as have k columns
  const void *w;  // at any address, also an odd one
  size_t w_stride;
  float *y;
  size_t y_stride;
  int rounds;  // y to the nearest bfloat16, ties to even
} gemm_t;

// Rows and columns of y, up to but not with the `end`s.
typedef struct {
  size_t row, row_end;
  size_t column, column_end;
} gemm_tile_t;

// Computes one tile. An element of y depends on its row of x and its row of w only: bits are the same for every tile
// that it is part of, every m and n, every number of threads and all parts that x may be in. Tiles that do not overlap may be computed at the same
// time. `scratch` belongs to this call while it runs and has GEMM_SCRATCH_BYTES.
typedef void gemm_kernel_t(const gemm_t *gemm, const gemm_tile_t *tile, void *scratch);

// A block of w in float32 and a few rows of x, from the first address in it that is a multiple of 64.
enum { GEMM_DEPTH = 256, GEMM_COLUMNS = 1024 };
enum { GEMM_SCRATCH_BYTES = (GEMM_COLUMNS * GEMM_DEPTH + 14 * (GEMM_DEPTH + 16)) * 4 + 64 };

// gemm-kernel.c as compiled for one instruction set. Those with fused multiply-add give the same bits.
typedef struct {
  const char *instruction_set;
  gemm_kernel_t *kernel;
} gemm_variant_t;

// Those that this processor can run, the fastest first; returns their number.
enum { MAX_GEMM_VARIANTS = 3 };
int gemm_variants(gemm_variant_t variants[MAX_GEMM_VARIANTS]);

// How y is best divided among `workers`, at least 1: into that many tiles or fewer, of about equal cost, which cover y
// once. 0 where y is empty.
size_t gemm_tiles(const gemm_t *gemm, size_t workers);
// The tile with the number `index`, less than gemm_tiles(gemm, workers).
gemm_tile_t gemm_tile(const gemm_t *gemm, size_t workers, size_t index);

#endif
