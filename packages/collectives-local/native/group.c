#include "group.h"

#include <string.h>

#include "meeting.h"

enum { CACHE_LINE = 64, PAGE_BYTES = 4096, MAX_RANKS = 1024 };

// As in src/stepwise-exchange.ts, where they are explained.
enum { DIRECT_BYTES = 1 << 19, DIRECT_CHUNKS = 16, DIRECT_CHUNK = 1 << 18, IN_PLACE_BLOCK = 1 << 20 };

// Reduced and passed on before the next piece is touched: it is still in the first-level cache then.
enum { PIECE_BYTES = 16384 };

static size_t smaller(size_t a, size_t b) {
  return a < b ? a : b;
}

static size_t larger(size_t a, size_t b) {
  return a > b ? a : b;
}

static size_t chunks_of(size_t bytes, size_t chunk_bytes) {
  return (bytes + chunk_bytes - 1) / chunk_bytes;
}

// The slot of `rank` for chunk `chunk` of this operation; as Arena.slot in src/arena.ts, where it is explained.
static uint8_t *slot_of(const group_t *group, size_t chunk, int rank) {
  size_t half = ((size_t)group->cursor[SLOT_HALF] + chunk) & 1u;
  size_t slot = group->world_size == 2 ? (size_t)rank ^ half : half * group->world_size + rank;
  return group->base + (size_t)PAGE_BYTES * (1 + group->world_size) + slot * group->slot_bytes;
}

size_t group_arena_bytes(size_t world_size, size_t slot_bytes) {
  size_t slots = world_size == 2 ? 2 : 2 * world_size;
  return PAGE_BYTES * (1 + world_size) + slots * slot_bytes;
}

static void finish(group_t *group, size_t chunks) {
  group->cursor[SLOT_HALF] = (int32_t)(((size_t)group->cursor[SLOT_HALF] + chunks) & 1u);
  group->step = 0;
}

// Meets the others at the end of a step. DONE: go on with the next one.
static status_t end_step(group_t *group) {
  status_t status = meet(group);
  if (status != DONE) return status;
  group->step++;
  return held_too_long(group) ? YIELD : DONE;
}

// Several tensors, seen as one run of bytes.
typedef struct {
  const part_t *parts;
  size_t count;
} run_t;

// The longest piece of a run that starts at `start` and lies in one tensor; at most `limit` bytes.
static part_t piece_of(run_t run, size_t start, size_t limit) {
  for (size_t i = 0; i < run.count; i++) {
    if (start < run.parts[i].bytes) {
      return (part_t){run.parts[i].data + start, smaller(limit, run.parts[i].bytes - start)};
    }
    start -= run.parts[i].bytes;
  }
  return (part_t){NULL, 0};
}

static size_t bytes_of(run_t run) {
  size_t bytes = 0;
  for (size_t i = 0; i < run.count; i++) bytes += run.parts[i].bytes;
  return bytes;
}

static void copy_in(run_t run, size_t start, size_t bytes, uint8_t *target) {
  for (size_t done = 0; done < bytes;) {
    part_t piece = piece_of(run, start + done, bytes - done);
    memcpy(target + done, piece.data, piece.bytes);
    done += piece.bytes;
  }
}

static void copy_out(run_t run, size_t start, size_t bytes, const uint8_t *source) {
  for (size_t done = 0; done < bytes;) {
    part_t piece = piece_of(run, start + done, bytes - done);
    memcpy(piece.data, source + done, piece.bytes);
    done += piece.bytes;
  }
}

// How a reduction finds the contribution of each rank: at `offset` of its slot, except for its own.
typedef struct {
  const group_t *group;
  dtype_t dtype;
  reduce_op_t op;
  size_t chunk;
  size_t offset;
} contributions_t;

static void reduce_slots(contributions_t from, const uint8_t *own, uint8_t *target, size_t bytes) {
  const void *sources[MAX_RANKS];
  const group_t *group = from.group;
  for (int rank = 0; rank < group->world_size; rank++) {
    sources[rank] = rank == group->rank ? own : slot_of(group, from.chunk, rank) + from.offset;
  }
  group->reduce(from.dtype, from.op, sources, group->world_size, target, bytes / item_size(from.dtype));
}

// Reduces a piece of a run in place; `publish`, unless it is NULL, gets a copy.
static void reduce_run(contributions_t from, run_t run, size_t start, size_t bytes, uint8_t *publish) {
  for (size_t done = 0; done < bytes;) {
    part_t piece = piece_of(run, start + done, smaller(PIECE_BYTES, bytes - done));
    contributions_t at = from;
    at.offset += done;
    reduce_slots(at, piece.data, piece.data, piece.bytes);
    if (publish != NULL) memcpy(publish + done, piece.data, piece.bytes);
    done += piece.bytes;
  }
}

status_t group_barrier(group_t *group) {
  enter(group);
  status_t status = group->step == 0 ? end_step(group) : DONE;
  if (status == DONE) finish(group, 0);
  return status;
}

static size_t direct_chunk_bytes(const group_t *group, size_t total) {
  size_t share = chunks_of(total, DIRECT_CHUNKS * CACHE_LINE) * CACHE_LINE;
  return smaller(larger(share, DIRECT_CHUNK), group->slot_bytes);
}

// Bytes of a run.
typedef struct {
  size_t start;
  size_t bytes;
} range_t;

// Empty beyond the last one.
static range_t range_of(size_t chunk, size_t chunk_bytes, size_t total) {
  size_t start = smaller(chunk * chunk_bytes, total);
  return (range_t){start, smaller(chunk_bytes, total - start)};
}

// Reduces one chunk and gives the next, in turns: of two ranks, each writes where it has just read.
static void reduce_and_give(contributions_t from, run_t run, range_t reduced, range_t given, uint8_t *slot) {
  for (size_t done = 0; done < larger(reduced.bytes, given.bytes); done += PIECE_BYTES) {
    from.offset = done;
    if (done < reduced.bytes) {
      reduce_run(from, run, reduced.start + done, smaller(PIECE_BYTES, reduced.bytes - done), NULL);
    }
    if (done < given.bytes) {
      copy_in(run, given.start + done, smaller(PIECE_BYTES, given.bytes - done), slot + done);
    }
  }
}

// Every rank gives all ranks everything, and each reduces all of it.
static status_t all_reduce_direct(group_t *group, dtype_t dtype, reduce_op_t op, run_t run, size_t total) {
  size_t chunk_bytes = direct_chunk_bytes(group, total);
  size_t chunks = chunks_of(total, chunk_bytes);
  for (;;) {
    size_t step = group->step;
    if (!group->meeting) {
      range_t reduced = step == 0 ? (range_t){0, 0} : range_of(step - 1, chunk_bytes, total);
      range_t given = range_of(step, chunk_bytes, total);
      contributions_t from = {group, dtype, op, step - 1, 0};
      reduce_and_give(from, run, reduced, given, slot_of(group, step, group->rank));
      if (step >= larger(chunks, 1)) break;
    }
    status_t status = end_step(group);
    if (status != DONE) return status;
  }
  finish(group, chunks);
  return DONE;
}

// Stripes of one chunk. A stripe lies at the same place of a slot in every chunk, so that a rank may write stripes of a
// chunk while others still read another stripe of the chunk before the last.
typedef struct {
  size_t chunk;
  size_t start;
  size_t bytes;
  size_t stripe_bytes;
  size_t stripe_room;
} chunk_t;

static chunk_t chunk_at(const group_t *group, size_t chunk, size_t total) {
  size_t room = group->slot_bytes / group->world_size / CACHE_LINE * CACHE_LINE;
  size_t start = chunk * room * group->world_size;
  size_t bytes = smaller(room * group->world_size, total - start);
  size_t lines = chunks_of(bytes, CACHE_LINE);
  return (chunk_t){chunk, start, bytes, chunks_of(lines, group->world_size) * CACHE_LINE, room};
}

static size_t stripe_start(chunk_t chunk, int rank) {
  return smaller(chunk.stripe_bytes * rank, chunk.bytes);
}

static size_t stripe_size(chunk_t chunk, int rank) {
  return stripe_start(chunk, rank + 1) - stripe_start(chunk, rank);
}

static void give_stripes(const group_t *group, run_t run, chunk_t chunk) {
  uint8_t *slot = slot_of(group, chunk.chunk, group->rank);
  for (int rank = 0; rank < group->world_size; rank++) {
    if (rank == group->rank) continue;
    copy_in(run, chunk.start + stripe_start(chunk, rank), stripe_size(chunk, rank), slot + rank * chunk.stripe_room);
  }
}

static void reduce_stripe(const group_t *group, dtype_t dtype, reduce_op_t op, run_t run, chunk_t chunk) {
  size_t offset = group->rank * chunk.stripe_room;
  uint8_t *publish = slot_of(group, chunk.chunk, group->rank) + offset;
  contributions_t from = {group, dtype, op, chunk.chunk, offset};
  size_t start = chunk.start + stripe_start(chunk, group->rank);
  reduce_run(from, run, start, stripe_size(chunk, group->rank), publish);
}

static void take_stripes(const group_t *group, run_t run, chunk_t chunk) {
  for (int rank = 0; rank < group->world_size; rank++) {
    if (rank == group->rank) continue;
    const uint8_t *stripe = slot_of(group, chunk.chunk, rank) + rank * chunk.stripe_room;
    copy_out(run, chunk.start + stripe_start(chunk, rank), stripe_size(chunk, rank), stripe);
  }
}

// Every rank reduces one stripe of each chunk. Three chunks are on their way at a time, so that one meeting per chunk
// is enough.
static status_t all_reduce_striped(group_t *group, dtype_t dtype, reduce_op_t op, run_t run, size_t total) {
  size_t room = group->slot_bytes / group->world_size / CACHE_LINE * CACHE_LINE;
  size_t chunks = chunks_of(total, room * group->world_size);
  for (;;) {
    size_t step = group->step;
    if (!group->meeting) {
      if (step >= 2) take_stripes(group, run, chunk_at(group, step - 2, total));
      if (step >= 1 && step <= chunks) reduce_stripe(group, dtype, op, run, chunk_at(group, step - 1, total));
      if (step < chunks) give_stripes(group, run, chunk_at(group, step, total));
      if (step > chunks) break;
    }
    status_t status = end_step(group);
    if (status != DONE) return status;
  }
  finish(group, chunks);
  return DONE;
}

status_t group_all_reduce(group_t *group, dtype_t dtype, reduce_op_t op, const part_t *parts, size_t count) {
  enter(group);
  run_t run = {parts, count};
  size_t bytes = bytes_of(run);
  size_t limit = smaller((size_t)(DIRECT_BYTES / (group->world_size - 1)), group->slot_bytes);
  bool direct = group->world_size == 2 || bytes <= limit;
  return direct ? all_reduce_direct(group, dtype, op, run, bytes) : all_reduce_striped(group, dtype, op, run, bytes);
}

// Reduces `bytes` from `start` of what all ranks hold and writes the result to each.
static void reduce_shared(const group_t *group, dtype_t dtype, reduce_op_t op, shared_t shared, size_t start,
                          size_t bytes) {
  const void *sources[MAX_RANKS];
  for (size_t done = 0; done < bytes; done += PIECE_BYTES) {
    size_t piece = smaller(PIECE_BYTES, bytes - done);
    uint8_t *first = shared.base + start + done;
    for (int rank = 0; rank < group->world_size; rank++) sources[rank] = first + rank * shared.stride;
    group->reduce(dtype, op, sources, group->world_size, first, piece / item_size(dtype));
    for (int rank = 1; rank < group->world_size; rank++) memcpy(first + rank * shared.stride, first, piece);
  }
}

// Step 0 meets, the steps after it reduce one block each of this rank's stripe, the last one meets again.
status_t group_all_reduce_in_place(group_t *group, dtype_t dtype, reduce_op_t op, shared_t shared) {
  enter(group);
  size_t lines = chunks_of(shared.bytes, CACHE_LINE);
  size_t start = lines * group->rank / group->world_size * CACHE_LINE;
  size_t end = smaller(lines * (group->rank + 1) / group->world_size * CACHE_LINE, shared.bytes);
  size_t blocks = chunks_of(end - start, IN_PLACE_BLOCK);
  for (;;) {
    size_t step = group->step;
    if (step == 0 || step == blocks + 1) {
      status_t status = end_step(group);
      if (status != DONE) return status;
      continue;
    }
    if (step == blocks + 2) break;
    size_t at = start + (step - 1) * IN_PLACE_BLOCK;
    reduce_shared(group, dtype, op, shared, at, smaller(IN_PLACE_BLOCK, end - at));
    group->step++;
    if (held_too_long(group)) return YIELD;
  }
  finish(group, 0);
  return DONE;
}

static void gather_chunk(const group_t *group, size_t chunk, part_t input, part_t output) {
  size_t start = chunk * group->slot_bytes;
  size_t bytes = smaller(group->slot_bytes, input.bytes - start);
  for (int rank = 0; rank < group->world_size; rank++) {
    const uint8_t *source = rank == group->rank ? input.data + start : slot_of(group, chunk, rank);
    memcpy(output.data + rank * input.bytes + start, source, bytes);
  }
}

status_t group_all_gather(group_t *group, part_t input, part_t output) {
  enter(group);
  size_t chunks = chunks_of(input.bytes, group->slot_bytes);
  for (;;) {
    size_t step = group->step;
    if (!group->meeting) {
      if (step >= 1 && step <= chunks) gather_chunk(group, step - 1, input, output);
      if (step >= larger(chunks, 1)) break;
      size_t start = smaller(step * group->slot_bytes, input.bytes);
      memcpy(slot_of(group, step, group->rank), input.data + start, smaller(group->slot_bytes, input.bytes - start));
    }
    status_t status = end_step(group);
    if (status != DONE) return status;
  }
  finish(group, chunks);
  return DONE;
}

// A chunk holds the same piece of the rows of every rank, one after the other.
status_t group_reduce_scatter(group_t *group, dtype_t dtype, reduce_op_t op, part_t input, part_t output) {
  enter(group);
  size_t room = group->slot_bytes / group->world_size / CACHE_LINE * CACHE_LINE;
  size_t chunks = chunks_of(output.bytes, room);
  for (;;) {
    size_t step = group->step;
    if (!group->meeting) {
      if (step >= 1 && step <= chunks) {
        size_t start = (step - 1) * room;
        contributions_t from = {group, dtype, op, step - 1, group->rank * room};
        const uint8_t *own = input.data + group->rank * output.bytes + start;
        reduce_slots(from, own, output.data + start, smaller(room, output.bytes - start));
      }
      if (step >= larger(chunks, 1)) break;
      size_t start = smaller(step * room, output.bytes);
      for (int rank = 0; rank < group->world_size; rank++) {
        if (rank == group->rank) continue;
        uint8_t *target = slot_of(group, step, group->rank) + rank * room;
        memcpy(target, input.data + rank * output.bytes + start, smaller(room, output.bytes - start));
      }
    }
    status_t status = end_step(group);
    if (status != DONE) return status;
  }
  finish(group, chunks);
  return DONE;
}

status_t group_broadcast(group_t *group, int source, part_t tensor) {
  enter(group);
  size_t chunks = chunks_of(tensor.bytes, group->slot_bytes);
  for (;;) {
    size_t step = group->step;
    if (!group->meeting) {
      if (step >= 1 && step <= chunks && group->rank != source) {
        size_t start = (step - 1) * group->slot_bytes;
        memcpy(tensor.data + start, slot_of(group, step - 1, source), smaller(group->slot_bytes, tensor.bytes - start));
      }
      if (step >= larger(chunks, 1)) break;
      size_t start = smaller(step * group->slot_bytes, tensor.bytes);
      if (group->rank == source) {
        memcpy(slot_of(group, step, source), tensor.data + start, smaller(group->slot_bytes, tensor.bytes - start));
      }
    }
    status_t status = end_step(group);
    if (status != DONE) return status;
  }
  finish(group, chunks);
  return DONE;
}
