import assert from 'node:assert/strict'
import {
  type Backend,
  type DeviceTensor,
  DTYPES,
  type DType,
  isFloatingPoint,
  itemSize,
  type Segment,
  Tensor,
} from '@rankwise/core'
import { type Check, type CheckGroup, expectCode } from '../check.ts'
import { castResults, opGraph, segmentOf } from '../ops/op-graph.ts'
import { normal } from '../ops/random.ts'
import { type Bench, counted, onBackend } from './bench.ts'
import { memorySource } from './memory-source.ts'
import type { BackendSubject } from './options.ts'

/** What a backend declares, refuses, counts and frees. */
export function contractGroups(subject: BackendSubject): readonly CheckGroup[] {
  return [
    { title: 'capabilities', checks: capabilityChecks(subject) },
    { title: 'errors', checks: errorChecks(subject) },
    { title: 'memory and dispose', checks: disposeChecks(subject) },
  ]
}

const FLOATS = DTYPES.filter(isFloatingPoint)

function linearSegment(dtype: DType): Segment {
  const types = [
    { dtype, shape: [2, 3] },
    { dtype, shape: [4, 3] },
  ]
  return segmentOf(opGraph('linear', types, {}, [1]))
}

function capabilityChecks(subject: BackendSubject): readonly Check[] {
  const { supports } = subject
  const undeclared = FLOATS.filter((dtype) => !supports.dtypes.includes(dtype))
  const declared = supports.dtypes[0] as DType
  /** Neither its inputs nor its results are in the dtype. */
  const castThere = (dtype: DType) =>
    segmentOf(castResults(opGraph('cast', [{ dtype: declared, shape: [2] }], { dtype }), declared))
  return [
    {
      title: `declares to compute in ${supports.dtypes.join(', ')}`,
      run: () =>
        onBackend(subject, async ({ backend }) => {
          assert.deepEqual([...backend.supports.dtypes].sort(), [...supports.dtypes].sort())
        }),
    },
    ...undeclared.map((dtype) => ({
      title: `refuses ${dtype}, which it does not declare`,
      run: () =>
        onBackend(subject, async ({ backend }) => {
          await expectCode(backend.compile(linearSegment(dtype)), 'DTYPE_UNSUPPORTED')
          // One that computes in a single dtype never gets a cast.
          await expectCode(backend.compile(castThere(dtype)), 'DTYPE_UNSUPPORTED', 'OP_UNSUPPORTED')
          await expectCode(backend.loadShard(memorySource('w', normal([2, 2], 1)), { dtype }), 'DTYPE_UNSUPPORTED')
          assert.equal(backend.memory().executables, 0)
        }),
    })),
  ]
}

function errorChecks(subject: BackendSubject): readonly Check[] {
  const dtype = subject.supports.dtypes[0] as DType
  const x = normal([2, 3], 1).cast(dtype)
  const weight = normal([4, 3], 2).cast(dtype)
  const check = (title: string, body: (bench: Bench) => Promise<void>): Check => ({
    title,
    run: () => onBackend(subject, body),
  })
  const compiled = async (bench: Bench) => {
    const loaded = await bench.load(weight, dtype)
    const executable = await bench.compile(linearSegment(dtype), [loaded])
    return { loaded, executable, given: bench.upload(x) }
  }
  return [
    check('refuse an operation that does not exist, with its module', async ({ backend }) => {
      const segment = linearSegment(dtype)
      for (const op of ['fft', 'toString']) {
        const nodes = segment.nodes.map((node) => ({ ...node, op }))
        await expectCode(backend.compile({ ...segment, nodes }), 'OP_UNSUPPORTED')
        await assert.rejects(backend.compile({ ...segment, nodes }), { where: 'module' })
      }
      assert.equal(backend.memory().executables, 0)
    }),
    check('refuse too few and too many arguments', async (bench) => {
      const { executable, loaded, given } = await compiled(bench)
      await expectCode(executable.run([], [loaded]), 'ARGUMENT_MISMATCH')
      await expectCode(executable.run([...given, ...given], [loaded]), 'ARGUMENT_MISMATCH')
      await expectCode(executable.run(given, []), 'ARGUMENT_MISMATCH')
      await expectCode(executable.run(given, [loaded, loaded]), 'ARGUMENT_MISMATCH')
    }),
    check('refuse inputs and weights of another shape', async (bench) => {
      const { executable, loaded, given } = await compiled(bench)
      await expectCode(executable.run(bench.upload(x.reshape([3, 2])), [loaded]), 'ARGUMENT_MISMATCH')
      const other = await bench.load(weight.reshape([3, 4]), dtype)
      await expectCode(executable.run(given, [other]), 'ARGUMENT_MISMATCH')
    }),
    check('refuse inputs of another dtype', async (bench) => {
      const { executable, loaded } = await compiled(bench)
      await expectCode(executable.run(bench.upload(Tensor.zeros('int32', [2, 3])), [loaded]), 'ARGUMENT_MISMATCH')
      for (const other of subject.supports.dtypes) {
        const own = await bench.compile(segmentOf(opGraph('silu', [{ dtype: other, shape: [2, 3] }], {})))
        for (const given of subject.supports.dtypes.filter((type) => type !== other)) {
          await expectCode(own.run(bench.upload(x.cast(given)), []), 'ARGUMENT_MISMATCH')
        }
      }
    }),
    check('refuse to compile for weights that are not those of the segment', async (bench) => {
      const other = await bench.load(weight.reshape([3, 4]), dtype)
      await expectCode(bench.backend.compile(linearSegment(dtype), [other]), 'ARGUMENT_MISMATCH')
      await expectCode(bench.backend.compile(linearSegment(dtype), [other, other]), 'ARGUMENT_MISMATCH')
      assert.equal(bench.backend.memory().executables, 0)
    }),
    check('refuse ids outside of a table', async (bench) => {
      const segment = segmentOf(opGraph('embedding', [Tensor.int32([1], [0]), weight], {}, [1]))
      for (const id of [4, -1]) await assert.rejects(bench.run(segment, [Tensor.int32([1], [id])], [weight]))
    }),
    check('refuse tensors of another backend', async (bench) => {
      const { executable, loaded, given } = await compiled(bench)
      const foreign = (tensor: Tensor): DeviceTensor => ({ dtype, shape: tensor.shape, dispose() {} })
      await expectCode(executable.run([foreign(x)], [loaded]), 'TENSOR_FOREIGN')
      await expectCode(executable.run(given, [foreign(weight)]), 'TENSOR_FOREIGN')
      await expectCode(bench.backend.download(foreign(x)), 'TENSOR_FOREIGN')
    }),
    check('refuse tensors that are disposed', async (bench) => {
      const { executable, loaded, given } = await compiled(bench)
      const gone = bench.upload(x)
      for (const tensor of gone) tensor.dispose()
      await expectCode(executable.run(gone, [loaded]), 'TENSOR_DISPOSED')
      await expectCode(bench.backend.download(gone[0] as never), 'TENSOR_DISPOSED')
      loaded.dispose()
      await expectCode(executable.run(given, [loaded]), 'TENSOR_DISPOSED')
      await expectCode(bench.backend.download(loaded), 'TENSOR_DISPOSED')
    }),
    check('refuse to run what is disposed', async (bench) => {
      const { executable, loaded, given } = await compiled(bench)
      await executable.dispose()
      await executable.dispose()
      await expectCode(executable.run(given, [loaded]), 'EXECUTABLE_DISPOSED')
    }),
    check('leave an executable usable after a run that was refused', async (bench) => {
      const { executable, loaded, given } = await compiled(bench)
      await expectCode(executable.run([], [loaded]), 'ARGUMENT_MISMATCH')
      assert.equal((await bench.results(executable, given, [loaded])).length, 1)
    }),
  ]
}

function disposeChecks(subject: BackendSubject): readonly Check[] {
  const dtype = subject.supports.dtypes[0] as DType
  const weight = normal([4, 3], 2).cast(dtype)
  const x = normal([2, 3], 1).cast(dtype)
  const check = (title: string, body: (bench: Bench) => Promise<void>): Check => ({
    title,
    run: () => onBackend(subject, body),
  })
  return [
    check('holds nothing at first', async ({ backend }) => assertEmpty(backend)),
    check('counts executables while they live', async (bench) => {
      const [first, second] = [await bench.compile(linearSegment(dtype)), await bench.compile(linearSegment(dtype))]
      assert.equal(bench.backend.memory().executables, 2)
      await first.dispose()
      await first.dispose()
      assert.equal(bench.backend.memory().executables, 1)
      await second.dispose()
      assert.equal(bench.backend.memory().executables, 0)
    }),
    check('holds no more after many runs than after one', async (bench) => {
      const loaded = await bench.load(weight, dtype)
      const executable = await bench.compile(linearSegment(dtype), [loaded])
      const runOnce = async () => {
        const given = bench.backend.upload(x)
        const outputs = await executable.run([given], [loaded])
        for (const tensor of [given, ...outputs]) tensor.dispose()
      }
      await runOnce()
      const once = bench.backend.memory()
      for (let i = 0; i < 20; i++) await runOnce()
      assert.deepEqual(bench.backend.memory(), once)
    }),
    check('leaves what was downloaded as it is', async (bench) => {
      const loaded = await bench.load(weight, dtype)
      const executable = await bench.compile(linearSegment(dtype), [loaded])
      const runOnce = (input: Tensor) => executable.run(bench.upload(input), [loaded])
      const [result] = (await runOnce(x)) as [DeviceTensor]
      const downloaded = await bench.backend.download(result)
      const before = [...downloaded.data]
      result.dispose()
      for (const seed of [3, 4]) {
        for (const later of await runOnce(normal([2, 3], seed).cast(dtype))) later.dispose()
      }
      assert.deepEqual([...downloaded.data], before)
    }),
    check('lends the memory of a value, if it lends any', async (bench) => {
      if (bench.backend.borrow === undefined) return
      const executable = await bench.compile(linearSegment(dtype))
      const [result] = (await executable.run(bench.upload(x), bench.upload(weight))) as [DeviceTensor]
      bench.own(result)
      const lent = bench.backend.borrow(result)
      lent.data.fill(1 as never)
      assert.deepEqual((await bench.backend.download(result)).data, lent.data)
    }),
    check('says where values are on a GPU, if they are, until they are disposed', async ({ backend }) => {
      const { deviceMemory } = backend
      if (deviceMemory === undefined) return
      const [one, two] = [backend.upload(x), backend.upload(x)]
      const buffers = [one, two].map((tensor) => deviceMemory.borrow(tensor))
      for (const buffer of buffers) assert.deepEqual([buffer.dtype, buffer.shape], [dtype, x.shape])
      assert.notEqual(buffers[0]?.dataPtr, buffers[1]?.dataPtr)
      for (const tensor of [one, two]) tensor.dispose()
      assert.throws(() => deviceMemory.borrow(one), { code: 'TENSOR_DISPOSED' })
      const foreign: DeviceTensor = { dtype, shape: x.shape, dispose() {} }
      assert.throws(() => deviceMemory.borrow(foreign), { code: 'TENSOR_FOREIGN' })
    }),
    {
      title: 'frees weights and executables with the backend, once',
      run: async () => {
        const backend = await subject.create()
        const loaded = await backend.loadShard(memorySource('w', weight), { dtype })
        const executable = await backend.compile(linearSegment(dtype), [loaded])
        const given = backend.upload(x)
        await backend.dispose()
        await backend.dispose()
        assertEmpty(backend)
        await expectCode(executable.run([given], [loaded]), 'EXECUTABLE_DISPOSED')
        await expectCode(backend.download(loaded), 'TENSOR_DISPOSED')
      },
    },
    {
      title: 'refuses work once it is disposed',
      run: async () => {
        const backend = await subject.create()
        await backend[Symbol.asyncDispose]()
        await expectCode(backend.compile(linearSegment(dtype)), 'BACKEND_DISPOSED')
        await expectCode(backend.loadShard(memorySource('w', weight), { dtype }), 'BACKEND_DISPOSED')
        await expectCode(
          Promise.resolve().then(() => backend.upload(x)),
          'BACKEND_DISPOSED',
        )
      },
    },
    {
      title: 'leaves nothing of a weight that loads while the backend is disposed',
      run: async () => {
        const backend = await subject.create()
        let read = () => {}
        const reading = new Promise<void>((resolve) => {
          read = resolve
        })
        const source = {
          ...memorySource('w', weight),
          read: async () => {
            await reading
            return weight.clone()
          },
        }
        const refused = expectCode(backend.loadShard(source, { dtype }), 'BACKEND_DISPOSED')
        const disposed = backend.dispose()
        read()
        await refused
        await disposed
        assertEmpty(backend)
      },
    },
    {
      title: 'ends runs that are under way before it is gone, or lets them fail with a code',
      run: async () => {
        const backend = await subject.create()
        const loaded = await backend.loadShard(memorySource('w', weight), { dtype })
        const executable = await backend.compile(linearSegment(dtype), [loaded])
        const running = executable.run([backend.upload(x)], [loaded])
        const outcome = running.then(
          (outputs) => assert.deepEqual(outputs[0]?.shape, [2, 4]),
          (error: { readonly code?: string }) => assert.ok(error.code, `${error}`),
        )
        await backend.dispose()
        await outcome
        assertEmpty(backend)
      },
    },
    check('counts bytes as they are stored, or as they are computed with', async (bench) => {
      await bench.load(normal([64, 64], 3), dtype)
      const { weightBytes, mappedBytes } = bench.backend.memory()
      const [least, most] = [64 * 64 * 2, 64 * 64 * Math.max(4, itemSize(dtype)) * 2]
      const held = weightBytes + mappedBytes
      assert.ok(held >= least && held <= most, `${held} bytes for 4096 elements`)
    }),
  ]
}

function assertEmpty(backend: Backend): void {
  assert.deepEqual(counted(backend.memory()), { weightBytes: 0, mappedBytes: 0, executables: 0 })
}
