// One rank's side of the operations of a group. The protocol is the one of src/stepwise-exchange.ts, word for word:
// ranks that run it in C and ranks that run it in TypeScript can be in one group.
#ifndef RANKWISE_GROUP_H
#define RANKWISE_GROUP_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "reduce.h"

// Counts the changes of what this code shares with TypeScript: protocol, layout of the arena, exports. The same number is
// in src/native-kernel.ts, which refuses an addon of another one.
enum { PROTOCOL = 2 };

// Where this rank stands, shared with src/cursor.ts; offsets in 32-bit words.
enum { PHASE, SLOT_HALF, OPERATION_HALF, VERIFIED, CURSOR_WORDS };

// What src/native-exchange.ts does next.
typedef enum {
  DONE,
  // A rank did not arrive while this one spun: wait for the phase in the cursor, then step again.
  WAIT,
  // The event loop has been held long enough: give it a turn, then step again.
  YIELD,
  // The ranks are at different operations.
  MISMATCH,
} status_t;

typedef struct {
  uint8_t *base;
  size_t slot_bytes;
  int world_size;
  int rank;
  bool spins;
  volatile int32_t *cursor;
  reduce_t *reduce;
  // Where an operation that was interrupted goes on.
  size_t step;
  bool meeting;
  uint64_t entered_ns;
} group_t;

// Memory of one tensor.
typedef struct {
  uint8_t *data;
  size_t bytes;
} part_t;

// Memory that holds one contribution of every rank, `stride` bytes apart.
typedef struct {
  uint8_t *base;
  size_t stride;
  size_t bytes;
} shared_t;

// Bytes of an arena, as in src/arena.ts.
size_t group_arena_bytes(size_t world_size, size_t slot_bytes);

// Every function below starts an operation, or goes on with one that returned WAIT or YIELD: the arguments are the same.
status_t group_barrier(group_t *group);
status_t group_all_reduce(group_t *group, dtype_t dtype, reduce_op_t op, const part_t *parts, size_t count);
status_t group_all_reduce_in_place(group_t *group, dtype_t dtype, reduce_op_t op, shared_t shared);
status_t group_all_gather(group_t *group, part_t input, part_t output);
status_t group_reduce_scatter(group_t *group, dtype_t dtype, reduce_op_t op, part_t input, part_t output);
status_t group_broadcast(group_t *group, int source, part_t tensor);

#endif
