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
typedef struct OrtSession OrtSession;
typedef struct OrtRunOptions OrtRunOptions;
typedef struct OrtValue OrtValue;

// Only what is fatal is logged: everything below is in the status of a call as well.
enum { ORT_LOG_FATAL = 4 };
enum { ORT_OPTIMIZE_BASIC = 1 };
enum { ORT_ARENA = 1 };
enum { ORT_MEMORY_DEFAULT = 0 };

// A function of the table: its position, what it returns and what it takes. A status is NULL where nothing failed.
#define ORT_FUNCTIONS(FUNCTION)                                                                                       \
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
  FUNCTION(39, OrtStatus *, CreateRunOptions, (OrtRunOptions **))                                                     \
  FUNCTION(41, OrtStatus *, RunOptionsSetRunLogSeverityLevel, (OrtRunOptions *, int level))                           \
  FUNCTION(46, OrtStatus *, RunOptionsSetTerminate, (OrtRunOptions *))                                                \
  FUNCTION(49, OrtStatus *, CreateTensorWithDataAsOrtValue,                                                           \
           (const OrtMemoryInfo *, void *data, size_t bytes, const int64_t *shape, size_t rank, int element_type,     \
            OrtValue **))                                                                                             \
  FUNCTION(69, OrtStatus *, CreateCpuMemoryInfo, (int allocator_type, int memory_type, OrtMemoryInfo **))             \
  FUNCTION(93, void, ReleaseStatus, (OrtStatus *))                                                                    \
  FUNCTION(95, void, ReleaseSession, (OrtSession *))                                                                  \
  FUNCTION(96, void, ReleaseValue, (OrtValue *))                                                                      \
  FUNCTION(97, void, ReleaseRunOptions, (OrtRunOptions *))                                                            \
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
  FUNCTION(227, OrtStatus *, SetGlobalIntraOpThreadAffinity, (OrtThreadingOptions *, const char *processors))

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
