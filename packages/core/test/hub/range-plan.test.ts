import fc from 'fast-check'
import { describe, expect, it } from 'vitest'
import { shardLayout } from '../../src/checkpoint/shard-layout.ts'
import { itemSize } from '../../src/dtype.ts'
import { MAX_REQUEST_BYTES, planRequests, type WantedRange } from '../../src/hub/range-plan.ts'
import { scatter, shardWindows } from '../../src/hub/shard-windows.ts'
import { byteSizeOf } from '../../src/tensor.ts'
import { patternBytes } from '../checkpoint/files.ts'
import { sliceCase, slicedBytes } from '../checkpoint/slices.ts'

const MIB = 1024 * 1024

describe('planRequests', () => {
  const size = fc.oneof(fc.nat({ max: 300 }), fc.nat({ max: 3 * MAX_REQUEST_BYTES }))
  const ranges = fc
    .array(fc.record({ file: fc.constantFrom('a', 'b'), gap: size, length: size.map((bytes) => bytes + 1) }), {
      maxLength: 30,
    })
    .map((steps) => {
      const ends = new Map<string, number>()
      return steps.map(({ file, gap, length }, owner): WantedRange<number> => {
        const offset = (ends.get(file) ?? 0) + gap
        ends.set(file, offset + length)
        return { file, offset, length, owner }
      })
    })

  it('makes requests in order that are bounded and waste little', () => {
    fc.assert(
      fc.property(ranges, fc.nat(), (wanted, seed) => {
        const requests = planRequests(shuffled(wanted, seed))
        for (const [i, { file, offset, length, wanted: parts }] of requests.entries()) {
          expect(length).toBeLessThanOrEqual(MAX_REQUEST_BYTES)
          const useful = parts.reduce((sum, part) => sum + part.length, 0)
          expect(length - useful).toBeLessThanOrEqual(length / 64)
          expect(parts[0]?.offset).toBe(offset)
          expect(Math.max(...parts.map((part) => part.offset + part.length))).toBe(offset + length)
          expect(new Set(parts.map((part) => part.file))).toEqual(new Set([file]))
          const next = requests[i + 1]
          if (next?.file === file) expect(next.offset).toBeGreaterThanOrEqual(offset + length)
        }
      }),
      { numRuns: 1000 },
    )
  })

  it('covers every range once', () => {
    fc.assert(
      fc.property(ranges, fc.nat(), (wanted, seed) => {
        const parts = planRequests(shuffled(wanted, seed)).flatMap((request) => request.wanted)
        for (const { owner, offset, length } of wanted) {
          let position = offset
          for (const part of parts.filter((candidate) => candidate.owner === owner)) {
            expect(part.offset).toBe(position)
            position += part.length
          }
          expect(position).toBe(offset + length)
        }
      }),
      { numRuns: 1000 },
    )
  })

  it('gives neighbours one request, and those apart their own', () => {
    const at = (offset: number, length: number, file = 'a'): WantedRange<string> => ({
      file,
      offset,
      length,
      owner: '',
    })
    const requests = planRequests([at(0, 6400), at(6400, 64), at(6500, 100), at(60_000, 10), at(0, 10, 'b')])
    expect(requests.map(({ file, offset, length }) => [file, offset, length])).toEqual([
      ['a', 0, 6600],
      ['a', 60_000, 10],
      ['b', 0, 10],
    ])
  })

  it('holds ranges that lie in others, as those of a tensor that is taken twice', () => {
    const wanted = [0, 100, 900].map((offset, owner) => ({ file: 'a', offset, length: owner === 0 ? 1000 : 10, owner }))
    expect(planRequests([...wanted, { file: 'a', offset: 1000, length: 5, owner: 3 }])).toMatchObject([
      { offset: 0, length: 1005, wanted: [{}, {}, {}, {}] },
    ])
  })

  it('needs no more requests than ranges and 16 MiB pieces', () => {
    const wanted = Array.from({ length: 10 }, (_, i) => ({
      file: 'a',
      offset: i * 40 * MIB,
      length: 20 * MIB,
      owner: i,
    }))
    expect(planRequests(wanted)).toHaveLength(20)
  })
})

describe('shardWindows and scatter', () => {
  it('give the bytes of the shard, however they arrive', () => {
    fc.assert(
      fc.property(sliceCase, fc.integer({ min: 1, max: 50 }), (testCase, step) => {
        const { dtype, shape, slices } = testCase
        const bytes = patternBytes(byteSizeOf(shape, dtype))
        const layout = shardLayout(shape, itemSize(dtype), slices, 'test')
        const target = new Uint8Array(layout.byteLength)
        for (const { offset, length } of shardWindows(layout)) {
          for (let start = offset; start < offset + length; start += step) {
            const end = Math.min(start + step, offset + length)
            scatter(layout, target, bytes.subarray(start, end), start)
          }
        }
        expect(target).toEqual(slicedBytes(bytes, testCase))
      }),
      { numRuns: 1000 },
    )
  })

  it('fetch contiguous shards without a byte too much', () => {
    fc.assert(
      fc.property(sliceCase, ({ dtype, shape, slices }) => {
        const layout = shardLayout(shape, itemSize(dtype), slices, 'test')
        if (layout.rowCount !== 1) return
        const fetched = shardWindows(layout).reduce((sum, { length }) => sum + length, 0)
        expect(fetched).toBe(layout.byteLength)
      }),
    )
  })

  it('read rows whole unless they are longer than 1 MiB apart', () => {
    const columns = (count: number) => ({ dim: 1, ranges: [[0, count / 2]] }) as const
    const short = shardLayout([4, 1000], 4, columns(1000), 'test')
    expect(shardWindows(short)).toEqual([{ offset: 0, length: 3 * 4000 + 2000 }])
    const long = shardLayout([3, MIB], 4, columns(MIB), 'test')
    expect(shardWindows(long)).toEqual([0, 1, 2].map((row) => ({ offset: row * 4 * MIB, length: 2 * MIB })))
  })
})

function shuffled(ranges: readonly WantedRange<number>[], seed: number): readonly WantedRange<number>[] {
  const key = ({ owner }: WantedRange<number>) => (owner * 7919 + seed) % 31
  return [...ranges].sort((a, b) => key(a) - key(b))
}
