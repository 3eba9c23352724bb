// The GPU of an engine: a stream on it, memory there, and ONNX Runtime's CUDA provider. libcudart is loaded when it is
// asked for, so nothing here is needed to compile or load the addon.
#pragma once
#include <stdbool.h>

#include "runtime.h"

typedef struct cuda cuda_t;

// Numbers of cudaMemcpyKind.
enum { CUDA_HOST_TO_DEVICE = 1, CUDA_DEVICE_TO_HOST = 2 };

// What returns text returns an error to be freed, or NULL.

// Loads libcudart, once in a process and always from the same file, and counts the GPUs that it sees.
char *cuda_load(const char *library, int *count);

// A stream on a GPU, which becomes the one of the thread that calls. Takes seconds where CUDA starts on it.
char *cuda_open(int device, cuda_t **cuda);
// After all copies have ended: frees the memory that is left.
void cuda_free_all(cuda_t *cuda);
// After all sessions have ended as well: frees the stream too.
void cuda_close(cuda_t *cuda);

const void *cuda_stream(const cuda_t *cuda);
const OrtMemoryInfo *cuda_memory(const cuda_t *cuda);

// On the thread of JavaScript, as is everything that looks at what is allocated.
char *cuda_allocate(cuda_t *cuda, size_t bytes, void **address);
char *cuda_release(cuda_t *cuda, void *address);
bool cuda_holds(const cuda_t *cuda, const void *address, size_t bytes);

// Puts a copy into the stream and waits until everything in it is done.
char *cuda_copy(const cuda_t *cuda, void *target, const void *source, size_t bytes, int kind);

// Has sessions compute on the GPU, in the stream, and refuses those with a node that would be computed elsewhere.
char *cuda_configure(const cuda_t *cuda, OrtSessionOptions *options);
