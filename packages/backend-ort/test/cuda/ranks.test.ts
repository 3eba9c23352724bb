import { RankProcesses } from '@rankwise/conformance/ranks'
import { describe, expect, it, onTestFinished } from 'vitest'
import { leaks } from '../../../collectives-nccl/test/stub.ts'
import type { CudaRankReport } from '../workers/cuda-rank.ts'
import { FakeCuda, NO_FAKE } from './fake-cuda.ts'

const WORKER = new URL('../workers/cuda-rank.ts', import.meta.url)

async function reports(): Promise<readonly CudaRankReport[]> {
  const fake = new FakeCuda()
  onTestFinished(() => fake[Symbol.dispose]())
  Object.assign(process.env, fake.env(0, 'ranks'))
  await using ranks = await RankProcesses.start<CudaRankReport>(2, WORKER, {})
  return await ranks.values()
}

describe.skipIf(NO_FAKE !== undefined)('two ranks with a fake GPU each', () => {
  it('all-reduce in memory of the GPU, ordered by the stream of the backend, without a copy', async () => {
    for (const [rank, report] of (await reports()).entries()) {
      const { device, stream, outputs, runCalls, calls, weightBytes } = report
      expect(device).toBe(`cuda:${rank}`)
      expect(outputs[0]).toEqual(outputs[1])
      expect(weightBytes).toBeGreaterThan(0)

      const count = (name: string) => runCalls.filter((call) => call.startsWith(name)).length
      expect(count('ncclAllReduce')).toBe(2)
      expect(runCalls.filter((call) => /^ncclAllReduce .* inplace=1 /.test(call))).toHaveLength(2)
      // The inputs and the output of the run.
      expect(count('cudaMemcpyAsync')).toBe(6 + 1)
      expect(runCalls.filter((call) => /^cudaMemcpyAsync \d+ 2$/.test(call))).toHaveLength(1)
      expect(count('cudaHostAlloc')).toBe(0)
      // NCCL waits for what is in the stream that ONNX Runtime computes in.
      expect(count(`cudaEventRecord ${stream}`)).toBe(2)
      expect(calls.filter((call) => call.startsWith('option user_compute_stream'))).toSatisfy((given: string[]) =>
        given.every((call) => call === `option user_compute_stream=${stream}`),
      )
      expect(calls).toContain(`option user_compute_stream=${stream}`)
      expect(calls).toContain(`option device_id=${rank}`)
      expect(calls).toContain('option use_tf32=0')
      expect(calls).toContain('AddSessionConfigEntry session.disable_cpu_ep_fallback=1')

      expect(leaks(calls)).toEqual({})
      expect(calls.filter((call) => call.startsWith('VIOLATION'))).toEqual([])
    }
  })
})
