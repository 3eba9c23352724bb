import { setTimeout } from 'node:timers/promises'
import { afterAll, beforeAll, describe, expect, test } from 'vitest'
import type { KernelName, TransportName } from '../src/index.ts'
import { builtAddon } from './built-addon.ts'
import { xorshift } from './oracle.ts'
import { endOf, type Held, Ranks } from './ranks.ts'

/** 200 in all are run with RANKWISE_KILLS=200. */
const KILLS = Number(process.env.RANKWISE_KILLS ?? 20)

/** What the interface promises: survivors fail within this time. */
const NOTICE_MS = 2_000

const KERNELS: readonly KernelName[] = builtAddon() === undefined ? ['wasm', 'js'] : ['native', 'wasm', 'js']
const CASES: readonly [TransportName, KernelName | 'auto'][] = [
  ...KERNELS.map((kernel): [TransportName, KernelName] => ['shm', kernel]),
  ['tcp', 'auto'],
]

let ranks: Ranks
beforeAll(() => {
  ranks = new Ranks(3)
})
afterAll(() => ranks[Symbol.asyncDispose]())

describe.each(CASES)('%s, %s', (transport, kernel) => {
  const kills = Math.ceil(KILLS / CASES.length)
  test(
    `${kills} kills at random moments: the survivors name the dead rank in time and keep nothing`,
    async () => {
      const next = xorshift(kernel.length)
      for (let i = 0; i < kills; i++) {
        await ranks.init({ transport, kernel })
        const dead = (next() >>> 0) % 3
        const survivors = [0, 1, 2].filter((rank) => rank !== dead)
        const failures = survivors.map((rank) => ranks.ask(rank, { do: 'untilFailure' }))
        void ranks.ask(dead, { do: 'untilFailure' })
        await setTimeout((next() >>> 0) % 120)
        const killed = performance.now()
        ranks.kill(dead, 'SIGKILL')
        for (const { error } of await Promise.all(failures)) {
          expect(error).toMatchObject({ code: 'RANK_LOST', actual: { ranks: [dead] } })
          expect(error?.message).toMatch(endOf(transport, dead))
        }
        expect(performance.now() - killed).toBeLessThan(NOTICE_MS)
        for (const rank of survivors) {
          await ranks.ask(rank, { do: 'destroy' })
          expect(((await ranks.ask(rank, { do: 'held' })).value as Held).mappings).toBe(0)
        }
      }
    },
    20_000 + 3_000 * kills,
  )
})
