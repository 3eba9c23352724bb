import type { Capabilities, DType, HostValues, Node, Segment } from '@rankwise/core'
import { Tensor } from '@rankwise/core'
import { ReferenceBackend } from '@rankwise/core/reference'
import type { BrokenBackend, Create } from './broken-backends.ts'

/** What mutants of bfloat16 declare. */
const WITH_BFLOAT16: Capabilities = { dtypes: ['float32', 'bfloat16'] }

/** Rounds float32 to bfloat16 by another rule on its bits, after operations; casts round by themselves. */
class OperationRounding extends ReferenceBackend {
  override readonly supports: Capabilities = WITH_BFLOAT16
  readonly #round: (bits: number) => number

  constructor(round: (bits: number) => number) {
    super()
    this.#round = round
  }

  protected override rounded(result: Tensor<'float64'>, dtype: DType): Tensor<'float64'> {
    if (dtype !== 'bfloat16') return result
    const words = new Uint32Array(result.cast('float32').clone().data.buffer)
    return new Tensor('bfloat16', result.shape, Uint16Array.from(words, this.#round)).cast('float64')
  }
}

/** Rounds float32 to bfloat16 by another rule on its bits, wherever that is done. */
function rounding(round: (bits: number) => number): Create {
  const isCast = ({ op, attributes }: Node) => op === 'cast' && attributes.dtype === 'bfloat16'
  class Rounding extends OperationRounding {
    protected override runSegment(segment: Segment, values: HostValues): readonly Tensor[] {
      // A product by 1 leaves rounding to `rounded`.
      const uncast = (node: Node) => (isCast(node) ? { ...node, op: 'mul_scalar', attributes: { value: 1 } } : node)
      return super.runSegment({ ...segment, nodes: segment.nodes.map(uncast) }, values)
    }
  }
  return () => new Rounding(round)
}

const toEven = (bits: number) => (isNaNBits(bits) ? 0x7fc0 : (bits + 0x7fff + ((bits >>> 16) & 1)) >>> 16)
const awayFromZero = (bits: number) => (isNaNBits(bits) ? 0x7fc0 : (bits + 0x8000) >>> 16)
const toZero = (bits: number) => (isNaNBits(bits) ? 0x7fc0 : (bits + 0x7fff) >>> 16)
const isNaNBits = (bits: number) => (bits & 0x7fffffff) > 0x7f800000

/** Rounds where a segment ends, and not after every operation in it. */
class LateRounding extends ReferenceBackend {
  override readonly supports: Capabilities = WITH_BFLOAT16

  protected override rounded(result: Tensor<'float64'>): Tensor<'float64'> {
    return result
  }
}

/** Gives what it has computed in float32 as it is. */
class Float32Results extends ReferenceBackend {
  override readonly supports: Capabilities = WITH_BFLOAT16

  protected override runSegment(segment: Segment, values: HostValues): readonly Tensor[] {
    return super
      .runSegment(segment, values)
      .map((tensor) => (tensor.dtype === 'bfloat16' ? tensor.cast('float32') : tensor))
  }
}

const OPS_FLOAT32 = 'operations in float32'
const OPS_BFLOAT16 = 'operations in bfloat16'

/** Mistakes in bfloat16. What is rounded wrong only at special values shows where float32 is cast. */
const MUTANTS: readonly (readonly [what: string, group: string, create: Create])[] = [
  ['bfloat16 is float32 until a segment ends', OPS_BFLOAT16, () => new LateRounding()],
  ['bfloat16 is float32 until a segment of several operations ends', 'segments', () => new LateRounding()],
  ['bfloat16 is given as float32', OPS_BFLOAT16, () => new Float32Results()],
  ['bfloat16 is cut off', OPS_BFLOAT16, rounding((bits) => bits >>> 16)],
  ['a cast to bfloat16 cuts off', OPS_FLOAT32, rounding((bits) => bits >>> 16)],
  ['ties go away from zero', OPS_FLOAT32, rounding(awayFromZero)],
  ['ties go to zero', OPS_FLOAT32, rounding(toZero)],
  ['ties of operations alone go away from zero', OPS_BFLOAT16, () => new OperationRounding(awayFromZero)],
  ['ties of operations alone go to zero', OPS_BFLOAT16, () => new OperationRounding(toZero)],
  ['NaN is rounded like a number', OPS_FLOAT32, rounding((bits) => (bits + 0x7fff + ((bits >>> 16) & 1)) >>> 16)],
  ['subnormal numbers become 0', OPS_FLOAT32, rounding((bits) => ((bits & 0x7f800000) === 0 ? 0 : toEven(bits)))],
  ['the largest numbers do not become infinite', OPS_FLOAT32, rounding((bits) => withoutOverflow(bits, toEven(bits)))],
  [
    'attention rounds a scaled query',
    OPS_BFLOAT16,
    () =>
      new (class extends ReferenceBackend {
        override readonly supports: Capabilities = WITH_BFLOAT16

        protected override runSegment(segment: Segment, values: HostValues): readonly Tensor[] {
          return super.runSegment({ ...segment, nodes: segment.nodes.flatMap(scaledQuery) }, values)
        }
      })(),
  ],
]

function withoutOverflow(bits: number, rounded: number): number {
  return (rounded & 0x7fff) === 0x7f80 && (bits & 0x7fffffff) < 0x7f800000 ? rounded - 1 : rounded
}

/** Scales the query in an operation of its own before attention. */
function scaledQuery(node: Node): readonly Node[] {
  const [q, ...others] = node.inputs
  if (node.op !== 'attention' || q === undefined) return [node]
  const scaled = { ...q, id: -1 }
  return [
    {
      ...node,
      op: 'mul_scalar',
      inputs: [q],
      attributes: { value: node.attributes.scale as number },
      outputs: [scaled],
    },
    { ...node, inputs: [scaled, ...others], attributes: { ...node.attributes, scale: 1 } },
  ]
}

/** Backends that are wrong in bfloat16. */
export const BROKEN_BFLOAT16: readonly BrokenBackend[] = MUTANTS.map(([what, group, create]) => {
  return { what, group, create, supports: WITH_BFLOAT16 }
})

/** The way to round otherwise, when it rounds as it should. */
export const UNBROKEN_ROUNDING: Omit<BrokenBackend, 'group'> = {
  what: 'rounding',
  create: rounding(toEven),
  supports: WITH_BFLOAT16,
}
