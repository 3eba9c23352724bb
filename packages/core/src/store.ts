/** Options of a wait for other ranks. */
export interface StoreWaitOptions {
  readonly signal?: AbortSignal | undefined
}

/**
 * Where ranks find what they need to know of each other before they can talk: small values under string keys, as
 * `torch.distributed.Store` keeps them. Values are overwritten, never removed; a store lives as long as the group.
 *
 * @throws RankwiseError `RENDEZVOUS_TIMEOUT`, `RANK_LOST` when the process that holds the store is gone, `ABORTED`,
 * `STORE_CLOSED` after `close`
 */
export interface Store extends AsyncDisposable {
  /** Sets a value, and wakes the ranks that wait for it. */
  set(key: string, value: Uint8Array): Promise<void>
  /** The value of a key; waits until a rank has set it. */
  get(key: string, options?: StoreWaitOptions): Promise<Uint8Array>
  /** Adds to a counter that starts at 0, and returns its new value: each rank gets another one. */
  add(key: string, amount: number): Promise<number>
  /**
   * Closes the connection; idempotent. Where this rank holds the store, its port is free at once, and up to 5 s are left
   * to the other ranks to read the rest and close theirs.
   */
  close(): Promise<void>
}
