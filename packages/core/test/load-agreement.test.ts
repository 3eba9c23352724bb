import { rm, truncate, writeFile } from 'node:fs/promises'
import { join } from 'node:path'
import fc from 'fast-check'
import { describe, expect, test } from 'vitest'
import type { DeviceTensor, LoadShardOptions } from '../src/backend.ts'
import { Checkpoint, type ShardSource, type TensorInfo } from '../src/checkpoint/index.ts'
import type { Collectives } from '../src/collectives.ts'
import { RankwiseError } from '../src/errors.ts'
import { type FromFirst, loadTogether, type SayOptions } from '../src/load-agreement.ts'
import { loadWeights } from '../src/load-weights.ts'
import { Linear } from '../src/nn/index.ts'
import { ReferenceBackend } from '../src/reference/index.ts'
import { writeSafetensors } from '../src/save/index.ts'
import { Tensor } from '../src/tensor.ts'
import { temporaryFolder } from './checkpoint/files.ts'
import { MemoryGroup } from './support-collectives.ts'

const after = (milliseconds: number) => new Promise((resolve) => setTimeout(resolve, milliseconds))

/** The ranks of a group in this process, which gather by adding what each has in its place. */
function ranksOf(worldSize: number): readonly Collectives[] {
  const group = new MemoryGroup(worldSize)
  return Array.from({ length: worldSize }, (_, rank) => {
    const member = group.member(rank)
    return Object.assign(member, {
      async allGather(tensor: Tensor): Promise<Tensor> {
        const all = Tensor.zeros(tensor.dtype, [worldSize * tensor.data.length])
        all.data.set(tensor.data as never, rank * tensor.data.length)
        await member.allReduce([all])
        return all
      },
    })
  })
}

/** Whether all ranks have taken part in as many exchanges: the next one of all is an exchange of the same thing. */
async function expectInStep(ranks: readonly Collectives[]): Promise<void> {
  const tensors = ranks.map(({ rank }) => new Tensor('float64', [1], Float64Array.of(10 ** rank)))
  await Promise.all(ranks.map((rank, i) => rank.allReduce([tensors[i] as Tensor])))
  for (const { data } of tensors) expect(data[0]).toBe(Number('1'.repeat(ranks.length)))
}

interface Outcome {
  readonly value?: string
  readonly error?: RankwiseError
}

const outcomeOf = (load: Promise<string>): Promise<Outcome> =>
  load.then(
    (value) => ({ value }),
    (error: RankwiseError) => ({ error }),
  )

/** What a rank does while it loads. */
interface Load {
  readonly ends: 'loaded' | 'failed' | 'aborted'
  /** Milliseconds. */
  readonly after: number
}

/** Loads on every rank; a rank that is aborted by another ends when it notices. */
async function loadOnRanks(ranks: readonly Collectives[], loads: readonly Load[]) {
  const released: number[] = []
  const outcomes = await Promise.all(
    loads.map(({ ends, after: milliseconds }, rank) => {
      const own = new AbortController()
      const load = async (signal: AbortSignal) => {
        await waitFor(milliseconds, signal)
        if (ends === 'failed') throw new RankwiseError('BROKEN', `disk of rank ${rank}`)
        if (ends === 'aborted') own.abort()
        return `weights of ${rank}`
      }
      const release = () => void released.push(rank)
      return outcomeOf(loadTogether(load, { collectives: ranks[rank], signal: own.signal, release }))
    }),
  )
  return { outcomes, released }
}

async function waitFor(milliseconds: number, signal: AbortSignal): Promise<void> {
  for (const end = Date.now() + milliseconds; Date.now() < end; ) {
    if (signal.aborted) throw new RankwiseError('ABORTED', 'noticed')
    await after(1)
  }
}

describe('ranks that load together', () => {
  test('have all loaded, or none, and stay in step, whichever fails and when', async () => {
    const load = fc.record({
      ends: fc.constantFrom<Load['ends']>('loaded', 'loaded', 'loaded', 'failed', 'aborted'),
      after: fc.constantFrom(0, 1, 20, 150, 250),
    })
    const cases = fc.sample(fc.array(load, { minLength: 2, maxLength: 4 }), 150)
    await Promise.all(cases.map(expectAgreement))
    expect(cases.filter((loads) => loads.every(({ ends }) => ends === 'loaded')).length).toBeGreaterThan(5)
  })

  test('wait for the last', async () => {
    const { outcomes } = await loadOnRanks(ranksOf(3), [
      { ends: 'loaded', after: 0 },
      { ends: 'loaded', after: 300 },
      { ends: 'loaded', after: 150 },
    ])
    expect(outcomes.map(({ value }) => value)).toEqual(['weights of 0', 'weights of 1', 'weights of 2'])
  })

  test('stop within a second when one is aborted, however slowly the others load', async () => {
    const start = Date.now()
    const { outcomes, released } = await loadOnRanks(ranksOf(3), [
      { ends: 'loaded', after: 60_000 },
      { ends: 'aborted', after: 10 },
      { ends: 'loaded', after: 10 },
    ])
    expect(outcomes.map(({ error }) => error?.code)).toEqual([
      'LOAD_FAILED_ELSEWHERE',
      'ABORTED',
      'LOAD_FAILED_ELSEWHERE',
    ])
    expect(outcomes[0]?.error?.actual).toMatchObject({ rank: 1, code: 'ABORTED' })
    expect(released.sort()).toEqual([1, 2])
    expect(Date.now() - start).toBeLessThan(1000)
  })

  test('stop when one is aborted that has loaded and waits', async () => {
    const ranks = ranksOf(2)
    const own = new AbortController()
    const released: string[] = []
    const release = (value: string) => void released.push(value)
    const waiting = loadTogether(async () => 'first', { collectives: ranks[0], signal: own.signal, release })
    const slow = loadTogether(
      async (signal) => {
        await waitFor(60_000, signal)
        return 'second'
      },
      { collectives: ranks[1], release },
    )
    setTimeout(() => own.abort(new Error('enough')), 50)
    const [first, second] = await Promise.all([outcomeOf(waiting), outcomeOf(slow)])
    expect(first.error).toMatchObject({ code: 'ABORTED', cause: new Error('enough') })
    expect(second.error).toMatchObject({ code: 'LOAD_FAILED_ELSEWHERE', actual: { rank: 0, code: 'ABORTED' } })
    expect(released).toEqual(['first'])
    await expectInStep(ranks)
  })

  test('load one model after the other when both are begun at once', async () => {
    const ranks = ranksOf(2)
    const events: string[] = []
    const loadBoth = async (collectives: Collectives, delays: readonly number[]) => {
      const one = (name: string, delay: number) =>
        loadTogether(
          async () => {
            events.push(`${collectives.rank} begins ${name}`)
            await after(delay)
            if (name === 'a' && collectives.rank === 1) throw new Error('no room')
            events.push(`${collectives.rank} has ${name}`)
            return name
          },
          { collectives, release: (value) => void events.push(`${collectives.rank} frees ${value}`) },
        )
      return Promise.all([outcomeOf(one('a', delays[0] as number)), outcomeOf(one('b', delays[1] as number))])
    }
    const [first, second] = await Promise.all([
      loadBoth(ranks[0] as Collectives, [0, 50]),
      loadBoth(ranks[1] as Collectives, [50, 0]),
    ])
    expect(first?.[0]?.error).toMatchObject({ code: 'LOAD_FAILED_ELSEWHERE', actual: { rank: 1, code: 'RANK_FAILED' } })
    expect(second?.[0]?.error?.message).toBe('no room')
    expect([first?.[1]?.value, second?.[1]?.value]).toEqual(['b', 'b'])
    expect(events.filter((event) => event.startsWith('0'))).toEqual([
      '0 begins a',
      '0 has a',
      '0 frees a',
      '0 begins b',
      '0 has b',
    ])
    await expectInStep(ranks)
  })

  test('hear what rank 0 has found, each load its own, however long that takes', async () => {
    const ranks = ranksOf(3)
    const one = (collectives: Collectives, name: string, delay: number) =>
      loadTogether(
        async (_, fromFirst) => {
          await after(Math.random() * 20)
          const commit = await fromFirst(async () => {
            await after(delay)
            return `commit of ${name}, as rank ${collectives.rank} knows it`
          })
          return commit
        },
        { collectives, release: () => {} },
      )
    const loads = await Promise.all(ranks.map((rank) => Promise.all([one(rank, 'a', 250), one(rank, 'b', 0)])))
    for (const values of loads) {
      expect(values).toEqual(['a', 'b'].map((name) => `commit of ${name}, as rank 0 knows it`))
    }
    await expectInStep(ranks)
  })

  test('do not wait for what rank 0 has not found, when it fails or another is aborted', async () => {
    const own = new AbortController()
    setTimeout(() => own.abort(), 50)
    const never = (signal: AbortSignal) => waitFor(60_000, signal).then(() => 'never')
    const failing = () => Promise.reject(new RankwiseError('BROKEN', 'no such repository'))
    for (const [work, codes] of [
      [failing, ['BROKEN', 'LOAD_FAILED_ELSEWHERE', 'LOAD_FAILED_ELSEWHERE']],
      [never, ['LOAD_FAILED_ELSEWHERE', 'LOAD_FAILED_ELSEWHERE', 'ABORTED']],
    ] as const) {
      const ranks = ranksOf(3)
      const start = Date.now()
      const load = (signal: AbortSignal, fromFirst: FromFirst) => fromFirst(() => work(signal))
      const outcomes = ranks.map((collectives, rank) => {
        const signal = rank === 2 && work === never ? { signal: own.signal } : {}
        return outcomeOf(loadTogether(load, { collectives, release: () => {}, ...signal }))
      })
      expect((await Promise.all(outcomes)).map(({ error }) => error?.code)).toEqual(codes)
      expect(Date.now() - start).toBeLessThan(1000)
      await expectInStep(ranks)
    }
  })

  test.each([0, 1, 2])('are refused on all ranks when rank %i alone does not ask rank 0', async (silent) => {
    const ranks = ranksOf(3)
    const released: string[] = []
    const outcomes = ranks.map((collectives, rank) => {
      const load = async (_: AbortSignal, fromFirst: FromFirst) =>
        rank === silent ? 'folder' : fromFirst(async () => 'commit')
      return outcomeOf(loadTogether(load, { collectives, release: (value) => void released.push(value) }))
    })
    expect((await Promise.all(outcomes)).map(({ error }) => error?.code)).toEqual(Array(3).fill('LOAD_DIFFERS'))
    expect(released).toContain('folder')
    await expectInStep(ranks)
  })

  test('load parts at the same time, in whatever order, and agree on the whole', async () => {
    const ranks = ranksOf(2)
    const events: string[] = []
    const part = (collectives: Collectives, name: string, delay: number, fromFirst: FromFirst, signal: AbortSignal) =>
      loadTogether(
        async (_, word) => {
          const commit = await word(async () => 'commit')
          events.push(`${collectives.rank} begins ${name} of ${commit}`)
          await waitFor(delay, signal)
          if (name === 'b' && collectives.rank === 1) throw new RankwiseError('BROKEN', 'no such file')
          return name
        },
        { collectives, within: fromFirst, release: () => void events.push('frees a part') },
      )
    const both = (collectives: Collectives, delays: readonly [number, number]) =>
      loadTogether(
        async (signal, fromFirst) => {
          const names = collectives.rank === 0 ? ['a', 'b'] : ['b', 'a']
          const parts = names.map((name, i) => part(collectives, name, delays[i] as number, fromFirst, signal))
          return (await Promise.all(parts)).join()
        },
        { collectives, release: (value) => void events.push(`frees ${value}`) },
      )
    const outcomes = await Promise.all([
      outcomeOf(both(ranks[0] as Collectives, [0, 20])),
      outcomeOf(both(ranks[1] as Collectives, [150, 60_000])),
    ])
    expect(outcomes[0]?.error).toMatchObject({ code: 'LOAD_FAILED_ELSEWHERE', actual: { rank: 1, code: 'BROKEN' } })
    expect(outcomes[1]?.error?.code).toBe('BROKEN')
    expect(events).toEqual([
      '0 begins a of commit',
      '0 begins b of commit',
      '1 begins b of commit',
      '1 begins a of commit',
      'frees a,b',
    ])
    await expectInStep(ranks)
  })

  test('refuse parts of which rank 0 says another word', async () => {
    const ranks = ranksOf(2)
    const outcomes = ranks.map((collectives) => {
      const load = async (_: AbortSignal, fromFirst: FromFirst) => {
        await fromFirst(async () => 'one commit')
        return loadTogether((_signal, word) => word(async () => 'another'), {
          collectives,
          within: fromFirst,
          release: () => {},
        })
      }
      return outcomeOf(loadTogether(load, { collectives, release: () => {} }))
    })
    const codes = (await Promise.all(outcomes)).map(({ error }) => error?.code)
    expect(codes).toEqual(['LOAD_DIFFERS', 'LOAD_FAILED_ELSEWHERE'])
    await expectInStep(ranks)
  })

  test('are refused on all ranks that have said other options, late as it may be', async () => {
    const ranks = ranksOf(3)
    const released: number[] = []
    const options = [{ dtype: 'float32' }, { dtype: 'bfloat16', lowMemory: 'true' }, { lowMemory: 'true' }]
    const outcomes = ranks.map((collectives, rank) => {
      const load = async (_: AbortSignal, fromFirst: FromFirst, sayOptions: SayOptions) => {
        await fromFirst(async () => 'commit')
        await after(rank * 150)
        sayOptions(options[rank] as Record<string, string>)
        return 'weights'
      }
      return outcomeOf(loadTogether(load, { collectives, release: () => void released.push(rank) }))
    })
    for (const { error } of await Promise.all(outcomes)) {
      expect(error).toMatchObject({
        code: 'LOAD_DIFFERS',
        where: 'dtype',
        actual: { dtype: ['float32', 'bfloat16', 'nothing'] },
      })
      expect(error?.message).toContain('actual: dtype [float32, bfloat16, nothing]')
    }
    expect(released.sort()).toEqual([0, 1, 2])
    await expectInStep(ranks)
  })

  test('agree when no rank has said another option than another', async () => {
    const ranks = ranksOf(3)
    const outcomes = ranks.map((collectives, rank) => {
      const load = async (_: AbortSignal, fromFirst: FromFirst, sayOptions: SayOptions) => {
        sayOptions(rank === 0 ? {} : { dtype: 'bfloat16' })
        sayOptions(rank === 2 ? {} : { 'quote " and \n line': 'x\ny' })
        return fromFirst(async () => 'word of\nrank 0')
      }
      return outcomeOf(loadTogether(load, { collectives, release: () => {} }))
    })
    expect((await Promise.all(outcomes)).map(({ value }) => value)).toEqual(Array(3).fill('word of\nrank 0'))
    await expectInStep(ranks)
  })

  test('hear what one cannot load before they hear of other options', async () => {
    const ranks = ranksOf(2)
    const outcomes = ranks.map((collectives, rank) => {
      const load = async (_: AbortSignal, _word: FromFirst, sayOptions: SayOptions) => {
        sayOptions({ lowMemory: String(rank === 1) })
        if (rank === 1) throw new RankwiseError('BROKEN', 'no such backend')
        return 'weights'
      }
      return outcomeOf(loadTogether(load, { collectives, release: () => {} }))
    })
    expect((await Promise.all(outcomes)).map(({ error }) => error?.code)).toEqual(['LOAD_FAILED_ELSEWHERE', 'BROKEN'])
    await expectInStep(ranks)
  })

  test('hear of long messages, cut at a character', async () => {
    const ranks = ranksOf(2)
    const message = `${'ü'.repeat(3000)} end`
    const fails = loadTogether(() => Promise.reject(new RankwiseError('BROKEN', message)), {
      collectives: ranks[0],
      release: () => {},
    })
    const loads = loadTogether(async () => 'x', { collectives: ranks[1], release: () => {} })
    const [own, heard] = await Promise.all([outcomeOf(fails), outcomeOf(loads)])
    expect(own.error?.message).toContain(message)
    expect(heard.error?.message).toMatch(/rank 0 failed to load\n.*code BROKEN, message \[BROKEN\] ü+\n/)
    expect(heard.error?.message).not.toContain('\ufffd')
  })
})

async function expectAgreement(loads: readonly Load[]): Promise<void> {
  const ranks = ranksOf(loads.length)
  const { outcomes, released } = await loadOnRanks(ranks, loads)
  const failed = loads.some(({ ends }) => ends !== 'loaded')
  for (const [rank, { value, error }] of outcomes.entries()) {
    if (!failed) expect(value).toBe(`weights of ${rank}`)
    else expectFailure(error, rank, loads)
  }
  if (!failed) expect(released).toEqual([])
  await expectInStep(ranks)
}

/** A rank that fails says so itself, unless another was first. */
function expectFailure(error: RankwiseError | undefined, rank: number, loads: readonly Load[]): void {
  const own = { loaded: undefined, failed: 'BROKEN', aborted: 'ABORTED' }[(loads[rank] as Load).ends]
  if (error === undefined) throw new Error(`rank ${rank} has loaded`)
  if (error.code === own) return
  expect(error.code).toBe('LOAD_FAILED_ELSEWHERE')
  const { rank: failed, code } = error.actual as { rank: number; code: string }
  expect(failed).not.toBe(rank)
  expect(code).toBe({ loaded: '', failed: 'BROKEN', aborted: 'ABORTED' }[(loads[failed] as Load).ends])
}

describe('a rank alone', () => {
  test.each([
    ['without a group', undefined],
    ['in a group of one', ranksOf(1)[0]],
  ])('%s just loads', async (_, collectives) => {
    const own = new AbortController()
    const options = { collectives, signal: own.signal, release: () => {} }
    expect(await loadTogether(async (signal) => signal.aborted, options)).toBe(false)
    own.abort()
    expect(await loadTogether(async (signal) => signal.aborted, options)).toBe(true)
    await expect(loadTogether(() => Promise.reject(new Error('broken')), options)).rejects.toThrow('broken')
  })
})

describe('a group that is broken', () => {
  const lost = () => Promise.reject(new RankwiseError('RANK_LOST', 'rank 1 is gone'))
  const broken = () => Object.assign(ranksOf(2)[0] as Collectives, { allGather: lost })

  test('stops the load and frees it', async () => {
    const released: string[] = []
    const load = loadTogether(async () => 'weights', {
      collectives: broken(),
      release: (value) => void released.push(value),
    })
    expect((await outcomeOf(load)).error?.code).toBe('RANK_LOST')
    expect(released).toEqual(['weights'])

    const slow = loadTogether(async (signal) => String(await waitFor(60_000, signal)), {
      collectives: broken(),
      release: () => {},
    })
    expect((await outcomeOf(slow)).error?.code).toBe('RANK_LOST')
  })

  test('does not hide why this rank failed', async () => {
    const load = loadTogether(() => Promise.reject(new RankwiseError('BROKEN', 'disk')), {
      collectives: broken(),
      release: () => {},
    })
    expect((await outcomeOf(load)).error?.code).toBe('BROKEN')
  })
})

describe('weights', () => {
  const names = ['weight', 'bias']

  /** A folder of its own for every rank, as on many machines. */
  async function foldersOf(worldSize: number): Promise<readonly string[]> {
    return Promise.all(
      Array.from({ length: worldSize }, async () => {
        const folder = await temporaryFolder()
        const tensors = new Map(names.map((name) => [name, Tensor.zeros('float32', name === 'bias' ? [64] : [64, 64])]))
        await writeSafetensors(join(folder, 'model.safetensors'), tensors)
        return folder
      }),
    )
  }

  class SlowBackend extends ReferenceBackend {
    delay = 0

    override async loadShard(source: ShardSource, options: LoadShardOptions): Promise<DeviceTensor> {
      await waitFor(this.delay, options.signal as AbortSignal)
      return super.loadShard(source, options)
    }
  }

  async function load(folder: string, collectives: Collectives, backend: SlowBackend): Promise<string> {
    const model = new Linear(64, 64, { bias: true })
    const work = async (signal: AbortSignal) => {
      await using checkpoint = await Checkpoint.open(folder, { weightsName: 'model' })
      return await loadWeights(checkpoint, model, {
        placements: new Map(),
        rank: collectives.rank,
        tpDegree: 1,
        backend,
        dtype: 'float32',
        component: 'linear',
        ignored: [],
        signal,
        onProgress: undefined,
      })
    }
    const release = ({ weights }: Awaited<ReturnType<typeof work>>) => {
      for (const weight of weights.values()) weight.dispose()
    }
    const { weights } = await loadTogether(work, { collectives, release })
    return [...weights.keys()].join()
  }

  test.each([
    ['is truncated', 'SAFETENSORS_TRUNCATED', (path: string) => truncate(path, 1000)],
    ['has no header', 'SAFETENSORS_TRUNCATED', (path: string) => writeFile(path, '')],
    ['is not there', 'CHECKPOINT_NOT_FOUND', (path: string) => rm(path)],
  ])('of all ranks are freed when the file of one %s', async (_, code, breakFile) => {
    const folders = await foldersOf(3)
    await breakFile(join(folders[1] as string, 'model.safetensors'))
    const ranks = ranksOf(3)
    const backends = ranks.map(() => new SlowBackend())
    const outcomes = await Promise.all(
      ranks.map((rank, i) => outcomeOf(load(folders[i] as string, rank, backends[i] as SlowBackend))),
    )
    expect(outcomes[1]?.error?.code).toBe(code)
    for (const i of [0, 2]) {
      expect(outcomes[i]?.error).toMatchObject({ code: 'LOAD_FAILED_ELSEWHERE', actual: { rank: 1, code } })
      expect(outcomes[i]?.error?.message).toContain(folders[1])
    }
    expect(backends.map((backend) => backend.memory().weightBytes)).toEqual([0, 0, 0])
    await expectInStep(ranks)
  })

  test('of all ranks are freed when a file becomes shorter while they load slowly', async () => {
    const folders = await foldersOf(2)
    const ranks = ranksOf(2)
    const backends = ranks.map(() => new SlowBackend())
    const [first, second] = backends as [SlowBackend, SlowBackend]
    first.delay = 60_000
    second.delay = 100
    const loads = ranks.map((rank, i) => outcomeOf(load(folders[i] as string, rank, backends[i] as SlowBackend)))
    await using checkpoint = await Checkpoint.open(folders[1] as string, { weightsName: 'model' })
    await truncate(
      join(folders[1] as string, 'model.safetensors'),
      (checkpoint.tensors.get('weight') as TensorInfo).byteOffset + 1,
    )
    const start = Date.now()
    const outcomes = await Promise.all(loads)
    expect(Date.now() - start).toBeLessThan(1000)
    expect(outcomes.map(({ error }) => error?.code)).toEqual(['LOAD_FAILED_ELSEWHERE', 'SAFETENSORS_TRUNCATED'])
    expect(backends.map((backend) => backend.memory().weightBytes)).toEqual([0, 0])
  })

  test('are there on all ranks when nothing is wrong', async () => {
    const folders = await foldersOf(2)
    const loads = ranksOf(2).map((rank, i) => load(folders[i] as string, rank, new SlowBackend()))
    expect(await Promise.all(loads)).toEqual(['weight,bias', 'weight,bias'])
  })
})
