import { readFileSync } from 'node:fs'
import { ncclCollectives } from '@rankwise/collectives-nccl'
import { runRank } from '@rankwise/conformance/ranks'
import { type Collectives, rendezvousFromEnv, type Tensor } from '@rankwise/core'
import type { OrtBackend } from '../../src/backend.ts'
import { ort } from '../../src/index.ts'
import { compileBlocks, placedBlocks } from '../cuda/blocks.ts'
import { fakeBackend } from '../cuda/fake-cuda.ts'

/** What a rank saw. */
export interface CudaRankReport {
  readonly device: string
  readonly stream: string
  /** What GPU and CPU give, as bits. */
  readonly outputs: readonly (readonly number[])[]
  /** Calls of the fake libraries while a graph ran on the GPU, and all of them at the end. */
  readonly runCalls: readonly string[]
  readonly calls: readonly string[]
  readonly weightBytes: number
}

function calls(): readonly string[] {
  return readFileSync(process.env.STUB_LOG as string, 'utf8')
    .split('\n')
    .filter(Boolean)
}

async function runOn(
  backend: OrtBackend,
  collectives: Collectives,
): Promise<{ out: Tensor; calls: readonly string[] }> {
  const blocks = placedBlocks(collectives.worldSize)
  const executor = await compileBlocks(blocks, backend, collectives)
  const before = calls().length
  const { out } = await executor.run(blocks.inputs)
  const during = calls().slice(before)
  await executor.dispose()
  return { out: out as Tensor, calls: during }
}

const bitsOf = ({ data }: Tensor) => [...new Uint32Array(data.buffer, data.byteOffset, data.length)]

// One rank of two on GPUs that are faked: the same blocks on the GPU and on the CPU, with the same collectives.
runRank(async (): Promise<CudaRankReport> => {
  const rendezvous = rendezvousFromEnv()
  process.env.STUB_LOG = `${process.env.STUB_LOG}.${rendezvous.rank}`
  const gpu = await fakeBackend()
  // Comparing operations takes copies, which are not to be counted.
  const collectives = await ncclCollectives(rendezvous, { checkFirst: 0 })
  const onGpu = await runOn(gpu, collectives)
  const { weightBytes } = gpu.memory()
  const stream = `0x${gpu.deviceMemory?.stream.toString(16)}`
  const { device } = gpu.selection
  await gpu.dispose()
  const cpu = await ort({ device: 'cpu', engine: 'capi', threads: 1 })
  const onCpu = await runOn(cpu, collectives)
  await cpu.dispose()
  await collectives.destroy()
  const outputs = [onGpu.out, onCpu.out].map(bitsOf)
  return { device, stream, outputs, runCalls: onGpu.calls, calls: calls(), weightBytes }
})
