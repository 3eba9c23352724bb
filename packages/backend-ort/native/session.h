// A graph that ONNX Runtime has loaded. Nothing here is told to Node.js: it runs on the thread of an engine.
#pragma once
#include "cuda.h"

typedef struct {
  char *name;
  // As TensorProto.DataType of onnx.proto numbers them.
  int element_type;
  size_t rank;
  int64_t *shape;
  size_t bytes;
} port_t;

typedef struct {
  OrtSession *session;
  size_t input_count;
  size_t output_count;
  // Inputs, then outputs.
  port_t *ports;
  const char **names;
  OrtValue **values;
} graph_t;

// How sessions are made and run.
typedef struct {
  int threads;
  // Of the threads beside the one that runs, or NULL.
  char *processors;
  OrtRunOptions *run_options;
  // The GPU that computes; NULL where the CPU does.
  cuda_t *cuda;
} session_settings_t;

// All return an error to be freed, or NULL.
char *graph_load(graph_t *graph, const session_settings_t *settings, const void *model, size_t bytes);
// `data` has the memory of every port, on the GPU where there is one, which ONNX Runtime reads and writes where it is.
char *graph_run(graph_t *graph, const session_settings_t *settings, void *const *data);

// Gives the session back; idempotent.
void graph_unload(graph_t *graph);
// Frees a graph that is unloaded.
void graph_free(graph_t *graph);
