import fc from 'fast-check'
import { describe, expect, test } from 'vitest'
import { parseShardSize } from '../../src/save/shard-size.ts'
import { expectCode } from '../checkpoint/files.ts'

test.each([
  ['10GB', 10_000_000_000],
  ['700KB', 700_000],
  ['1.5MB', 1_500_000],
  [' 2 tb ', 2_000_000_000_000],
  ['0.0015KB', 1],
  [1, 1],
  [5_000_000_000, 5_000_000_000],
] as const)('%j is %i bytes', (size, bytes) => {
  expect(parseShardSize(size)).toBe(bytes)
})

describe('refuses', () => {
  test.each([
    '',
    'GB',
    '5',
    '5B',
    '5GiB',
    '-5GB',
    '+5GB',
    '1e3GB',
    'infGB',
    'nanGB',
    '0GB',
    '0.0001KB',
    '5GB5GB',
    '99999999TB',
    0,
    -1,
    1.5,
    Number.NaN,
    Number.POSITIVE_INFINITY,
    2 ** 53,
  ])('%j', async (size) => {
    await expectCode(() => parseShardSize(size), 'SAVE_SHARD_SIZE', size)
  })

  test('whatever is no number and unit', () => {
    fc.assert(
      fc.property(fc.string(), (text) => {
        fc.pre(!/^\s*\d+(\.\d+)?\s*[KMGT]B\s*$/i.test(text))
        expect(() => parseShardSize(text)).toThrow(/SAVE_SHARD_SIZE/)
      }),
    )
  })
})
