#define _GNU_SOURCE
#include "worker.h"

#include <pthread.h>
#include <sched.h>
#include <stdlib.h>

struct worker {
  pthread_t thread;
  pthread_mutex_t lock;
  pthread_cond_t wake;
  job_t *first;
  job_t **end;
  bool stops;
  int processor;
  void (*done)(job_t *, void *context);
  void *context;
};

// NULL once the worker is stopped.
static job_t *next_job(worker_t *worker) {
  pthread_mutex_lock(&worker->lock);
  while (worker->first == NULL && !worker->stops) pthread_cond_wait(&worker->wake, &worker->lock);
  job_t *job = worker->stops ? NULL : worker->first;
  if (job != NULL) {
    worker->first = job->next;
    if (worker->first == NULL) worker->end = &worker->first;
  }
  pthread_mutex_unlock(&worker->lock);
  return job;
}

static void *do_jobs(void *argument) {
  worker_t *worker = argument;
  if (worker->processor >= 0) {
    cpu_set_t processors;
    CPU_ZERO(&processors);
    CPU_SET(worker->processor, &processors);
    sched_setaffinity(0, sizeof processors, &processors);
  }
  for (job_t *job = next_job(worker); job != NULL; job = next_job(worker)) {
    job->work(job);
    worker->done(job, worker->context);
  }
  return NULL;
}

worker_t *worker_start(int processor, void (*done)(job_t *, void *context), void *context) {
  worker_t *worker = calloc(1, sizeof *worker);
  if (worker == NULL) return NULL;
  worker->end = &worker->first;
  worker->processor = processor;
  worker->done = done;
  worker->context = context;
  pthread_mutex_init(&worker->lock, NULL);
  pthread_cond_init(&worker->wake, NULL);
  if (pthread_create(&worker->thread, NULL, do_jobs, worker) == 0) return worker;
  free(worker);
  return NULL;
}

void worker_push(worker_t *worker, job_t *job) {
  job->next = NULL;
  pthread_mutex_lock(&worker->lock);
  *worker->end = job;
  worker->end = &job->next;
  pthread_cond_signal(&worker->wake);
  pthread_mutex_unlock(&worker->lock);
}

job_t *worker_stop(worker_t *worker) {
  pthread_mutex_lock(&worker->lock);
  worker->stops = true;
  pthread_cond_signal(&worker->wake);
  pthread_mutex_unlock(&worker->lock);
  pthread_join(worker->thread, NULL);
  job_t *left = worker->first;
  pthread_mutex_destroy(&worker->lock);
  pthread_cond_destroy(&worker->wake);
  free(worker);
  return left;
}
