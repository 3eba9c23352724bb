import { describe, expect, it, vi } from 'vitest'
import { engineError } from '../src/engine/engine-error.ts'
import { ort } from '../src/index.ts'

vi.mock('../src/engine/addon.ts', () => ({
  loadAddon: () => {
    throw engineError('the addon does not load', { remedy: 'compile it' })
  },
  libraryPath: () => '/none',
}))

describe('where there is no addon', () => {
  it('the binding is taken, and why is said', async () => {
    await using backend = await ort({ device: 'cpu', engine: 'auto' })
    expect(backend.engine).toBe('binding')
    expect(backend.selection.rejected).toEqual([
      { engine: 'capi', reason: expect.stringContaining('the addon does not load') },
    ])
  })

  it('nothing stands in for an engine that is asked for', async () => {
    await expect(ort({ device: 'cpu', engine: 'capi' })).rejects.toMatchObject({
      code: 'ORT_ENGINE',
      remedy: expect.stringContaining('compile it'),
    })
  })
})
