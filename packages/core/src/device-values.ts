import type { DeviceTensor } from './backend.ts'
import { RankwiseError } from './errors.ts'

/** The values of one run by id, until they are released. */
export class DeviceValues {
  readonly #tensors = new Map<number, DeviceTensor>()
  /** Those that outlive the run. */
  readonly #kept = new Set<DeviceTensor>()

  set(id: number, tensor: DeviceTensor): void {
    this.#tensors.set(id, tensor)
  }

  /** Adds a tensor that stays the caller's. */
  lend(id: number, tensor: DeviceTensor): void {
    this.#kept.add(tensor)
    this.set(id, tensor)
  }

  /** @throws RankwiseError `EXECUTOR_VALUE` */
  at(id: number): DeviceTensor {
    const tensor = this.#tensors.get(id)
    if (tensor === undefined) throw new RankwiseError('EXECUTOR_VALUE', `value ${id} is not there`)
    return tensor
  }

  /** Gives a tensor to the caller, whose it is from then on. @throws RankwiseError `EXECUTOR_VALUE` */
  keep(id: number): DeviceTensor {
    const tensor = this.at(id)
    this.#kept.add(tensor)
    return tensor
  }

  /** Forgets a value; its tensor is freed unless it goes on under another id, as sums over one rank do. */
  release(id: number): void {
    const tensor = this.#tensors.get(id)
    this.#tensors.delete(id)
    if (tensor === undefined || this.#kept.has(tensor)) return
    if (![...this.#tensors.values()].includes(tensor)) tensor.dispose()
  }

  releaseAll(): void {
    for (const id of [...this.#tensors.keys()]) this.release(id)
  }
}
