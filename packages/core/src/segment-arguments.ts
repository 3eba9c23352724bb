import type { DeviceTensor } from './backend.ts'
import { RankwiseError } from './errors.ts'
import type { Value } from './graph.ts'
import { sameShape } from './tensor.ts'

/**
 * Refuses tensors that are not what a segment takes. Of weights only shapes count: a backend may keep them in the dtype of
 * their file.
 *
 * @param values - `segment.inputs` or `segment.parameters`
 * @throws RankwiseError `ARGUMENT_MISMATCH` with the name of the value, what was given and what the segment takes
 */
export function checkArguments(values: readonly Value[], given: readonly DeviceTensor[]): void {
  if (given.length !== values.length) {
    throw new RankwiseError(
      'ARGUMENT_MISMATCH',
      `a segment was given ${given.length} tensors for ${values.length} values`,
      {
        actual: { given: given.length, taken: values.map(({ name, id }) => name ?? `value ${id}`) },
        rule: 'inputs and parameters are those of the segment, in its order',
      },
    )
  }
  for (const [i, value] of values.entries()) {
    const tensor = given[i] as DeviceTensor
    const sameDType = value.kind === 'parameter' || tensor.dtype === value.dtype
    if (sameDType && sameShape(tensor.shape, value.shape)) continue
    throw new RankwiseError('ARGUMENT_MISMATCH', 'an argument is not what the segment was compiled for', {
      where: value.name ?? `value ${value.id}`,
      actual: { given: typeText(tensor), compiled: typeText(value) },
      rule: 'shapes, and the dtypes of inputs, are those that a segment was compiled for',
    })
  }
}

function typeText({ dtype, shape }: Pick<Value, 'dtype' | 'shape'>): string {
  return `${dtype}[${shape.join(', ')}]`
}
