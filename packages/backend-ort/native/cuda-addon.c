// What src/cuda/ sees of a GPU; see addon.c.
#include "addon.h"

#include <stdlib.h>

typedef struct {
  task_t task;
  int device;
} attachment_t;

typedef struct {
  task_t task;
  void *target;
  const void *source;
  size_t bytes;
  int kind;
} copy_t;

bool device_address(napi_env env, const engine_t *engine, napi_value value, size_t bytes, void **address) {
  uint64_t number;
  bool lossless;
  if (engine->settings.cuda != NULL && napi_get_value_bigint_uint64(env, value, &number, &lossless) == napi_ok &&
      lossless) {
    *address = (void *)(uintptr_t)number;
    if (cuda_holds(engine->settings.cuda, *address, bytes)) return true;
  }
  fail(env, "there is no memory of the GPU at this address");
  return false;
}

// An engine that has a GPU and is not closed.
static engine_t *engine_with_gpu(napi_env env, napi_value value) {
  engine_t *engine = external(env, value);
  if (engine == NULL || engine->settings.cuda != NULL) return engine;
  fail(env, "the engine has no GPU");
  return NULL;
}

static napi_value address_value(napi_env env, const void *address) {
  napi_value result;
  return napi_create_bigint_uint64(env, (uintptr_t)address, &result) == napi_ok ? result : NULL;
}

// cudaDevices(library): the number of GPUs
static napi_value devices(napi_env env, napi_callback_info info) {
  napi_value values[MOST_ARGUMENTS], result;
  if (!arguments(env, info, 1, values)) return NULL;
  char *library = text(env, values[0]);
  if (library == NULL) return NULL;
  int count = 0;
  char *error = cuda_load(library, &count);
  free(library);
  if (error != NULL) return fail_with(env, error);
  return napi_create_int32(env, count, &result) == napi_ok ? result : NULL;
}

static void attach_work(job_t *job) {
  attachment_t *attachment = (attachment_t *)job;
  attachment->task.error = cuda_open(attachment->device, &attachment->task.engine->settings.cuda);
}

// cudaAttach(engine, device): a promise, after which the engine computes on the GPU
static napi_value attach(napi_env env, napi_callback_info info) {
  napi_value values[MOST_ARGUMENTS], kept;
  int32_t device;
  if (!arguments(env, info, 2, values)) return NULL;
  if (napi_get_value_int32(env, values[1], &device) != napi_ok || device < 0) return fail(env, "device is no number");
  engine_t *engine = external(env, values[0]);
  if (engine == NULL) return NULL;
  if (engine->settings.cuda != NULL) return fail(env, "the engine has a GPU already");
  attachment_t *attachment = make_task(env, engine, sizeof *attachment, values, 1, &kept);
  if (attachment == NULL) return NULL;
  attachment->device = device;
  return start(env, &attachment->task, kept, attach_work);
}

// cudaStream(engine): its address
static napi_value stream(napi_env env, napi_callback_info info) {
  napi_value values[MOST_ARGUMENTS];
  if (!arguments(env, info, 1, values)) return NULL;
  engine_t *engine = engine_with_gpu(env, values[0]);
  return engine == NULL ? NULL : address_value(env, cuda_stream(engine->settings.cuda));
}

// cudaAllocate(engine, bytes): the address of memory with any content
static napi_value allocate(napi_env env, napi_callback_info info) {
  napi_value values[MOST_ARGUMENTS];
  int64_t bytes;
  if (!arguments(env, info, 2, values)) return NULL;
  if (napi_get_value_int64(env, values[1], &bytes) != napi_ok || bytes < 1) return fail(env, "bytes is no size");
  engine_t *engine = engine_with_gpu(env, values[0]);
  if (engine == NULL) return NULL;
  void *address;
  char *error = cuda_allocate(engine->settings.cuda, (size_t)bytes, &address);
  return error == NULL ? address_value(env, address) : fail_with(env, error);
}

// cudaFree(engine, address)
static napi_value release(napi_env env, napi_callback_info info) {
  napi_value values[MOST_ARGUMENTS];
  void *address;
  if (!arguments(env, info, 2, values)) return NULL;
  engine_t *engine = engine_with_gpu(env, values[0]);
  if (engine == NULL || !device_address(env, engine, values[1], 0, &address)) return NULL;
  char *error = cuda_release(engine->settings.cuda, address);
  return error == NULL ? NULL : fail_with(env, error);
}

static void copy_work(job_t *job) {
  copy_t *copy = (copy_t *)job;
  copy->task.error = cuda_copy(copy->task.engine->settings.cuda, copy->target, copy->source, copy->bytes, copy->kind);
}

// The address on the GPU is the second argument, the memory of the process the third.
static napi_value start_copy(napi_env env, napi_callback_info info, int kind) {
  napi_value values[MOST_ARGUMENTS], kept;
  void *device, *host;
  size_t bytes;
  if (!arguments(env, info, 3, values)) return NULL;
  engine_t *engine = engine_with_gpu(env, values[0]);
  if (engine == NULL || !typed_array(env, values[2], &host, &bytes)) return NULL;
  if (!device_address(env, engine, values[1], bytes, &device)) return NULL;
  copy_t *copy = make_task(env, engine, sizeof *copy, values, 3, &kept);
  if (copy == NULL) return NULL;
  const bool writes = kind == CUDA_HOST_TO_DEVICE;
  copy->target = writes ? device : host;
  copy->source = writes ? host : device;
  copy->bytes = bytes;
  copy->kind = kind;
  return start(env, &copy->task, kept, copy_work);
}

// cudaWrite(engine, address, data: TypedArray): a promise. The data is not changed meanwhile.
static napi_value write_device(napi_env env, napi_callback_info info) {
  return start_copy(env, info, CUDA_HOST_TO_DEVICE);
}

// cudaRead(engine, address, data: TypedArray): a promise
static napi_value read_device(napi_env env, napi_callback_info info) {
  return start_copy(env, info, CUDA_DEVICE_TO_HOST);
}

bool define_cuda(napi_env env, napi_value exports) {
  const napi_property_descriptor functions[] = {
      {"cudaDevices", NULL, devices, NULL, NULL, NULL, napi_enumerable, NULL},
      {"cudaAttach", NULL, attach, NULL, NULL, NULL, napi_enumerable, NULL},
      {"cudaStream", NULL, stream, NULL, NULL, NULL, napi_enumerable, NULL},
      {"cudaAllocate", NULL, allocate, NULL, NULL, NULL, napi_enumerable, NULL},
      {"cudaFree", NULL, release, NULL, NULL, NULL, napi_enumerable, NULL},
      {"cudaWrite", NULL, write_device, NULL, NULL, NULL, napi_enumerable, NULL},
      {"cudaRead", NULL, read_device, NULL, NULL, NULL, napi_enumerable, NULL},
  };
  return napi_define_properties(env, exports, sizeof functions / sizeof *functions, functions) == napi_ok;
}
