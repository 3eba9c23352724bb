import { ReadStats } from '../checkpoint/read-stats.ts'

/** What reading a checkpoint from a hub has cost so far: `bytesRead` counts every byte that arrived for tensors. */
export class HubReadStats extends ReadStats {
  /** Requests for headers and ranges, repeated ones included. */
  requests = 0
}
