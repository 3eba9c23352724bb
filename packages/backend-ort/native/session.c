#define _GNU_SOURCE
#include "session.h"

#include <stdlib.h>
#include <string.h>

#include "linear.h"

// The operator of our own has a kernel for the CPU only.
static char *add_linear(OrtSessionOptions *options, const session_settings_t *settings) {
  OrtCustomOpDomain *domain = NULL;
  char *error = linear_domain(settings->threads, &domain);
  return error == NULL ? runtime_error(runtime_ort()->AddCustomOpDomain(options, domain)) : error;
}

// Optimisations from "extended" on turn Add + LayerNormalization into SkipLayerNormalization, which is 2 to 5 times less
// exact. A memory pattern would be allocated beside the arena. Threads that spin after a run take the cores from others.
static char *configure(OrtSessionOptions *options, const session_settings_t *settings) {
  const ort_t *ort = runtime_ort();
  bool shares = runtime_shares(settings->threads, settings->processors);
  char *error = runtime_error(ort->SetSessionGraphOptimizationLevel(options, ORT_OPTIMIZE_BASIC));
  if (error == NULL) error = runtime_error(ort->SetSessionLogSeverityLevel(options, ORT_LOG_FATAL));
  if (error == NULL) error = runtime_error(ort->DisableMemPattern(options));
  if (error == NULL) error = runtime_error(ort->AddSessionConfigEntry(options, "session.use_env_allocators", "1"));
  if (error == NULL) error = runtime_error(ort->AddSessionConfigEntry(options, "session.force_spinning_stop", "1"));
  if (error != NULL) return error;
  error = settings->cuda == NULL ? add_linear(options, settings) : cuda_configure(settings->cuda, options);
  if (error != NULL) return error;
  if (shares) return runtime_error(ort->DisablePerSessionThreads(options));
  error = runtime_error(ort->SetIntraOpNumThreads(options, settings->threads));
  if (error != NULL || settings->processors == NULL) return error;
  return runtime_error(
      ort->AddSessionConfigEntry(options, "session.intra_op_thread_affinities", settings->processors));
}

static char *create(graph_t *graph, const session_settings_t *settings, const void *model, size_t bytes) {
  const ort_t *ort = runtime_ort();
  OrtSessionOptions *options = NULL;
  char *error = runtime_error(ort->CreateSessionOptions(&options));
  if (error == NULL) error = configure(options, settings);
  if (error == NULL) {
    error = runtime_error(ort->CreateSessionFromArray(runtime_env(), model, bytes, options, &graph->session));
  }
  if (options != NULL) ort->ReleaseSessionOptions(options);
  return error;
}

char *graph_load(graph_t *graph, const session_settings_t *settings, const void *model, size_t bytes) {
  char *error = runtime_enter();
  if (error != NULL) return error;
  error = create(graph, settings, model, bytes);
  // The environment is somebody else's, such as that of the Node.js binding: sessions have threads of their own then.
  if (error != NULL && strstr(error, "CreateEnvWithGlobalThreadPools") != NULL) {
    free(error);
    runtime_share_nothing();
    error = create(graph, settings, model, bytes);
  }
  if (error != NULL) runtime_leave();
  return error;
}

// Values are small objects that point to the data of others.
static char *make_values(graph_t *graph, const OrtMemoryInfo *memory, void *const *data) {
  const ort_t *ort = runtime_ort();
  for (size_t i = 0; i < graph->input_count + graph->output_count; i++) {
    const port_t *port = graph->ports + i;
    char *error = runtime_error(ort->CreateTensorWithDataAsOrtValue(
        memory, data[i], port->bytes, port->shape, port->rank, port->element_type, graph->values + i));
    if (error != NULL) return error;
  }
  return NULL;
}

char *graph_run(graph_t *graph, const session_settings_t *settings, void *const *data) {
  const ort_t *ort = runtime_ort();
  const size_t inputs = graph->input_count, outputs = graph->output_count;
  char *error = make_values(graph, settings->cuda == NULL ? runtime_memory() : cuda_memory(settings->cuda), data);
  if (error == NULL) {
    error = runtime_error(ort->Run(graph->session, settings->run_options, graph->names,
                                   (const OrtValue *const *)graph->values, inputs, graph->names + inputs, outputs,
                                   graph->values + inputs));
  }
  for (size_t i = 0; i < inputs + outputs; i++) {
    if (graph->values[i] != NULL) ort->ReleaseValue(graph->values[i]);
    graph->values[i] = NULL;
  }
  return error;
}

void graph_unload(graph_t *graph) {
  if (graph->session == NULL) return;
  runtime_ort()->ReleaseSession(graph->session);
  graph->session = NULL;
  runtime_leave();
}

void graph_free(graph_t *graph) {
  graph_unload(graph);
  for (size_t i = 0; graph->ports != NULL && i < graph->input_count + graph->output_count; i++) {
    free(graph->ports[i].name);
    free(graph->ports[i].shape);
  }
  free(graph->ports);
  free(graph->names);
  free(graph->values);
  free(graph);
}
