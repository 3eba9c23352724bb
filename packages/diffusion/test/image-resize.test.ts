import { createHash } from 'node:crypto'
import fc from 'fast-check'
import { describe, expect, it } from 'vitest'
import { Image } from '../src/image.ts'
import { preprocess } from '../src/image-processor.ts'
import { codeOf, ownGoldenJson } from './support.ts'

interface ResizeCase {
  readonly from: readonly [width: number, height: number]
  readonly to: readonly [width: number, height: number]
  readonly sha256: string
}

const { cases } = await ownGoldenJson<{ readonly cases: readonly ResizeCase[] }>('resize.json')

/** The `noise` of make_images.py: a hash of each byte's index. */
function noise(width: number, height: number): Image {
  const data = Uint8Array.from({ length: width * height * 3 }, (_, i) => {
    const mixed = Math.imul(i, 2654435761) >>> 0
    return Math.imul(mixed ^ (mixed >>> 15), 2246822519) >>> 24
  })
  return new Image(width, height, data)
}

const image = (width: number, height: number) =>
  fc.tuple(fc.integer({ min: 1, max: width }), fc.integer({ min: 1, max: height }))

describe('resize', () => {
  it.each(cases)('gives the bits of Pillow: $from to $to', ({ from, to, sha256 }) => {
    const { width, height, data } = noise(...from).resize(...to)
    expect([width, height]).toEqual(to)
    expect(createHash('sha256').update(data).digest('hex')).toBe(sha256)
  })

  it('would be noticed in another order of its passes', () => {
    // In so few pixels that both orders may give the same, they prove nothing.
    const large = cases.filter(({ from, to }) => to[0] * to[1] > 1000 && from[0] !== to[0] && from[1] !== to[1])
    expect(large.length).toBeGreaterThan(6)
    for (const { from, to, sha256 } of large) {
      const [rowsFirst, columnsFirst] = [
        noise(...from).resize(to[0], from[1]),
        noise(...from).resize(from[0], to[1]),
      ].map((once) =>
        createHash('sha256')
          .update(once.resize(...to).data)
          .digest('hex'),
      )
      expect([rowsFirst, columnsFirst]).toContain(sha256)
      expect(rowsFirst).not.toBe(columnsFirst)
    }
  })

  it('keeps one colour', () => {
    fc.assert(
      fc.property(image(40, 40), image(60, 60), fc.nat(255), (from, to, value) => {
        const plain = new Image(...from, new Uint8Array(from[0] * from[1] * 3).fill(value))
        expect(new Set(plain.resize(...to).data)).toEqual(new Set([value]))
      }),
      { numRuns: 50 },
    )
  })

  it('treats rows as columns', () => {
    fc.assert(
      fc.property(fc.integer({ min: 1, max: 30 }), fc.integer({ min: 1, max: 45 }), (from, to) => {
        const row = noise(from, 1).resize(to, 1)
        expect(new Image(1, from, noise(from, 1).data).resize(1, to).data).toEqual(row.data)
      }),
      { numRuns: 50 },
    )
  })

  it('refuses sizes that are none', async () => {
    for (const size of [0, -1, 1.5, Number.NaN]) {
      expect(await codeOf(() => noise(2, 2).resize(size, 2))).toBe('IMAGE_SIZE')
      expect(await codeOf(() => noise(2, 2).resize(2, size))).toBe('IMAGE_SIZE')
    }
  })
})

describe('centerCrop', () => {
  it('takes the middle', () => {
    const sides = fc.tuple(fc.integer({ min: 1, max: 20 }), fc.nat(10))
    fc.assert(
      fc.property(sides, sides, ([width, moreX], [height, moreY]) => {
        const source = noise(width + moreX, height + moreY)
        const cropped = source.centerCrop(width, height)
        const [left, top] = [Math.floor(moreX / 2), Math.floor(moreY / 2)]
        for (let i = 0; i < cropped.data.length; i++) {
          const pixel = Math.floor(i / 3)
          const from = (top + Math.floor(pixel / width)) * source.width + left + (pixel % width)
          if (cropped.data[i] !== source.data[from * 3 + (i % 3)]) throw new Error(`byte ${i} comes from elsewhere`)
        }
      }),
    )
  })

  it('refuses what does not lie in the image', async () => {
    expect(await codeOf(() => noise(4, 4).centerCrop(5, 4))).toBe('IMAGE_SIZE')
    expect(await codeOf(() => noise(4, 4).centerCrop(4, 0))).toBe('IMAGE_SIZE')
  })
})

describe('preprocess', () => {
  it('has planes in [-1, 1]', () => {
    const tensor = preprocess(new Image(2, 1, Uint8Array.of(0, 128, 255, 51, 1, 254)))
    expect(tensor.shape).toEqual([1, 3, 1, 2])
    const expected = [0, 51, 128, 1, 255, 254].map((byte) => Math.fround(Math.fround(Math.fround(byte / 255) * 2) - 1))
    expect([...tensor.data]).toEqual(expected)
  })
})
