// Stands for libnccl and libcudart where there is no GPU: the same symbols and structs, "devices" in the memory of the
// process, streams that are threads, and communicators that exchange data through a file that the ranks map. It is
// stricter than the real libraries: it knows every allocation, and refuses what they would let crash or hang. Every call
// goes to the file STUB_LOG; what is never allowed goes there as VIOLATION.
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

// ---------------------------------------------------------------- recording

static pthread_mutex_t log_lock = PTHREAD_MUTEX_INITIALIZER;

static void record(const char *format, ...) {
  const char *path = getenv("STUB_LOG");
  if (!path) return;
  char line[1024];
  va_list args;
  va_start(args, format);
  int length = vsnprintf(line, sizeof line - 1, format, args);
  va_end(args);
  line[length++] = '\n';
  pthread_mutex_lock(&log_lock);
  int fd = open(path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
  if (fd >= 0) {
    if (write(fd, line, length) < 0) abort();
    close(fd);
  }
  pthread_mutex_unlock(&log_lock);
}

static void hex(char *text, const void *data, size_t bytes) {
  for (size_t i = 0; i < bytes; i++) sprintf(text + 2 * i, "%02x", ((const uint8_t *)data)[i]);
}

// STUB_FAULT is "name" or "name:number"; the test changes it while the process runs.
static int fault(const char *name) {
  const char *set = getenv("STUB_FAULT");
  size_t length = strlen(name);
  if (!set || strncmp(set, name, length) != 0) return 0;
  if (set[length] == ':') return atoi(set + length + 1);
  return set[length] == 0;
}

static int setting(const char *name, int otherwise) {
  const char *value = getenv(name);
  return value ? atoi(value) : otherwise;
}

// ---------------------------------------------------------------- CUDA: memory

enum { SUCCESS = 0, INVALID_VALUE = 1, OUT_OF_MEMORY = 2, NO_DEVICE = 100, INVALID_DEVICE = 101, NOT_READY = 600 };

typedef struct Memory {
  char *start;
  size_t bytes;
  int pinned;
  struct Memory *next;
} Memory;

static pthread_mutex_t memory_lock = PTHREAD_MUTEX_INITIALIZER;
static Memory *memories;
static _Thread_local int current_device = -1;
static _Thread_local int last_error;

static int fails(const char *name, int error) {
  last_error = error;
  record("ERROR %s %d", name, error);
  return error;
}

static int violates(const char *what, const void *address, size_t bytes) {
  record("VIOLATION %s %p %zu", what, address, bytes);
  return INVALID_VALUE;
}

static int holds(const void *address, size_t bytes, int pinned) {
  int found = 0;
  pthread_mutex_lock(&memory_lock);
  for (Memory *m = memories; m; m = m->next) {
    if (m->pinned == pinned && (char *)address >= m->start && (char *)address + bytes <= m->start + m->bytes) found = 1;
  }
  pthread_mutex_unlock(&memory_lock);
  return found;
}

static int take(void **out, size_t bytes, int pinned) {
  Memory *m = malloc(sizeof *m);
  *m = (Memory){.start = aligned_alloc(4096, (bytes + 4095) / 4096 * 4096), .bytes = bytes, .pinned = pinned};
  memset(m->start, 0xa5, bytes);
  pthread_mutex_lock(&memory_lock);
  m->next = memories;
  memories = m;
  pthread_mutex_unlock(&memory_lock);
  *out = m->start;
  return SUCCESS;
}

static int give(void *address, int pinned) {
  int found = 0;
  pthread_mutex_lock(&memory_lock);
  for (Memory **at = &memories; *at; at = &(*at)->next) {
    Memory *m = *at;
    if (m->start != address || m->pinned != pinned) continue;
    *at = m->next;
    free(m->start);
    free(m);
    found = 1;
    break;
  }
  pthread_mutex_unlock(&memory_lock);
  return found ? SUCCESS : violates("free", address, 0);
}

int cudaMalloc(void **out, size_t bytes) {
  if (fault("malloc")) return fails("cudaMalloc", OUT_OF_MEMORY);
  record("cudaMalloc %zu", bytes);
  if (current_device < 0) return violates("cudaMalloc without a device", NULL, bytes);
  return take(out, bytes, 0);
}
int cudaFree(void *address) {
  record("cudaFree");
  return address ? give(address, 0) : SUCCESS;
}
int cudaHostAlloc(void **out, size_t bytes, unsigned flags) {
  record("cudaHostAlloc %zu %u", bytes, flags);
  return take(out, bytes, 1);
}
int cudaFreeHost(void *address) {
  record("cudaFreeHost");
  return give(address, 1);
}

// ---------------------------------------------------------------- CUDA: devices

int cudaRuntimeGetVersion(int *out) { return *out = setting("STUB_CUDART_VERSION", 13020), SUCCESS; }
int cudaDriverGetVersion(int *out) { return *out = setting("STUB_DRIVER_VERSION", 13020), SUCCESS; }
int cudaGetDeviceCount(int *out) {
  *out = setting("STUB_DEVICES", 4);
  return *out > 0 ? SUCCESS : fails("cudaGetDeviceCount", NO_DEVICE);
}
int cudaSetDevice(int device) {
  record("cudaSetDevice %d", device);
  if (device < 0 || device >= setting("STUB_DEVICES", 4)) return fails("cudaSetDevice", INVALID_DEVICE);
  current_device = device;
  return SUCCESS;
}
int cudaDeviceGetPCIBusId(char *out, int length, int device) {
  const char *id = getenv("STUB_PCI_BUS_ID");
  if (id) snprintf(out, length, "%s", id);
  else snprintf(out, length, "0000:%02X:00.0", device + 10);
  return SUCCESS;
}
int cudaGetLastError(void) {
  int error = last_error;
  last_error = 0;
  return error;
}
const char *cudaGetErrorName(int error) {
  switch (error) {
    case OUT_OF_MEMORY: return "cudaErrorMemoryAllocation";
    case NO_DEVICE: return "cudaErrorNoDevice";
    case INVALID_DEVICE: return "cudaErrorInvalidDevice";
    case 700: return "cudaErrorIllegalAddress";
    default: return "cudaErrorInvalidValue";
  }
}
const char *cudaGetErrorString(int error) {
  switch (error) {
    case OUT_OF_MEMORY: return "out of memory";
    case NO_DEVICE: return "no CUDA-capable device is detected";
    case INVALID_DEVICE: return "invalid device ordinal";
    case 700: return "an illegal memory access was encountered";
    default: return "invalid argument";
  }
}

// ---------------------------------------------------------------- CUDA: streams and events

typedef struct Work {
  void (*run)(struct Work *);
  struct Work *next;
  void *target;
  const void *source;
  size_t bytes;
  void *object;
  int64_t number;
  int kind, dtype, op, root;
} Work;

typedef struct Stream {
  pthread_t thread;
  pthread_mutex_t lock;
  pthread_cond_t changed;
  Work *first, **last;
  int ended;
} Stream;

typedef struct Event {
  _Atomic int64_t recorded, happened;
} Event;

static void *run_stream(void *argument) {
  Stream *s = argument;
  for (;;) {
    pthread_mutex_lock(&s->lock);
    while (!s->first && !s->ended) pthread_cond_wait(&s->changed, &s->lock);
    Work *work = s->first;
    if (!work) break;
    s->first = work->next;
    if (!s->first) s->last = &s->first;
    pthread_mutex_unlock(&s->lock);
    work->run(work);
    free(work);
  }
  pthread_mutex_unlock(&s->lock);
  return NULL;
}

static void put(Stream *s, Work work) {
  Work *copy = malloc(sizeof work);
  *copy = work;
  copy->next = NULL;
  pthread_mutex_lock(&s->lock);
  *s->last = copy;
  s->last = &copy->next;
  pthread_cond_signal(&s->changed);
  pthread_mutex_unlock(&s->lock);
}

int cudaStreamCreateWithFlags(Stream **out, unsigned flags) {
  record("cudaStreamCreateWithFlags %u", flags);
  if (current_device < 0) return violates("cudaStreamCreateWithFlags without a device", NULL, 0);
  Stream *s = calloc(1, sizeof *s);
  pthread_mutex_init(&s->lock, NULL);
  pthread_cond_init(&s->changed, NULL);
  s->last = &s->first;
  pthread_create(&s->thread, NULL, run_stream, s);
  *out = s;
  return SUCCESS;
}
int cudaStreamDestroy(Stream *s) {
  record("cudaStreamDestroy");
  pthread_mutex_lock(&s->lock);
  s->ended = 1;
  pthread_cond_signal(&s->changed);
  pthread_mutex_unlock(&s->lock);
  pthread_join(s->thread, NULL);
  free(s);
  return SUCCESS;
}

static void happen(Work *work) { ((Event *)work->object)->happened = work->number; }

int cudaStreamSynchronize(Stream *s) {
  record("cudaStreamSynchronize");
  Event done = {.recorded = 1};
  put(s, (Work){.run = happen, .object = &done, .number = 1});
  while (done.happened < 1) usleep(20);
  return SUCCESS;
}

static void copy(Work *work) { memcpy(work->target, work->source, work->bytes); }

int cudaMemcpyAsync(void *target, const void *source, size_t bytes, int kind, Stream *s) {
  record("cudaMemcpyAsync %zu %d", bytes, kind);
  if (fault("memcpy")) return fails("cudaMemcpyAsync", INVALID_VALUE);
  // Memory of the process that is not pinned is allowed to callers that wait for the stream.
  const int pageable = setting("STUB_PAGEABLE", 0);
  if (!(pageable && kind == 2) && !holds(target, bytes, kind == 2)) return violates("cudaMemcpyAsync target", target, bytes);
  if (!(pageable && kind == 1) && !holds(source, bytes, kind == 1)) return violates("cudaMemcpyAsync source", source, bytes);
  put(s, (Work){.run = copy, .target = target, .source = source, .bytes = bytes});
  return SUCCESS;
}

static void wait_for(Work *work) {
  while (((Event *)work->object)->happened < work->number) usleep(50);
}

int cudaEventCreateWithFlags(Event **out, unsigned flags) {
  record("cudaEventCreateWithFlags %u", flags);
  *out = calloc(1, sizeof **out);
  return SUCCESS;
}
int cudaEventDestroy(Event *event) {
  record("cudaEventDestroy");
  free(event);
  return SUCCESS;
}
// Work in the default stream is what STUB_DEFAULT_STREAM_MS lets it take.
static void *happen_later(void *argument) {
  usleep(1000 * setting("STUB_DEFAULT_STREAM_MS", 0));
  happen(argument);
  free(argument);
  return NULL;
}
int cudaEventRecord(Event *event, Stream *s) {
  record("cudaEventRecord %p", (void *)s);
  int64_t number = ++event->recorded;
  if (s) put(s, (Work){.run = happen, .object = event, .number = number});
  else {
    Work *work = calloc(1, sizeof *work);
    work->object = event;
    work->number = number;
    pthread_t thread;
    pthread_create(&thread, NULL, happen_later, work);
    pthread_detach(thread);
  }
  return SUCCESS;
}
int cudaStreamWaitEvent(Stream *s, Event *event, unsigned flags) {
  record("cudaStreamWaitEvent %u", flags);
  put(s, (Work){.run = wait_for, .object = event, .number = event->recorded});
  return SUCCESS;
}
int cudaEventQuery(Event *event) {
  int error = fault("event");
  if (error) return fails("cudaEventQuery", error);
  if (event->happened >= event->recorded) return SUCCESS;
  last_error = NOT_READY;
  return NOT_READY;
}

// ---------------------------------------------------------------- NCCL: what ranks share

enum { IN_PROGRESS = 7, INTERNAL_ERROR = 3, INVALID_ARGUMENT = 4, INVALID_USAGE = 5 };
enum { MAX_RANKS = 8, MAX_PENDING = 16, SLOT_BYTES = 1 << 20 };
enum { ALL_REDUCE = 1, ALL_GATHER, REDUCE_SCATTER, BROADCAST };

// As in nccl.h of 2.30.7.
typedef struct {
  size_t size;
  unsigned magic, version;
  int blocking, cgaClusterSize, minCTAs, maxCTAs;
  const char *netName;
  int splitShare, trafficClass;
  const char *commName;
  int collnetEnable, CTAPolicy, shrinkShare, nvlsCTAs, nChannelsPerNetPeer, nvlinkCentricSched, graphUsageMode, numRmaCtx,
      maxP2pPeers, graphStreamOrdering;
} Config;
_Static_assert(sizeof(Config) == 96, "size of ncclConfig_t");
_Static_assert(offsetof(Config, netName) == 32 && offsetof(Config, commName) == 48, "layout of ncclConfig_t");
_Static_assert(offsetof(Config, graphStreamOrdering) == 92, "layout of ncclConfig_t");

typedef struct { char internal[128]; } UniqueId;

typedef struct {
  _Atomic uint64_t arrived;
  uint64_t call[4];
} Seat;

typedef struct {
  Seat seats[MAX_RANKS];
  char slots[MAX_RANKS][SLOT_BYTES];
} Shared;

typedef struct Comm {
  int ranks, rank, device;
  Shared *shared;
  uint64_t met;
  _Atomic int state, aborted, finalized, running;
  pthread_t thread;
  int has_thread;
  Work pending[MAX_PENDING];
  Stream *streams[MAX_PENDING];
  int pending_count;
} Comm;

static _Thread_local int group_depth;
static _Thread_local Comm *group_comm;
static _Thread_local char last_text[128];

int ncclGetVersion(int *out) { return *out = setting("STUB_NCCL_VERSION", 23007), SUCCESS; }
const char *ncclGetErrorString(int result) {
  return result == 6 ? "remote process exited or there was a network error" : "stub error";
}
const char *ncclGetLastError(Comm *comm) { return comm ? "wrong" : last_text; }

int ncclGetUniqueId(UniqueId *id) {
  if (fault("unique-id")) return 2;
  int fd = open("/dev/urandom", O_RDONLY | O_CLOEXEC);
  if (read(fd, id, sizeof *id) != sizeof *id) abort();
  close(fd);
  char text[257];
  hex(text, id, sizeof *id);
  record("ncclGetUniqueId %s", text);
  return SUCCESS;
}

// Waits until all ranks are here; nonzero if the communicator was aborted.
static int meet(Comm *comm) {
  comm->met++;
  comm->shared->seats[comm->rank].arrived = comm->met;
  for (int rank = 0; rank < comm->ranks; rank++) {
    while (comm->shared->seats[rank].arrived < comm->met) {
      if (comm->aborted) return 1;
      usleep(20);
    }
  }
  return 0;
}

static void start(Comm *comm, void *(*body)(void *)) {
  if (comm->has_thread) pthread_join(comm->thread, NULL);
  comm->has_thread = 1;
  comm->state = IN_PROGRESS;
  pthread_create(&comm->thread, NULL, body, comm);
}

static void *initialize(void *argument) {
  Comm *comm = argument;
  if (fault("init-hang")) while (!comm->aborted) usleep(100);
  if (meet(comm)) return NULL;
  comm->state = fault("init");
  return NULL;
}

int ncclCommInitRankConfig(Comm **out, int ranks, UniqueId id, int rank, Config *config) {
  char id_text[257], config_text[193];
  hex(id_text, &id, sizeof id);
  hex(config_text, config, sizeof *config);
  const char *multi = getenv("NCCL_MULTI_RANK_GPU_ENABLE");
  record("ncclCommInitRankConfig %d %d %s %s multi=%s", ranks, rank, id_text, config_text, multi ? multi : "unset");
  *out = NULL;
  if (config->magic != 0xcafebeef || config->size != sizeof *config || config->blocking != 0) return INVALID_ARGUMENT;
  if (current_device < 0 || ranks > MAX_RANKS || rank < 0 || rank >= ranks) return INVALID_ARGUMENT;
  id_text[16] = 0;
  char path[512];
  snprintf(path, sizeof path, "%s/%s", getenv("STUB_FOLDER"), id_text);
  int fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
  if (fd < 0 || ftruncate(fd, sizeof(Shared)) != 0) return 2;
  Comm *comm = calloc(1, sizeof *comm);
  comm->shared = mmap(NULL, sizeof(Shared), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  close(fd);
  comm->ranks = ranks;
  comm->rank = rank;
  comm->device = current_device;
  *out = comm;
  start(comm, initialize);
  return IN_PROGRESS;
}

int ncclCommGetAsyncError(Comm *comm, int *out) {
  int injected = fault("async");
  snprintf(last_text, sizeof last_text, "%s", injected ? "Net: injected by the test" : "");
  *out = injected ? injected : comm->state;
  return SUCCESS;
}

static int busy(Comm *comm, const char *name) {
  if (comm->state != IN_PROGRESS) return 0;
  record("VIOLATION %s before the previous call was ready", name);
  return 1;
}

// ---------------------------------------------------------------- NCCL: collectives

static const int SIZES[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2};

static float from_half(uint16_t h) {
  int exponent = h >> 10 & 31, fraction = h & 1023;
  uint32_t bits = (uint32_t)(h >> 15) << 31;
  float f;
  if (exponent == 31) bits |= 0x7f800000 | fraction << 13;
  else if (exponent) bits |= (uint32_t)(exponent + 112) << 23 | fraction << 13;
  else return (h >> 15 ? -1.0f : 1.0f) * fraction * 0x1p-24f;
  memcpy(&f, &bits, 4);
  return f;
}
static uint16_t to_half(float f) {
  uint32_t bits;
  memcpy(&bits, &f, 4);
  uint16_t sign = bits >> 16 & 0x8000;
  bits &= 0x7fffffff;
  if (bits > 0x7f800000) return sign | 0x7e00;
  if (bits >= 0x477ff000) return sign | 0x7c00;
  if (bits < 0x38800000) {
    float small;
    memcpy(&small, &bits, 4);
    small += 0.5f;
    memcpy(&bits, &small, 4);
    return sign | (bits - 0x3f000000);
  }
  return sign | (bits - 0x38000000 + 0xfff + (bits >> 13 & 1)) >> 13;
}
static float from_brain(uint16_t b) {
  uint32_t bits = (uint32_t)b << 16;
  float f;
  memcpy(&f, &bits, 4);
  return f;
}
static uint16_t to_brain(float f) {
  uint32_t bits;
  memcpy(&bits, &f, 4);
  if (f != f) return 0x7fc0;
  return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}

// As Math.max and Math.min: any NaN wins, and -0 is below 0.
#define COMBINE(op, a, b, nan, negative) \
  ((op) == 0 ? (a) + (b) : nan ? (a) + (b) : (op) == 2 ? ((a) > (b) || ((a) == (b) && !(negative)) ? (a) : (b)) \
                                                      : ((a) < (b) || ((a) == (b) && (negative)) ? (a) : (b)))
#define NUMBER(T, nan, negative) \
  for (size_t i = 0; i < count; i++) { \
    T a = ((T *)parts[0])[i]; \
    for (int r = 1; r < ranks; r++) { \
      T b = ((T *)parts[r])[i]; \
      a = COMBINE(op, a, b, nan, negative); \
    } \
    ((T *)target)[i] = a; \
  }
#define HALF(from, to) \
  for (size_t i = 0; i < count; i++) { \
    float a = from(((uint16_t *)parts[0])[i]); \
    for (int r = 1; r < ranks; r++) { \
      float b = from(((uint16_t *)parts[r])[i]); \
      a = COMBINE(op, a, b, a != a || b != b, __builtin_signbit(a)); \
    } \
    ((uint16_t *)target)[i] = to(a); \
  }

static void reduce(void *target, char **parts, int ranks, size_t count, int dtype, int op) {
  if (fault("skip-rank")) ranks--;
  switch (dtype) {
    case 0: NUMBER(int8_t, 0, 0) break;
    case 1: NUMBER(uint8_t, 0, 0) break;
    case 2: NUMBER(int32_t, 0, 0) break;
    case 4: NUMBER(int64_t, 0, 0) break;
    case 6: HALF(from_half, to_half) break;
    case 7: NUMBER(float, a != a || b != b, __builtin_signbit(a)) break;
    case 8: NUMBER(double, a != a || b != b, __builtin_signbit(a)) break;
    case 9: HALF(from_brain, to_brain) break;
  }
}

static int collective(Comm *comm, Work *w) {
  Shared *shared = comm->shared;
  uint64_t call[4] = {w->kind, w->bytes, w->dtype, (uint64_t)w->op << 32 | (unsigned)w->root};
  memcpy(shared->seats[comm->rank].call, call, sizeof call);
  if (meet(comm)) return 1;
  for (int r = 0; r < comm->ranks; r++) {
    if (memcmp(shared->seats[r].call, call, sizeof call) == 0) continue;
    record("VIOLATION ranks %d and %d at different calls", comm->rank, r);
    comm->state = INTERNAL_ERROR;
    return 1;
  }
  // No rank goes on to its next call, which takes the place of this one, before all have compared it.
  if (meet(comm)) return 1;
  if (fault("hang")) while (!comm->aborted) usleep(100);
  // Pieces that fit a slot; of a reduce-scatter, of the part of each rank in turn.
  size_t unit = SIZES[w->dtype], total = w->bytes, step = SLOT_BYTES / 64 * 64;
  int sections = w->kind == REDUCE_SCATTER ? comm->ranks : 1;
  for (int section = 0; section < sections; section++) {
    for (size_t at = 0; at < total; at += step) {
      size_t bytes = total - at < step ? total - at : step;
      const char *source = (const char *)w->source + section * total + at;
      if (w->kind != BROADCAST || comm->rank == w->root) memcpy(shared->slots[comm->rank], source, bytes);
      if (meet(comm)) return 1;
      char *parts[MAX_RANKS];
      for (int r = 0; r < comm->ranks; r++) parts[r] = shared->slots[r];
      char *target = (char *)w->target + at;
      if (w->kind == ALL_REDUCE) reduce(target, parts, comm->ranks, bytes / unit, w->dtype, w->op);
      if (w->kind == REDUCE_SCATTER && section == comm->rank) {
        reduce(target, parts, comm->ranks, bytes / unit, w->dtype, w->op);
      }
      if (w->kind == BROADCAST) memcpy(target, parts[w->root], bytes);
      if (w->kind == ALL_GATHER) {
        for (int r = 0; r < comm->ranks; r++) memcpy(target + r * total, parts[r], bytes);
      }
      if (meet(comm)) return 1;
    }
  }
  return 0;
}

static void run_collective(Work *work) {
  collective(work->object, work);
  ((Comm *)work->object)->running--;
}

// A non-blocking communicator has nothing in the stream before it is ready: an event recorded too early happens too early.
static void *launch(void *argument) {
  Comm *comm = argument;
  usleep(300);
  for (int i = 0; i < comm->pending_count; i++) put(comm->streams[i], comm->pending[i]);
  comm->pending_count = 0;
  comm->state = fault("launch");
  return NULL;
}

static int call(const char *name, Comm *comm, Stream *stream, Work work, size_t send_bytes, size_t receive_bytes) {
  record("%s send=%zu receive=%zu dtype=%d op=%d root=%d inplace=%d group=%d", name, send_bytes, receive_bytes, work.dtype,
         work.op, work.root, work.target == work.source, group_depth);
  if (busy(comm, name)) return INVALID_ARGUMENT;
  if (fault("call")) return fault("call");
  if (work.dtype < 0 || work.dtype > 9 || !stream) return INVALID_ARGUMENT;
  if (!holds(work.source, send_bytes, 0)) return violates(name, work.source, send_bytes), INVALID_ARGUMENT;
  if (!holds(work.target, receive_bytes, 0)) return violates(name, work.target, receive_bytes), INVALID_ARGUMENT;
  if (comm->pending_count == MAX_PENDING) return INTERNAL_ERROR;
  work.run = run_collective;
  work.object = comm;
  comm->running++;
  comm->streams[comm->pending_count] = stream;
  comm->pending[comm->pending_count++] = work;
  group_comm = comm;
  if (group_depth == 0) start(comm, launch);
  return IN_PROGRESS;
}

int ncclGroupStart(void) {
  group_depth++;
  record("ncclGroupStart");
  return SUCCESS;
}
int ncclGroupEnd(void) {
  record("ncclGroupEnd");
  if (--group_depth > 0 || !group_comm) return SUCCESS;
  start(group_comm, launch);
  group_comm = NULL;
  return IN_PROGRESS;
}

int ncclAllReduce(const void *send, void *receive, size_t count, int dtype, int op, Comm *comm, Stream *stream) {
  size_t bytes = count * SIZES[dtype];
  Work work = {.kind = ALL_REDUCE, .source = send, .target = receive, .bytes = bytes, .dtype = dtype, .op = op};
  return call("ncclAllReduce", comm, stream, work, bytes, bytes);
}
int ncclAllGather(const void *send, void *receive, size_t count, int dtype, Comm *comm, Stream *stream) {
  size_t bytes = count * SIZES[dtype];
  Work work = {.kind = ALL_GATHER, .source = send, .target = receive, .bytes = bytes, .dtype = dtype};
  return call("ncclAllGather", comm, stream, work, bytes, comm->ranks * bytes);
}
int ncclReduceScatter(const void *send, void *receive, size_t count, int dtype, int op, Comm *comm, Stream *stream) {
  size_t bytes = count * SIZES[dtype];
  Work work = {.kind = REDUCE_SCATTER, .source = send, .target = receive, .bytes = bytes, .dtype = dtype, .op = op};
  return call("ncclReduceScatter", comm, stream, work, comm->ranks * bytes, bytes);
}
int ncclBroadcast(const void *send, void *receive, size_t count, int dtype, int root, Comm *comm, Stream *stream) {
  size_t bytes = count * SIZES[dtype];
  Work work = {.kind = BROADCAST, .source = send, .target = receive, .bytes = bytes, .dtype = dtype, .root = root};
  return call("ncclBroadcast", comm, stream, work, bytes, bytes);
}

// ---------------------------------------------------------------- NCCL: the end

static void *finalize(void *argument) {
  Comm *comm = argument;
  usleep(300);
  comm->finalized = 1;
  comm->state = SUCCESS;
  return NULL;
}
int ncclCommFinalize(Comm *comm) {
  record("ncclCommFinalize");
  if (busy(comm, "ncclCommFinalize")) return INVALID_ARGUMENT;
  start(comm, finalize);
  return IN_PROGRESS;
}

static void release(Comm *comm) {
  if (comm->has_thread) pthread_join(comm->thread, NULL);
  while (comm->running > 0) usleep(50);
  munmap(comm->shared, sizeof(Shared));
  free(comm);
}
int ncclCommDestroy(Comm *comm) {
  record("ncclCommDestroy finalized=%d", comm->finalized);
  release(comm);
  return SUCCESS;
}
int ncclCommAbort(Comm *comm) {
  record("ncclCommAbort");
  if (fault("abort-hang")) for (;;) pause();
  comm->aborted = 1;
  release(comm);
  return SUCCESS;
}
