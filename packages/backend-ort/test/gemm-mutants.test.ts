import { bfloat16ToFloat32, float32ToBfloat16 } from '@rankwise/core'
import { afterAll, describe, expect, it } from 'vitest'
import { GemmLibrary, NO_COMPILER, type Placement, type Sizes } from './gemm/library.ts'
import { dense, type Matrices, matrices, product, randomMatrices, wrongElement } from './gemm/matrices.ts'

/** Deliberately wrong kernels: what they do, and the change to gemm-kernel.c. */
const MUTANTS: readonly (readonly [what: string, from: string, to: string])[] = [
  ['leaves out the last element of k', 'for (; p < depth; p += GROUP)', 'for (; p + 1 < depth; p += GROUP)'],
  ['copies one element too few at the edge', 'smaller(depth - p, GROUP)', 'smaller(depth - p - 1, GROUP)'],
  ['leaves out the last block of k', 'while (block.start < gemm->k)', 'while (block.start + DEPTH < gemm->k)'],
  ['forgets what was summed before', '.adds = block.start > 0,', '.adds = 0,'],
  ['adds to what y was before', '.adds = block.start > 0,', '.adds = 1,'],
  ['multiplies every block with the first of x', 'row + r, block.start, block.depth', 'row + r, 0, block.depth'],
  ['takes one row of x for all of a strip', 'copy_row(gemm, row + r,', 'copy_row(gemm, row,'],
  ['goes on within the first part of x', 'part->columns - start);', 'count);'],
  ['skips as many columns of every part of x', '    start = 0;\n', ''],
  ['takes the stride of the first part of x for all', 'row * part->stride', 'row * gemm->x->stride'],
  ['leaves out the last row of a strip', '(strip + 1) / strips - row', '(strip + 1) / strips - row - 1'],
  ['starts a panel one row of w too late', 'pack_panel(w + j * stride', 'pack_panel(w + (j + (j > 0)) * stride'],
  ['takes the length of a row of w for its stride', 'stride = gemm->w_stride * 2;', 'stride = gemm->k * 2;'],
  ['keeps only one panel for several strips', 'strips == 1 ? panels', 'strips >= 1 ? panels'],
  ['packs more columns than the scratch holds', 'PANEL, MOST_COLUMNS)', 'PANEL, 2 * MOST_COLUMNS)'],
  ['reads rows beyond the last of w', 'if (columns == LANES)', 'if (columns > 0)'],
  ['reads beyond the end of a row of w', 'for (; p + GROUP <= depth;', 'for (; p < depth;'],
  ['writes beyond the columns of the tile', 'if (columns >= PANEL) multiply_rows', 'if (columns > 0) multiply_rows'],
  ['rounds before all is summed', 'gemm->rounds && block.start + block.depth == gemm->k', 'gemm->rounds'],
  ['rounds ties up', 'bits + 0x7fff + (bits >> 16 & 1)', 'bits + 0x8000'],
  ['cuts off what it should round', 'bits + 0x7fff + (bits >> 16 & 1)', 'bits'],
  ['copies a whole panel at the edge of y', 'whole[r], columns * sizeof *y)', 'whole[r], sizeof whole[r])'],
]

const strided = (m: number, n: number, k: number): Sizes => ({
  m,
  n,
  k,
  xStride: k + 3,
  wStride: k + 5,
  yStride: n + 1,
})

const CASES: readonly (readonly [Sizes, Placement])[] = [
  [strided(3, 37, 25), {}],
  [strided(31, 100, 300), { tiles: 3 }],
  [dense(31, 96, 259), {}],
  [dense(5, 33, 520), { odd: true, atEnd: false }],
  [dense(600, 2100, 3), {}],
  [strided(7, 40, 600), { parts: [300, 0, 1, 299] }],
  [dense(9, 40, 600), { rounds: true }],
]

function firstFailure(library: GemmLibrary, variant: string): string | undefined {
  for (const [sizes, placement] of CASES) {
    const given = placement.rounds === true ? wholeNumbers(sizes) : randomMatrices(sizes, 3)
    try {
      const y = product(library, variant, given, placement)
      const wrong = placement.rounds === true ? wronglyRounded(library, given, y) : wrongElement(y, given)
      if (wrong !== undefined) return wrong
    } catch (error) {
      return String(error)
    }
  }
  return undefined
}

/** Their sums are often in the middle between two numbers of bfloat16. */
const wholeNumbers = (sizes: Sizes) =>
  matrices(
    sizes,
    (row, p) => ((row * 7 + p * 3) % 33) - 16,
    (row, p) => ((row * 5 + p * 11) % 61) - 30,
  )

/** Compared with what the original gives without rounding. */
function wronglyRounded({ variants }: GemmLibrary, given: Matrices, y: Float32Array): string | undefined {
  const exactly = product(original as GemmLibrary, variants[0] as string, given)
  const i = y.findIndex((value, i) => value !== bfloat16ToFloat32(float32ToBfloat16(exactly[i] as number)))
  return i < 0 ? undefined : `y is ${y[i]} where ${exactly[i]} is rounded`
}

const original = NO_COMPILER === undefined ? new GemmLibrary() : undefined
afterAll(() => original?.[Symbol.dispose]())

describe.skipIf(original === undefined)('cases for the matrix multiply', () => {
  const of = original as GemmLibrary

  it('pass', () => {
    for (const variant of of.variants) expect(firstFailure(of, variant)).toBeUndefined()
  })

  it.each(MUTANTS)('catch a kernel that %s', (_, from, to) => {
    const change = (source: string) => {
      expect(source.split(from)).toHaveLength(2)
      return source.replace(from, to)
    }
    using mutant = new GemmLibrary({ of, change })
    expect(firstFailure(mutant, of.variants[0] as string)).toBeDefined()
  })
})
