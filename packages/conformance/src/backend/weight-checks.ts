import assert from 'node:assert/strict'
import { mkdtemp, rm } from 'node:fs/promises'
import { tmpdir } from 'node:os'
import { join } from 'node:path'
import {
  type Backend,
  Checkpoint,
  type DType,
  isFloatingPoint,
  type Placement,
  REPLICATED,
  type ShardSource,
  shard,
  shardSlices,
  type Tensor,
  writeSafetensors,
} from '@rankwise/core'
import { referenceOp, shardTensor } from '@rankwise/core/reference'
import { type Check, type CheckGroup, expectCode } from '../check.ts'
import { expectClose } from '../compare/expect-close.ts'
import { expectSame } from '../compare/expect-same.ts'
import { toleranceRow } from '../compare/tolerance-table.ts'
import { type OpCase, WEIGHT_OPERANDS } from '../ops/op-case.ts'
import { OP_CASES } from '../ops/op-cases.ts'
import { opGraph, segmentOf } from '../ops/op-graph.ts'
import { normal } from '../ops/random.ts'
import { type Bench, onBackend } from './bench.ts'
import { memorySource } from './memory-source.ts'
import type { BackendSubject } from './options.ts'

/** Dtypes that checkpoints store weights in. */
const STORED: readonly DType[] = ['float32', 'float16', 'bfloat16']

/** Weights as models have them: loaded slices of files in any stored dtype. */
export function weightGroups(subject: BackendSubject): readonly CheckGroup[] {
  const { dtypes } = subject.supports
  const ops = Object.keys(WEIGHT_OPERANDS)
  return [
    { title: 'weights', checks: dtypes.flatMap((dtype) => ops.map((op) => loadedWeightsCheck(subject, op, dtype))) },
    {
      title: 'shard loading',
      checks: [
        ...dtypes.flatMap((dtype) => STORED.map((stored) => shardsCheck(subject, stored, dtype))),
        ...loadChecks(subject),
      ],
    },
  ]
}

function loadedWeightsCheck(subject: BackendSubject, op: string, dtype: DType): Check {
  const indices = WEIGHT_OPERANDS[op] as readonly number[]
  const cases = OP_CASES.filter((opCase) => opCase.op === op && indices.every((i) => isUsual(opCase.inputs[i]))).filter(
    ({ inputs }) => inputs.every((x) => x.data.length <= 10_000),
  )
  return {
    title: `${op} in ${dtype} by weights stored in ${STORED.join(', ')}`,
    run: () =>
      onBackend(subject, async (bench) => {
        for (const stored of STORED) {
          for (const opCase of cases) await checkLoadedWeights(bench, opCase, stored, dtype)
        }
      }),
  }
}

function isUsual(operand: Tensor | undefined): boolean {
  return operand === undefined || (operand.shape.length > 0 && operand.data.length > 0)
}

/** Only the values that the file has matter, rounded to what they are computed in. */
async function checkLoadedWeights(
  bench: Bench,
  { op, title, inputs, attributes }: OpCase,
  stored: DType,
  dtype: DType,
) {
  const weightIndices = (WEIGHT_OPERANDS[op] ?? []).filter((i) => i < inputs.length)
  const isWeight = (i: number) => weightIndices.includes(i)
  const weights = weightIndices.map((i) => (inputs[i] as Tensor).cast(stored))
  const operands = inputs.map((x, i) => {
    if (!isFloatingPoint(x.dtype)) return x
    return isWeight(i) ? x.cast(stored).cast(dtype) : x.cast(dtype)
  })
  const segment = segmentOf(opGraph(op, operands, attributes, weightIndices))
  const results = await bench.run(
    segment,
    operands.filter((_, i) => !isWeight(i)),
    weights,
  )
  try {
    expectSame(results, referenceOp(op, operands, attributes), { row: toleranceRow(op), dtype })
  } catch (error) {
    throw new Error(`${title}, weights stored in ${stored}: ${(error as Error).message}`, { cause: error })
  }
}

/** Rows, columns and packed rows and columns of a weight `[24, 20]` over 2 ranks, and all of it. */
const PLACEMENTS: readonly Placement[] = [
  REPLICATED,
  shard(0, [24]),
  shard(1, [20]),
  shard(0, [4, 4, 4, 6, 6]),
  shard(1, [8, 12]),
]

/** The slices of every rank, from a file and with a neighbour on either side, hold the values that they should. */
function shardsCheck(subject: BackendSubject, stored: DType, dtype: DType): Check {
  return {
    title: `slices of a file in ${stored}, for ${dtype}: whole, rows, columns, packed`,
    run: () =>
      onBackend(subject, (bench) =>
        withFile(stored, async (checkpoint, whole) => {
          for (const placement of PLACEMENTS) {
            for (const rank of [0, 1]) {
              const source = checkpoint.source('weight', shardSlices(placement, rank, 2))
              const weight = await bench.load(source, dtype)
              const expected = shardTensor(whole, placement, rank, 2)
              assert.deepEqual(weight.shape, expected.shape)
              expectClose((await bench.backend.download(weight)).cast('float64'), expected, { absolute: 0 })
            }
          }
        }),
      ),
  }
}

async function withFile(stored: DType, body: (checkpoint: Checkpoint, whole: Tensor) => Promise<void>): Promise<void> {
  const folder = await mkdtemp(join(tmpdir(), 'rankwise-conformance-'))
  try {
    // Values that float16 and bfloat16 have alike, so that a backend may hold them in any dtype.
    const exact = normal([24, 20], 7).cast('bfloat16').cast('float32')
    const whole = exact.cast(stored)
    const neighbour = normal([3, 5], 8).cast(stored)
    const tensors = new Map([
      ['before', neighbour],
      ['weight', whole],
      ['z_after', neighbour],
    ])
    await writeSafetensors(join(folder, 'diffusion_pytorch_model.safetensors'), tensors)
    await using checkpoint = await Checkpoint.open(folder)
    await body(checkpoint, whole)
  } finally {
    await rm(folder, { recursive: true })
  }
}

function loadChecks(subject: BackendSubject): readonly Check[] {
  const dtype = subject.supports.dtypes[0] as DType
  const weight = normal([6, 4], 9)
  const unread = (): ShardSource => {
    const fail = () => {
      throw new Error('the weight was read')
    }
    return { ...memorySource('unread', weight), ranges: fail, read: fail }
  }
  const check = (title: string, body: (backend: Backend, bench: Bench) => Promise<void>): Check => ({
    title,
    run: () => onBackend(subject, (bench) => body(bench.backend, bench)),
  })
  return [
    check('refuses a dtype that it does not compute in before it reads', (backend) =>
      expectCode(backend.loadShard(unread(), { dtype: 'int8' }), 'DTYPE_UNSUPPORTED'),
    ),
    check('counts a weight while it is loaded, once', async (backend, bench) => {
      const held = () => backend.memory().weightBytes + backend.memory().mappedBytes
      const loaded = await bench.load(weight, dtype)
      const once = held()
      assert.ok(once >= 24 * 2, `24 elements are ${once} bytes`)
      const other = await bench.load(weight, dtype)
      assert.equal(held(), 2 * once)
      other.dispose()
      other.dispose()
      assert.equal(held(), once)
      loaded.dispose()
      assert.equal(held(), 0)
    }),
    check('passes on what a source throws, and holds nothing', async (backend) => {
      const failing = { ...memorySource('failing', weight), read: () => Promise.reject(new Error('no such byte')) }
      await assert.rejects(backend.loadShard(failing, { dtype }), /no such byte/)
      assert.equal(backend.memory().weightBytes, 0)
    }),
    check('stops before it reads when it is aborted', (backend) =>
      expectCode(backend.loadShard(memorySource('w', weight), { dtype, signal: AbortSignal.abort() }), 'ABORTED'),
    ),
    check('stops while it reads when it is aborted, and holds nothing', async (backend) => {
      const controller = new AbortController()
      const source: ShardSource = {
        ...memorySource('slow', weight),
        read: async (options = {}) => {
          controller.abort()
          return memorySource('slow', weight).read(options)
        },
      }
      await expectCode(backend.loadShard(source, { dtype, signal: controller.signal }), 'ABORTED')
      assert.equal(backend.memory().weightBytes, 0)
    }),
  ]
}
