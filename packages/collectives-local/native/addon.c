// What src/native-kernel.ts sees of the group. Arguments are checked there; what would make this code read or write
// other memory than it was given is checked here again.
#define NAPI_VERSION 8
#include <node_api.h>
#include <stdlib.h>
#include <string.h>

#include "group.h"

enum { MAX_ARGUMENTS = 6, MAX_RANKS = 1024, FEW_PARTS = 16 };

static napi_value fail(napi_env env, const char *message) {
  napi_throw_type_error(env, NULL, message);
  return NULL;
}

static bool arguments(napi_env env, napi_callback_info info, size_t wanted, napi_value *values) {
  size_t count = wanted;
  if (napi_get_cb_info(env, info, &count, values, NULL, NULL) == napi_ok && count >= wanted) return true;
  fail(env, "too few arguments");
  return false;
}

static bool integer(napi_env env, napi_value value, int64_t least, int64_t most, int64_t *result) {
  if (napi_get_value_int64(env, value, result) == napi_ok && *result >= least && *result <= most) return true;
  fail(env, "an integer is out of range");
  return false;
}

static bool typed_array(napi_env env, napi_value value, part_t *part, napi_typedarray_type *type) {
  static const size_t ITEM_BYTES[] = {1, 1, 1, 2, 2, 4, 4, 4, 8, 8, 8};
  size_t length;
  void *data;
  if (napi_get_typedarray_info(env, value, type, &length, &data, NULL, NULL) != napi_ok) {
    fail(env, "no typed array");
    return false;
  }
  if ((size_t)*type >= sizeof ITEM_BYTES / sizeof *ITEM_BYTES) {
    fail(env, "the typed array is of an unknown type");
    return false;
  }
  *part = (part_t){data, length * ITEM_BYTES[*type]};
  return true;
}

static bool bytes_of(napi_env env, napi_value value, part_t *part) {
  napi_typedarray_type type;
  return typed_array(env, value, part, &type);
}

// A list of typed arrays. The result is `few`, or memory to be freed with `release`; NULL after an error.
static part_t *list_of(napi_env env, napi_value value, part_t few[FEW_PARTS], uint32_t *count) {
  if (napi_get_array_length(env, value, count) != napi_ok) {
    fail(env, "no array");
    return NULL;
  }
  part_t *parts = *count <= FEW_PARTS ? few : malloc(*count * sizeof *parts);
  if (parts == NULL) fail(env, "out of memory");
  for (uint32_t i = 0; parts != NULL && i < *count; i++) {
    napi_value element;
    if (napi_get_element(env, value, i, &element) == napi_ok && bytes_of(env, element, parts + i)) continue;
    if (parts != few) free(parts);
    parts = NULL;
  }
  return parts;
}

static void release(part_t *parts, const part_t *few) {
  if (parts != few) free(parts);
}

static group_t *group_of(napi_env env, napi_value value) {
  void *group;
  if (napi_get_value_external(env, value, &group) == napi_ok) return group;
  fail(env, "no group");
  return NULL;
}

static bool reduction(napi_env env, const napi_value *values, dtype_t *dtype, reduce_op_t *op) {
  int64_t numbers[2];
  if (!integer(env, values[0], 0, DTYPES - 1, numbers)) return false;
  if (!integer(env, values[1], 0, REDUCE_OPS - 1, numbers + 1)) return false;
  *dtype = (dtype_t)numbers[0];
  *op = (reduce_op_t)numbers[1];
  return true;
}

static napi_value number(napi_env env, int value) {
  napi_value result;
  return napi_create_int32(env, value, &result) == napi_ok ? result : NULL;
}

typedef struct {
  group_t group;
  // Keep the memory that the group points to.
  napi_ref arena;
  napi_ref cursor;
} handle_t;

static void free_handle(napi_env env, void *data, void *hint) {
  (void)hint;
  handle_t *handle = data;
  napi_delete_reference(env, handle->arena);
  napi_delete_reference(env, handle->cursor);
  free(handle);
}

// open(arena: Uint8Array, slotBytes, worldSize, rank, spins, cursor: Int32Array)
static napi_value open_group(napi_env env, napi_callback_info info) {
  napi_value values[MAX_ARGUMENTS];
  part_t arena, cursor;
  napi_typedarray_type type;
  int64_t slot_bytes, world_size, rank, spins;
  if (!arguments(env, info, 6, values) || !bytes_of(env, values[0], &arena)) return NULL;
  if (!integer(env, values[1], 64, INT32_MAX, &slot_bytes)) return NULL;
  if (!integer(env, values[2], 2, MAX_RANKS, &world_size)) return NULL;
  if (!integer(env, values[3], 0, world_size - 1, &rank) || !integer(env, values[4], 0, 1, &spins)) return NULL;
  if (!typed_array(env, values[5], &cursor, &type)) return NULL;
  if (type != napi_int32_array || cursor.bytes < CURSOR_WORDS * 4) return fail(env, "the cursor is too small");
  if (arena.bytes < group_arena_bytes(world_size, slot_bytes)) return fail(env, "the arena is too small");

  handle_t *handle = calloc(1, sizeof *handle);
  if (handle == NULL) return fail(env, "out of memory");
  variant_t variants[MAX_VARIANTS];
  reduce_variants(variants);
  handle->group = (group_t){
      .base = arena.data,
      .slot_bytes = (size_t)slot_bytes,
      .world_size = (int)world_size,
      .rank = (int)rank,
      .spins = spins == 1,
      .cursor = (volatile int32_t *)cursor.data,
      .reduce = variants[0].reduce,
  };
  napi_value external;
  bool kept = napi_create_reference(env, values[0], 1, &handle->arena) == napi_ok;
  kept = kept && napi_create_reference(env, values[5], 1, &handle->cursor) == napi_ok;
  if (kept && napi_create_external(env, handle, free_handle, NULL, &external) == napi_ok) return external;
  if (handle->cursor != NULL) napi_delete_reference(env, handle->cursor);
  if (handle->arena != NULL) napi_delete_reference(env, handle->arena);
  free(handle);
  return fail(env, "the group cannot be made");
}

// barrier(group)
static napi_value barrier(napi_env env, napi_callback_info info) {
  napi_value values[MAX_ARGUMENTS];
  if (!arguments(env, info, 1, values)) return NULL;
  group_t *group = group_of(env, values[0]);
  return group == NULL ? NULL : number(env, group_barrier(group));
}

// allReduce(group, dtype, op, tensors: TypedArray[])
static napi_value all_reduce(napi_env env, napi_callback_info info) {
  napi_value values[MAX_ARGUMENTS];
  dtype_t dtype;
  reduce_op_t op;
  if (!arguments(env, info, 4, values)) return NULL;
  group_t *group = group_of(env, values[0]);
  if (group == NULL || !reduction(env, values + 1, &dtype, &op)) return NULL;
  part_t few[FEW_PARTS];
  uint32_t count;
  part_t *parts = list_of(env, values[3], few, &count);
  if (parts == NULL) return NULL;
  status_t status = group_all_reduce(group, dtype, op, parts, count);
  release(parts, few);
  return number(env, status);
}

// allReduceInPlace(group, dtype, op, shared: Uint8Array, offset, bytes): `shared` holds the memory of all ranks
static napi_value all_reduce_in_place(napi_env env, napi_callback_info info) {
  napi_value values[MAX_ARGUMENTS];
  dtype_t dtype;
  reduce_op_t op;
  part_t whole;
  int64_t offset, bytes;
  if (!arguments(env, info, 6, values)) return NULL;
  group_t *group = group_of(env, values[0]);
  if (group == NULL || !reduction(env, values + 1, &dtype, &op) || !bytes_of(env, values[3], &whole)) return NULL;
  int64_t stride = (int64_t)whole.bytes / group->world_size;
  if (!integer(env, values[4], 0, stride, &offset)) return NULL;
  if (!integer(env, values[5], 0, stride - offset, &bytes)) return NULL;
  shared_t shared = {whole.data + offset, (size_t)stride, (size_t)bytes};
  return number(env, group_all_reduce_in_place(group, dtype, op, shared));
}

// allGather(group, input, output)
static napi_value all_gather(napi_env env, napi_callback_info info) {
  napi_value values[MAX_ARGUMENTS];
  part_t input, output;
  if (!arguments(env, info, 3, values)) return NULL;
  group_t *group = group_of(env, values[0]);
  if (group == NULL || !bytes_of(env, values[1], &input) || !bytes_of(env, values[2], &output)) return NULL;
  if (output.bytes != input.bytes * group->world_size) return fail(env, "the output has another size");
  return number(env, group_all_gather(group, input, output));
}

// reduceScatter(group, dtype, op, input, output)
static napi_value reduce_scatter(napi_env env, napi_callback_info info) {
  napi_value values[MAX_ARGUMENTS];
  dtype_t dtype;
  reduce_op_t op;
  part_t input, output;
  if (!arguments(env, info, 5, values)) return NULL;
  group_t *group = group_of(env, values[0]);
  if (group == NULL || !reduction(env, values + 1, &dtype, &op)) return NULL;
  if (!bytes_of(env, values[3], &input) || !bytes_of(env, values[4], &output)) return NULL;
  if (input.bytes != output.bytes * group->world_size) return fail(env, "the output has another size");
  return number(env, group_reduce_scatter(group, dtype, op, input, output));
}

// broadcast(group, source, tensor)
static napi_value broadcast(napi_env env, napi_callback_info info) {
  napi_value values[MAX_ARGUMENTS];
  int64_t source;
  part_t tensor;
  if (!arguments(env, info, 3, values)) return NULL;
  group_t *group = group_of(env, values[0]);
  if (group == NULL || !integer(env, values[1], 0, group->world_size - 1, &source)) return NULL;
  if (!bytes_of(env, values[2], &tensor)) return NULL;
  return number(env, group_broadcast(group, (int)source, tensor));
}

// reduce(variant, dtype, op, sources: TypedArray[], target): without a group: over TCP, and in the tests of the instruction sets
static napi_value reduce(napi_env env, napi_callback_info info) {
  napi_value values[MAX_ARGUMENTS];
  int64_t index;
  dtype_t dtype;
  reduce_op_t op;
  part_t target;
  variant_t variants[MAX_VARIANTS];
  if (!arguments(env, info, 5, values)) return NULL;
  if (!integer(env, values[0], 0, reduce_variants(variants) - 1, &index)) return NULL;
  if (!reduction(env, values + 1, &dtype, &op) || !bytes_of(env, values[4], &target)) return NULL;
  part_t few[FEW_PARTS];
  uint32_t ranks;
  part_t *parts = list_of(env, values[3], few, &ranks);
  if (parts == NULL) return NULL;
  const void *sources[FEW_PARTS];
  bool fits = ranks >= 2 && ranks <= FEW_PARTS;
  for (uint32_t rank = 0; fits && rank < ranks; rank++) {
    sources[rank] = parts[rank].data;
    fits = parts[rank].bytes == target.bytes;
  }
  release(parts, few);
  if (!fits) return fail(env, "from 2 to 16 sources, all as long as the target");
  variants[index].reduce(dtype, op, sources, (int)ranks, target.data, target.bytes / item_size(dtype));
  return NULL;
}

// The instruction sets that this processor has code for, the one in use first.
static napi_value instruction_sets(napi_env env) {
  variant_t variants[MAX_VARIANTS];
  int count = reduce_variants(variants);
  napi_value names, name;
  if (napi_create_array(env, &names) != napi_ok) return NULL;
  for (int i = 0; i < count; i++) {
    if (napi_create_string_utf8(env, variants[i].instruction_set, NAPI_AUTO_LENGTH, &name) != napi_ok) return NULL;
    if (napi_set_element(env, names, (uint32_t)i, name) != napi_ok) return NULL;
  }
  return names;
}

NAPI_MODULE_INIT() {
  napi_property_descriptor properties[] = {
      {"open", NULL, open_group, NULL, NULL, NULL, napi_enumerable, NULL},
      {"barrier", NULL, barrier, NULL, NULL, NULL, napi_enumerable, NULL},
      {"allReduce", NULL, all_reduce, NULL, NULL, NULL, napi_enumerable, NULL},
      {"allReduceInPlace", NULL, all_reduce_in_place, NULL, NULL, NULL, napi_enumerable, NULL},
      {"allGather", NULL, all_gather, NULL, NULL, NULL, napi_enumerable, NULL},
      {"reduceScatter", NULL, reduce_scatter, NULL, NULL, NULL, napi_enumerable, NULL},
      {"broadcast", NULL, broadcast, NULL, NULL, NULL, napi_enumerable, NULL},
      {"reduce", NULL, reduce, NULL, NULL, NULL, napi_enumerable, NULL},
      {"protocol", NULL, NULL, NULL, NULL, number(env, PROTOCOL), napi_enumerable, NULL},
      {"instructionSets", NULL, NULL, NULL, NULL, instruction_sets(env), napi_enumerable, NULL},
  };
  if (napi_define_properties(env, exports, sizeof properties / sizeof *properties, properties) != napi_ok) return NULL;
  return exports;
}
