import { setTimeout as delay } from 'node:timers/promises'
import { RankwiseError } from '@rankwise/core'
import { describe, expect, it } from 'vitest'
import { loadAll } from '../src/load-all.ts'

/** What loads do, in order; each ends after so many milliseconds, unless it is aborted. */
class Recorder {
  readonly events: string[] = []

  load(name: string, milliseconds: number, error?: Error): (signal: AbortSignal) => Promise<AsyncDisposable> {
    return async (signal) => {
      this.events.push(`begins ${name}`)
      await delay(milliseconds, undefined, { signal }).catch(() => {
        this.events.push(`aborts ${name}`)
        throw new RankwiseError('ABORTED', name)
      })
      if (error !== undefined) throw error
      this.events.push(`has ${name}`)
      return { [Symbol.asyncDispose]: async () => void this.events.push(`frees ${name}`) }
    }
  }
}

const none = new AbortController().signal

describe('loads', () => {
  it('run at the same time', async () => {
    const recorder = new Recorder()
    const loads = { a: recorder.load('a', 40), b: recorder.load('b', 1) }
    const loaded = await loadAll(loads, { isParallel: true, signal: none })
    expect(Object.keys(loaded).sort()).toEqual(['a', 'b'])
    expect(recorder.events).toEqual(['begins a', 'begins b', 'has b', 'has a'])
  })

  it('run one after the other, and none after one that failed', async () => {
    const recorder = new Recorder()
    const loads = { a: recorder.load('a', 5), b: recorder.load('b', 0, new Error('broken')), c: recorder.load('c', 0) }
    await expect(loadAll(loads, { isParallel: false, signal: none })).rejects.toThrow('broken')
    expect(recorder.events).toEqual(['begins a', 'has a', 'begins b', 'frees a'])
  })

  it('are all freed when one fails: of those that are there, and of those under way', async () => {
    const recorder = new Recorder()
    const loads = {
      slow: recorder.load('slow', 60_000),
      broken: recorder.load('broken', 20, new RankwiseError('BROKEN', 'no such file')),
      quick: recorder.load('quick', 1),
    }
    await expect(loadAll(loads, { isParallel: true, signal: none })).rejects.toMatchObject({ code: 'BROKEN' })
    expect(recorder.events.slice(3)).toEqual(['has quick', 'aborts slow', 'frees quick'])
  })

  it.each([true, false])('end with the signal, at the same time or not (%s)', async (isParallel) => {
    const recorder = new Recorder()
    const stop = new AbortController()
    const loads = { a: recorder.load('a', 1), b: recorder.load('b', 60_000) }
    const loading = loadAll(loads, { isParallel, signal: stop.signal })
    setTimeout(() => stop.abort(), 50)
    await expect(loading).rejects.toMatchObject({ code: 'ABORTED' })
    expect(recorder.events.at(-1)).toBe('frees a')
  })
})
