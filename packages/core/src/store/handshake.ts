import { createHmac, randomBytes, timingSafeEqual } from 'node:crypto'

/**
 * How a rank and rank 0's store prove to each other that they know the secret of the launch, without saying it. It is
 * spoken in the store's own protocol, under three keys that belong to the connection, so that clients of torch can do
 * it too: the rank sets HELLO to a nonce, gets CHALLENGE, which holds the session, the store's nonce and its proof, and
 * sets ANSWER to its own proof. A proof is an HMAC-SHA256 over both nonces: it is worth nothing on another connection.
 */
export const HELLO = 'rankwise/hello'
export const CHALLENGE = 'rankwise/challenge'
export const ANSWER = 'rankwise/answer'

export const NONCE_BYTES = 32
/** Names one run of one store; see `openStore`. */
export const SESSION_BYTES = 16
export const PROOF_BYTES = 32
export const CHALLENGE_BYTES = SESSION_BYTES + NONCE_BYTES + PROOF_BYTES

/** What both sides know before they meet. */
export interface Secret {
  /** Empty when the launch has none: then a proof only tells a store of Rankwise from other programs. */
  readonly token: string
  /** Tells apart what has one token: other jobs, and after a restart the ranks of the last attempt. */
  readonly scope: string
}

type Side = 'store' | 'rank'

/** What both sides say in a handshake. */
export interface Transcript {
  readonly session: Uint8Array
  readonly hello: Uint8Array
  readonly nonce: Uint8Array
}

export function newNonce(): Buffer {
  return randomBytes(NONCE_BYTES)
}

export function encodeChallenge(secret: Secret, transcript: Transcript): Buffer {
  return Buffer.concat([transcript.session, transcript.nonce, proofOf('store', secret, transcript)])
}

/** @returns what the store said; undefined when whoever said it does not know the secret */
export function verifyChallenge(secret: Secret, hello: Uint8Array, challenge: Buffer): Transcript | undefined {
  if (challenge.length !== CHALLENGE_BYTES) return undefined
  const session = challenge.subarray(0, SESSION_BYTES)
  const nonce = challenge.subarray(SESSION_BYTES, SESSION_BYTES + NONCE_BYTES)
  const transcript = { session, hello, nonce }
  const isProven = timingSafeEqual(
    challenge.subarray(SESSION_BYTES + NONCE_BYTES),
    proofOf('store', secret, transcript),
  )
  return isProven ? transcript : undefined
}

export function encodeAnswer(secret: Secret, transcript: Transcript): Buffer {
  return proofOf('rank', secret, transcript)
}

export function verifyAnswer(secret: Secret, transcript: Transcript, answer: Buffer): boolean {
  return answer.length === PROOF_BYTES && timingSafeEqual(answer, proofOf('rank', secret, transcript))
}

function proofOf(side: Side, { token, scope }: Secret, { session, hello, nonce }: Transcript): Buffer {
  const hmac = createHmac('sha256', token)
  hmac.update(`rankwise store 1 ${side} ${scope}\n`)
  for (const part of [session, hello, nonce]) hmac.update(part)
  return hmac.digest()
}
