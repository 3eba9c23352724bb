import { referencePath } from '@rankwise/fixtures'
import { describe, expect, it } from 'vitest'
import { rankwise } from './rankwise.ts'

const klein = referencePath('flux2-klein-tiny')
const sizes = ['--image-tokens', '64', '--text-tokens', '32']

describe('rankwise plan', () => {
  it('prints the traced graph with placements as stable text', async () => {
    const { code, stdout, stderr } = await rankwise('plan', klein, '--tp', '2', '--graph', ...sizes)
    expect(code, stderr).toBe(0)
    expect(stdout).toMatchSnapshot()
  })

  it('reports weights, exchanges and legal degrees', async () => {
    const { code, stdout, stderr } = await rankwise('plan', klein, '--tp', '2', ...sizes)
    expect(code, stderr).toBe(0)
    expect(stdout).toMatchSnapshot()
  })

  it('takes the folder of a transformer as well, and prints JSON', async () => {
    const { code, stdout } = await rankwise(
      'plan',
      referencePath('flux2-tiny', 'transformer'),
      '--tp',
      '4',
      '--json',
      ...sizes,
    )
    expect(code).toBe(0)
    expect(JSON.parse(stdout)).toMatchObject({ tpDegree: 4, allReduces: 7, legalDegrees: [1, 2, 4] })
  })

  it('refuses an illegal degree', async () => {
    const { code, stderr } = await rankwise('plan', klein, '--tp', '3')
    expect(code).toBe(1)
    expect(stderr).toContain('HEADS_NOT_DIVISIBLE')
  })
})
