/** A connection ended, or carried something that is not of the protocol; whoever reads it decides what that means. */
export class ConnectionError extends Error {
  override readonly name = 'ConnectionError'
}
