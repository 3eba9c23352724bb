import { setTimeout as sleep } from 'node:timers/promises'
import { describe, expect, it } from 'vitest'
import { StallGuard } from '../../src/hub/stall-guard.ts'
import { TransientError } from '../../src/hub/transient-error.ts'
import { expectCode } from '../checkpoint/files.ts'

/** A part of an answer that comes after some time. */
function part(ms: number, bytes: number): Promise<number> {
  return sleep(ms).then(() => bytes)
}

/** Keeps the event loop busy, as the run of a model does. */
function block(ms: number): void {
  const end = performance.now() + ms
  while (performance.now() < end);
}

const itself = (bytes: number) => bytes

describe('StallGuard', () => {
  it('lets parts pass that come in time', async () => {
    const guard = new StallGuard(300, undefined)
    for (let i = 0; i < 10; i++) expect(await guard.next(part(50, 20_000), itself)).toBe(20_000)
    expect(guard.signal.aborted).toBe(false)
  })

  it('ends the request when nothing comes', async () => {
    const guard = new StallGuard(100, undefined)
    const never = new Promise<number>((_, reject) => {
      guard.signal.addEventListener('abort', () => reject(guard.signal.reason), { once: true })
    })
    await expect(guard.next(never, itself)).rejects.toThrow(TransientError)
  })

  it('does not wait for a request that does not end', async () => {
    await expect(new StallGuard(100, undefined).next(new Promise<number>(() => {}), itself)).rejects.toThrow(
      TransientError,
    )
    const controller = new AbortController()
    const waiting = new StallGuard(60_000, controller.signal).next(new Promise<number>(() => {}), itself)
    controller.abort()
    await expectCode(() => waiting, 'ABORTED')
    await expectCode(
      () => new StallGuard(100, controller.signal).next(new Promise<number>(() => {}), itself),
      'ABORTED',
    )
  })

  it('ends the request when little comes, however often', async () => {
    const guard = new StallGuard(100, undefined)
    const drip = async () => {
      for (;;) await guard.next(part(5, 1), itself)
    }
    await expect(drip()).rejects.toThrow(/less than 16384 bytes in 100 ms/)
    expect(guard.signal.aborted).toBe(true)
  })

  it('does not count what the receiver does between parts', async () => {
    const guard = new StallGuard(100, undefined)
    for (let i = 0; i < 5; i++) {
      expect(await guard.next(part(1, 1), itself)).toBe(1)
      await sleep(60)
    }
  })

  it('does not count time in which the event loop is blocked', async () => {
    const guard = new StallGuard(200, undefined)
    for (let i = 0; i < 3; i++) {
      const waiting = guard.next(part(10, 1), itself)
      block(300)
      expect(await waiting).toBe(1)
    }
  })

  it('tells an abort from a stall', async () => {
    const controller = new AbortController()
    const guard = new StallGuard(100, controller.signal)
    controller.abort()
    await expectCode(() => guard.next(Promise.reject(new Error('socket')), itself), 'ABORTED')
    expect(guard.signal.aborted).toBe(true)
  })
})
