/** What clients may take of the server; a client that wants more is cut off. */
export interface ServerLimits {
  /** Time from the connection to the end of the handshake, in milliseconds. @default 5000 */
  readonly helloMs: number
  /** Connections that have not yet done the handshake; a new one ends the oldest. @default 64 */
  readonly strangers: number
  /** All connections. @default 4096 */
  readonly connections: number
  /** Bytes of a key. @default 4096 */
  readonly keyBytes: number
  /** Bytes of a value. @default 16777216 */
  readonly valueBytes: number
  /** Keys of one command. @default 4096 */
  readonly keys: number
  /** Bytes of all keys and values together. @default 268435456 */
  readonly totalBytes: number
}

/** A rank has its first messages ready when it connects; whoever says nothing for so long is a stranger. */
const HELLO_MS = 5_000

export const LIMITS: ServerLimits = {
  helloMs: HELLO_MS,
  strangers: 64,
  connections: 4_096,
  keyBytes: 2 ** 12,
  valueBytes: 2 ** 24,
  keys: 4_096,
  totalBytes: 2 ** 28,
}
