import type { CollectiveOptions, Collectives, DType, Shape } from '@rankwise/core'
import type { KernelName } from './kernel.ts'
import type { SharedTensor } from './shared-tensor.ts'
import type { TransportName } from './transport.ts'

/** Collectives between the ranks of one machine. */
export interface LocalGroup extends Collectives {
  /** What reduces; see `LocalCollectivesOptions.kernel`. */
  readonly kernel: KernelName
  /** What carries tensors from rank to rank; see `LocalCollectivesOptions.transport`. `none` in a group of one rank. */
  readonly transport: TransportName | 'none'
  /** Why it is that one, in words: what was asked for, or which rank cannot share memory and why. */
  readonly transportReason: string
  /**
   * A tensor of zeros in memory that all ranks share: `allReduce` reduces it in place. Over TCP the memory is that of this
   * rank alone and travels like any other. Every rank calls it, in the same order among all operations and with the same
   * dtype and shape; each gets a tensor of its own. If it fails on one rank, it fails on all, and the group goes on.
   *
   * @throws RankwiseError `SHARED_MEMORY` when there is not enough memory, `COLLECTIVE_SHAPE`, and what every operation
   * throws
   */
  allocate<D extends DType>(dtype: D, shape: Shape, options?: CollectiveOptions): Promise<SharedTensor<D>>
  /**
   * A group of some of the ranks, as `torch.distributed.new_group` makes it. Every rank of this group calls it, with the
   * same ranks; those that are named get the new group, numbered by their rank here, the others undefined. A rank may
   * be in several groups. A group outlives the one it was made from, and is destroyed by itself.
   *
   * @param ranks ranks of this group, each once
   * @throws RankwiseError `GROUP_RANKS`, `SHARED_MEMORY`, and what every operation throws
   */
  newGroup(ranks: readonly number[], options?: CollectiveOptions): Promise<LocalGroup | undefined>
}
