// A thread that does jobs, one after the other.
#pragma once
#include <stdbool.h>

typedef struct job {
  struct job *next;
  void (*work)(struct job *);
} job_t;

typedef struct worker worker_t;

// `done` is called on the thread, after every job. `processor` is the only one that the thread runs on; -1 for any.
// NULL where no thread can be started.
worker_t *worker_start(int processor, void (*done)(job_t *, void *context), void *context);

void worker_push(worker_t *worker, job_t *job);

// Waits for the job that is under way, ends the thread and frees the worker. The result are jobs that were not begun.
job_t *worker_stop(worker_t *worker);
