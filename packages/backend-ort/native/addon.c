// What src/engine/addon.ts sees. Arguments are checked there; what would make this code read or write other memory than
// it was given is checked here again.
#define _GNU_SOURCE
#include "addon.h"

#include <stdlib.h>
#include <string.h>

#include "linear.h"

// As PROTOCOL in src/engine/addon.ts.
enum { PROTOCOL = 2 };
enum { MOST_TEXT = 4096, MOST_DIMENSIONS = 64 };

napi_value fail(napi_env env, const char *message) {
  napi_throw_error(env, NULL, message);
  return NULL;
}

napi_value fail_with(napi_env env, char *message) {
  fail(env, message);
  free(message);
  return NULL;
}

bool arguments(napi_env env, napi_callback_info info, size_t wanted, napi_value *values) {
  size_t count = wanted;
  if (napi_get_cb_info(env, info, &count, values, NULL, NULL) == napi_ok && count >= wanted) return true;
  fail(env, "too few arguments");
  return false;
}

void *external(napi_env env, napi_value value) {
  void *data = NULL;
  if (napi_get_value_external(env, value, &data) != napi_ok) fail(env, "an argument is not what it should be");
  return data;
}

char *text(napi_env env, napi_value value) {
  napi_valuetype type;
  if (napi_typeof(env, value, &type) == napi_ok && type == napi_null) return NULL;
  char buffer[MOST_TEXT];
  size_t length;
  if (napi_get_value_string_utf8(env, value, buffer, sizeof buffer, &length) == napi_ok && length < sizeof buffer - 1) {
    return strdup(buffer);
  }
  fail(env, "a text is missing or too long");
  return NULL;
}

bool typed_array(napi_env env, napi_value value, void **data, size_t *bytes) {
  static const size_t ITEM_BYTES[] = {1, 1, 1, 2, 2, 4, 4, 4, 8, 8, 8};
  // Where an array is empty, there may be no address; ONNX Runtime asks for one.
  static char nothing[64];
  napi_typedarray_type type;
  size_t length;
  if (napi_get_typedarray_info(env, value, &type, &length, data, NULL, NULL) != napi_ok ||
      (size_t)type >= sizeof ITEM_BYTES / sizeof *ITEM_BYTES) {
    fail(env, "no typed array");
    return false;
  }
  *bytes = length * ITEM_BYTES[type];
  if (*data == NULL) *data = nothing;
  return true;
}

// Runs on the thread of the engine.
static void announce(job_t *job, void *context) {
  engine_t *engine = context;
  napi_call_threadsafe_function(engine->done, job, napi_tsfn_blocking);
}

void free_task(task_t *task) {
  free(task->data);
  free(task->error);
  free(task);
}

// Settles the promise of a task; `env` is NULL when JavaScript has ended.
static void settle(napi_env env, napi_value callback, void *context, void *data) {
  (void)callback;
  (void)context;
  task_t *task = data;
  if (env != NULL) {
    napi_value value, message;
    napi_get_undefined(env, &value);
    if (task->error == NULL) {
      napi_resolve_deferred(env, task->deferred, value);
    } else {
      napi_create_string_utf8(env, task->error, NAPI_AUTO_LENGTH, &message);
      napi_create_error(env, NULL, message, &value);
      napi_reject_deferred(env, task->deferred, value);
    }
    napi_delete_reference(env, task->kept);
    if (--task->engine->pending == 0) napi_unref_threadsafe_function(env, task->engine->done);
  }
  free_task(task);
}

napi_value start(napi_env env, task_t *task, napi_value kept, void (*work)(job_t *)) {
  engine_t *engine = task->engine;
  napi_value promise;
  if (engine->worker == NULL) {
    free_task(task);
    return fail(env, "the engine is closed");
  }
  if (napi_create_reference(env, kept, 1, &task->kept) != napi_ok ||
      napi_create_promise(env, &task->deferred, &promise) != napi_ok) {
    free_task(task);
    return fail(env, "a task cannot be made");
  }
  if (engine->pending++ == 0) napi_ref_threadsafe_function(env, engine->done);
  task->job.work = work;
  worker_push(engine->worker, &task->job);
  return promise;
}

static void stop_worker(engine_t *engine) {
  if (engine->worker == NULL) return;
  job_t *left = worker_stop(engine->worker);
  engine->worker = NULL;
  while (left != NULL) {
    task_t *task = (task_t *)left;
    left = left->next;
    free_task(task);
  }
}

// JavaScript ends: what runs stops after the kernel that it is at.
static void interrupt(void *argument) {
  engine_t *engine = argument;
  free(runtime_error(runtime_ort()->RunOptionsSetTerminate(engine->settings.run_options)));
  stop_worker(engine);
}

static void free_engine(napi_env env, void *data, void *hint) {
  (void)hint;
  engine_t *engine = data;
  if (engine->worker != NULL) {
    napi_remove_env_cleanup_hook(env, interrupt, engine);
    interrupt(engine);
    napi_release_threadsafe_function(engine->done, napi_tsfn_release);
  }
  // JavaScript has ended without closing the engine. Its sessions, which may go later, still have the stream.
  if (engine->settings.cuda != NULL) cuda_free_all(engine->settings.cuda);
  if (engine->settings.run_options != NULL) runtime_ort()->ReleaseRunOptions(engine->settings.run_options);
  free(engine->settings.processors);
  free(engine);
}

static char *make_run_options(OrtRunOptions **options) {
  const ort_t *ort = runtime_ort();
  char *error = runtime_error(ort->CreateRunOptions(options));
  return error == NULL ? runtime_error(ort->RunOptionsSetRunLogSeverityLevel(*options, ORT_LOG_FATAL)) : error;
}

static bool start_worker(napi_env env, engine_t *engine, int processor) {
  napi_value name;
  if (napi_create_string_utf8(env, "rankwise", NAPI_AUTO_LENGTH, &name) != napi_ok) return false;
  if (napi_create_threadsafe_function(env, NULL, NULL, name, 0, 1, NULL, NULL, NULL, settle, &engine->done) != napi_ok) {
    return false;
  }
  napi_unref_threadsafe_function(env, engine->done);
  engine->worker = worker_start(processor, announce, engine);
  if (engine->worker == NULL) {
    napi_release_threadsafe_function(engine->done, napi_tsfn_release);
    return false;
  }
  napi_add_env_cleanup_hook(env, interrupt, engine);
  return true;
}

// open(library, threads, processors: string | null, processor): the engine. `processor` is the one of its own thread, or -1.
static napi_value open_engine(napi_env env, napi_callback_info info) {
  napi_value values[MOST_ARGUMENTS];
  int32_t threads, processor;
  if (!arguments(env, info, 4, values)) return NULL;
  if (napi_get_value_int32(env, values[1], &threads) != napi_ok || threads < 1) return fail(env, "threads is no count");
  if (napi_get_value_int32(env, values[3], &processor) != napi_ok) return fail(env, "processor is no number");
  engine_t *engine = calloc(1, sizeof *engine);
  char *library = text(env, values[0]);
  napi_value result;
  if (engine == NULL || library == NULL || napi_create_external(env, engine, free_engine, NULL, &result) != napi_ok) {
    free(engine);
    free(library);
    return NULL;
  }
  engine->settings.threads = threads;
  engine->settings.processors = text(env, values[2]);
  char *error = runtime_load(library, threads, engine->settings.processors);
  free(library);
  if (error == NULL) error = make_run_options(&engine->settings.run_options);
  if (error != NULL) return fail_with(env, error);
  if (!start_worker(env, engine, processor)) return fail(env, "a thread cannot be started");
  return result;
}

// close(engine): after all its promises are settled and its graphs unloaded.
static napi_value close_engine(napi_env env, napi_callback_info info) {
  napi_value values[MOST_ARGUMENTS];
  if (!arguments(env, info, 1, values)) return NULL;
  engine_t *engine = external(env, values[0]);
  if (engine == NULL || engine->worker == NULL) return NULL;
  if (engine->pending > 0) return fail(env, "the engine is busy");
  napi_remove_env_cleanup_hook(env, interrupt, engine);
  stop_worker(engine);
  napi_release_threadsafe_function(engine->done, napi_tsfn_release);
  if (engine->settings.cuda != NULL) cuda_close(engine->settings.cuda);
  engine->settings.cuda = NULL;
  return NULL;
}

static bool property(napi_env env, napi_value object, const char *name, napi_value *value) {
  if (napi_get_named_property(env, object, name, value) == napi_ok) return true;
  fail(env, "a property is missing");
  return false;
}

static bool read_shape(napi_env env, napi_value shape, port_t *port) {
  uint32_t rank;
  if (napi_get_array_length(env, shape, &rank) != napi_ok || rank > MOST_DIMENSIONS) return false;
  port->rank = rank;
  port->shape = calloc(rank + 1, sizeof *port->shape);
  if (port->shape == NULL) return false;
  for (uint32_t i = 0; i < rank; i++) {
    napi_value size;
    if (napi_get_element(env, shape, i, &size) != napi_ok) return false;
    if (napi_get_value_int64(env, size, port->shape + i) != napi_ok || port->shape[i] < 0) return false;
    port->bytes *= (size_t)port->shape[i];
  }
  return true;
}

// Reads { name, elementType, itemBytes, shape }.
static bool read_port(napi_env env, napi_value value, port_t *port) {
  napi_value name, type, item, shape;
  if (!property(env, value, "name", &name) || !property(env, value, "elementType", &type)) return false;
  if (!property(env, value, "itemBytes", &item) || !property(env, value, "shape", &shape)) return false;
  int32_t item_bytes;
  if (napi_get_value_int32(env, item, &item_bytes) == napi_ok && item_bytes > 0 &&
      napi_get_value_int32(env, type, &port->element_type) == napi_ok) {
    port->bytes = (size_t)item_bytes;
    port->name = text(env, name);
    if (port->name == NULL || read_shape(env, shape, port)) return port->name != NULL;
  }
  fail(env, "an input or output is not described as it should be");
  return false;
}

static graph_t *read_graph(napi_env env, napi_value list, uint32_t inputs) {
  uint32_t count;
  if (napi_get_array_length(env, list, &count) != napi_ok || inputs > count) {
    fail(env, "no list of inputs and outputs");
    return NULL;
  }
  graph_t *graph = calloc(1, sizeof *graph);
  if (graph == NULL) return NULL;
  *graph = (graph_t){.input_count = inputs, .output_count = count - inputs};
  graph->ports = calloc(count + 1, sizeof *graph->ports);
  graph->names = calloc(count + 1, sizeof *graph->names);
  graph->values = calloc(count + 1, sizeof *graph->values);
  bool valid = graph->ports != NULL && graph->names != NULL && graph->values != NULL;
  for (uint32_t i = 0; valid && i < count; i++) {
    napi_value value;
    valid = napi_get_element(env, list, i, &value) == napi_ok && read_port(env, value, graph->ports + i);
    graph->names[i] = graph->ports[i].name;
  }
  if (valid) return graph;
  graph_free(graph);
  return NULL;
}

static void free_graph(napi_env env, void *data, void *hint) {
  (void)env;
  (void)hint;
  graph_free(data);
}

// describe(inputsAndOutputs, inputCount): a graph that is not loaded yet.
static napi_value describe(napi_env env, napi_callback_info info) {
  napi_value values[MOST_ARGUMENTS], result;
  uint32_t inputs;
  if (!arguments(env, info, 2, values)) return NULL;
  if (napi_get_value_uint32(env, values[1], &inputs) != napi_ok) return fail(env, "inputCount is no count");
  graph_t *graph = read_graph(env, values[0], inputs);
  if (graph == NULL) return NULL;
  if (napi_create_external(env, graph, free_graph, NULL, &result) == napi_ok) return result;
  graph_free(graph);
  return fail(env, "out of memory");
}

void *make_task(napi_env env, engine_t *engine, size_t size, const napi_value *values, size_t count, napi_value *kept) {
  task_t *task = napi_create_array_with_length(env, count, kept) == napi_ok ? calloc(1, size) : NULL;
  if (task == NULL) {
    fail(env, "out of memory");
    return NULL;
  }
  for (size_t i = 0; i < count; i++) napi_set_element(env, *kept, (uint32_t)i, values[i]);
  task->engine = engine;
  return task;
}

// A task of the first two arguments, which are the engine and a graph.
static task_t *make_graph_task(napi_env env, const napi_value *values, size_t count, napi_value *kept) {
  engine_t *engine = external(env, values[0]);
  graph_t *graph = engine == NULL ? NULL : external(env, values[1]);
  task_t *task = graph == NULL ? NULL : make_task(env, engine, sizeof *task, values, count, kept);
  if (task != NULL) task->graph = graph;
  return task;
}

static void load_work(job_t *job) {
  task_t *task = (task_t *)job;
  task->error = graph_load(task->graph, &task->engine->settings, task->model, task->model_bytes);
}

// load(engine, graph, model: Uint8Array): a promise
static napi_value load(napi_env env, napi_callback_info info) {
  napi_value values[MOST_ARGUMENTS], kept;
  void *model;
  size_t bytes;
  if (!arguments(env, info, 3, values) || !typed_array(env, values[2], &model, &bytes)) return NULL;
  task_t *task = make_graph_task(env, values, 3, &kept);
  if (task == NULL) return NULL;
  task->model = model;
  task->model_bytes = bytes;
  return start(env, task, kept, load_work);
}

static void run_work(job_t *job) {
  task_t *task = (task_t *)job;
  task->error = task->graph->session == NULL ? strdup("the graph is not loaded")
                                             : graph_run(task->graph, &task->engine->settings, task->data);
}

// The memory of an input or output; false after an error.
static bool read_port_data(napi_env env, const engine_t *engine, const port_t *port, napi_value value, void **data) {
  size_t bytes;
  if (engine->settings.cuda != NULL) return device_address(env, engine, value, port->bytes, data);
  if (!typed_array(env, value, data, &bytes)) return false;
  if (bytes != port->bytes) fail(env, "an input or output has another size than the graph says");
  return bytes == port->bytes;
}

// The memory of every input and output; false after an error.
static bool read_data(napi_env env, const engine_t *engine, const graph_t *graph, napi_value list, void **data) {
  uint32_t count;
  const size_t wanted = graph->input_count + graph->output_count;
  if (napi_get_array_length(env, list, &count) != napi_ok || count != wanted) {
    fail(env, "there are too few or too many inputs and outputs");
    return false;
  }
  for (uint32_t i = 0; i < count; i++) {
    napi_value value;
    if (napi_get_element(env, list, i, &value) != napi_ok) return false;
    if (!read_port_data(env, engine, graph->ports + i, value, data + i)) return false;
  }
  return true;
}

// run(engine, graph, inputsAndOutputs: TypedArray[], or BigInt[] where the engine has a GPU): a promise. The list is not
// changed meanwhile.
static napi_value run(napi_env env, napi_callback_info info) {
  napi_value values[MOST_ARGUMENTS], kept;
  if (!arguments(env, info, 3, values)) return NULL;
  task_t *task = make_graph_task(env, values, 3, &kept);
  if (task == NULL) return NULL;
  task->data = calloc(task->graph->input_count + task->graph->output_count + 1, sizeof *task->data);
  if (task->data != NULL && read_data(env, task->engine, task->graph, values[2], task->data)) {
    return start(env, task, kept, run_work);
  }
  free_task(task);
  return NULL;
}

static void unload_work(job_t *job) { graph_unload(((task_t *)job)->graph); }

// unload(engine, graph): a promise
static napi_value unload(napi_env env, napi_callback_info info) {
  napi_value values[MOST_ARGUMENTS], kept;
  if (!arguments(env, info, 2, values)) return NULL;
  task_t *task = make_graph_task(env, values, 2, &kept);
  return task == NULL ? NULL : start(env, task, kept, unload_work);
}

// version(): of the library, once an engine was opened
static napi_value version(napi_env env, napi_callback_info info) {
  (void)info;
  napi_value result;
  const char *loaded = runtime_version();
  if (loaded == NULL) return fail(env, "nothing is loaded");
  return napi_create_string_utf8(env, loaded, NAPI_AUTO_LENGTH, &result) == napi_ok ? result : NULL;
}

NAPI_MODULE_INIT() {
  const napi_property_descriptor functions[] = {
      {"open", NULL, open_engine, NULL, NULL, NULL, napi_enumerable, NULL},
      {"close", NULL, close_engine, NULL, NULL, NULL, napi_enumerable, NULL},
      {"describe", NULL, describe, NULL, NULL, NULL, napi_enumerable, NULL},
      {"load", NULL, load, NULL, NULL, NULL, napi_enumerable, NULL},
      {"run", NULL, run, NULL, NULL, NULL, napi_enumerable, NULL},
      {"unload", NULL, unload, NULL, NULL, NULL, napi_enumerable, NULL},
      {"version", NULL, version, NULL, NULL, NULL, napi_enumerable, NULL},
  };
  napi_value protocol;
  if (napi_create_int32(env, PROTOCOL, &protocol) != napi_ok) return NULL;
  if (napi_set_named_property(env, exports, "protocol", protocol) != napi_ok) return NULL;
  napi_value instructions;
  if (napi_create_string_utf8(env, linear_instruction_set(), NAPI_AUTO_LENGTH, &instructions) != napi_ok) return NULL;
  if (napi_set_named_property(env, exports, "instructionSet", instructions) != napi_ok) return NULL;
  const size_t count = sizeof functions / sizeof *functions;
  if (napi_define_properties(env, exports, count, functions) != napi_ok) return NULL;
  return define_cuda(env, exports) ? exports : NULL;
}
