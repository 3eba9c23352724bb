import { RankwiseError, type Segment } from '@rankwise/core'
import type { GpuTensor } from './gpu-tensor.ts'

/** An input of a segment that rows of a table are looked up with. */
interface Lookup {
  /** Among the segment's inputs. */
  readonly input: number
  readonly entries: number
  readonly path: string
}

/**
 * The lookups of a segment. Where an id is outside of its table, the CUDA kernel of Gather gives zeros and no error, so ids are
 * checked on their way to the GPU, which only those are on that come from the host.
 *
 * @throws RankwiseError `OP_UNSUPPORTED` where ids are computed
 */
export function lookupsOf({ nodes, inputs }: Segment): readonly Lookup[] {
  const embeddings = nodes.filter(({ op }) => op === 'embedding')
  return embeddings.map(({ inputs: [ids, table], path }) => {
    const input = inputs.findIndex(({ id }) => id === ids?.id)
    if (input >= 0) return { input, entries: table?.shape[0] ?? 0, path: path || '(model)' }
    throw new RankwiseError('OP_UNSUPPORTED', 'the ort backend looks up no ids on a GPU that are computed there', {
      where: path || '(model)',
      rule: 'the ids of an embedding are an input of the segment',
    })
  })
}

/** @throws RankwiseError `ORT_RUN` where an id is outside of its table, or did not come from the host */
export function checkIds(lookups: readonly Lookup[], values: readonly GpuTensor[]): void {
  for (const { input, entries, path } of lookups) {
    const ids = values[input]?.ids
    if (ids !== undefined && ids.least >= 0 && ids.most < entries) continue
    throw new RankwiseError('ORT_RUN', 'an id is outside of the table that it is looked up in', {
      where: path,
      actual: { ...(ids ?? { ids: 'computed on the GPU' }), entries },
      rule: 'ids come from the host and are from 0 to the number of entries - 1',
    })
  }
}
