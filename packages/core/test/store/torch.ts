import { type ChildProcess, spawn, spawnSync } from 'node:child_process'
import { once } from 'node:events'
import { createInterface } from 'node:readline'
import { fileURLToPath } from 'node:url'

const SCRIPT = fileURLToPath(new URL('torch-store.py', import.meta.url))

/** A Python that has torch: RANKWISE_PYTHON, or python3. */
export function findTorch(): string | undefined {
  const python = process.env.RANKWISE_PYTHON ?? 'python3'
  const { status } = spawnSync(python, ['-c', 'import torch.distributed'], { stdio: 'ignore' })
  if (status === 0) return python
  process.stderr.write(
    `SKIPPED: tests against torch's TCPStore: ${python} has no torch (name one in RANKWISE_PYTHON)\n`,
  )
  return undefined
}

/** A process that uses torch's TCPStore. */
export class TorchStore implements Disposable {
  readonly #child: ChildProcess
  readonly #lines: AsyncIterator<string>
  port = 0

  private constructor(child: ChildProcess) {
    this.#child = child
    this.#lines = createInterface({ input: child.stdout as NodeJS.ReadableStream })[Symbol.asyncIterator]()
  }

  static async start(
    python: string,
    role: 'master' | 'client',
    server: 'libuv' | 'legacy',
    port: number,
  ): Promise<TorchStore> {
    const child = spawn(python, [SCRIPT, String(port), role, server], { stdio: ['pipe', 'pipe', 'ignore'] })
    await once(child, 'spawn')
    const store = new TorchStore(child)
    store.port = Number(await store.#line())
    return store
  }

  /** What the expression is, as Python prints it; the name of the exception if there was one. */
  evaluate(expression: string): Promise<string> {
    this.#child.stdin?.write(`${expression}\n`)
    return this.#line()
  }

  [Symbol.dispose](): void {
    this.#child.kill('SIGKILL')
  }

  async #line(): Promise<string> {
    const { value, done } = await this.#lines.next()
    if (done === true) throw new Error('the process of torch has ended')
    return value
  }
}
