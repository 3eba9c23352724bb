/**
 * Where this rank stands in its group: 32-bit words of memory that is its own. The native kernel moves it on as
 * well; the same offsets are in native/group.h.
 */
export type Cursor = Int32Array

/** Number of the last meeting that this rank has reached; counts up and wraps. */
export const PHASE = 0
/** Half of the slots that the next chunk uses. */
export const SLOT_HALF = 1
/** Half of the operation words that the current operation uses. */
export const OPERATION_HALF = 2
/** 1 once all ranks are known to run the current operation. */
export const VERIFIED = 3

/** The cursor of a rank that has just joined. */
export function newCursor(): Cursor {
  return new Int32Array(4)
}
