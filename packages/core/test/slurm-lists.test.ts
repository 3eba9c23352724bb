import fc from 'fast-check'
import { describe, expect, test } from 'vitest'
import { expandHostList, expandTaskCounts } from '../src/slurm-lists.ts'

describe('expandHostList', () => {
  test.each<[string, string[]]>([
    ['node1', ['node1']],
    ['a,b', ['a', 'b']],
    ['node[1-3]', ['node1', 'node2', 'node3']],
    ['node[01-03,7],gpu-a', ['node01', 'node02', 'node03', 'node7', 'gpu-a']],
    ['n[098-101]', ['n098', 'n099', 'n100', 'n101']],
    [
      'rack[1-2]node[1,3].cluster',
      ['rack1node1.cluster', 'rack1node3.cluster', 'rack2node1.cluster', 'rack2node3.cluster'],
    ],
    ['[1-2]', ['1', '2']],
  ])('%s', (text, hosts) => {
    expect(expandHostList(text)).toEqual(hosts)
  })

  test.each([
    '',
    ',',
    'a,',
    'n[',
    'n]',
    'n[]',
    'n[1-]',
    'n[-1]',
    'n[2-1]',
    'n[a]',
    'n[1[2]]',
    'two words',
    'n[1-999999999]',
  ])('%o is none', (text) => {
    expect(expandHostList(text)).toBeUndefined()
  })

  test('any text gives a list or none, in little time', () => {
    const part = fc.oneof(fc.constantFrom('[', ']', ',', '-', 'n', '1-9', '1-99999'), fc.nat().map(String))
    fc.assert(
      fc.property(fc.array(part, { maxLength: 12 }), (parts) => {
        const hosts = expandHostList(parts.join(''))
        expect(hosts === undefined || hosts.every((host) => /^[^[\],\s]+$/.test(host))).toBe(true)
      }),
    )
  })
})

describe('expandTaskCounts', () => {
  test.each<[string, number[]]>([
    ['4', [4]],
    ['2(x3),1', [2, 2, 2, 1]],
    ['1,2,1(x2)', [1, 2, 1, 1]],
  ])('%s', (text, counts) => {
    expect(expandTaskCounts(text)).toEqual(counts)
  })

  test.each(['', 'x', '2(x)', '2(3)', '2(x3', '1,', '2(x999999)'])('%o is none', (text) => {
    expect(expandTaskCounts(text)).toBeUndefined()
  })
})
