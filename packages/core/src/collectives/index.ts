// What collectives packages share: how an operation is checked, compared and described, how a failure becomes an error,
// and how ranks prove to each other that they belong to one launch. No stable API.
export { ByteReader } from '../store/byte-reader.ts'
export { ConnectionError } from '../store/connection-error.ts'
export {
  CHALLENGE_BYTES,
  encodeAnswer,
  encodeChallenge,
  NONCE_BYTES,
  newNonce,
  PROOF_BYTES,
  SESSION_BYTES,
  type Secret,
  type Transcript,
  verifyAnswer,
  verifyChallenge,
} from '../store/handshake.ts'
export { type Failure, failureError, lost, nameRanks, type Verdict } from './failure.ts'
export {
  describeEncoded,
  describeOperation,
  encodeOperation,
  OPERATION_WORDS,
  type Operation,
  requireValid,
  type SharedPlace,
  type TensorLayout,
} from './operation.ts'
export { requireKnownOptions } from './options.ts'
