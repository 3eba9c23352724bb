// Compiled once per instruction set, as VARIANT; see gemm-variants.json. A block of w is widened to float32 and
// transposed into a buffer that stays in the second-level cache, and all rows of the tile are multiplied with it before
// the next one. Float32 multiply-adds are the fast way on AVX-512 without AMX: 175 GFLOP/s of a core, where VDPBF16PS
// reaches 86. The products of DEPTH elements of k are summed from the first to the last, and these sums are added up in
// y: over 12288 elements, that rounds less than a single sum would.
#include "gemm.h"

#include <stdint.h>
#include <string.h>
#if defined(__AVX2__)
#include <immintrin.h>
#endif

#ifndef VARIANT
#define VARIANT gemm_baseline
#endif

// ROWS x 2 vectors of sums, two of w and one of x fill the registers.
#if defined(__AVX512F__) && defined(__AVX512BW__)
enum { LANES = 16, ROWS = 14 };
#elif defined(__AVX2__)
enum { LANES = 8, ROWS = 6 };
#elif defined(__aarch64__)
enum { LANES = 4, ROWS = 8 };
#else
enum { LANES = 4, ROWS = 6 };
#endif

enum {
  PANEL = 2 * LANES,            // columns of y that are computed together
  DEPTH = GEMM_DEPTH,           // of k, in a block: a panel of 32 columns is 32 KiB, of 48 KiB first-level cache
  MOST_COLUMNS = GEMM_COLUMNS,  // in a block: 1 MiB, of 2 MiB second-level cache
  LEAST_COLUMNS = 256,          // in a block
  PITCH = DEPTH + 16,           // of rows of x, which may else fall into the same few lines of the cache
  GROUP = 8,                    // elements of k that are transposed together: 16 bytes of a row of w
  LINE = 32,                    // elements of w in a line of the cache
  AHEAD = 8,                    // elements of k by which panels are fetched from the second-level cache
};

typedef float vector_t __attribute__((vector_size(4 * LANES), may_alias));
typedef float unaligned_vector_t __attribute__((vector_size(4 * LANES), may_alias, aligned(4)));
typedef uint32_t bits_t __attribute__((vector_size(4 * LANES), may_alias));

// Sums stay in registers only where the loops over them are unrolled.
#if defined(__clang__)
#define UNROLLED _Pragma("clang loop unroll(full)")
#else
#define UNROLLED _Pragma("GCC unroll 16")
#endif
#define INLINED static inline __attribute__((always_inline))

static size_t smaller(size_t a, size_t b) {
  return a < b ? a : b;
}

// Transposes GROUP elements of LANES rows into float32: `panel` gets PANEL floats per element of k.
#if defined(__AVX512F__) && defined(__AVX512BW__)
INLINED __m512i load_quarters(const char *row, size_t stride) {
  __m512i four = _mm512_castsi128_si512(_mm_loadu_si128((const void *)row));
  four = _mm512_inserti32x4(four, _mm_loadu_si128((const void *)(row + 4 * stride)), 1);
  four = _mm512_inserti32x4(four, _mm_loadu_si128((const void *)(row + 8 * stride)), 2);
  return _mm512_inserti32x4(four, _mm_loadu_si128((const void *)(row + 12 * stride)), 3);
}

INLINED void store_pair(float *panel, __m512i pair) {
  _mm512_store_si512(panel, _mm512_slli_epi32(pair, 16));
  _mm512_store_si512(panel + PANEL, _mm512_and_si512(pair, _mm512_set1_epi32((int)0xffff0000)));
}

INLINED void pack_group(const char *w, size_t stride, float *panel) {
  __m512i a = load_quarters(w, stride);
  __m512i b = load_quarters(w + stride, stride);
  __m512i c = load_quarters(w + 2 * stride, stride);
  __m512i d = load_quarters(w + 3 * stride, stride);
  __m512i ab_low = _mm512_unpacklo_epi32(a, b);
  __m512i ab_high = _mm512_unpackhi_epi32(a, b);
  __m512i cd_low = _mm512_unpacklo_epi32(c, d);
  __m512i cd_high = _mm512_unpackhi_epi32(c, d);
  store_pair(panel, _mm512_unpacklo_epi64(ab_low, cd_low));
  store_pair(panel + 2 * PANEL, _mm512_unpackhi_epi64(ab_low, cd_low));
  store_pair(panel + 4 * PANEL, _mm512_unpacklo_epi64(ab_high, cd_high));
  store_pair(panel + 6 * PANEL, _mm512_unpackhi_epi64(ab_high, cd_high));
}
#elif defined(__AVX2__)
INLINED __m256i load_halves(const char *row, size_t stride) {
  __m256i two = _mm256_castsi128_si256(_mm_loadu_si128((const void *)row));
  return _mm256_inserti128_si256(two, _mm_loadu_si128((const void *)(row + 4 * stride)), 1);
}

INLINED void store_pair(float *panel, __m256i pair) {
  _mm256_store_si256((void *)panel, _mm256_slli_epi32(pair, 16));
  _mm256_store_si256((void *)(panel + PANEL), _mm256_and_si256(pair, _mm256_set1_epi32((int)0xffff0000)));
}

INLINED void pack_group(const char *w, size_t stride, float *panel) {
  __m256i a = load_halves(w, stride);
  __m256i b = load_halves(w + stride, stride);
  __m256i c = load_halves(w + 2 * stride, stride);
  __m256i d = load_halves(w + 3 * stride, stride);
  __m256i ab_low = _mm256_unpacklo_epi32(a, b);
  __m256i ab_high = _mm256_unpackhi_epi32(a, b);
  __m256i cd_low = _mm256_unpacklo_epi32(c, d);
  __m256i cd_high = _mm256_unpackhi_epi32(c, d);
  store_pair(panel, _mm256_unpacklo_epi64(ab_low, cd_low));
  store_pair(panel + 2 * PANEL, _mm256_unpackhi_epi64(ab_low, cd_low));
  store_pair(panel + 4 * PANEL, _mm256_unpacklo_epi64(ab_high, cd_high));
  store_pair(panel + 6 * PANEL, _mm256_unpackhi_epi64(ab_high, cd_high));
}
#else
INLINED void pack_group(const char *w, size_t stride, float *panel) {
  for (size_t column = 0; column < LANES; column++) {
    uint16_t halves[GROUP];
    memcpy(halves, w + column * stride, sizeof halves);
    for (size_t p = 0; p < GROUP; p++) {
      uint32_t bits = (uint32_t)halves[p] << 16;
      memcpy(panel + p * PANEL + column, &bits, sizeof bits);
    }
  }
}
#endif

// Where fewer rows or elements are left, they are copied first: nothing beyond them is read. The other lanes are zero.
static void pack_edge(const char *w, size_t stride, size_t columns, size_t depth, float *panel) {
  uint16_t halves[LANES][GROUP] = {0};
  for (size_t column = 0; column < columns; column++) memcpy(halves[column], w + column * stride, depth * 2);
  float group[GROUP][PANEL] __attribute__((aligned(64)));
  pack_group((const char *)halves, sizeof halves[0], group[0]);
  for (size_t p = 0; p < depth; p++) memcpy(panel + p * PANEL, group[p], sizeof(vector_t));
}

// One vector of columns, or fewer at the edge.
static void pack_columns(const char *w, size_t stride, size_t columns, size_t depth, float *panel) {
  size_t p = 0;
  if (columns == LANES) {
    for (; p + GROUP <= depth; p += GROUP) pack_group(w + p * 2, stride, panel + p * PANEL);
  }
  for (; p < depth; p += GROUP) {
    pack_edge(w + p * 2, stride, columns, smaller(depth - p, GROUP), panel + p * PANEL);
  }
}

static void pack_panel(const char *w, size_t stride, size_t columns, size_t depth, float *panel) {
  for (size_t first = 0; first < PANEL; first += LANES) {
    size_t count = columns > first ? smaller(columns - first, LANES) : 0;
    pack_columns(w + first * stride, stride, count, depth, panel + first);
  }
}

typedef struct {
  const float *x;  // rows at a distance of PITCH
  const float *panel;
  size_t depth;
  float *y;
  size_t y_stride;
  int adds;          // to what is in y
  int rounds;        // the sums
  const char *next;  // PANEL rows of w that will be packed next, and their distance in bytes
  size_t next_stride;
} product_t;

// To bfloat16.
INLINED vector_t rounded(vector_t values) {
  bits_t bits = (bits_t)values;
  bits_t is_nan = (bits_t)(values != values);
  bits_t nearest = bits + 0x7fff + (bits >> 16 & 1);
  return (vector_t)((is_nan & 0x7fc00000) | (~is_nan & nearest & 0xffff0000));
}

// Fetches one line of `next` per element of k, over all of its rows and then further on: the memory works while the
// processor multiplies. Hardware does not foresee these lines, for a row is read in pieces of 512 bytes. More at a time
// would wait for each other.
INLINED void multiply(size_t rows, const product_t *product) {
  const float *x = product->x;
  vector_t sums[ROWS][2] = {0};
  for (size_t start = 0; start < product->depth; start += LINE) {
    size_t end = smaller(start + LINE, product->depth);
    const char *line = product->next + start * 2;
    for (size_t p = start; p < end; p++) {
      const float *panel = product->panel + p * PANEL;
      __builtin_prefetch(line);
      line += product->next_stride;
      __builtin_prefetch(panel + AHEAD * PANEL);
      __builtin_prefetch(panel + AHEAD * PANEL + LANES);
      vector_t left = *(const vector_t *)panel;
      vector_t right = *(const vector_t *)(panel + LANES);
      UNROLLED
      for (size_t r = 0; r < rows; r++) {
        sums[r][0] += left * x[r * PITCH + p];
        sums[r][1] += right * x[r * PITCH + p];
      }
    }
  }
  UNROLLED
  for (size_t r = 0; r < rows; r++) {
    unaligned_vector_t *y = (unaligned_vector_t *)(product->y + r * product->y_stride);
    if (product->adds) {
      sums[r][0] += y[0];
      sums[r][1] += y[1];
    }
    if (product->rounds) {
      sums[r][0] = rounded(sums[r][0]);
      sums[r][1] = rounded(sums[r][1]);
    }
    y[0] = sums[r][0];
    y[1] = sums[r][1];
  }
}

static void multiply_rows(size_t rows, const product_t *product) {
#define CASE(count)                                    \
  case count:                                          \
    if ((count) <= ROWS) multiply(count, product);     \
    break
  switch (rows) {
    CASE(1);
    CASE(2);
    CASE(3);
    CASE(4);
    CASE(5);
    CASE(6);
    CASE(7);
    CASE(8);
    CASE(9);
    CASE(10);
    CASE(11);
    CASE(12);
    CASE(13);
    CASE(14);
  }
#undef CASE
}

// The last panel may reach beyond the tile: it is multiplied elsewhere.
static void multiply_edge(size_t rows, size_t columns, const product_t *product) {
  float whole[ROWS][PANEL] = {{0}};
  product_t copy = *product;
  copy.y = whole[0];
  copy.y_stride = PANEL;
  float *y = product->y;
  size_t stride = product->y_stride;
  for (size_t r = 0; product->adds && r < rows; r++) memcpy(whole[r], y + r * stride, columns * sizeof *y);
  multiply_rows(rows, &copy);
  for (size_t r = 0; r < rows; r++) memcpy(y + r * stride, whole[r], columns * sizeof *y);
}

typedef struct {
  size_t column, columns;
  size_t start, depth;  // of k
} block_t;

// What is packed after the columns from `j`: those beside them, or the first ones in the next block of k; NULL where
// there is no whole panel.
static const char *next_panel(const gemm_t *gemm, block_t block, const char *w, size_t j) {
  if (block.columns - j >= 2 * PANEL) return w + (j + PANEL) * gemm->w_stride * 2;
  if (block.columns >= PANEL && block.start + 2 * DEPTH <= gemm->k) return w + DEPTH * 2;
  return NULL;
}

// Elements of a row of x from `start` on.
static void copy_row(const gemm_t *gemm, size_t row, size_t start, size_t count, float *copy) {
  for (const gemm_part_t *part = gemm->x; count > 0; part++) {
    if (start >= part->columns) {
      start -= part->columns;
      continue;
    }
    size_t length = smaller(count, part->columns - start);
    memcpy(copy, part->data + row * part->stride + start, length * sizeof *copy);
    copy += length;
    count -= length;
    start = 0;
  }
}

// Multiplies a block of w with all rows of the tile. The first rows are multiplied with a panel as soon as it is
// packed; where there are no others, the next panel takes its place.
static void multiply_block(const gemm_t *gemm, const gemm_tile_t *tile, block_t block, float *x, float *panels) {
  size_t stride = gemm->w_stride * 2;
  const char *w = (const char *)gemm->w + block.column * stride + block.start * 2;
  size_t rows = tile->row_end - tile->row;
  size_t strips = (rows + ROWS - 1) / ROWS;
  for (size_t strip = 0; strip < strips; strip++) {
    size_t row = tile->row + rows * strip / strips;
    size_t count = tile->row + rows * (strip + 1) / strips - row;
    for (size_t r = 0; r < count; r++) copy_row(gemm, row + r, block.start, block.depth, x + r * PITCH);
    for (size_t j = 0; j < block.columns; j += PANEL) {
      float *panel = strips == 1 ? panels : panels + j * DEPTH;
      size_t columns = block.columns - j;
      float *y = gemm->y + row * gemm->y_stride + block.column + j;
      product_t product = {
          .x = x,
          .panel = panel,
          .depth = block.depth,
          .y = y,
          .y_stride = gemm->y_stride,
          .adds = block.start > 0,
          .rounds = gemm->rounds && block.start + block.depth == gemm->k,
          .next = (const char *)panel,
      };
      if (strip == 0) {
        pack_panel(w + j * stride, stride, columns, block.depth, panel);
        const char *next = next_panel(gemm, block, w, j);
        if (next != NULL) {
          product.next = next;
          product.next_stride = stride;
        }
      }
      if (columns >= PANEL) multiply_rows(count, &product);
      else multiply_edge(count, columns, &product);
    }
  }
}

// The more rows, the longer it takes to copy them for every block. With fewer, more of the caches is left to w, and rows
// of w are best read to their ends: 12.7 instead of 11.2 GB/s for one row.
static size_t block_columns(size_t rows) {
  if (rows <= 4) return PANEL;
  return rows <= 64 ? LEAST_COLUMNS : smaller(LEAST_COLUMNS / 64 * rows / PANEL * PANEL, MOST_COLUMNS);
}

void VARIANT(const gemm_t *gemm, const gemm_tile_t *tile, void *scratch) {
  float *panels = (float *)(((uintptr_t)scratch + 63) & ~(uintptr_t)63);
  float *x = panels + MOST_COLUMNS * DEPTH;
  size_t width = block_columns(tile->row_end - tile->row);
  for (size_t column = tile->column; column < tile->column_end; column += width) {
    block_t block = {.column = column, .columns = smaller(tile->column_end - column, width)};
    // At least once: without any k, y is zero.
    do {
      block.depth = smaller(gemm->k - block.start, DEPTH);
      multiply_block(gemm, tile, block, x, panels);
      block.start += DEPTH;
    } while (block.start < gemm->k);
  }
}
