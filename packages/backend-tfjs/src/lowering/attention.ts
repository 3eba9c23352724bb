import type { Engine, Ref } from '../engine.ts'
import { filled } from './filled.ts'
import type { Operand, RuleContext, Rules } from './rule.ts'

type AttentionAttributes = { readonly scale: number; readonly causal: boolean }
type Sizes4 = readonly [number, number, number, number]

/** Below every score but -Infinity. */
const LOWEST = -3e38
/** Above 0 and below every sum of exponentials, of which the largest is 1. */
const SMALLEST = 1e-30

/** `[batch, tokens, heads, headDim]` to `[batch, heads, tokens, headDim]`, and back. */
const SWAP_HEADS = [0, 2, 1, 3]

/** A few queries of all heads at a time, so that the whole score matrix never exists. */
function attention(
  { engine, attributes, outputs: [result] }: RuleContext<AttentionAttributes>,
  q: Operand,
  k: Operand,
  v: Operand,
  bias?: Operand,
) {
  const [batch, queries, heads, headDim] = q.shape as Sizes4
  const [, keys, , valueDim] = v.shape as Sizes4
  if (keys === 0) return [filled(engine, result?.shape ?? [], 0)]
  const query = engine.transpose(engine.binary('mul', q.ref, engine.scalar(attributes.scale)), SWAP_HEADS)
  const [key, value] = [k, v].map((operand) => perHead(engine, operand)) as [Ref, Ref]
  const most = Math.max(1, Math.floor(engine.maxScoreBytes / (4 * batch * heads * keys)))
  const chunks: Ref[] = []
  for (let start = 0; start < queries; start += most) {
    const count = Math.min(most, queries - start)
    const [chunk] = engine.tidy(() => {
      const rows = engine.slice(query, [0, 0, start, 0], [batch, heads, count, headDim])
      const mask = maskOf(engine, { start, count, keys, causal: attributes.causal }, bias)
      return [engine.reshape(attend(engine, rows, key, value, mask), [batch, heads, count, valueDim])]
    })
    chunks.push(chunk as Ref)
  }
  return [engine.transpose(engine.concat(chunks, 2), SWAP_HEADS)]
}

/** `[batch, tokens, kvHeads, size]` as `[batch * kvHeads, tokens, size]`. */
function perHead(engine: Engine, { ref, shape }: Operand): Ref {
  const [batch, tokens, heads, size] = shape as Sizes4
  return engine.reshape(engine.transpose(ref, SWAP_HEADS), [batch * heads, tokens, size])
}

/**
 * @param query - `[batch, heads, count, headDim]`, scaled. The heads that share a key head follow each other, so they are
 *   more rows of one product
 * @param mask - `[batch or 1, 1, count, keys]`
 */
function attend(engine: Engine, query: Ref, key: Ref, value: Ref, mask: Ref | undefined): Ref {
  const [batch, heads, count, headDim] = query.shape as Sizes4
  const [kvBatch, keys] = key.shape as [number, number, number]
  const grouped = engine.reshape(query, [kvBatch, (batch * heads * count) / kvBatch, headDim])
  const scores = engine.matMul(grouped, key, true)
  if (mask === undefined) {
    const weights = engine.softmax(engine.reshape(scores, [batch * heads * count, keys]))
    return engine.matMul(engine.reshape(weights, scores.shape), value, false)
  }
  const masked = engine.binary('add', engine.reshape(scores, [batch, heads, count, keys]), mask)
  return attendMasked(engine, engine.reshape(masked, scores.shape), value)
}

/** A softmax that gives zeros, and not NaN, where every score is -Infinity. */
function attendMasked(engine: Engine, scores: Ref, value: Ref): Ref {
  const [batch, count, keys] = scores.shape as [number, number, number]
  const rows = engine.reshape(scores, [batch * count, keys])
  const largest = engine.binary('maximum', engine.reduce('max', rows), engine.scalar(LOWEST))
  const weights = engine.unary('exp', engine.binary('sub', rows, largest))
  const sum = engine.binary('maximum', engine.reduce('sum', weights), engine.scalar(SMALLEST))
  const mixed = engine.matMul(engine.reshape(weights, scores.shape), value, false)
  return engine.binary('div', mixed, engine.reshape(sum, [batch, count, 1]))
}

interface MaskedQueries {
  readonly start: number
  readonly count: number
  readonly keys: number
  /** Whether query i sees keys 0 to i only. */
  readonly causal: boolean
}

/** What is added to the scores of some queries; `undefined` when that is nothing. */
function maskOf(engine: Engine, { start, count, keys, causal }: MaskedQueries, bias?: Operand): Ref | undefined {
  const rows = bias && engine.slice(bias.ref, [0, 0, start, 0], [bias.shape[0] as number, 1, count, keys])
  if (!causal) return rows
  const future = new Float32Array(count * keys)
  for (let i = 0; i < count; i++)
    future.fill(Number.NEGATIVE_INFINITY, Math.min(i * keys + start + i + 1, (i + 1) * keys), (i + 1) * keys)
  const hidden = engine.write('float32', [1, 1, count, keys], future)
  return rows === undefined ? hidden : engine.binary('add', rows, hidden)
}

/** x `[batch, tokens, heads, headDim]`, cos and sin `[tokens, headDim / 2]`. */
function rope(
  { engine, attributes: { interleaved } }: RuleContext<{ readonly interleaved: boolean }>,
  x: Operand,
  cos: Operand,
  sin: Operand,
) {
  const [batch, tokens, heads, headDim] = x.shape as Sizes4
  const half = headDim / 2
  // A pair is two neighbours, or an element of each half: along one dimension of size 2 either way.
  const [pairs, dim] = interleaved ? ([half, 2] as const) : ([2, half] as const)
  const paired = engine.reshape(x.ref, [batch, tokens, heads, pairs, dim])
  if (interleaved && engine.multiplyComplex !== undefined) {
    const turns = engine.concat(
      [cos, sin].map(({ ref }) => engine.reshape(ref, [tokens, 1, half, 1])),
      3,
    )
    return [engine.reshape(engine.multiplyComplex(paired, turns), x.shape)]
  }
  const pairDim = interleaved ? 4 : 3
  const size = paired.shape.with(pairDim, 1) as number[]
  const first = engine.slice(paired, [0, 0, 0, 0, 0], size)
  const second = engine.slice(paired, [0, 0, 0, 0, 0].with(pairDim, 1), size)
  const table = ({ ref }: Operand) => engine.reshape(ref, interleaved ? [tokens, 1, half, 1] : [tokens, 1, 1, half])
  const [c, s] = [table(cos), table(sin)]
  const turned = engine.concat(
    [
      engine.binary('sub', engine.binary('mul', first, c), engine.binary('mul', second, s)),
      engine.binary('add', engine.binary('mul', second, c), engine.binary('mul', first, s)),
    ],
    pairDim,
  )
  return [engine.reshape(turned, x.shape)]
}

export const attentionRules: Rules = { attention, rope }
