/**
 * The protocol of torch's TCPStore, as torch 2.15 speaks it with both of its servers: a client first sends VALIDATE with
 * MAGIC, then commands, each answered before the next; SET, APPEND, MULTI_SET and QUEUE_PUSH have no answer. Numbers are
 * little-endian; keys and values go behind their length, and lists behind their number of elements, as uint64.
 */
export const Command = {
  VALIDATE: 0,
  SET: 1,
  COMPARE_SET: 2,
  GET: 3,
  ADD: 4,
  CHECK: 5,
  WAIT: 6,
  GET_NUM_KEYS: 7,
  DELETE_KEY: 8,
  APPEND: 9,
  MULTI_GET: 10,
  MULTI_SET: 11,
  CANCEL_WAIT: 12,
  PING: 13,
  QUEUE_PUSH: 14,
  QUEUE_POP: 15,
  QUEUE_LEN: 16,
  LIST_KEYS: 17,
  BARRIER: 18,
} as const

export const MAGIC = 0x3c85f7ce

/** Answers to CHECK. */
export const READY = 0
export const NOT_READY = 1

/** Answers to WAIT, BARRIER and CANCEL_WAIT. */
export const STOP_WAITING = 0
export const WAIT_CANCELED = 1

/** torch's clients put this before every key. */
export const KEY_PREFIX = '/'

export function uint8(value: number): Buffer {
  return Buffer.of(value)
}

export function uint32(value: number): Buffer {
  const bytes = Buffer.alloc(4)
  bytes.writeUInt32LE(value)
  return bytes
}

export function int64(value: number | bigint): Buffer {
  const bytes = Buffer.alloc(8)
  bytes.writeBigInt64LE(BigInt(value))
  return bytes
}

/** Bytes behind their length. */
export function value(bytes: Uint8Array): Buffer {
  return Buffer.concat([int64(bytes.byteLength), bytes])
}

export function key(text: string): Buffer {
  return value(Buffer.from(text, 'latin1'))
}
