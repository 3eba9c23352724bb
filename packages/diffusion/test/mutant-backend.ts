import {
  type DeviceTensor,
  type Executable,
  type LoadShardOptions,
  type Node,
  type Segment,
  type ShardSource,
  Tensor,
} from '@rankwise/core'
import { ReferenceBackend } from '@rankwise/core/reference'

/** What a mutant changes; everything else stays as the model says. */
export interface Mutation {
  readonly node?: (node: Node) => Node
  readonly weight?: (weight: Tensor, name: string) => Tensor
}

/** Computes something else than the model says, to prove that a comparison notices. */
export class MutantBackend extends ReferenceBackend {
  readonly #mutation: Mutation

  constructor(mutation: Mutation) {
    super()
    this.#mutation = mutation
  }

  override loadShard(source: ShardSource, options: LoadShardOptions): Promise<DeviceTensor> {
    const { weight = (tensor: Tensor) => tensor } = this.#mutation
    return super.loadShard({ ...source, read: async (read) => weight(await source.read(read), source.name) }, options)
  }

  override compile(segment: Segment): Promise<Executable> {
    const { node = (unchanged: Node) => unchanged } = this.#mutation
    return super.compile({ ...segment, nodes: segment.nodes.map(node) })
  }
}

/** Gives every node of an operation other attributes. */
export function withAttributes(op: string, attributes: Node['attributes']): Mutation {
  return {
    node: (node) => (node.op === op ? { ...node, attributes: { ...node.attributes, ...attributes } } : node),
  }
}

/** Swaps the two halves of a weight's rows. */
export function swapRows(weight: Tensor): Tensor {
  const { shape, data } = weight.cast('float32')
  const half = data.length / 2
  return Tensor.float32(shape, [...data.subarray(half), ...data.subarray(0, half)])
}
