// Stands for an ONNX Runtime with its CUDA provider where there is none: the library of onnxruntime-node, whose CPU provider
// computes on the "memory of a GPU" that the stub of collectives-nccl takes from the process. What a session is given for the
// GPU goes to the file STUB_LOG. STUB_ORT_LIBRARY is the library; STUB_ORT_FAULT has the provider fail.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

// Positions in the table, by onnxruntime_c_api.h.
enum {
  CREATE_STATUS = 0,
  CREATE_MEMORY_INFO = 68,
  CREATE_CPU_MEMORY_INFO = 69,
  ADD_SESSION_CONFIG_ENTRY = 130,
  APPEND_CUDA = 204,
  CREATE_OPTIONS = 205,
  UPDATE_OPTIONS = 206,
  RELEASE_OPTIONS = 208,
  UPDATE_WITH_VALUE = 263,
  ENTRIES = 285,
};

typedef struct {
  const void *const *(*GetApi)(uint32_t version);
  const char *(*GetVersionString)(void);
} Base;

static const Base *real;
static const void *table[ENTRIES];

static void record(const char *format, ...) {
  const char *path = getenv("STUB_LOG");
  if (!path) return;
  char line[512];
  va_list args;
  va_start(args, format);
  int length = vsnprintf(line, sizeof line - 1, format, args);
  va_end(args);
  line[length++] = '\n';
  int fd = open(path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
  if (fd < 0 || write(fd, line, length) < 0) abort();
  close(fd);
}

static void *refused(const char *message) {
  void *(*create_status)(int, const char *) = (void *(*)(int, const char *))real->GetApi(17)[CREATE_STATUS];
  return create_status(1, message);
}

static void *create_memory_info(const char *name, int type, int device, int memory_type, void **out) {
  record("CreateMemoryInfo %s %d %d %d", name, type, device, memory_type);
  if (strcmp(name, "Cuda") != 0) return refused("no such memory");
  void *(*create)(int, int, void **) = (void *(*)(int, int, void **))real->GetApi(17)[CREATE_CPU_MEMORY_INFO];
  return create(type, memory_type, out);
}

static void *add_session_config_entry(void *options, const char *key, const char *value) {
  record("AddSessionConfigEntry %s=%s", key, value);
  // Every node is on the CPU here.
  if (strcmp(key, "session.disable_cpu_ep_fallback") == 0) return NULL;
  void *(*add)(void *, const char *, const char *) =
      (void *(*)(void *, const char *, const char *))real->GetApi(17)[ADD_SESSION_CONFIG_ENTRY];
  return add(options, key, value);
}

static void *create_options(void **out) {
  record("CreateCUDAProviderOptions");
  *out = malloc(8);
  return NULL;
}
static void *update_options(void *options, const char *const *keys, const char *const *values, size_t count) {
  (void)options;
  for (size_t i = 0; i < count; i++) record("option %s=%s", keys[i], values[i]);
  return NULL;
}
static void *update_with_value(void *options, const char *key, void *value) {
  (void)options;
  record("option %s=%p", key, value);
  return NULL;
}
static void *append(void *session_options, const void *options) {
  (void)session_options;
  (void)options;
  record("SessionOptionsAppendExecutionProvider_CUDA_V2");
  return getenv("STUB_ORT_FAULT") ? refused("Failed to load library libonnxruntime_providers_cuda.so") : NULL;
}
static void release_options(void *options) {
  record("ReleaseCUDAProviderOptions");
  free(options);
}

static const void *const *get_api(uint32_t version) {
  const void *const *own = real->GetApi(version);
  if (!own) return NULL;
  memcpy(table, own, sizeof table);
  table[CREATE_MEMORY_INFO] = (void *)create_memory_info;
  table[ADD_SESSION_CONFIG_ENTRY] = (void *)add_session_config_entry;
  table[APPEND_CUDA] = (void *)append;
  table[CREATE_OPTIONS] = (void *)create_options;
  table[UPDATE_OPTIONS] = (void *)update_options;
  table[RELEASE_OPTIONS] = (void *)release_options;
  table[UPDATE_WITH_VALUE] = (void *)update_with_value;
  return table;
}

static const char *get_version(void) { return real->GetVersionString(); }

const Base *OrtGetApiBase(void) {
  static const Base base = {get_api, get_version};
  void *handle = dlopen(getenv("STUB_ORT_LIBRARY"), RTLD_NOW | RTLD_LOCAL);
  if (!handle) abort();
  real = ((const Base *(*)(void))dlsym(handle, "OrtGetApiBase"))();
  return &base;
}
