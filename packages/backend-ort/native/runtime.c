#define _GNU_SOURCE
#include "runtime.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static struct {
  pthread_mutex_t lock;
  ort_t ort;
  const char *version;
  OrtEnv *env;
  OrtMemoryInfo *memory;
  // Of the pool; 0 where there is none.
  int threads;
  char *processors;
  int sessions;
} runtime = {.lock = PTHREAD_MUTEX_INITIALIZER};

const char *runtime_version(void) { return runtime.version; }

const ort_t *runtime_ort(void) { return &runtime.ort; }

const OrtEnv *runtime_env(void) { return runtime.env; }

const OrtMemoryInfo *runtime_memory(void) { return runtime.memory; }

char *runtime_error(OrtStatus *status) {
  if (status == NULL) return NULL;
  char *text = strdup(runtime.ort.GetErrorMessage(status));
  runtime.ort.ReleaseStatus(status);
  return text == NULL ? strdup("out of memory") : text;
}

static char *bind_functions(const char *library) {
  // The library sends usage data unless it is told not to before it is loaded; process.env of a worker is no environment.
  setenv("ORT_DISABLE_TELEMETRY", "1", 0);
  void *handle = dlopen(library, RTLD_NOW | RTLD_LOCAL);
  if (handle == NULL) return strdup(dlerror());
  const ort_base_t *(*get_base)(void);
  *(void **)&get_base = dlsym(handle, "OrtGetApiBase");
  if (get_base == NULL) return strdup(dlerror());
  const ort_base_t *base = get_base();
  const void *const *table = base->GetApi(ORT_TABLE_VERSION);
  if (table == NULL) {
    char *text = NULL;
    if (asprintf(&text, "ONNX Runtime %s is too old", base->GetVersionString()) < 0) return strdup("out of memory");
    return text;
  }
#define BIND(POSITION, RETURNS, NAME, ARGUMENTS) memcpy(&runtime.ort.NAME, table + POSITION, sizeof(void *));
  ORT_FUNCTIONS(BIND)
#undef BIND
  runtime.version = base->GetVersionString();
  return NULL;
}

static char *set_threads(OrtThreadingOptions *options, int threads, const char *processors) {
  const ort_t *ort = &runtime.ort;
  char *error = runtime_error(ort->SetGlobalIntraOpNumThreads(options, threads));
  if (error == NULL) error = runtime_error(ort->SetGlobalInterOpNumThreads(options, 1));
  if (error == NULL && processors != NULL) {
    error = runtime_error(ort->SetGlobalIntraOpThreadAffinity(options, processors));
  }
  return error;
}

static char *make_env(int threads, const char *processors) {
  const ort_t *ort = &runtime.ort;
  OrtThreadingOptions *options = NULL;
  char *error = runtime_error(ort->CreateThreadingOptions(&options));
  if (error == NULL) error = set_threads(options, threads, processors);
  if (error == NULL) {
    error = runtime_error(ort->CreateEnvWithGlobalThreadPools(ORT_LOG_FATAL, "rankwise", options, &runtime.env));
  }
  if (options != NULL) ort->ReleaseThreadingOptions(options);
  if (error != NULL) return error;
  runtime.threads = threads;
  runtime.processors = processors == NULL ? NULL : strdup(processors);
  return runtime_error(ort->CreateCpuMemoryInfo(ORT_ARENA, ORT_MEMORY_DEFAULT, &runtime.memory));
}

char *runtime_load(const char *library, int threads, const char *processors) {
  pthread_mutex_lock(&runtime.lock);
  char *error = runtime.version == NULL ? bind_functions(library) : NULL;
  if (error == NULL && runtime.memory == NULL) error = make_env(threads, processors);
  pthread_mutex_unlock(&runtime.lock);
  return error;
}

bool runtime_shares(int threads, const char *processors) {
  pthread_mutex_lock(&runtime.lock);
  bool same = processors == NULL || runtime.processors == NULL ? processors == runtime.processors
                                                               : strcmp(processors, runtime.processors) == 0;
  bool shares = same && threads == runtime.threads;
  pthread_mutex_unlock(&runtime.lock);
  return shares;
}

void runtime_share_nothing(void) {
  pthread_mutex_lock(&runtime.lock);
  runtime.threads = 0;
  pthread_mutex_unlock(&runtime.lock);
}

// The arena begins with 64 MiB, of which only what is touched costs memory, and doubles; chunks are split wherever 1 MiB is
// left. A FLUX.2-klein-4B single block of 768 tokens then peaked at 236 MB and a double one at 226, Node.js with 75 included;
// 268 and 237 if it begins with 16 MiB, 293 and 285 if it grows by what is asked for. That was before what lies between two
// projections stayed in parts, which takes 30 MB less.
static char *register_arena(void) {
  const ort_t *ort = &runtime.ort;
  static const char *const KEYS[] = {"arena_extend_strategy", "initial_chunk_size_bytes", "max_dead_bytes_per_chunk"};
  static const size_t VALUES[] = {0, (size_t)64 << 20, (size_t)1 << 20};
  OrtArenaCfg *config = NULL;
  char *error = runtime_error(ort->CreateArenaCfgV2(KEYS, VALUES, 3, &config));
  if (error == NULL) error = runtime_error(ort->CreateAndRegisterAllocator(runtime.env, runtime.memory, config));
  if (config != NULL) ort->ReleaseArenaCfg(config);
  return error;
}

char *runtime_enter(void) {
  pthread_mutex_lock(&runtime.lock);
  char *error = runtime.sessions == 0 ? register_arena() : NULL;
  if (error == NULL) runtime.sessions++;
  pthread_mutex_unlock(&runtime.lock);
  return error;
}

void runtime_leave(void) {
  pthread_mutex_lock(&runtime.lock);
  if (--runtime.sessions == 0) free(runtime_error(runtime.ort.UnregisterAllocator(runtime.env, runtime.memory)));
  pthread_mutex_unlock(&runtime.lock);
}
