// Calls the kernels for gemm.test.ts, on copies of its matrices beside pages that must not be touched.
#define _GNU_SOURCE
#include "gemm.h"

#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

enum { DONE = 0, TOUCHED_GUARD = 1, NO_MEMORY = 2, NO_VARIANT = 3 };

int harness_variants(void) {
  gemm_variant_t variants[MAX_GEMM_VARIANTS];
  return gemm_variants(variants);
}

const char *harness_variant(int index) {
  gemm_variant_t variants[MAX_GEMM_VARIANTS];
  return index < gemm_variants(variants) ? variants[index].instruction_set : NULL;
}

// Memory between two pages without access: it begins behind the one or ends before the other.
typedef struct {
  char *pages;
  size_t length;
  char *data;
} guarded_t;

static int guard(guarded_t *guarded, size_t bytes, size_t shift, int at_end) {
  size_t page = (size_t)sysconf(_SC_PAGESIZE);
  size_t inner = (bytes + shift + page - 1) / page * page;
  guarded->length = inner + 2 * page;
  guarded->pages = mmap(NULL, guarded->length, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (guarded->pages == MAP_FAILED) return 0;
  char *first = guarded->pages + page;
  if (inner > 0 && mprotect(first, inner, PROT_READ | PROT_WRITE) != 0) return 0;
  guarded->data = at_end ? first + inner - bytes - shift : first + shift;
  return 1;
}

static int guard_copy(guarded_t *guarded, const void *source, size_t bytes, size_t shift, int at_end) {
  if (!guard(guarded, bytes, shift, at_end)) return 0;
  if (bytes > 0) memcpy(guarded->data, source, bytes);
  return 1;
}

static void give_back(guarded_t *guarded) {
  if (guarded->pages != NULL && guarded->pages != MAP_FAILED) munmap(guarded->pages, guarded->length);
}

static _Thread_local sigjmp_buf fault;

static void on_fault(int signal_number) {
  (void)signal_number;
  siglongjmp(fault, 1);
}

typedef struct {
  gemm_kernel_t *kernel;
  const gemm_t *gemm;
  gemm_tile_t tile;
  void *scratch;
  int result;
} job_t;

static void *run(void *argument) {
  job_t *job = argument;
  if (sigsetjmp(fault, 1) != 0) job->result = TOUCHED_GUARD;
  else job->kernel(job->gemm, &job->tile, job->scratch);
  return NULL;
}

// Every tile at the same time, in a thread of its own with its own scratch.
static int run_jobs(job_t *jobs, size_t count) {
  struct sigaction action = {.sa_handler = on_fault};
  struct sigaction segv;
  struct sigaction bus;
  sigaction(SIGSEGV, &action, &segv);
  sigaction(SIGBUS, &action, &bus);
  pthread_t *threads = malloc((count + 1) * sizeof *threads);
  size_t started = 0;
  int starts = threads != NULL;
  while (starts && started < count) {
    starts = pthread_create(&threads[started], NULL, run, &jobs[started]) == 0;
    if (starts) started++;
  }
  int result = starts ? DONE : NO_MEMORY;
  for (size_t i = 0; i < started; i++) {
    pthread_join(threads[i], NULL);
    if (jobs[i].result != DONE) result = jobs[i].result;
  }
  free(threads);
  sigaction(SIGSEGV, &segv, NULL);
  sigaction(SIGBUS, &bus, NULL);
  return result;
}

static size_t extent(size_t rows, size_t columns, size_t stride) {
  return rows == 0 ? 0 : (rows - 1) * stride + columns;
}

// Columns of x beside pages of their own. The last part has rows at the distance that x has beyond k.
static int guard_parts(guarded_t *guarded, gemm_part_t *parts, const float *x, const uint32_t *sizes,
                       const uint32_t *columns, size_t count, int at_end) {
  size_t m = sizes[0], k = sizes[2], x_stride = sizes[3], first = 0;
  for (size_t i = 0; i < count; i++) {
    size_t stride = columns[i] + (i + 1 == count ? x_stride - k : 0);
    if (!guard(&guarded[i], extent(m, columns[i], stride) * sizeof *x, 0, at_end)) return 0;
    float *data = (float *)guarded[i].data;
    for (size_t row = 0; columns[i] > 0 && row < m; row++) {
      memcpy(data + row * stride, x + row * x_stride + first, columns[i] * sizeof *x);
    }
    parts[i] = (gemm_part_t){data, columns[i], stride};
    first += columns[i];
  }
  return 1;
}

// `columns`: of the parts of x. `tiles`: four numbers each, or NULL for those of gemm_tiles with `count` workers.
int harness_multiply(int variant, const uint32_t *sizes, const float *x, const uint32_t *columns, uint32_t part_count,
                     const uint16_t *w, float *y, int odd, int at_end, int rounds, const uint32_t *tiles,
                     uint32_t count) {
  gemm_variant_t variants[MAX_GEMM_VARIANTS];
  if (variant >= gemm_variants(variants)) return NO_VARIANT;
  gemm_t gemm = {.m = sizes[0], .n = sizes[1], .k = sizes[2]};
  gemm.w_stride = sizes[4];
  gemm.y_stride = sizes[5];
  gemm.rounds = rounds;
  size_t w_bytes = extent(gemm.n, gemm.k, gemm.w_stride) * sizeof *w;
  size_t y_bytes = extent(gemm.m, gemm.n, gemm.y_stride) * sizeof *y;
  size_t workers = count;
  if (tiles == NULL) count = (uint32_t)gemm_tiles(&gemm, workers);

  guarded_t guarded[2] = {{0}};
  job_t *jobs = calloc(count + 1, sizeof *jobs);
  guarded_t *scratch = calloc(count + 1, sizeof *scratch);
  guarded_t *guarded_parts = calloc(part_count + 1, sizeof *guarded_parts);
  gemm_part_t *parts = calloc(part_count + 1, sizeof *parts);
  int result = NO_MEMORY;
  if (jobs == NULL || scratch == NULL || guarded_parts == NULL || parts == NULL) goto free_all;
  if (!guard_parts(guarded_parts, parts, x, sizes, columns, part_count, at_end)) goto free_all;
  if (!guard_copy(&guarded[0], w, w_bytes, odd ? 1 : 0, at_end)) goto free_all;
  if (!guard_copy(&guarded[1], y, y_bytes, 0, at_end)) goto free_all;
  gemm.x = parts;
  gemm.w = guarded[0].data;
  gemm.y = (float *)guarded[1].data;
  for (size_t i = 0; i < count; i++) {
    if (!guard(&scratch[i], GEMM_SCRATCH_BYTES, odd ? 4 : 0, at_end)) goto free_all;
    memset(scratch[i].data, 0xff, GEMM_SCRATCH_BYTES);
    const uint32_t *own = tiles + 4 * i;
    gemm_tile_t tile = tiles == NULL ? gemm_tile(&gemm, workers, i) : (gemm_tile_t){own[0], own[1], own[2], own[3]};
    jobs[i] = (job_t){variants[variant].kernel, &gemm, tile, scratch[i].data, DONE};
  }
  result = run_jobs(jobs, count);
  if (y_bytes > 0) memcpy(y, gemm.y, y_bytes);

free_all:
  for (size_t i = 0; i < 2; i++) give_back(&guarded[i]);
  for (size_t i = 0; guarded_parts != NULL && i < part_count; i++) give_back(&guarded_parts[i]);
  for (size_t i = 0; scratch != NULL && i < count; i++) give_back(&scratch[i]);
  free(parts);
  free(guarded_parts);
  free(scratch);
  free(jobs);
  return result;
}

// The tiles for `workers`: four numbers each.
uint32_t harness_tiles(uint32_t m, uint32_t n, uint32_t k, uint32_t workers, uint32_t *tiles) {
  gemm_t gemm = {.m = m, .n = n, .k = k};
  size_t count = gemm_tiles(&gemm, workers);
  for (size_t i = 0; i < count; i++) {
    gemm_tile_t tile = gemm_tile(&gemm, workers, i);
    tiles[4 * i] = (uint32_t)tile.row;
    tiles[4 * i + 1] = (uint32_t)tile.row_end;
    tiles[4 * i + 2] = (uint32_t)tile.column;
    tiles[4 * i + 3] = (uint32_t)tile.column_end;
  }
  return (uint32_t)count;
}
