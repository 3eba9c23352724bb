import type { Tensor } from '@rankwise/core'
import { expectClose } from '@rankwise/fixtures'
import { expect } from 'vitest'

/** Packed latents after every step are those of a golden. */
export function expectSameLatents(latents: readonly Tensor[], golden: ReadonlyMap<string, Tensor>): void {
  expect(latents).toHaveLength([...golden.keys()].filter((name) => /^latents\.[1-9]/.test(name)).length)
  for (const [i, actual] of latents.entries()) {
    expectClose(actual, golden.get(`latents.${i + 1}`) as Tensor, { relativeRms: 2e-5 })
  }
}
