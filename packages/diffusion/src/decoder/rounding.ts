import { itemSize, type TracedTensor } from '@rankwise/core'

/** Whether a value loses bits to every operation on it: one that is done in two then differs. */
export function isRounded({ dtype }: TracedTensor): boolean {
  return itemSize(dtype) === 2
}
