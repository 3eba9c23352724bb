import { RankwiseError, sizeOf } from '@rankwise/core'
import type { Engine, Ref } from '../engine.ts'
import { filled } from './filled.ts'
import type { Operand, RuleContext, Rules } from './rule.ts'

const ALIGNED_ROWS = 32

/** One product over all rows of x, with the weight as it is stored. */
function linear({ engine, outputs: [result] }: RuleContext<object>, x: Operand, weight: Operand) {
  const [out, features] = weight.shape as [number, number]
  const shape = result?.shape ?? []
  if (features === 0) return [filled(engine, shape, 0)]
  const { ref, order } = weight.stored ?? { ref: weight.ref, order: [0, 1] }
  const isTransposed = order[0] === 1
  const rows = engine.reshape(x.ref, [1, sizeOf(x.shape) / features, features])
  const matrix = engine.reshape(ref, isTransposed ? [1, features, out] : [1, out, features])
  if (ref.dtype !== 'bfloat16') return [engine.reshape(engine.matMul(rows, matrix, !isTransposed), shape)]
  if (!engine.multipliesBfloat16) return [engine.reshape(castProduct(engine, rows, ref), shape)]
  const product = engine.matMul(engine.cast(rows, 'bfloat16'), matrix, !isTransposed)
  return [engine.reshape(engine.cast(product, 'float32'), shape)]
}

/**
 * In float32, with some rows of a bfloat16 weight at a time, which then stay in the caches between cast and product.
 *
 * @param x - `[1, rows, in]`
 * @param weight - `[out, in]`: engines that move weights keep none in bfloat16
 */
function castProduct(engine: Engine, x: Ref, weight: Ref): Ref {
  const [out, features] = weight.shape as [number, number]
  const most = Math.max(1, Math.floor(engine.maxCastBytes / (4 * features)))
  // TensorFlow slices without a copy where a slice begins at a multiple of 64 bytes.
  const step = most > ALIGNED_ROWS ? most - (most % ALIGNED_ROWS) : most
  const products: Ref[] = []
  for (let start = 0; start < out; start += step) {
    const count = Math.min(step, out - start)
    const [product] = engine.tidy(() => {
      const piece = engine.cast(engine.slice(weight, [start, 0], [count, features]), 'float32')
      return [engine.matMul(x, engine.reshape(piece, [1, count, features]), true)]
    })
    products.push(product as Ref)
  }
  return engine.concat(products, 2)
}

type EmbeddingAttributes = { readonly before?: number; readonly after?: number }

/** Looks rows up before they are cast or moved: a table has many more than a prompt has tokens. */
function embedding(
  { engine, attributes: { before = 0, after = 0 }, outputs: [result] }: RuleContext<EmbeddingAttributes>,
  ids: Operand,
  table: Operand,
) {
  requireEntries(engine.read(ids.ref) as Int32Array, table.shape[0] as number)
  const { ref, order } = table.stored ?? { ref: table.ref, order: [0, 1] }
  const isTransposed = order[0] === 1
  const flat = engine.reshape(ids.ref, [sizeOf(ids.shape)])
  const found = engine.gather(ref, flat, isTransposed ? 1 : 0)
  const rows = isTransposed ? engine.transpose(found, [1, 0]) : found
  const cast = rows.dtype === 'bfloat16' ? engine.cast(rows, 'float32') : rows
  const padded =
    before === 0 && after === 0
      ? cast
      : engine.pad(cast, [
          [0, 0],
          [before, after],
        ])
  return [engine.reshape(padded, result?.shape ?? [])]
}

/** WebAssembly and GPUs do not notice ids outside of the table. @throws RankwiseError `EMBEDDING_ID` */
function requireEntries(ids: Int32Array, entries: number): void {
  const position = ids.findIndex((id) => id < 0 || id >= entries)
  if (position < 0) return
  throw new RankwiseError('EMBEDDING_ID', `the id ${ids[position]} is outside of the table`, {
    actual: { id: ids[position], position, entries },
    rule: 'ids are at least 0 and less than the number of entries',
  })
}

export const linearRules: Rules = { linear, embedding }
