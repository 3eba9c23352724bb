#include "gemm.h"

gemm_kernel_t gemm_baseline;
#if defined(__x86_64__)
gemm_kernel_t gemm_avx2;
gemm_kernel_t gemm_avx512;
#endif

int gemm_variants(gemm_variant_t variants[MAX_GEMM_VARIANTS]) {
  int count = 0;
#if defined(__x86_64__)
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("fma")) {
    variants[count++] = (gemm_variant_t){"avx512", gemm_avx512};
  }
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) {
    variants[count++] = (gemm_variant_t){"avx2", gemm_avx2};
  }
#endif
  variants[count++] = (gemm_variant_t){"baseline", gemm_baseline};
  return count;
}

// Tiles begin at multiples of the widest panel. Fewer rows than these fill no registers.
enum { TILE_COLUMNS = 32, TILE_ROWS = 14 };

// What one element of w or x costs a tile besides the multiplications, counted in multiplications, 32 of which take one
// cycle with AVX-512: one of w is fetched from memory and packed, 0.7 cycles; one of x is copied for every block, 0.15.
enum { PACK_COST = 22, COPY_COST = 5 };

typedef struct {
  size_t rows, columns;
} grid_t;

static size_t divide_up(size_t a, size_t b) {
  return (a + b - 1) / b;
}

static size_t smaller(size_t a, size_t b) {
  return a < b ? a : b;
}

// Of the largest tile of a grid, per element of k.
static double cost(const gemm_t *gemm, grid_t grid) {
  double rows = (double)divide_up(gemm->m, grid.rows);
  double columns = (double)(divide_up(divide_up(gemm->n, TILE_COLUMNS), grid.columns) * TILE_COLUMNS);
  double copies = (double)divide_up((size_t)columns, GEMM_COLUMNS);
  return rows * columns + PACK_COST * columns + COPY_COST * rows * copies;
}

static grid_t best_grid(const gemm_t *gemm, size_t workers) {
  grid_t best = {0, 0};
  if (gemm->m == 0 || gemm->n == 0) return best;
  size_t most_rows = divide_up(gemm->m, TILE_ROWS);
  size_t most_columns = divide_up(gemm->n, TILE_COLUMNS);
  for (size_t rows = 1; rows <= smaller(workers, most_rows); rows++) {
    grid_t grid = {rows, smaller(workers / rows, most_columns)};
    if (best.rows == 0 || cost(gemm, grid) < cost(gemm, best)) best = grid;
  }
  return best;
}

size_t gemm_tiles(const gemm_t *gemm, size_t workers) {
  grid_t grid = best_grid(gemm, workers);
  return grid.rows * grid.columns;
}

gemm_tile_t gemm_tile(const gemm_t *gemm, size_t workers, size_t index) {
  grid_t grid = best_grid(gemm, workers);
  size_t row = index / grid.columns;
  size_t column = index % grid.columns;
  size_t panels = divide_up(gemm->n, TILE_COLUMNS);
  return (gemm_tile_t){
      .row = gemm->m * row / grid.rows,
      .row_end = gemm->m * (row + 1) / grid.rows,
      .column = panels * column / grid.columns * TILE_COLUMNS,
      .column_end = smaller(panels * (column + 1) / grid.columns * TILE_COLUMNS, gemm->n),
  };
}
