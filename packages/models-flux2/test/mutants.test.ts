import { expectCaught, modelChecks } from '@rankwise/conformance'
import { packedColwise, type TensorParallelPlan } from '@rankwise/core'
import { describe, it } from 'vitest'
import { Flux2Transformer2DModel, flux2Plan } from '../src/index.ts'
import { CONFORMANCE } from './conformance-options.ts'

/** The checks of a model with another plan that match a title. */
function groupsOf(change: TensorParallelPlan, title: RegExp) {
  class Planned extends Flux2Transformer2DModel {
    static override readonly tensorParallelPlan = { ...flux2Plan, ...change }
  }
  return modelChecks({ ...CONFORMANCE, model: Planned }).filter((group) => title.test(group.title))
}

describe('mutants of the plan of FLUX.2', () => {
  it('a fused projection is split without its blocks', async (context) => {
    await expectCaught(groupsOf({ 'transformer_blocks.*.ff.linear_in': 'colwise' }, /weights of flux2-klein/), context)
  })

  it('gate and up are split in other proportions', async (context) => {
    await expectCaught(groupsOf({ 'transformer_blocks.*.ff.linear_in': packedColwise([1, 2]) }, /plan of/), context)
  })

  it('a block gives what another one does', async (context) => {
    const goldens = CONFORMANCE.goldens.map((golden) => ({
      ...golden,
      outputs: async () => {
        const outputs = await golden.outputs()
        return 'mid.double1.0' in outputs ? { ...outputs, 'mid.double0.0': outputs['mid.double1.0'] } : outputs
      },
    }))
    const groups = modelChecks({ ...CONFORMANCE, goldens, degrees: [1] })
    await expectCaught(
      groups.filter(({ title }) => title === 'on 1 process'),
      context,
    )
  })
})
