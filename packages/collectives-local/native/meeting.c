#define _GNU_SOURCE
#include "meeting.h"

#include <limits.h>
#include <linux/futex.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

// The layout of src/arena.ts, in 32-bit words.
enum { PAGE_WORDS = 1024, TICKET = 0, SLEEPERS = 16, RANK_PHASE = 0, OPERATION = 32, OPERATION_STRIDE = 16 };
enum { OPERATION_WORDS = 9 };

// As SPIN_MS and HOLD_MS in src/lockstep.ts, where they are explained.
enum { SPIN_NS = 150 * 1000, HOLD_NS = 10 * 1000 * 1000 };

// Looks between two looks at the clock.
enum { LOOKS = 64 };

static uint64_t now_ns(void) {
  struct timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return (uint64_t)time.tv_sec * 1000000000u + (uint64_t)time.tv_nsec;
}

static inline void pause_cpu(void) {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  __asm__ volatile("yield");
#endif
}

static int32_t *page(const group_t *group, int rank) {
  return (int32_t *)group->base + (1 + rank) * PAGE_WORDS;
}

// Phases count up and wrap.
static bool all_arrived(const group_t *group, int32_t phase) {
  for (int rank = 0; rank < group->world_size; rank++) {
    int32_t reached = __atomic_load_n(page(group, rank) + RANK_PHASE, __ATOMIC_SEQ_CST);
    if ((int32_t)((uint32_t)reached - (uint32_t)phase) < 0) return false;
  }
  return true;
}

static void wake(const group_t *group) {
  int32_t *words = (int32_t *)group->base;
  __atomic_fetch_add(words + TICKET, 1, __ATOMIC_SEQ_CST);
  if (__atomic_load_n(words + SLEEPERS, __ATOMIC_SEQ_CST) > 0) {
    syscall(SYS_futex, words + TICKET, FUTEX_WAKE, INT_MAX, NULL, NULL, 0);
  }
}

static void arrive(group_t *group) {
  int32_t phase = (int32_t)((uint32_t)group->cursor[PHASE] + 1u);
  group->cursor[PHASE] = phase;
  __atomic_store_n(page(group, group->rank) + RANK_PHASE, phase, __ATOMIC_SEQ_CST);
  if (all_arrived(group, phase)) wake(group);
}

static bool spin(const group_t *group) {
  int32_t phase = group->cursor[PHASE];
  if (all_arrived(group, phase)) return true;
  if (!group->spins) return false;
  uint64_t end = now_ns() + SPIN_NS;
  do {
    for (int look = 0; look < LOOKS; look++) {
      if (all_arrived(group, phase)) return true;
      pause_cpu();
    }
  } while (now_ns() < end);
  return false;
}

static bool same_operations(const group_t *group) {
  int start = OPERATION + group->cursor[OPERATION_HALF] * OPERATION_STRIDE;
  const int32_t *own = page(group, group->rank) + start;
  for (int rank = 0; rank < group->world_size; rank++) {
    if (memcmp(own, page(group, rank) + start, OPERATION_WORDS * sizeof *own) != 0) return false;
  }
  return true;
}

status_t meet(group_t *group) {
  if (!group->meeting) arrive(group);
  group->meeting = !spin(group);
  if (group->meeting) return WAIT;
  if (group->cursor[VERIFIED]) return DONE;
  if (!same_operations(group)) return MISMATCH;
  group->cursor[VERIFIED] = 1;
  return DONE;
}

void enter(group_t *group) {
  group->entered_ns = now_ns();
}

bool held_too_long(const group_t *group) {
  return now_ns() - group->entered_ns > HOLD_NS;
}
