import { RankwiseError } from './errors.ts'
import type { Attributes, TensorType } from './graph.ts'
import { formatPlacement, type Placement, REPLICATED } from './placement.ts'

/** An operand as a placement rule sees it. */
export interface PlacedType extends TensorType {
  readonly placement: Placement
  /** How an error names it: the weight's or argument's name, or `input 0`. */
  readonly label: string
  /** Whether a `rowwise_split_input` weight asks that its replicated input is sliced for it. */
  readonly splitInput?: boolean
}

/** What an operation costs one rank. */
export interface Cost {
  /** Floating-point operations; a multiply-add counts as 2. */
  readonly flops: number
}

/** The rules of one primitive operation. Everything that knows operations is made of these and a backend's lowering. */
export interface OpDefinition<A extends Attributes = Attributes> {
  readonly name: string
  /**
   * Whether results consist of elements of the operands, so that those of a 16-bit dtype need no rounding.
   * @default false
   */
  readonly movesOnly?: boolean
  /** Types of the results. @throws RankwiseError `OP_SHAPE` */
  infer(inputs: readonly TensorType[], attributes: A): readonly TensorType[]
  /** Placements of the results, or an error saying which rule the operands break. */
  place(context: PlacementContext<A>): readonly Placement[]
  /** The attributes that one rank executes, where they differ from those of the whole model. */
  localize?(attributes: A, context: LocalContext): Attributes
  /** Cost at the given (local) shapes. */
  cost(inputs: readonly TensorType[], outputs: readonly TensorType[], attributes: A): Cost
}

/** One rank's view of an operation. */
export interface LocalContext {
  readonly rank: number
  readonly tpDegree: number
  readonly inputs: readonly PlacedType[]
  readonly outputs: readonly PlacedType[]
}

/** What a placement rule may look at and ask for. */
export class PlacementContext<A extends Attributes = Attributes> {
  readonly op: string
  readonly path: string
  readonly attributes: A
  readonly inputs: readonly PlacedType[]
  readonly outputs: readonly TensorType[]
  readonly tpDegree: number
  /** Indices of partial inputs that must be all-reduced before this operation runs. */
  readonly reductions: Set<number> = new Set()
  /** Indices of replicated inputs that this rank must slice first, and how. */
  readonly splits: Map<number, Placement> = new Map()

  constructor(
    op: string,
    path: string,
    attributes: A,
    inputs: readonly PlacedType[],
    outputs: readonly TensorType[],
    tpDegree: number,
  ) {
    this.op = op
    this.path = path
    this.attributes = attributes
    this.inputs = inputs
    this.outputs = outputs
    this.tpDegree = tpDegree
  }

  /** An operand. @throws RankwiseError `OP_ARITY` */
  input(index: number): PlacedType {
    const input = this.inputs[index]
    if (input === undefined) throw new RankwiseError('OP_ARITY', `${this.op} has no input ${index}`)
    return input
  }

  /** Placement of an input as it is, partial or not. */
  placement(index: number): Placement {
    return this.input(index).placement
  }

  /** Placement of an input for an operation that is not linear in it: a partial one is asked to be all-reduced. */
  complete(index: number): Placement {
    const { placement } = this.input(index)
    if (placement.kind !== 'partial') return placement
    this.reductions.add(index)
    return REPLICATED
  }

  /** Refuses the graph. `remedy` says which style usually fixes it. */
  illegal(code: string, rule: string, remedy: string): never {
    const operands = this.inputs.map((input) => `${input.label} ${formatPlacement(input.placement)}`)
    throw new RankwiseError(code, `${this.op} cannot run on these placements: ${operands.join(', ')}`, {
      where: this.path || '(model)',
      actual: {
        op: this.op,
        placements: this.inputs.map((input) => formatPlacement(input.placement)),
        shapes: this.inputs.map((input) => `[${input.shape.join(', ')}]`),
        tpDegree: this.tpDegree,
      },
      rule,
      remedy,
    })
  }
}

const definitions = new Map<string, OpDefinition>()

/** Registers an operation; `core` registers its own when it is imported. */
export function defineOp<A extends Attributes>(definition: OpDefinition<A>): void {
  definitions.set(definition.name, definition as unknown as OpDefinition)
}

/** @throws RankwiseError `OP_UNKNOWN` */
export function opDefinition(name: string): OpDefinition {
  const definition = definitions.get(name)
  if (definition === undefined) {
    throw new RankwiseError('OP_UNKNOWN', `there is no operation '${name}'`, {
      actual: { known: [...definitions.keys()].join(' ') },
    })
  }
  return definition
}

/** Names of all operations, in the order they were defined. */
export function opNames(): readonly string[] {
  return [...definitions.keys()]
}

/** Refuses operands whose shapes do not go together. */
export function shapeError(op: string, inputs: readonly TensorType[], rule: string): RankwiseError {
  return new RankwiseError('OP_SHAPE', `${op} cannot take these shapes`, {
    actual: { shapes: inputs.map((input) => `${input.dtype}[${input.shape.join(', ')}]`) },
    rule,
  })
}
