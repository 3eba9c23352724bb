import type { ShardRun } from '../checkpoint/shard-layout.ts'
import { partOf, partsOf, type Shard, type ShardSlices } from '../placement.ts'
import type { Shape } from '../tensor.ts'

/** How the piece of a tensor that one rank saved contributes to a part of the tensor at another degree. */
export interface GatherPlan {
  /** Offsets count from the start of the piece, targets from that of the part; both ascend. */
  runs(): Iterable<ShardRun>
  /** Whether the runs are a few long ones, instead of some in every row. */
  readonly isContiguous: boolean
}

/** What is gathered, and from whose piece. */
export interface GatherOptions {
  /** Of the whole tensor. */
  readonly shape: Shape
  readonly itemBytes: number
  /** How the tensor lies over the pieces; undefined when the piece is all of it. */
  readonly saved: Shard | undefined
  readonly savedDegree: number
  readonly rank: number
  /** The part that is gathered; undefined for all of the tensor. */
  readonly wanted: ShardSlices | undefined
}

/** Neighbouring indices of a dimension that are neighbours in both the piece and the part. */
interface Span {
  readonly source: number
  readonly target: number
  readonly length: number
}

/** A dimension, and what of it is in both the piece and the part. */
interface Axis {
  readonly sourceSize: number
  readonly targetSize: number
  /** Ascending. */
  readonly spans: readonly Span[]
}

/** Plans what to take from the piece of one rank; undefined when it has nothing of the part. */
export function gatherPlan({ shape, itemBytes, ...options }: GatherOptions): GatherPlan | undefined {
  const axes = shape.map((size, dim) => axisOf(size, dim, options))
  if (axes.some(({ spans }) => spans.length === 0)) return undefined
  const innermost = axes.findLastIndex((axis) => !isWhole(axis))
  const rowBytes = axes.slice(innermost + 1).reduce((bytes, { sourceSize }) => bytes * sourceSize, itemBytes)
  const outer = axes.slice(0, innermost + 1)
  return {
    runs: () => byteRuns(outer, rowBytes),
    isContiguous: outer.slice(0, -1).every(({ spans }) => spans.length === 1 && spans[0]?.length === 1),
  }
}

function axisOf(
  size: number,
  dim: number,
  { saved, savedDegree, rank, wanted }: Omit<GatherOptions, 'shape' | 'itemBytes'>,
): Axis {
  const inPiece = saved?.dim === dim ? savedIndices(saved, rank, savedDegree) : [{ index: 0, at: 0, length: size }]
  const inPart = wanted?.dim === dim ? wantedIndices(wanted.ranges) : [{ index: 0, at: 0, length: size }]
  return { sourceSize: lengthOf(inPiece), targetSize: lengthOf(inPart), spans: joined(common(inPiece, inPart)) }
}

/** Indices of a dimension of the whole tensor, and where they are in a piece or part of it. */
interface Indices {
  readonly index: number
  readonly at: number
  readonly length: number
}

/** A rank has the same fraction of every block. */
function savedIndices(saved: Shard, rank: number, degree: number): readonly Indices[] {
  const [parts, part] = [partsOf(saved, degree), partOf(saved, rank, degree)]
  let start = 0
  return saved.blocks.map((block) => {
    const length = block / parts
    const indices = { index: start + part * length, at: start / parts, length }
    start += block
    return indices
  })
}

function wantedIndices(ranges: ShardSlices['ranges']): readonly Indices[] {
  let at = 0
  return ranges.map(([start, end]) => {
    const indices = { index: start, at, length: end - start }
    at += end - start
    return indices
  })
}

function common(inPiece: readonly Indices[], inPart: readonly Indices[]): readonly Span[] {
  return inPart.flatMap((part) =>
    inPiece.flatMap((piece) => {
      const start = Math.max(part.index, piece.index)
      const length = Math.min(part.index + part.length, piece.index + piece.length) - start
      if (length <= 0) return []
      return [{ source: piece.at + start - piece.index, target: part.at + start - part.index, length }]
    }),
  )
}

function joined(spans: readonly Span[]): readonly Span[] {
  const result: Span[] = []
  for (const span of spans) {
    const last = result.at(-1)
    const follows = last && last.source + last.length === span.source && last.target + last.length === span.target
    if (follows) result[result.length - 1] = { ...last, length: last.length + span.length }
    else result.push(span)
  }
  return result
}

function lengthOf(indices: readonly Indices[]): number {
  return indices.reduce((sum, { length }) => sum + length, 0)
}

function isWhole({ sourceSize, targetSize, spans }: Axis): boolean {
  return sourceSize === targetSize && spans.length === 1 && spans[0]?.length === sourceSize
}

/** The runs of `axes`, below which every index has `rowBytes` that are copied whole. */
function* byteRuns([axis, ...inner]: readonly Axis[], rowBytes: number, offset = 0, target = 0): Generator<ShardRun> {
  if (axis === undefined) {
    yield { offset, target, length: rowBytes }
    return
  }
  const sourceBytes = inner.reduce((bytes, { sourceSize }) => bytes * sourceSize, rowBytes)
  const targetBytes = inner.reduce((bytes, { targetSize }) => bytes * targetSize, rowBytes)
  for (const span of axis.spans) {
    const [from, to] = [offset + span.source * sourceBytes, target + span.target * targetBytes]
    if (inner.length === 0) {
      yield { offset: from, target: to, length: span.length * rowBytes }
      continue
    }
    for (let i = 0; i < span.length; i++) yield* byteRuns(inner, rowBytes, from + i * sourceBytes, to + i * targetBytes)
  }
}
