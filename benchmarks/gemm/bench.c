// Times one product of backend-ort's matrix multiply; compiled and started by bench.ts. Prints a line of JSON per
// kernel, and one for reading the weights only. Arguments: m n k threads repeats.
#include "gemm.h"

#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

// Weights are read from memory, as in a model, not from a cache that has them from the run before: copies take turns.
enum { WEIGHT_BYTES = 512 << 20 };

static size_t threads, repeats, copies, copy;
static uint16_t *weights;
static gemm_t gemm;
static gemm_kernel_t *kernel;  // or NULL, to read only

static double now(clockid_t clock) {
  struct timespec time;
  clock_gettime(clock, &time);
  return (double)time.tv_sec * 1e3 + (double)time.tv_nsec / 1e6;
}

static void *allocate(size_t bytes) {
  void *memory = aligned_alloc(4096, (bytes + 4095) / 4096 * 4096);
  if (memory == NULL) {
    fprintf(stderr, "no memory for %zu bytes\n", bytes);
    exit(1);
  }
  memset(memory, 0, bytes);
  return memory;
}

static uint64_t read_share(size_t index) {
  size_t bytes = gemm.n * gemm.k * 2 / 64 * 64;
  const char *first = (const char *)gemm.w + bytes / 64 * index / threads * 64;
  const char *end = (const char *)gemm.w + bytes / 64 * (index + 1) / threads * 64;
  uint64_t sums[8] = {0};
  for (; first < end; first += 64) {
    __builtin_prefetch(first + 2048);
    uint64_t words[8];
    memcpy(words, first, 64);
    for (int i = 0; i < 8; i++) sums[i] += words[i];
  }
  return sums[0] + sums[1] + sums[2] + sums[3] + sums[4] + sums[5] + sums[6] + sums[7];
}

typedef struct {
  size_t index;
  void *scratch;
  uint64_t sum;
} share_t;

static void *work(void *argument) {
  share_t *share = argument;
  if (kernel == NULL) {
    share->sum += read_share(share->index);
  } else if (share->index < gemm_tiles(&gemm, threads)) {
    gemm_tile_t tile = gemm_tile(&gemm, threads, share->index);
    kernel(&gemm, &tile, share->scratch);
  }
  return NULL;
}

static void run(share_t *shares) {
  gemm.w = weights + copy++ % copies * gemm.n * gemm.k;
  pthread_t others[threads];
  for (size_t i = 1; i < threads; i++) pthread_create(&others[i], NULL, work, &shares[i]);
  work(&shares[0]);
  for (size_t i = 1; i < threads; i++) pthread_join(others[i], NULL);
}

// Elements all over y, against sums in double: what is timed has to be the whole product.
static void require_product(const char *name) {
  for (size_t sample = 0; sample < 1000; sample++) {
    size_t row = sample * 7919 % gemm.m;
    size_t column = sample * 104729 % gemm.n;
    double sum = 0;
    double magnitude = 0;
    for (size_t p = 0; p < gemm.k; p++) {
      uint32_t bits = (uint32_t)((const uint16_t *)gemm.w)[column * gemm.k + p] << 16;
      float weight;
      memcpy(&weight, &bits, sizeof weight);
      double term = (double)gemm.x->data[row * gemm.k + p] * weight;
      sum += term;
      magnitude += term < 0 ? -term : term;
    }
    double error = gemm.y[row * gemm.n + column] - sum;
    if (error <= 1e-5 * magnitude && error >= -1e-5 * magnitude) continue;
    fprintf(stderr, "%s: y[%zu, %zu] is off by %g\n", name, row, column, error);
    exit(1);
  }
}

static int ascending(const void *a, const void *b) {
  double difference = *(const double *)a - *(const double *)b;
  return difference < 0 ? -1 : difference > 0;
}

static void measure(const char *name, share_t *shares) {
  double wall[repeats];
  double cpu[repeats];
  // NaN, where a kernel would leave something out.
  memset(gemm.y, 0xff, gemm.m * gemm.n * sizeof *gemm.y);
  run(shares);
  for (size_t i = 0; i < repeats; i++) {
    double wall_start = now(CLOCK_MONOTONIC);
    double cpu_start = now(CLOCK_PROCESS_CPUTIME_ID);
    run(shares);
    cpu[i] = now(CLOCK_PROCESS_CPUTIME_ID) - cpu_start;
    wall[i] = now(CLOCK_MONOTONIC) - wall_start;
  }
  if (kernel != NULL) require_product(name);
  qsort(wall, repeats, sizeof *wall, ascending);
  qsort(cpu, repeats, sizeof *cpu, ascending);
  printf("{\"kernel\":\"%s\",\"milliseconds\":%.4f,\"minMilliseconds\":%.4f,\"maxMilliseconds\":%.4f,"
         "\"minCpuMilliseconds\":%.4f}\n",
         name, wall[repeats / 2], wall[0], wall[repeats - 1], cpu[0]);
  fflush(stdout);
}

int main(int count, char **arguments) {
  if (count != 6) return 2;
  size_t numbers[5];
  for (int i = 0; i < 5; i++) numbers[i] = strtoull(arguments[i + 1], NULL, 10);
  gemm = (gemm_t){.m = numbers[0], .n = numbers[1], .k = numbers[2]};
  threads = numbers[3];
  repeats = numbers[4];
  gemm.w_stride = gemm.k;
  gemm.y_stride = gemm.n;
  copies = WEIGHT_BYTES / (gemm.n * gemm.k * 2) + 1;
  float *x = allocate(gemm.m * gemm.k * sizeof *x);
  gemm_part_t whole = {x, gemm.k, gemm.k};
  gemm.x = &whole;
  gemm.y = allocate(gemm.m * gemm.n * sizeof *gemm.y);
  weights = allocate(copies * gemm.n * gemm.k * 2);
  for (size_t i = 0; i < gemm.m * gemm.k; i++) x[i] = (float)(i * 7919 % 1001) / 1000 - 0.5f;
  for (size_t i = 0; i < copies * gemm.n * gemm.k; i++) {
    weights[i] = (uint16_t)(0x3c00 + i * 40503 % 1024 + i % 2 * 0x8000);
  }
  share_t shares[threads];
  for (size_t i = 0; i < threads; i++) shares[i] = (share_t){i, allocate(GEMM_SCRATCH_BYTES), 0};

  gemm_variant_t variants[MAX_GEMM_VARIANTS];
  int known = gemm_variants(variants);
  for (int i = 0; i < known; i++) {
    kernel = variants[i].kernel;
    measure(variants[i].instruction_set, shares);
  }
  kernel = NULL;
  measure("read", shares);
  uint64_t sum = 0;
  for (size_t i = 0; i < threads; i++) sum += shares[i].sum;
  return sum == 1;
}
