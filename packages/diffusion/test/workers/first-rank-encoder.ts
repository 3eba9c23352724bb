import '@rankwise/collectives-local'
import { ort } from '@rankwise/backend-ort'
import { initProcessGroup, type RankwiseError, Tensor } from '@rankwise/core'
import { referencePath, runRank } from '@rankwise/fixtures'
import { FirstRankTextEncoder } from '../../src/first-rank-text-encoder.ts'
import { Qwen3ForCausalLM } from '../../src/qwen3.ts'
import { padded, textGoldens } from '../text-goldens.ts'

export interface FirstRankResult {
  readonly embeds: Float32Array
  /** Of two calls that were begun at once. */
  readonly together: readonly Float32Array[]
  /** Codes of the calls that were to fail, in this order: a token out of range on all ranks, another text on rank 1, an aborted rank 1, a load. */
  readonly failures: readonly string[]
  /** Embeddings after all of these. */
  readonly after: Float32Array
  /** Of this rank's backend: with the encoder, and after it was disposed of. */
  readonly weightBytes: readonly [loaded: number, freed: number]
}

const PIPELINE = 'flux2-klein-tiny'
const PADDING = { side: 'right', padTokenId: 1000 } as const

async function codeOf(work: Promise<unknown>): Promise<string> {
  return work.then(
    () => 'no error',
    (error: RankwiseError) => error.code,
  )
}

/** A text encoder on rank 0, and all that can go wrong with it, in one group that outlives it. */
runRank(async (): Promise<FirstRankResult> => {
  await using group = await initProcessGroup({ backend: 'local' })
  await using backend = await ort({ device: 'cpu', threads: 1 })
  const load = (directory: string) => (signal: AbortSignal) =>
    Qwen3ForCausalLM.fromPretrained(directory, { subfolder: 'text_encoder', backend, signal })
  const { inputs } = await textGoldens(PIPELINE, '').prompts(128)
  const isSecond = group.rank === 1

  await using encoder = await FirstRankTextEncoder.create(load(referencePath(PIPELINE)))
  const held = () => backend.memory().weightBytes + backend.memory().mappedBytes
  const loaded = held()
  const embeds = await encoder.encode(inputs)
  const short = padded([[1, 2, 3]], 8, PADDING)
  const together = await Promise.all([
    encoder.encode(short, { outLayers: [1] }),
    encoder.encode(short, { outLayers: [2, 3] }),
  ])
  const wrong = { ...short, inputIds: Tensor.int32([1, 8], new Int32Array(8).fill(9999)) }
  const other = padded([[isSecond ? 4 : 5]], 8, PADDING)
  const failures = [
    await codeOf(encoder.encode(wrong)),
    await codeOf(encoder.encode(other)),
    await codeOf(encoder.encode(short, { signal: isSecond ? AbortSignal.abort() : undefined })),
    await codeOf(FirstRankTextEncoder.create(load('/nowhere'))),
  ]
  const after = await encoder.encode(inputs)
  await encoder.dispose()
  return {
    embeds: embeds.data as Float32Array,
    together: together.map(({ data }) => data as Float32Array),
    failures,
    after: after.data as Float32Array,
    weightBytes: [loaded, held()],
  }
})
