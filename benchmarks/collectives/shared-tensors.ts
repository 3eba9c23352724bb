import type { Shape, Tensor } from '@rankwise/core'

/** What collectives have whose ranks share memory for tensors. */
export interface SharedTensors {
  allocate(dtype: 'float32', shape: Shape): Promise<Tensor<'float32'>>
}

export function hasSharedTensors(collectives: object): collectives is SharedTensors {
  return typeof (collectives as Partial<SharedTensors>).allocate === 'function'
}
