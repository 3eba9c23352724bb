import fc from 'fast-check'
import { describe, expect, it } from 'vitest'
import { jsonOf, RankwiseError, TensorParallelConfig, textOf } from '../src/index.ts'
import { reportOf } from '../src/rank-report.ts'

const failing = (): never => {
  throw new Error('of the value')
}
const proxy = new Proxy({}, { get: failing })
const { proxy: revoked, revoke } = Proxy.revocable([], {})
revoke()
const cyclic: unknown[] = [1]
cyclic.push(cyclic, cyclic, [cyclic])

/** Values that `String` or a template cannot make text of, and others. */
const ODD: readonly (readonly [value: unknown, text: string])[] = [
  ['text', 'text'],
  [-0, '0'],
  [12n, '12'],
  [null, 'null'],
  [undefined, 'undefined'],
  [Symbol('s'), 'Symbol(s)'],
  [[1, [Symbol('s'), null]], '[1, [Symbol(s), null]]'],
  [{ toString: failing }, '[object]'],
  [{ toString: () => ({}), valueOf: () => ({}) }, '[object]'],
  [Object.create(null), '[object]'],
  [proxy, '[object]'],
  [revoked, '[object]'],
  [[Object.create(null), proxy], '[[object], [object]]'],
  [Object.assign([1, 2], { map: failing }), '[1, 2]'],
  [Object.assign(() => 1, { toString: failing }), '[function]'],
  [cyclic, '[1, […], […], [[…]]]'],
]

describe('a value in an error', () => {
  it('is text, whatever it is', () => {
    for (const [value, text] of ODD) {
      expect(textOf(value)).toBe(text)
      expect(new RankwiseError('CODE', 'what', { actual: { value } }).message).toBe(
        `[CODE] what\n  actual: value ${text}`,
      )
    }
  })

  it('that was thrown, is text', () => {
    for (const error of [Object.create(null), proxy, Symbol('s')]) {
      expect(reportOf('failed', { error })).toEqual({ kind: 'failed', code: 'RANK_FAILED', message: textOf(error) })
    }
  })

  it('of any kind does not throw', () => {
    const anything = fc.anything({
      withBigInt: true,
      withNullPrototype: true,
      withSparseArray: true,
      withTypedArray: true,
    })
    fc.assert(
      fc.property(anything, (value) => {
        expect(typeof textOf(value)).toBe('string')
        expect(typeof jsonOf(value)).toBe('string')
      }),
    )
  })

  it('is JSON where JSON has it, and text elsewhere', () => {
    expect(jsonOf({ kind: 'x', of: [1, null] })).toBe('{"kind":"x","of":[1,null]}')
    expect(jsonOf(undefined)).toBe('undefined')
    expect(jsonOf({ size: 1n })).toBe('[object Object]')
    expect(jsonOf(cyclic)).toBe('[1, […], […], [[…]]]')
    expect(jsonOf(proxy)).toBe('[object]')
  })

  it('does not hide why a degree is refused', () => {
    for (const [value, text] of ODD) {
      let thrown: unknown
      try {
        new TensorParallelConfig({ tpDegree: value as number })
      } catch (error) {
        thrown = error
      }
      expect(thrown).toMatchObject({
        code: 'TP_DEGREE_INVALID',
        message: expect.stringContaining(`${text} is not a tensor-parallel degree`),
      })
    }
  })
})
