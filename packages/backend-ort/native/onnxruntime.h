// What this addon calls of the C API of ONNX Runtime, which hands out a table of functions. The table only ever grows at
// its end, so a function keeps its position in all versions; src/engine/self-check.ts proves the positions before an
// engine is used.
#pragma once
#include <stddef.h>
#include <stdint.h>

// The version of the table that is asked for. Libraries from 1.17 on have it; nothing here is younger.
enum { ORT_TABLE_VERSION = 17 };

typedef struct OrtStatus OrtStatus;
typedef struct OrtEnv OrtEnv;
typedef struct OrtMemoryInfo OrtMemoryInfo;
typedef struct OrtArenaCfg OrtArenaCfg;
typedef struct OrtThreadingOptions OrtThreadingOptions;
typedef struct OrtSessionOptions OrtSessionOptions;
typedef struct OrtCUDAProviderOptionsV2 OrtCUDAProviderOptionsV2;
typedef struct OrtSession OrtSession;
typedef struct OrtRunOptions OrtRunOptions;
typedef struct OrtValue OrtValue;
typedef struct OrtTensorTypeAndShapeInfo OrtTensorTypeAndShapeInfo;
typedef struct OrtCustomOpDomain OrtCustomOpDomain;
typedef struct OrtKernelContext OrtKernelContext;

// Only what is fatal is logged: everything below is in the status of a call as well.
enum { ORT_LOG_FATAL = 4 };
enum { ORT_OPTIMIZE_BASIC = 1 };
enum { ORT_DEVICE_ALLOCATOR = 0, ORT_ARENA = 1 };
enum { ORT_MEMORY_DEFAULT = 0 };
enum { ORT_FAIL = 1, ORT_INVALID_ARGUMENT = 2 };
enum { ORT_REQUIRED = 0, ORT_VARIADIC = 2 };
// As TensorProto.DataType of onnx.proto numbers them.
enum { ORT_ELEMENT_FLOAT = 1, ORT_ELEMENT_BFLOAT16 = 16 };

// An operator of our own, as ONNX Runtime asks for it. The order of the fields is part of its interface; those that are
// NULL here it does not ask for.
typedef struct OrtCustomOp OrtCustomOp;
struct OrtCustomOp {
  uint32_t version;
  void *(*CreateKernel)(const OrtCustomOp *, const void *table, const void *info);
  const char *(*GetName)(const OrtCustomOp *);
  const char *(*GetExecutionProviderType)(const OrtCustomOp *);
  int (*GetInputType)(const OrtCustomOp *, size_t index);
  size_t (*GetInputTypeCount)(const OrtCustomOp *);
  int (*GetOutputType)(const OrtCustomOp *, size_t index);
  size_t (*GetOutputTypeCount)(const OrtCustomOp *);
  void (*KernelCompute)(void *kernel, OrtKernelContext *);
  void (*KernelDestroy)(void *kernel);
  int (*GetInputCharacteristic)(const OrtCustomOp *, size_t index);
  int (*GetOutputCharacteristic)(const OrtCustomOp *, size_t index);
  int (*GetInputMemoryType)(const OrtCustomOp *, size_t index);
  int (*GetVariadicInputMinArity)(const OrtCustomOp *);
  int (*GetVariadicInputHomogeneity)(const OrtCustomOp *);
  int (*GetVariadicOutputMinArity)(const OrtCustomOp *);
  int (*GetVariadicOutputHomogeneity)(const OrtCustomOp *);
  OrtStatus *(*CreateKernelV2)(const OrtCustomOp *, const void *table, const void *info, void **kernel);
  OrtStatus *(*KernelComputeV2)(void *kernel, OrtKernelContext *);
  OrtStatus *(*InferOutputShapeFn)(const OrtCustomOp *, void *context);
  int (*GetStartVersion)(const OrtCustomOp *);
  int (*GetEndVersion)(const OrtCustomOp *);
  size_t (*GetMayInplace)(int **inputs, int **outputs);
  void (*ReleaseMayInplace)(int *inputs, int *outputs);
  size_t (*GetAliasMap)(int **inputs, int **outputs);
  void (*ReleaseAliasMap)(int *inputs, int *outputs);
};

// A function of the table: its position, what it returns and what it takes. A status is NULL where nothing failed.
#define ORT_FUNCTIONS(FUNCTION)                                                                                       \
  FUNCTION(0, OrtStatus *, CreateStatus, (int code, const char *message))                                              \
  FUNCTION(2, const char *, GetErrorMessage, (const OrtStatus *))                                                     \
  FUNCTION(8, OrtStatus *, CreateSessionFromArray,                                                                    \
           (const OrtEnv *, const void *model, size_t bytes, const OrtSessionOptions *, OrtSession **))               \
  FUNCTION(9, OrtStatus *, Run,                                                                                       \
           (OrtSession *, const OrtRunOptions *, const char *const *input_names, const OrtValue *const *inputs,       \
            size_t input_count, const char *const *output_names, size_t output_count, OrtValue **outputs))            \
  FUNCTION(10, OrtStatus *, CreateSessionOptions, (OrtSessionOptions **))                                             \
  FUNCTION(17, OrtStatus *, DisableMemPattern, (OrtSessionOptions *))                                                 \
  FUNCTION(22, OrtStatus *, SetSessionLogSeverityLevel, (OrtSessionOptions *, int level))                             \
  FUNCTION(23, OrtStatus *, SetSessionGraphOptimizationLevel, (OrtSessionOptions *, int level))                       \
  FUNCTION(24, OrtStatus *, SetIntraOpNumThreads, (OrtSessionOptions *, int threads))                                 \
  FUNCTION(26, OrtStatus *, CreateCustomOpDomain, (const char *name, OrtCustomOpDomain **))                            \
  FUNCTION(27, OrtStatus *, CustomOpDomain_Add, (OrtCustomOpDomain *, const OrtCustomOp *))                            \
  FUNCTION(28, OrtStatus *, AddCustomOpDomain, (OrtSessionOptions *, OrtCustomOpDomain *))                             \
  FUNCTION(39, OrtStatus *, CreateRunOptions, (OrtRunOptions **))                                                     \
  FUNCTION(41, OrtStatus *, RunOptionsSetRunLogSeverityLevel, (OrtRunOptions *, int level))                           \
  FUNCTION(46, OrtStatus *, RunOptionsSetTerminate, (OrtRunOptions *))                                                \
  FUNCTION(49, OrtStatus *, CreateTensorWithDataAsOrtValue,                                                           \
           (const OrtMemoryInfo *, void *data, size_t bytes, const int64_t *shape, size_t rank, int element_type,     \
            OrtValue **))                                                                                             \
  FUNCTION(51, OrtStatus *, GetTensorMutableData, (OrtValue *, void **data))                                           \
  FUNCTION(61, OrtStatus *, GetDimensionsCount, (const OrtTensorTypeAndShapeInfo *, size_t *count))                    \
  FUNCTION(62, OrtStatus *, GetDimensions, (const OrtTensorTypeAndShapeInfo *, int64_t *sizes, size_t count))          \
  FUNCTION(65, OrtStatus *, GetTensorTypeAndShape, (const OrtValue *, OrtTensorTypeAndShapeInfo **))                   \
  FUNCTION(68, OrtStatus *, CreateMemoryInfo,                                                                         \
           (const char *name, int allocator_type, int device, int memory_type, OrtMemoryInfo **))                     \
  FUNCTION(69, OrtStatus *, CreateCpuMemoryInfo, (int allocator_type, int memory_type, OrtMemoryInfo **))             \
  FUNCTION(88, OrtStatus *, KernelContext_GetInputCount, (const OrtKernelContext *, size_t *count))                     \
  FUNCTION(90, OrtStatus *, KernelContext_GetInput, (const OrtKernelContext *, size_t index, const OrtValue **))       \
  FUNCTION(91, OrtStatus *, KernelContext_GetOutput,                                                                   \
           (OrtKernelContext *, size_t index, const int64_t *sizes, size_t count, OrtValue **))                        \
  FUNCTION(93, void, ReleaseStatus, (OrtStatus *))                                                                    \
  FUNCTION(94, void, ReleaseMemoryInfo, (OrtMemoryInfo *))                                                            \
  FUNCTION(95, void, ReleaseSession, (OrtSession *))                                                                  \
  FUNCTION(96, void, ReleaseValue, (OrtValue *))                                                                      \
  FUNCTION(97, void, ReleaseRunOptions, (OrtRunOptions *))                                                            \
  FUNCTION(99, void, ReleaseTensorTypeAndShapeInfo, (OrtTensorTypeAndShapeInfo *))                                     \
  FUNCTION(100, void, ReleaseSessionOptions, (OrtSessionOptions *))                                                   \
  FUNCTION(119, OrtStatus *, CreateEnvWithGlobalThreadPools,                                                          \
           (int log_level, const char *log_id, const OrtThreadingOptions *, OrtEnv **))                               \
  FUNCTION(120, OrtStatus *, DisablePerSessionThreads, (OrtSessionOptions *))                                         \
  FUNCTION(121, OrtStatus *, CreateThreadingOptions, (OrtThreadingOptions **))                                        \
  FUNCTION(122, void, ReleaseThreadingOptions, (OrtThreadingOptions *))                                               \
  FUNCTION(130, OrtStatus *, AddSessionConfigEntry, (OrtSessionOptions *, const char *key, const char *value))        \
  FUNCTION(144, OrtStatus *, CreateAndRegisterAllocator, (OrtEnv *, const OrtMemoryInfo *, const OrtArenaCfg *))      \
  FUNCTION(147, OrtStatus *, SetGlobalIntraOpNumThreads, (OrtThreadingOptions *, int threads))                        \
  FUNCTION(148, OrtStatus *, SetGlobalInterOpNumThreads, (OrtThreadingOptions *, int threads))                        \
  FUNCTION(157, void, ReleaseArenaCfg, (OrtArenaCfg *))                                                               \
  FUNCTION(164, OrtStatus *, CreateArenaCfgV2,                                                                        \
           (const char *const *keys, const size_t *values, size_t count, OrtArenaCfg **))                             \
  FUNCTION(177, OrtStatus *, UnregisterAllocator, (OrtEnv *, const OrtMemoryInfo *))                                  \
  FUNCTION(204, OrtStatus *, SessionOptionsAppendExecutionProvider_CUDA_V2,                                           \
           (OrtSessionOptions *, const OrtCUDAProviderOptionsV2 *))                                                   \
  FUNCTION(205, OrtStatus *, CreateCUDAProviderOptions, (OrtCUDAProviderOptionsV2 **))                                \
  FUNCTION(206, OrtStatus *, UpdateCUDAProviderOptions,                                                               \
           (OrtCUDAProviderOptionsV2 *, const char *const *keys, const char *const *values, size_t count))            \
  FUNCTION(208, void, ReleaseCUDAProviderOptions, (OrtCUDAProviderOptionsV2 *))                                       \
  FUNCTION(227, OrtStatus *, SetGlobalIntraOpThreadAffinity, (OrtThreadingOptions *, const char *processors))          \
  FUNCTION(263, OrtStatus *, UpdateCUDAProviderOptionsWithValue,                                                      \
           (OrtCUDAProviderOptionsV2 *, const char *key, void *value))                                                \
  FUNCTION(274, OrtStatus *, KernelContext_ParallelFor,                                                                \
           (const OrtKernelContext *, void (*body)(void *, size_t), size_t count, size_t batches, void *data))

#define ORT_FIELD(POSITION, RETURNS, NAME, ARGUMENTS) RETURNS(*NAME) ARGUMENTS;
typedef struct {
  ORT_FUNCTIONS(ORT_FIELD)
} ort_t;
#undef ORT_FIELD

// What the only function that the library exports gives.
typedef struct {
  const void *const *(*GetApi)(uint32_t version);
  const char *(*GetVersionString)(void);
} ort_base_t;
