// What the functions that JavaScript calls have in common.
#pragma once
#define NAPI_VERSION 8
#include <node_api.h>

#include "session.h"
#include "worker.h"

enum { MOST_ARGUMENTS = 5 };

typedef struct {
  worker_t *worker;
  napi_threadsafe_function done;
  session_settings_t settings;
  // Jobs that have a promise which is not settled.
  int pending;
} engine_t;

// Work for the thread of an engine, and what it needs meanwhile. The JavaScript values in `kept` are those it reads and
// writes.
typedef struct {
  job_t job;
  engine_t *engine;
  graph_t *graph;
  const void *model;
  size_t model_bytes;
  void **data;
  char *error;
  napi_ref kept;
  napi_deferred deferred;
} task_t;

// Throws an error; the result is NULL.
napi_value fail(napi_env env, const char *message);
// Throws an error and frees its text.
napi_value fail_with(napi_env env, char *message);

// What follows throws where it gives false or NULL.
bool arguments(napi_env env, napi_callback_info info, size_t wanted, napi_value *values);
void *external(napi_env env, napi_value value);
// A copy of a string; NULL after an error, and without one for null.
char *text(napi_env env, napi_value value);
bool typed_array(napi_env env, napi_value value, void **data, size_t *bytes);
// A task of `size` bytes, which begin with a task_t, that keeps the arguments.
void *make_task(napi_env env, engine_t *engine, size_t size, const napi_value *values, size_t count, napi_value *kept);
// Gives a task to the engine; the result is its promise. Node.js does not end before that is settled.
napi_value start(napi_env env, task_t *task, napi_value kept, void (*work)(job_t *));
void free_task(task_t *task);

// A BigInt as an address of `bytes` bytes on the GPU of an engine.
bool device_address(napi_env env, const engine_t *engine, napi_value value, size_t bytes, void **address);

// The functions for GPUs.
bool define_cuda(napi_env env, napi_value exports);
