import assert from 'node:assert/strict'
import type { CheckGroup } from '../check.ts'
import type { Comparable } from '../compare/comparable.ts'
import { expectClose } from '../compare/expect-close.ts'
import { toleranceOf } from '../compare/tolerance-table.ts'
import type { ModelConformanceOptions, ModelGolden } from './options.ts'

type Outputs = Readonly<Record<string, Comparable>>

/** The model on real processes, against what the reference implementation computes. */
export function goldenGroups({ goldens, run, degrees = [1, 2, 4] }: ModelConformanceOptions): readonly CheckGroup[] {
  return degrees.map((degree) => {
    // One run serves all checks of a degree.
    let running: ReturnType<typeof run> | undefined
    const ranks = () => {
      running ??= run(degree)
      return running
    }
    return {
      title: `on ${degree} ${degree === 1 ? 'process' : 'processes'}`,
      checks: [
        ...goldens.map((golden, i) => ({
          title: `${golden.name} agrees with the reference implementation`,
          timeoutMs: 120_000,
          run: async () => checkGolden((await ranks())[0]?.[i], golden),
        })),
        {
          title: 'all ranks hold the same bits',
          timeoutMs: 120_000,
          run: async () => {
            const all = await ranks()
            assert.equal(all.length, degree)
            for (const outputs of all) assert.deepEqual(outputs, all[0])
          },
        },
      ],
    }
  })
}

/** @throws Error naming the output and the worst index */
async function checkGolden(outputs: Outputs | undefined, golden: ModelGolden): Promise<void> {
  const expected = Object.entries(await golden.outputs())
  assert.ok(expected.length > 0, `the golden ${golden.name} has outputs`)
  for (const [name, whole] of expected) {
    const output = outputs?.[name]
    assert.ok(output !== undefined, `the output '${name}' is there`)
    try {
      expectClose(output, whole, golden.tolerance ?? toleranceOf('golden', 'float32', whole))
    } catch (error) {
      throw new Error(`${name}: ${(error as Error).message}`, { cause: error })
    }
  }
}
