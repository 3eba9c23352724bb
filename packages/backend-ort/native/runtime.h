// ONNX Runtime in this process. Its environment exists once in a process, whoever makes it, and stays to its end: so
// there is one pool of threads, with as many as the first engine has, and one arena for all sessions.
#pragma once
#include <stdbool.h>

#include "onnxruntime.h"

// Loads the library and makes the environment, unless that has been done. An error is text to be freed; NULL is success.
// `processors` are those of the pool's threads, as ONNX Runtime counts them, or NULL.
char *runtime_load(const char *library, int threads, const char *processors);

// Of the library that is loaded.
const char *runtime_version(void);

const ort_t *runtime_ort(void);
const OrtEnv *runtime_env(void);

// Memory of the process.
const OrtMemoryInfo *runtime_memory(void);

// Whether the pool of the process is one for sessions with so many threads on these processors; others bring their own.
bool runtime_shares(int threads, const char *processors);

// After an environment turned out to be one that others made, which has no pool.
void runtime_share_nothing(void);

// Sessions that are open: the arena is there while there are some, and its memory goes back with the last.
char *runtime_enter(void);
void runtime_leave(void);

// The text of a status, which it frees; NULL where nothing failed.
char *runtime_error(OrtStatus *status);
