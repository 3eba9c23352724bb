#define _GNU_SOURCE
#include "linear.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include "gemm.h"

enum { MOST_DIMENSIONS = 8 };

// Of the inputs: the weight comes before the parts of x.
enum { FIRST_PART = 1 };

// An operator on some number of threads.
typedef struct {
  OrtCustomOp op;
  const char *name;
  size_t threads;
  int rounds;
} linear_t;

// The operators on one number of threads, in a list of those that were asked for.
typedef struct domain {
  linear_t linear, rounded;
  OrtCustomOpDomain *ort;
  struct domain *next;
} domain_t;

// What the threads share of one product.
typedef struct {
  gemm_t gemm;
  size_t workers;
  gemm_kernel_t *kernel;
  atomic_bool lacks_memory;
} product_t;

static pthread_key_t scratch_key;
static pthread_once_t scratch_once = PTHREAD_ONCE_INIT;

static void make_scratch_key(void) { pthread_key_create(&scratch_key, free); }

// Memory of this thread, which its later products use again.
static void *scratch(void) {
  pthread_once(&scratch_once, make_scratch_key);
  void *memory = pthread_getspecific(scratch_key);
  if (memory == NULL) {
    memory = malloc(GEMM_SCRATCH_BYTES);
    pthread_setspecific(scratch_key, memory);
  }
  return memory;
}

static gemm_variant_t fastest(void) {
  gemm_variant_t variants[MAX_GEMM_VARIANTS];
  gemm_variants(variants);
  return variants[0];
}

const char *linear_instruction_set(void) { return fastest().instruction_set; }

static void compute_tile(void *argument, size_t index) {
  product_t *product = argument;
  gemm_tile_t tile = gemm_tile(&product->gemm, product->workers, index);
  void *memory = scratch();
  if (memory != NULL) product->kernel(&product->gemm, &tile, memory);
  else atomic_store(&product->lacks_memory, true);
}

typedef struct {
  size_t rank;
  int64_t sizes[MOST_DIMENSIONS];
} shape_t;

static OrtStatus *read_shape(const OrtValue *value, shape_t *shape) {
  const ort_t *ort = runtime_ort();
  OrtTensorTypeAndShapeInfo *info = NULL;
  OrtStatus *status = ort->GetTensorTypeAndShape(value, &info);
  if (status != NULL) return status;
  status = ort->GetDimensionsCount(info, &shape->rank);
  if (status == NULL && (shape->rank == 0 || shape->rank > MOST_DIMENSIONS)) {
    status = ort->CreateStatus(ORT_INVALID_ARGUMENT, "Linear takes tensors of 1 to 8 dimensions");
  }
  if (status == NULL) status = ort->GetDimensions(info, shape->sizes, shape->rank);
  ort->ReleaseTensorTypeAndShapeInfo(info);
  return status;
}

static OrtStatus *input(const OrtKernelContext *context, size_t index, shape_t *shape, const void **data) {
  const ort_t *ort = runtime_ort();
  const OrtValue *value = NULL;
  OrtStatus *status = ort->KernelContext_GetInput(context, index, &value);
  if (status == NULL) status = read_shape(value, shape);
  void *memory = NULL;
  if (status == NULL) status = ort->GetTensorMutableData((OrtValue *)value, &memory);
  *data = memory;
  return status;
}

static OrtStatus *output(OrtKernelContext *context, const shape_t *shape, float **data) {
  const ort_t *ort = runtime_ort();
  OrtValue *value = NULL;
  OrtStatus *status = ort->KernelContext_GetOutput(context, 0, shape->sizes, shape->rank, &value);
  void *memory = NULL;
  if (status == NULL) status = ort->GetTensorMutableData(value, &memory);
  *data = memory;
  return status;
}

// Adds a value to what is beside it in x, whose last size counts the columns until then.
static OrtStatus *add_part(const OrtKernelContext *context, size_t index, shape_t *x, gemm_part_t *part) {
  shape_t shape;
  const void *data;
  OrtStatus *status = input(context, index, &shape, &data);
  if (status != NULL) return status;
  const size_t last = shape.rank - 1;
  size_t columns = (size_t)shape.sizes[last];
  *part = (gemm_part_t){data, columns, columns};
  if (index == FIRST_PART) *x = shape;
  else if (shape.rank != x->rank || memcmp(shape.sizes, x->sizes, last * sizeof *shape.sizes) != 0) {
    return runtime_ort()->CreateStatus(ORT_INVALID_ARGUMENT, "Linear takes parts of x with equally many rows");
  } else x->sizes[last] += shape.sizes[last];
  return NULL;
}

// y = x @ w^T, where x is in `count` parts.
static OrtStatus *multiply_parts(const linear_t *linear, OrtKernelContext *context, gemm_part_t *parts, size_t count) {
  const ort_t *ort = runtime_ort();
  shape_t x, w;
  const void *w_data;
  OrtStatus *status = input(context, 0, &w, &w_data);
  for (size_t i = 0; status == NULL && i < count; i++) status = add_part(context, FIRST_PART + i, &x, parts + i);
  if (status != NULL) return status;
  int64_t *columns = x.sizes + x.rank - 1;
  if (w.rank != 2 || w.sizes[1] != *columns) {
    return ort->CreateStatus(ORT_INVALID_ARGUMENT, "Linear takes a weight with as many columns as its input has");
  }
  size_t m = 1, k = (size_t)*columns, n = (size_t)w.sizes[0];
  for (size_t i = 0; i + 1 < x.rank; i++) m *= (size_t)x.sizes[i];
  *columns = w.sizes[0];
  float *y_data;
  status = output(context, &x, &y_data);
  if (status != NULL) return status;
  product_t product = {
      .gemm = {m, n, k, .x = parts, .w = w_data, .w_stride = k, .y = y_data, .y_stride = n,
               .rounds = linear->rounds},
      .workers = linear->threads,
      .kernel = fastest().kernel,
  };
  size_t tiles = gemm_tiles(&product.gemm, product.workers);
  if (tiles == 1) compute_tile(&product, 0);
  if (tiles > 1) status = ort->KernelContext_ParallelFor(context, compute_tile, tiles, tiles, &product);
  if (status != NULL || !atomic_load(&product.lacks_memory)) return status;
  return ort->CreateStatus(ORT_FAIL, "Linear: out of memory");
}

static OrtStatus *multiply(void *kernel, OrtKernelContext *context) {
  size_t inputs = 0;
  OrtStatus *status = runtime_ort()->KernelContext_GetInputCount(context, &inputs);
  if (status != NULL) return status;
  size_t count = inputs - FIRST_PART;
  gemm_part_t *parts = malloc(count * sizeof *parts);
  if (parts == NULL) return runtime_ort()->CreateStatus(ORT_FAIL, "Linear: out of memory");
  status = multiply_parts(kernel, context, parts, count);
  free(parts);
  return status;
}

// The first field of a linear_t is its operator.
static const char *get_name(const OrtCustomOp *op) { return ((const linear_t *)op)->name; }
static const char *get_provider(const OrtCustomOp *op) { return (void)op, NULL; }
static int get_input_type(const OrtCustomOp *op, size_t index) {
  return (void)op, index == 0 ? ORT_ELEMENT_BFLOAT16 : ORT_ELEMENT_FLOAT;
}
static size_t get_input_count(const OrtCustomOp *op) { return (void)op, 2; }
static int get_output_type(const OrtCustomOp *op, size_t index) { return (void)op, (void)index, ORT_ELEMENT_FLOAT; }
static size_t get_output_count(const OrtCustomOp *op) { return (void)op, 1; }
static int get_input_characteristic(const OrtCustomOp *op, size_t index) {
  return (void)op, index == 0 ? ORT_REQUIRED : ORT_VARIADIC;
}
static int get_output_characteristic(const OrtCustomOp *op, size_t index) { return (void)op, (void)index, ORT_REQUIRED; }
static int get_least_parts(const OrtCustomOp *op) { return (void)op, 1; }
static int get_parts_are_alike(const OrtCustomOp *op) { return (void)op, 1; }
static int get_memory_type(const OrtCustomOp *op, size_t index) { return (void)op, (void)index, ORT_MEMORY_DEFAULT; }
static int get_first_version(const OrtCustomOp *op) { return (void)op, 1; }
static int get_last_version(const OrtCustomOp *op) { return (void)op, INT32_MAX; }

// A kernel has nothing of its own.
static OrtStatus *create_kernel(const OrtCustomOp *op, const void *table, const void *info, void **kernel) {
  (void)table;
  (void)info;
  *kernel = (void *)op;
  return NULL;
}
static void destroy_kernel(void *kernel) { (void)kernel; }

static char *add_operator(OrtCustomOpDomain *domain, linear_t *linear, const char *name, size_t threads, int rounds) {
  linear->name = name;
  linear->threads = threads;
  linear->rounds = rounds;
  linear->op = (OrtCustomOp){
      .version = ORT_TABLE_VERSION,
      .GetName = get_name,
      .GetExecutionProviderType = get_provider,
      .GetInputType = get_input_type,
      .GetInputTypeCount = get_input_count,
      .GetOutputType = get_output_type,
      .GetOutputTypeCount = get_output_count,
      .KernelDestroy = destroy_kernel,
      .GetInputCharacteristic = get_input_characteristic,
      .GetOutputCharacteristic = get_output_characteristic,
      .GetInputMemoryType = get_memory_type,
      .GetVariadicInputMinArity = get_least_parts,
      .GetVariadicInputHomogeneity = get_parts_are_alike,
      .CreateKernelV2 = create_kernel,
      .KernelComputeV2 = multiply,
      .GetStartVersion = get_first_version,
      .GetEndVersion = get_last_version,
  };
  return runtime_error(runtime_ort()->CustomOpDomain_Add(domain, &linear->op));
}

static char *fill_domain(domain_t *domain, size_t threads) {
  char *error = runtime_error(runtime_ort()->CreateCustomOpDomain("rankwise", &domain->ort));
  if (error == NULL) error = add_operator(domain->ort, &domain->linear, "Linear", threads, 0);
  if (error == NULL) error = add_operator(domain->ort, &domain->rounded, "RoundedLinear", threads, 1);
  return error;
}

char *linear_domain(int threads, OrtCustomOpDomain **domain) {
  static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
  static domain_t *list;
  pthread_mutex_lock(&lock);
  domain_t *found = list;
  while (found != NULL && found->linear.threads != (size_t)threads) found = found->next;
  char *error = NULL;
  if (found == NULL) {
    found = calloc(1, sizeof *found);
    if (found == NULL) abort();
    error = fill_domain(found, (size_t)threads);
    found->next = list;
    if (error == NULL) list = found;
  }
  *domain = found->ort;
  pthread_mutex_unlock(&lock);
  return error;
}
