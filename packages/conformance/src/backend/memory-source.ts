import { type ShardSource, type Tensor, throwIfAborted } from '@rankwise/core'

/** A weight that lies in no file, as those of a model that is split in memory do. */
export function memorySource(name: string, tensor: Tensor): ShardSource {
  const { dtype, shape, byteLength } = tensor
  return {
    name,
    file: `${name} in memory`,
    dtype,
    fullShape: shape,
    slices: undefined,
    shape,
    byteLength,
    ranges: () => undefined,
    read: async ({ signal } = {}) => {
      throwIfAborted(signal, name)
      return tensor.clone()
    },
  }
}
