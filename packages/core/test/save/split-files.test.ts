import fc from 'fast-check'
import { expect, test } from 'vitest'
import type { TensorType } from '../../src/graph.ts'
import { splitIntoFiles } from '../../src/save/split-files.ts'

type Split = typeof splitIntoFiles

const bytesOfTensors = fc.array(fc.nat({ max: 20 }), { maxLength: 12 })

function typesOf(bytes: readonly number[]): ReadonlyMap<string, TensorType> {
  return new Map(bytes.map((length, i) => [`t${i}`, { dtype: 'uint8', shape: [length] }]))
}

/** The rules of `split_state_dict_into_shards_factory`, each as a property of the result. */
function expectSplit(split: Split): void {
  fc.assert(
    fc.property(bytesOfTensors, fc.integer({ min: 1, max: 25 }), (bytes, maxBytes) => {
      const files = split(typesOf(bytes), maxBytes).map((names) => names.map((name) => Number(name.slice(1))))
      const sizeOf = (i: number) => bytes[i] as number
      const total = (file: readonly number[]) => file.reduce((sum, i) => sum + sizeOf(i), 0)

      expect(files.flat().sort((a, b) => a - b)).toEqual(bytes.map((_, i) => i))
      const large = files.filter((file) => total(file) > maxBytes)
      expect(large.every((file) => file.length === 1)).toBe(true)

      const filled = files.filter((file) => total(file) <= maxBytes)
      expect(filled.flat()).toEqual([...filled.flat()].sort((a, b) => a - b))
      for (const [i, file] of filled.entries()) {
        const next = filled[i + 1]?.[0]
        if (next !== undefined) expect(total(file) + sizeOf(next)).toBeGreaterThan(maxBytes)
      }
      // A large tensor comes before the file that is being filled when it is met.
      for (const [at, file] of files.entries()) {
        if (!large.includes(file)) continue
        const [met] = file as [number]
        const finished = files.slice(0, at).flat()
        expect(finished.every((i) => i < met)).toBe(true)
        const later = files.slice(at + 1).flat()
        const open = later.filter((i) => i < met)
        expect(new Set(open.map((i) => files.findIndex((other) => other.includes(i)))).size).toBeLessThanOrEqual(1)
      }
    }),
    { numRuns: 1000 },
  )
}

test('deals tensors out as diffusers does', () => {
  expectSplit(splitIntoFiles)
})

test.each([
  [[6, 6, 2, 6, 2, 2], 10, [[0], [1, 2], [3, 4, 5]]],
  [[3, 3, 30, 3, 3], 10, [[2], [0, 1, 3], [4]]],
  [[10, 10], 10, [[0], [1]]],
  [[5, 5], 10, [[0, 1]]],
  [[11], 10, [[0]]],
  [[], 10, [[]]],
  [[0, 0], 10, [[0, 1]]],
])('%j in files of %i', (bytes, maxBytes, expected) => {
  const files = splitIntoFiles(typesOf(bytes), maxBytes)
  expect(files).toEqual(expected.map((file) => file.map((i) => `t${i}`)))
})

const mutants: readonly (readonly [what: string, mutant: Split])[] = [
  ['files are a byte too small', (tensors, maxBytes) => splitIntoFiles(tensors, maxBytes - 1)],
  ['files are a byte too large', (tensors, maxBytes) => splitIntoFiles(tensors, maxBytes + 1)],
  ['the last tensor is dropped', (tensors, maxBytes) => splitIntoFiles(new Map([...tensors].slice(0, -1)), maxBytes)],
  ['files are in reverse', (tensors, maxBytes) => [...splitIntoFiles(tensors, maxBytes)].reverse()],
  ['every tensor has a file', (tensors) => [...tensors.keys()].map((name) => [name])],
  [
    'large tensors come last',
    (tensors, maxBytes) => {
      const files = splitIntoFiles(tensors, maxBytes)
      const isLarge = ([name]: readonly string[]) => (tensors.get(name ?? '')?.shape[0] ?? 0) > maxBytes
      return [...files.filter((file) => !isLarge(file)), ...files.filter(isLarge)]
    },
  ],
]

test.each(mutants)('sees that %s', (_, mutant) => {
  expect(() => expectSplit(mutant)).toThrow(/Property failed/)
})
