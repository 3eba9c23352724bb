import { describe, expect, it } from 'vitest'
import type { GraphExecutor } from '../src/executor.ts'
import { ExecutorCache } from '../src/executor-cache.ts'

/** Executors that say when they are compiled and freed. */
class Executors {
  readonly compiled: string[] = []
  readonly freed: string[] = []

  compile(key: string): () => Promise<GraphExecutor> {
    return async () => {
      this.compiled.push(key)
      return { dispose: async () => void this.freed.push(key) } as unknown as GraphExecutor
    }
  }
}

const keys = Array.from({ length: 10 }, (_, i) => `shape ${i}`)

describe('ExecutorCache', () => {
  it('compiles a shape once, also for calls that overlap', async () => {
    const [cache, executors] = [new ExecutorCache(), new Executors()]
    const use = () => cache.use('a', executors.compile('a'), async () => 1)
    expect(await Promise.all([use(), use()])).toEqual([1, 1])
    expect(await use()).toBe(1)
    expect(executors.compiled).toEqual(['a'])
  })

  it('frees the least recently used shapes beyond 8', async () => {
    const [cache, executors] = [new ExecutorCache(), new Executors()]
    const use = (key: string) => cache.use(key, executors.compile(key), async () => {})
    for (const key of keys.slice(0, 8)) await use(key)
    await use('shape 0')
    await use('shape 8')
    await use('shape 9')
    expect(executors.freed).toEqual(['shape 1', 'shape 2'])
    await use('shape 1')
    expect(executors.compiled.filter((key) => key === 'shape 1')).toHaveLength(2)
  })

  it('frees no executor that is in use', async () => {
    const [cache, executors] = [new ExecutorCache(), new Executors()]
    const gate: { open?: () => void } = {}
    const running = cache.use(
      'slow',
      executors.compile('slow'),
      () => new Promise<void>((resolve) => (gate.open = resolve)),
    )
    for (const key of keys) await cache.use(key, executors.compile(key), async () => {})
    expect(executors.freed).not.toContain('slow')
    gate.open?.()
    await running
    await cache.use('another', executors.compile('another'), async () => {})
    expect(executors.freed).toContain('slow')
  })

  it('compiles again what could not be compiled, and frees everything', async () => {
    const [cache, executors] = [new ExecutorCache(), new Executors()]
    const failing = async () => Promise.reject(new Error('no memory'))
    await expect(cache.use('a', failing, async () => {})).rejects.toThrow('no memory')
    await cache.use('a', executors.compile('a'), async () => {})
    await expect(cache.use('a', failing, async () => Promise.reject(new Error('run')))).rejects.toThrow('run')
    await cache.dispose()
    expect(executors.freed).toEqual(['a'])
  })
})
