import assert from 'node:assert/strict'
import {
  constant,
  type DType,
  type Executable,
  embedding,
  itemSize,
  linear,
  Module,
  Parameter,
  type Segment,
  Tensor,
  type TracedTensor,
  trace,
  viewAs,
} from '@rankwise/core'
import { referenceOp } from '@rankwise/core/reference'
import fc from 'fast-check'
import type { Check, CheckGroup } from '../check.ts'
import { expectClose } from '../compare/expect-close.ts'
import { expectSame } from '../compare/expect-same.ts'
import { opGraph, segmentOf } from '../ops/op-graph.ts'
import { normal } from '../ops/random.ts'
import { type Bench, onBackend } from './bench.ts'
import type { BackendSubject } from './options.ts'

/** A module for graphs that have no weights. */
class Empty extends Module {
  override forward(): void {}
}

/** A segment of operations, without weights. */
function segmentFrom(
  inputs: Readonly<Record<string, Tensor>>,
  forward: (inputs: Readonly<Record<string, TracedTensor>>) => Readonly<Record<string, TracedTensor>>,
): Segment {
  return segmentOf(trace('segment', new Empty(), inputs, forward))
}

/** A table whose rows are looked up and which projects back: one weight that is used twice. */
class Tied extends Module {
  readonly weight = new Parameter([6, 4])

  override forward(ids: TracedTensor): TracedTensor {
    return linear(embedding(ids, this.weight), this.weight)
  }
}

/** What holds for segments whatever their operations are, in every dtype that the backend declares. */
export function segmentGroup(subject: BackendSubject): CheckGroup {
  return { title: 'segments', checks: subject.supports.dtypes.flatMap((dtype) => segmentChecks(subject, dtype)) }
}

function segmentChecks(subject: BackendSubject, dtype: DType): readonly Check[] {
  const check = (title: string, body: (bench: Bench) => Promise<void>): Check => ({
    title: `${title}, in ${dtype}`,
    run: () => onBackend(subject, body),
  })
  const floats = (...values: number[]) => Tensor.float32([values.length], values).cast(dtype)
  const plusOne = () => segmentOf(opGraph('add_scalar', [{ dtype, shape: [3] }], { value: 1 }))
  const numbersOf = (tensor: Tensor | undefined) => Array.from(tensor?.cast('float64').data ?? [])
  const runNumbers = async (bench: Bench, executable: Executable, ...values: number[]) =>
    numbersOf((await bench.results(executable, bench.upload(floats(...values))))[0])

  return [
    check('run one executable on other inputs, and at the same time', async (bench) => {
      const executable = await bench.compile(plusOne())
      assert.deepEqual(await runNumbers(bench, executable, 1, 2, 3), [2, 3, 4])
      const runs = [0, 10, 20].map((base) => runNumbers(bench, executable, base, base + 1, base + 2))
      assert.deepEqual(await Promise.all(runs), [
        [1, 2, 3],
        [11, 12, 13],
        [21, 22, 23],
      ])
    }),
    check('run one executable on the weights of several blocks', async (bench) => {
      const types = [
        { dtype, shape: [2, 3] },
        { dtype, shape: [2, 3] },
      ]
      const x = normal([2, 3], 1).cast(dtype)
      const weights = [normal([2, 3], 2).cast(dtype), normal([2, 3], 3).cast(dtype)]
      const [first, second] = [
        await bench.load(weights[0] as Tensor, dtype),
        await bench.load(weights[1] as Tensor, dtype),
      ]
      const executable = await bench.compile(segmentOf(opGraph('linear', types, {}, [1])), [first])
      for (const [i, weight] of [first, second, first].entries()) {
        const results = await bench.results(executable, bench.upload(x), [weight])
        expectSame(results, referenceOp('linear', [x, weights[i % 2] as Tensor], {}), { row: 'linear', dtype })
      }
    }),
    check('leave results of earlier runs as they are', async (bench) => {
      const executable = await bench.compile(plusOne())
      const [result] = await executable.run(bench.upload(floats(1, 2, 3)), [])
      await executable.run(bench.upload(floats(7, 8, 9)), []).then((others) => others.map((other) => bench.own(other)))
      const downloaded = await bench.backend.download(bench.own(result as never))
      assert.deepEqual(numbersOf(downloaded), [2, 3, 4])
    }),
    check('give results that share no memory with inputs or with each other', async (bench) => {
      const x = floats(1, 2, 3, 4)
      const segment = segmentOf(
        trace('shared', new Empty(), { x }, (traced) => ({
          same: traced.x.reshape([4]),
          again: traced.x.reshape([2, 2]),
          part: traced.x.split([4, 0], 0)[0] as TracedTensor,
        })),
      )
      const results = await bench.results(await bench.compile(segment), bench.upload(x))
      for (const [i, result] of results.entries()) {
        assert.deepEqual(numbersOf(result), [1, 2, 3, 4])
        for (let j = 0; j < result.data.length; j++) result.data[j] = 0
        for (const other of results.slice(i + 1)) assert.deepEqual(numbersOf(other), [1, 2, 3, 4])
      }
      assert.deepEqual(numbersOf(x), [1, 2, 3, 4])
    }),
    check('read views and shared memory', async (bench) => {
      const executable = await bench.compile(plusOne())
      const whole = floats(9, 1, 2, 3, 9)
      const shared = viewAs(dtype, new Uint8Array(new SharedArrayBuffer(3 * itemSize(dtype))))
      shared.set(floats(1, 2, 3).data as never)
      for (const data of [whole.data.subarray(1, 4), shared]) {
        const results = await bench.results(executable, bench.upload(new Tensor(dtype, [3], data as never)))
        assert.deepEqual(numbersOf(results[0]), [2, 3, 4])
      }
      assert.deepEqual(numbersOf(whole), [9, 1, 2, 3, 9])
    }),
    check('keep infinities and NaN', async (bench) => {
      const x = floats(Number.POSITIVE_INFINITY, Number.NEGATIVE_INFINITY, Number.NaN)
      const results = await bench.run(plusOne(), [x])
      expectClose(results[0] as Tensor, x, { absolute: 0 })
    }),
    check('have constants', async (bench) => {
      const model = new Empty()
      const table = constant
      const segment = segmentOf(
        trace('constants', model, { ids: { dtype: 'int32', shape: [2] } }, ({ ids }) => ({
          y: embedding(ids, table(Tensor.float32([2, 1], [7, 8]).cast(dtype))).mul(table(floats(10))),
        })),
      )
      assert.deepEqual(numbersOf((await bench.run(segment, [Tensor.int32([2], [1, 0])]))[0]), [80, 70])
    }),
    check('take a weight that two operations use', async (bench) => {
      const model = new Tied()
      const [ids, weight] = [Tensor.int32([3], [5, 0, 2]), normal([6, 4], 5).cast(dtype)]
      const segment = segmentOf(trace('tied', model, { ids }, (traced) => ({ y: model.call(traced.ids) }), dtype))
      const [rows] = referenceOp('embedding', [ids, weight], {})
      const expected = referenceOp('linear', [rows as Tensor, weight], {})
      expectSame(await bench.run(segment, [ids], [weight]), expected, { row: 'linear', dtype })
    }),
    check('take inputs and weights that nothing reads', async (bench) => {
      const unread = { id: 8, kind: 'input', dtype, shape: [0] } as const
      const unused = { id: 9, kind: 'parameter', dtype, shape: [2], name: 'weight' } as const
      const segment = plusOne()
      const more = { ...segment, inputs: [...segment.inputs, unread], parameters: [unused] }
      const results = await bench.run(more, [floats(1, 2, 3), floats()], [floats(0, 0)])
      assert.deepEqual(numbersOf(results[0]), [2, 3, 4])
    }),
    check('give the pieces of a split that are asked for', async (bench) => {
      const sizes = [2, 0, 3, 1]
      const x = normal([2, 6], 6).cast(dtype)
      const pieces = referenceOp('split', [x], { dim: 1, sizes })
      for (const [i, piece] of pieces.entries()) {
        const segment = segmentFrom({ x }, (traced) => ({ y: traced.x?.split(sizes, 1)[i] as TracedTensor }))
        expectSame(await bench.run(segment, [x]), [piece], { row: 'movement', dtype })
      }
    }),
    check('move every element to its place, at any shape', async (bench) => {
      await fc.assert(
        fc.asyncProperty(movements, async ({ op, inputs, attributes }) => {
          const operands = inputs.map((input) => input.cast(dtype))
          const results = await bench.run(segmentOf(opGraph(op, operands, attributes)), operands)
          expectSame(results, referenceOp(op, operands, attributes), { row: 'movement', dtype })
        }),
        // The same shapes every time: who runs a suite wants to see what changed in their package.
        { numRuns: 150, seed: 1 },
      )
    }),
    ...(itemSize(dtype) === 2 ? [check('round after every operation', (bench) => checkSteps(bench, dtype))] : []),
  ]
}

/** Every step is exact in float32 but the last bits that its 16-bit dtype does not have, which are ties among others. */
async function checkSteps(bench: Bench, dtype: DType): Promise<void> {
  const x = normal([33, 40], 7, { deviation: 3 }).cast(dtype)
  const steps: readonly (readonly [(value: TracedTensor) => TracedTensor, (value: number) => number])[] = [
    [(value) => value.mul(1.125), (value) => value * 1.125],
    [(value) => value.add(0.375), (value) => value + 0.375],
    [(value) => value.mul(0.625), (value) => value * 0.625],
    [(value) => value.mul(1.375), (value) => value * 1.375],
    [(value) => value.add(-0.125), (value) => value - 0.125],
  ]
  const segment = segmentFrom({ x }, (traced) => ({
    y: steps.reduce((value, [step]) => step(value), traced.x as TracedTensor),
  }))
  const expected = steps.reduce<Tensor>((tensor, [, step]) => {
    return new Tensor('float64', x.shape, tensor.cast('float64').data.map(step)).cast(dtype)
  }, x)
  expectSame(await bench.run(segment, [x]), [expected], { row: 'movement', dtype })
}

const size = fc.integer({ min: 0, max: 4 })
const shapes = fc.array(size, { minLength: 1, maxLength: 4 })

const transposes = shapes
  .chain((shape) => fc.tuple(fc.constant(shape), fc.shuffledSubarray([...shape.keys()], { minLength: shape.length })))
  .map(([shape, permutation]) => ({ op: 'transpose', inputs: [count(shape)], attributes: { permutation } }))

const splits = fc
  .tuple(shapes, fc.array(size, { minLength: 1, maxLength: 4 }), fc.nat(3))
  .map(([shape, sizes, anyDim]) => {
    const dim = anyDim % shape.length
    const whole = sizes.reduce((sum, part) => sum + part, 0)
    return { op: 'split', inputs: [count(shape.with(dim, whole))], attributes: { dim, sizes } }
  })

const concats = splits.map(({ inputs: [whole], attributes: { dim, sizes } }) => ({
  op: 'concat',
  inputs: sizes.map((part, i) => count((whole as Tensor).shape.with(dim, part), 20 * i)),
  attributes: { dim },
}))

const movements = fc.oneof(transposes, splits, concats)

/** 0, 1, 2, … up to 16 bits can tell them apart. */
function count(shape: readonly number[], start = 0): Tensor {
  const length = shape.reduce((product, dim) => product * dim, 1)
  return Tensor.float32(
    shape,
    Float32Array.from({ length }, (_, i) => (start + i) % 251),
  )
}
