import { isRunning, processState } from '@rankwise/core'
import { beforeAll, describe, expect, test, vi } from 'vitest'
import { Arena } from '../src/arena.ts'
import { loadNative, type Native } from '../src/native.ts'

const NONCE = 12_345

let native: Native
beforeAll(async () => {
  native = await loadNative()
})

/** An arena of two ranks, as both of them have it. */
function twoArenas() {
  const host = Arena.create(native, 2, 4096, NONCE)
  const guest = Arena.open(native, host.location(NONCE))
  const destroy = () => {
    host.destroy()
    guest.destroy()
  }
  return { host, guest, [Symbol.dispose]: destroy }
}

describe('arena', () => {
  test('what one rank writes the other reads', () => {
    using arenas = twoArenas()
    const { host, guest } = arenas
    host.bytes[host.slot(1, 0)] = 7
    expect(guest.bytes[guest.slot(1, 0)]).toBe(7)
    expect(host.slot(0, 1) - host.slot(0, 0)).toBe(4096)
  })

  test('a phase is reached when all ranks have, across the wrap of the counter', () => {
    using arenas = twoArenas()
    const { host, guest } = arenas
    for (const phase of [1, 2 ** 31 - 1, -(2 ** 31), -1, 0, 1]) {
      host.arrive(0, phase)
      expect(guest.allArrived(phase)).toBe(false)
      guest.arrive(1, phase)
      expect(host.allArrived(phase)).toBe(true)
    }
  })

  test('the last rank to arrive wakes those that sleep, and only it', async () => {
    using arenas = twoArenas()
    const { host, guest } = arenas
    const wake = vi.spyOn(native, 'wake')
    const sleep = host.sleep(host.ticket)
    host.arrive(0, 1)
    expect(wake).not.toHaveBeenCalled()
    guest.arrive(1, 1)
    expect(wake).toHaveBeenCalledOnce()
    await sleep
    guest.arrive(1, 2)
    host.arrive(0, 2)
    expect(wake).toHaveBeenCalledOnce()
    wake.mockRestore()
  })

  test('a sleep ends at once when the ticket is an old one', async () => {
    using arenas = twoArenas()
    const { host } = arenas
    const { ticket } = host
    host.wake()
    await host.sleep(ticket)
    expect(host.ticket).not.toBe(ticket)
  })

  test('a verdict is read as it was written', () => {
    using arenas = twoArenas()
    const verdict = { code: 'ABORTED', what: 'no “memory”\n\u0000\ud800', ranks: [0, 1] }
    expect(arenas.host.verdict(1)).toBeUndefined()
    arenas.guest.giveUp(1, verdict)
    expect(arenas.host.verdict(1)).toEqual(verdict)
    expect(arenas.host.verdict(0)).toBeUndefined()
  })

  test('another memory than the one of rank 0 is refused', () => {
    using arenas = twoArenas()
    const location = arenas.host.location(NONCE)
    const refused = expect.objectContaining({ code: 'SHARED_MEMORY' })
    expect(() => Arena.open(native, { ...location, nonce: NONCE + 1 })).toThrow(refused)
    expect(() => Arena.open(native, { ...location, slotBytes: 8192 })).toThrow(refused)
    expect(() => Arena.open(native, { ...location, descriptor: 9999 })).toThrow(refused)
    arenas.host.close()
    expect(() => Arena.open(native, location)).toThrow(refused)
  })

  test('beyond 4 GiB it is refused, not crashed', () => {
    const refused = expect.objectContaining({ code: 'SHARED_MEMORY' })
    expect(() => Arena.create(native, 8, 2 ** 28, NONCE)).toThrow(refused)
  })

  test('after destroy nothing touches the memory', () => {
    const arena = Arena.create(native, 2, 4096, NONCE)
    arena.destroy()
    arena.destroy()
    expect(() => arena.arrive(0, 1)).toThrow(RangeError)
    expect(arena.bytes).toHaveLength(0)
  })
})

describe('process state', () => {
  test('of this process, and of none', () => {
    const { state, startTime } = processState(process.pid) ?? {}
    expect(state).toMatch(/^[RS]$/)
    expect(isRunning(process.pid, startTime as string)).toBe(true)
    expect(processState(2 ** 30)).toBeUndefined()
  })

  test('a later process with the same pid is not taken for it', () => {
    expect(isRunning(process.pid, '1')).toBe(false)
  })
})
