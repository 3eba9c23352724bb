import type { Collectives, Shape, Tensor } from '@rankwise/core'

/** Collectives with tensors in the memory that their ranks share. */
export interface SharedTensors extends Collectives {
  allocate(dtype: 'float32', shape: Shape): Promise<Tensor<'float32'>>
}

export function hasSharedTensors(collectives: Collectives): collectives is SharedTensors {
  return 'allocate' in collectives
}
