import { Tensor } from '@rankwise/core'
import { describe, expect, test } from 'vitest'
import { localCollectives } from '../src/index.ts'
import { rendezvous } from './ranks.ts'

// Nothing listens on port 1: a group of one rank opens no connection.
const alone = () => localCollectives(rendezvous(0, 1, 1))
const tensor = () => Tensor.float32([2], [1.5, -2])

describe('a group of one rank', () => {
  test('leaves tensors as they are', async () => {
    await using group = await alone()
    const input = tensor()
    await group.allReduce([input])
    await group.broadcast(input)
    await group.barrier()
    expect(input).toEqual(tensor())
    const gathered = await group.allGather(input)
    const scattered = await group.reduceScatter(input)
    expect([gathered, scattered]).toEqual([tensor(), tensor()])
    input.data[0] = 9
    expect([gathered, scattered]).toEqual([tensor(), tensor()])
  })

  test('checks arguments as a larger group does', async () => {
    await using group = await alone()
    const refused = { code: 'COLLECTIVE_DTYPE' }
    await expect(group.allReduce([Tensor.zeros('int64', [1])])).rejects.toMatchObject(refused)
    await expect(group.broadcast(tensor(), { source: 1 })).rejects.toMatchObject({ code: 'COLLECTIVE_SOURCE' })
    await expect(group.allGather(Tensor.float32([], [1]))).rejects.toMatchObject({ code: 'COLLECTIVE_SHAPE' })
  })

  test('fails after an aborted signal, after abort and after destroy', async () => {
    const cause = new Error('stop')
    const bySignal = await alone()
    await expect(bySignal.barrier({ signal: AbortSignal.abort(cause) })).rejects.toMatchObject({
      code: 'ABORTED',
      cause,
    })
    await expect(bySignal.barrier()).rejects.toMatchObject({ code: 'ABORTED' })

    const aborted = await alone()
    aborted.abort(cause)
    await expect(aborted.barrier()).rejects.toMatchObject({ code: 'ABORTED', cause })

    const destroyed = await alone()
    await destroyed.destroy()
    await destroyed.destroy()
    await expect(destroyed.barrier()).rejects.toMatchObject({ code: 'COLLECTIVES_DESTROYED' })
  })
})
