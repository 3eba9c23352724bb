import assert from 'node:assert/strict'
import type {
  Backend,
  DeviceTensor,
  DType,
  Executable,
  MemoryReport,
  Segment,
  ShardSource,
  Tensor,
} from '@rankwise/core'
import { memorySource } from './memory-source.ts'
import type { BackendSubject } from './options.ts'

/** A backend under test, with what was made on it. */
export class Bench {
  readonly backend: Backend
  readonly #tensors = new Set<DeviceTensor>()
  readonly #executables = new Set<Executable>()

  constructor(backend: Backend) {
    this.backend = backend
  }

  upload(...tensors: readonly Tensor[]): readonly DeviceTensor[] {
    return tensors.map((tensor) => this.own(this.backend.upload(tensor)))
  }

  /** Loads a weight, from memory where it is given as a tensor. */
  async load(source: ShardSource | Tensor, dtype: DType = 'float32'): Promise<DeviceTensor> {
    const from = 'read' in source ? source : memorySource('weight', source)
    return this.own(await this.backend.loadShard(from, { dtype }))
  }

  async compile(segment: Segment, parameters?: readonly DeviceTensor[]): Promise<Executable> {
    const executable = await this.backend.compile(segment, parameters)
    this.#executables.add(executable)
    return executable
  }

  /** What a segment computes, on the host. */
  async run(segment: Segment, inputs: readonly Tensor[], weights: readonly Tensor[] = []): Promise<readonly Tensor[]> {
    const parameters: DeviceTensor[] = []
    for (const [i, weight] of weights.entries()) {
      parameters.push(await this.load(weight, segment.parameters[i]?.dtype))
    }
    const executable = await this.compile(segment, parameters)
    const results = await this.results(executable, this.upload(...inputs), parameters)
    await executable.dispose()
    return results
  }

  /** What one run of an executable gives, on the host. */
  async results(
    executable: Executable,
    inputs: readonly DeviceTensor[],
    parameters: readonly DeviceTensor[] = [],
  ): Promise<readonly Tensor[]> {
    const outputs = await executable.run(inputs, parameters)
    return Promise.all(outputs.map((output) => this.backend.download(this.own(output))))
  }

  /** Frees a tensor with the rest. */
  own(tensor: DeviceTensor): DeviceTensor {
    this.#tensors.add(tensor)
    return tensor
  }

  /** Frees tensors and executables, but not the backend. */
  async clear(): Promise<void> {
    for (const tensor of this.#tensors) tensor.dispose()
    for (const executable of this.#executables) await executable.dispose()
    this.#tensors.clear()
    this.#executables.clear()
  }
}

/** Gives `body` a new backend. Whatever it checks, what it made has to be gone when it has been freed. */
export async function onBackend({ create }: BackendSubject, body: (bench: Bench) => Promise<void>): Promise<void> {
  const backend = await create()
  try {
    const before = counted(backend.memory())
    const bench = new Bench(backend)
    await body(bench)
    await bench.clear()
    assert.deepEqual(counted(backend.memory()), before, 'memory() is what it was once everything is disposed')
  } finally {
    await backend.dispose()
  }
}

/** Backends may report more than this. */
export function counted({ weightBytes, mappedBytes, executables }: MemoryReport): MemoryReport {
  return { weightBytes, mappedBytes, executables }
}
