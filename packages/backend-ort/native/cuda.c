#define _GNU_SOURCE
#include "cuda.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

// What is called of libcudart; cudaError_t is an int, 0 is success, and a cudaStream_t is a pointer.
#define CUDA_FUNCTIONS(FUNCTION)                                                                        \
  FUNCTION(int, cudaGetDeviceCount, (int *count))                                                       \
  FUNCTION(int, cudaSetDevice, (int device))                                                            \
  FUNCTION(int, cudaMalloc, (void **address, size_t bytes))                                             \
  FUNCTION(int, cudaFree, (void *address))                                                              \
  FUNCTION(int, cudaMemcpyAsync, (void *target, const void *source, size_t bytes, int kind, void *stream)) \
  FUNCTION(int, cudaStreamCreateWithFlags, (void **stream, unsigned flags))                             \
  FUNCTION(int, cudaStreamSynchronize, (void *stream))                                                  \
  FUNCTION(int, cudaStreamDestroy, (void *stream))                                                      \
  FUNCTION(const char *, cudaGetErrorString, (int error))

#define CUDA_FIELD(RETURNS, NAME, ARGUMENTS) RETURNS(*NAME) ARGUMENTS;
static struct {
  pthread_mutex_t lock;
  // What it was loaded as; NULL before.
  char *library;
  CUDA_FUNCTIONS(CUDA_FIELD)
} cudart = {.lock = PTHREAD_MUTEX_INITIALIZER};
#undef CUDA_FIELD

// cudaStreamNonBlocking: the legacy default stream, which other code of the process may use, does not wait for it.
enum { STREAM_NON_BLOCKING = 1 };

typedef struct block {
  struct block *next;
  char *address;
  size_t bytes;
} block_t;

struct cuda {
  int device;
  void *stream;
  OrtMemoryInfo *memory;
  block_t *blocks;
};

static char *failed(const char *function, int error) {
  char *text = NULL;
  if (error == 0) return NULL;
  if (asprintf(&text, "%s: %s (CUDA error %d)", function, cudart.cudaGetErrorString(error), error) >= 0) return text;
  return strdup("out of memory");
}

static char *bind_functions(const char *library) {
  void *handle = dlopen(library, RTLD_NOW | RTLD_LOCAL);
  if (handle == NULL) return strdup(dlerror());
#define BIND(RETURNS, NAME, ARGUMENTS)                    \
  *(void **)&cudart.NAME = dlsym(handle, #NAME);          \
  if (cudart.NAME == NULL) return strdup(dlerror());
  CUDA_FUNCTIONS(BIND)
#undef BIND
  cudart.library = strdup(library);
  return NULL;
}

// Addresses and streams are those of one library.
static char *check_library(const char *library) {
  char *text = NULL;
  if (strcmp(library, cudart.library) == 0) return NULL;
  if (asprintf(&text, "%s: the process has loaded %s already", library, cudart.library) >= 0) return text;
  return strdup("out of memory");
}

char *cuda_load(const char *library, int *count) {
  pthread_mutex_lock(&cudart.lock);
  char *error = cudart.library == NULL ? bind_functions(library) : check_library(library);
  pthread_mutex_unlock(&cudart.lock);
  return error == NULL ? failed("cudaGetDeviceCount", cudart.cudaGetDeviceCount(count)) : error;
}

static char *start(cuda_t *cuda) {
  char *error = failed("cudaSetDevice", cudart.cudaSetDevice(cuda->device));
  if (error != NULL) return error;
  error = runtime_error(
      runtime_ort()->CreateMemoryInfo("Cuda", ORT_DEVICE_ALLOCATOR, cuda->device, ORT_MEMORY_DEFAULT, &cuda->memory));
  if (error != NULL) return error;
  return failed("cudaStreamCreateWithFlags", cudart.cudaStreamCreateWithFlags(&cuda->stream, STREAM_NON_BLOCKING));
}

char *cuda_open(int device, cuda_t **cuda) {
  if (cudart.library == NULL) return strdup("libcudart is not loaded");
  cuda_t *opened = calloc(1, sizeof *opened);
  if (opened == NULL) return strdup("out of memory");
  opened->device = device;
  char *error = start(opened);
  if (error == NULL) *cuda = opened;
  else cuda_close(opened);
  return error;
}

void cuda_free_all(cuda_t *cuda) {
  while (cuda->blocks != NULL) free(cuda_release(cuda, cuda->blocks->address));
}

void cuda_close(cuda_t *cuda) {
  cuda_free_all(cuda);
  if (cuda->stream != NULL) cudart.cudaStreamDestroy(cuda->stream);
  if (cuda->memory != NULL) runtime_ort()->ReleaseMemoryInfo(cuda->memory);
  free(cuda);
}

const void *cuda_stream(const cuda_t *cuda) { return cuda->stream; }

const OrtMemoryInfo *cuda_memory(const cuda_t *cuda) { return cuda->memory; }

// Other code of this thread may have made another GPU the current one.
char *cuda_allocate(cuda_t *cuda, size_t bytes, void **address) {
  char *error = failed("cudaSetDevice", cudart.cudaSetDevice(cuda->device));
  if (error == NULL) error = failed("cudaMalloc", cudart.cudaMalloc(address, bytes));
  if (error != NULL) return error;
  block_t *block = malloc(sizeof *block);
  if (block == NULL) {
    cudart.cudaFree(*address);
    return strdup("out of memory");
  }
  *block = (block_t){.next = cuda->blocks, .address = *address, .bytes = bytes};
  cuda->blocks = block;
  return NULL;
}

char *cuda_release(cuda_t *cuda, void *address) {
  block_t **at = &cuda->blocks;
  while (*at != NULL && (*at)->address != address) at = &(*at)->next;
  block_t *block = *at;
  if (block == NULL) return strdup("this memory is not allocated");
  *at = block->next;
  free(block);
  char *error = failed("cudaSetDevice", cudart.cudaSetDevice(cuda->device));
  return error == NULL ? failed("cudaFree", cudart.cudaFree(address)) : error;
}

bool cuda_holds(const cuda_t *cuda, const void *address, size_t bytes) {
  for (const block_t *block = cuda->blocks; block != NULL; block = block->next) {
    const size_t offset = (size_t)((const char *)address - block->address);
    const bool begins = (const char *)address >= block->address && offset <= block->bytes;
    if (begins && bytes <= block->bytes - offset) return true;
  }
  return false;
}

char *cuda_copy(const cuda_t *cuda, void *target, const void *source, size_t bytes, int kind) {
  char *error = failed("cudaMemcpyAsync", cudart.cudaMemcpyAsync(target, source, bytes, kind, cuda->stream));
  return error == NULL ? failed("cudaStreamSynchronize", cudart.cudaStreamSynchronize(cuda->stream)) : error;
}

// TF32, which the provider multiplies float32 in unless it is told not to, has 10 bits of mantissa. Memory of a session
// grows by what it needs: every session has its own, and doubling it would take twice as much of the GPU.
static char *set_options(const cuda_t *cuda, OrtCUDAProviderOptionsV2 *options) {
  const ort_t *ort = runtime_ort();
  char device[16];
  snprintf(device, sizeof device, "%d", cuda->device);
  const char *keys[] = {"device_id", "use_tf32", "arena_extend_strategy"};
  const char *values[] = {device, "0", "kSameAsRequested"};
  char *error = runtime_error(ort->UpdateCUDAProviderOptions(options, keys, values, sizeof keys / sizeof *keys));
  if (error != NULL) return error;
  return runtime_error(ort->UpdateCUDAProviderOptionsWithValue(options, "user_compute_stream", cuda->stream));
}

char *cuda_configure(const cuda_t *cuda, OrtSessionOptions *options) {
  const ort_t *ort = runtime_ort();
  OrtCUDAProviderOptionsV2 *provider = NULL;
  char *error = runtime_error(ort->CreateCUDAProviderOptions(&provider));
  if (error == NULL) error = set_options(cuda, provider);
  if (error == NULL) error = runtime_error(ort->SessionOptionsAppendExecutionProvider_CUDA_V2(options, provider));
  if (provider != NULL) ort->ReleaseCUDAProviderOptions(provider);
  if (error != NULL) return error;
  return runtime_error(ort->AddSessionConfigEntry(options, "session.disable_cpu_ep_fallback", "1"));
}
