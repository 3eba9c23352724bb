import { type Collectives, RankwiseError, type ReduceOp, Tensor } from '@rankwise/core'

/** What a rank works with instead of its member of the group. */
type Wrap = (member: Collectives) => Collectives
type AllReduceOptions = Parameters<Collectives['allReduce']>[1]

/** A member with other methods. */
function overriding(make: (right: Collectives) => Partial<Collectives>): Wrap {
  return (member) => {
    const changed = make(member)
    return new Proxy(member, {
      get: (target, property) => {
        const own = changed[property as keyof Collectives]
        if (own !== undefined) return own
        const value = Reflect.get(target, property, target) as unknown
        return typeof value === 'function' ? value.bind(target) : value
      },
    })
  }
}

/** Changes what this rank holds after an all-reduce. */
function after(change: (tensor: Tensor, before: Tensor, rank: number) => void): Wrap {
  return overriding((right) => ({
    allReduce: async (tensors: readonly Tensor[], options: AllReduceOptions) => {
      const before = tensors.map((tensor) => tensor.clone())
      await right.allReduce(tensors, options)
      for (const [i, tensor] of tensors.entries()) change(tensor, before[i] as Tensor, right.rank)
    },
  }))
}

/** Changes what this rank brings to an all-reduce. */
function brought(change: (tensor: Tensor, rank: number, worldSize: number) => Tensor, only?: ReduceOp): Wrap {
  return overriding((right) => ({
    allReduce: async (tensors: readonly Tensor[], options: AllReduceOptions) => {
      const isMeant = only === undefined || (options?.op ?? 'sum') === only
      const parts = isMeant ? tensors.map((tensor) => change(tensor.clone(), right.rank, right.worldSize)) : tensors
      await right.allReduce(parts, options)
      for (const [i, tensor] of tensors.entries()) write(tensor, (parts[i] as Tensor).data)
    },
  }))
}

function write(tensor: Tensor, values: Tensor['data']): void {
  for (let i = 0; i < values.length; i++) tensor.data[i] = values[i] as never
}

const zeros = ({ dtype, shape }: Tensor) => Tensor.zeros(dtype, shape)

/** Deliberately broken collectives, and the group of checks that has to notice. */
export interface BrokenCollectives {
  readonly what: string
  readonly group: string
  readonly wrap: Wrap
}

const WELL = '2 ranks'
const FAILING = 'one rank fails'

/** All broken collectives. */
export const BROKEN_COLLECTIVES: readonly BrokenCollectives[] = [
  { what: 'an all-reduce is skipped', group: WELL, wrap: after((tensor, before) => write(tensor, before.data)) },
  {
    what: 'an all-reduce is done twice',
    group: WELL,
    wrap: overriding((right) => ({
      allReduce: async (tensors: readonly Tensor[], options: AllReduceOptions) => {
        await right.allReduce(tensors, options)
        await right.allReduce(tensors, options)
      },
    })),
  },
  {
    what: 'the last rank is forgotten',
    group: WELL,
    wrap: brought((x, rank, n) => (rank === n - 1 ? zeros(x) : x), 'sum'),
  },
  {
    what: 'only the first of packed tensors is reduced',
    group: WELL,
    wrap: overriding((right) => ({
      allReduce: (tensors: readonly Tensor[], options: AllReduceOptions) =>
        right.allReduce(tensors.slice(0, 1), options),
    })),
  },
  {
    what: 'every reduction is a sum',
    group: WELL,
    wrap: overriding((right) => ({
      allReduce: (tensors: readonly Tensor[], options: AllReduceOptions) => {
        const isKnown = ['max', 'min'].includes(options?.op ?? '')
        return right.allReduce(tensors, isKnown ? { ...options, op: 'sum' } : options)
      },
    })),
  },
  {
    what: 'min and max are swapped',
    group: WELL,
    wrap: overriding((right) => ({
      reduceScatter: (tensor: Tensor, options: AllReduceOptions) => {
        const swapped = { min: 'max', max: 'min' } as Partial<Record<string, ReduceOp>>
        return right.reduceScatter(tensor, { ...options, op: swapped[options?.op ?? ''] ?? options?.op ?? 'sum' })
      },
    })),
  },
  {
    what: 'an infinity becomes NaN',
    group: WELL,
    wrap: after((tensor) => {
      if (tensor.dtype === 'float32')
        write(
          tensor,
          (tensor.data as Float32Array).map((x) => (Number.isFinite(x) ? x : Number.NaN)),
        )
    }),
  },
  {
    what: '16-bit floats are rounded before they are added',
    group: WELL,
    wrap: brought((x) => (x.dtype === 'float32' ? x.cast('bfloat16').cast('float32') : x), 'sum'),
  },
  {
    what: 'one rank holds other bits than the rest',
    group: WELL,
    wrap: after((tensor, _, rank) => {
      const bytes = new Uint8Array(tensor.data.buffer, tensor.data.byteOffset, tensor.data.byteLength)
      if (rank === 1 && bytes.length > 0) bytes[0] = (bytes[0] as number) ^ 1
    }),
  },
  {
    what: 'the result of an earlier call is given again',
    group: WELL,
    wrap: (() => {
      const earlier = new WeakMap<Collectives, Tensor>()
      return overriding((right) => ({
        allGather: async (tensor: Tensor) => {
          const gathered = await right.allGather(tensor)
          const last = earlier.get(right)
          earlier.set(right, gathered)
          return last?.data.length === gathered.data.length && last.dtype === gathered.dtype ? last : gathered
        },
      }))
    })(),
  },
  {
    what: 'gathered in another order',
    group: WELL,
    wrap: overriding((right) => ({
      allGather: async (tensor: Tensor) => {
        const gathered = await right.allGather(tensor)
        const part = tensor.data.length
        const turned = gathered.clone()
        write(turned, gathered.data.slice(part) as never)
        for (let i = 0; i < part; i++) turned.data[gathered.data.length - part + i] = gathered.data[i] as never
        return turned
      },
    })),
  },
  {
    what: 'scattered to the neighbour',
    group: WELL,
    wrap: overriding((right) => ({
      reduceScatter: async (tensor: Tensor, options: AllReduceOptions) => {
        const own = await right.reduceScatter(tensor, options)
        if (own.data.length === 0) return own
        const all = await right.allGather(own)
        const next = ((right.rank + 1) % right.worldSize) * own.data.length
        return new Tensor(own.dtype, own.shape, all.data.slice(next, next + own.data.length) as never)
      },
    })),
  },
  {
    what: 'always broadcasts from rank 0',
    group: WELL,
    wrap: overriding((right) => ({
      broadcast: (tensor: Tensor, options: Parameters<Collectives['broadcast']>[1]) => {
        return right.broadcast(tensor, options?.source === right.worldSize ? options : { ...options, source: 0 })
      },
    })),
  },
  { what: 'nobody waits at a barrier', group: WELL, wrap: overriding(() => ({ barrier: async () => {} })) },
  {
    what: 'calls that are not waited for overtake each other',
    group: WELL,
    wrap: overriding((right) => {
      let calls = 0
      return {
        allReduce: async (tensors: readonly Tensor[], options: AllReduceOptions) => {
          // Every other call of one rank begins later than it was made.
          if (right.rank === 1 && calls++ % 2 === 0) await new Promise((resolve) => setTimeout(resolve, 1))
          await right.allReduce(tensors, options)
        },
      }
    }),
  },
  {
    what: 'an unknown reduction is taken for a sum',
    group: WELL,
    wrap: overriding((right) => ({
      allReduce: (tensors: readonly Tensor[], options: AllReduceOptions) => {
        const isKnown = ['sum', 'max', 'min'].includes(options?.op ?? 'sum')
        return right.allReduce(tensors, isKnown ? options : { ...options, op: 'sum' })
      },
    })),
  },
  {
    what: 'works on after destroy',
    group: WELL,
    wrap: overriding(() => ({ destroy: async () => {}, [Symbol.asyncDispose]: async () => {} })),
  },
  {
    what: 'another size on one rank is cut to fit',
    group: FAILING,
    wrap: overriding((right) => ({
      allReduce: (tensors: readonly Tensor[], options: AllReduceOptions) =>
        right.allReduce(
          tensors.map((tensor) => new Tensor(tensor.dtype, [4], tensor.data.slice(0, 4) as never)),
          options,
        ),
    })),
  },
  {
    what: 'a signal is not looked at',
    group: FAILING,
    wrap: overriding((right) => ({ allReduce: (tensors: readonly Tensor[]) => right.allReduce(tensors) })),
  },
  {
    what: 'the reason of an abort is lost',
    group: FAILING,
    wrap: overriding((right) => ({ abort: () => right.abort(new Error('something')) })),
  },
  {
    what: 'the lost rank is not named',
    group: FAILING,
    wrap: overriding((right) => ({
      allReduce: (tensors: readonly Tensor[], options: AllReduceOptions) =>
        right.allReduce(tensors, options).catch((error: RankwiseError) => {
          throw new RankwiseError(error.code, error.message)
        }),
    })),
  },
  {
    what: 'goes on after a failure',
    group: FAILING,
    wrap: overriding((right) => ({ barrier: () => right.barrier().catch(() => {}) })),
  },
]

/** The way to break collectives, which breaks nothing by itself. */
export const UNBROKEN_COLLECTIVES: Wrap = overriding(() => ({}))
