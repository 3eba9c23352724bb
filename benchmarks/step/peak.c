// How fast one core multiplies and adds: prints GFLOP/s of float32 and, where the CPU has them, of bfloat16 products.
// Compiled with -O2 -march=native by peak.ts.
#include <stdio.h>
#include <time.h>

#if defined(__AVX512F__)
#define BYTES 64
#elif defined(__AVX__)
#define BYTES 32
#else
#define BYTES 16
#endif
#define LANES (BYTES / 4)
// Enough chains to hide the latency of a multiply-add on two units, and no more than there are registers.
#define CHAINS (BYTES == 64 ? 24 : 12)

typedef float Vector __attribute__((vector_size(BYTES)));

// Of this process: others may have the core meanwhile.
static double now(void) {
  struct timespec time;
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &time);
  return time.tv_sec + 1e-9 * time.tv_nsec;
}

static double float32(long rounds) {
  Vector sums[CHAINS], x = {0}, y = {0};
  for (int i = 0; i < CHAINS; i++) sums[i] = x;
  x += 1.0f;
  y += 0.5f;
  double started = now();
  for (long i = 0; i < rounds; i++) {
#pragma GCC unroll 24
    for (int j = 0; j < CHAINS; j++) sums[j] += x * y;
    // Keeps the products from being moved out of the loop.
    __asm__ volatile("" : "+x"(x), "+x"(y));
  }
  double seconds = now() - started;
  for (int i = 0; i < CHAINS; i++) __asm__ volatile("" : : "x"(sums[i]));
  return 2.0 * LANES * CHAINS * rounds / seconds / 1e9;
}

#if defined(__AVX512BF16__)
#include <immintrin.h>
static double bfloat16(long rounds) {
  __m512 sums[24];
  for (int i = 0; i < 24; i++) sums[i] = _mm512_setzero_ps();
  __m512bh x = (__m512bh)_mm512_set1_epi16(0x3f80), y = (__m512bh)_mm512_set1_epi16(0x3f00);
  double started = now();
  for (long i = 0; i < rounds; i++) {
#pragma GCC unroll 24
    for (int j = 0; j < 24; j++) sums[j] = _mm512_dpbf16_ps(sums[j], x, y);
    __asm__ volatile("" : "+v"(x), "+v"(y));
  }
  double seconds = now() - started;
  for (int i = 0; i < 24; i++) __asm__ volatile("" : : "v"(sums[i]));
  return 2.0 * 32 * 24 * rounds / seconds / 1e9;
}
#else
static double bfloat16(long rounds) {
  (void)rounds;
  return 0;
}
#endif

// The best of several: two threads of a core share its units.
static double best(double (*measure)(long), long rounds) {
  double most = 0;
  for (int i = 0; i < 5; i++) {
    double measured = measure(rounds);
    if (measured > most) most = measured;
  }
  return most;
}

int main(void) {
  printf("{\"float32\":%.1f,\"bfloat16\":%.1f}\n", best(float32, 4000000), best(bfloat16, 2000000));
  return 0;
}
