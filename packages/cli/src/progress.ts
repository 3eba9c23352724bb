import type { LoadProgress, SaveProgress } from '@rankwise/core'
import { MultiBar, Presets, type SingleBar } from 'cli-progress'

/** Shows how far a generation has come. */
export interface Progress {
  load(progress: LoadProgress): void
  save(progress: SaveProgress): void
  step(done: number, total: number): void
  /** Leaves the terminal as it was; idempotent. */
  stop(): void
}

/** Bars on a terminal, lines elsewhere; both on stderr, so that stdout holds results only. */
export function createProgress(stream: NodeJS.WriteStream = process.stderr): Progress {
  return stream.isTTY ? new BarProgress(stream) : new LineProgress(stream)
}

/** For ranks that others speak for. */
export const silentProgress: Progress = { load: () => {}, save: () => {}, step: () => {}, stop: () => {} }

class BarProgress implements Progress {
  readonly #bars: MultiBar
  readonly #byName = new Map<string, SingleBar>()

  constructor(stream: NodeJS.WriteStream) {
    const format = ' {name} [{bar}] {percentage}% {detail}'
    // The cursor stays: a signal ends the process at once, and nothing would bring it back.
    this.#bars = new MultiBar({ stream, format, hideCursor: false, clearOnComplete: false }, Presets.shades_grey)
  }

  load({ component, loadedBytes, totalBytes }: LoadProgress): void {
    this.#updateBytes(`load ${component}`, loadedBytes, totalBytes)
  }

  save({ component, savedBytes, totalBytes }: SaveProgress): void {
    this.#updateBytes(`write ${component}`, savedBytes, totalBytes)
  }

  step(done: number, total: number): void {
    this.#update('steps', done, total, `${done} / ${total}`)
  }

  stop(): void {
    this.#bars.stop()
  }

  #updateBytes(name: string, bytes: number, total: number): void {
    this.#update(name, bytes, total, `${megabytes(bytes)} / ${megabytes(total)} MB`)
  }

  #update(name: string, value: number, total: number, detail: string): void {
    const payload = { name: name.padEnd(18), detail }
    const bar = this.#byName.get(name) ?? this.#bars.create(total, 0, payload)
    this.#byName.set(name, bar)
    bar.update(value, payload)
  }
}

class LineProgress implements Progress {
  readonly #stream: NodeJS.WriteStream

  constructor(stream: NodeJS.WriteStream) {
    this.#stream = stream
  }

  load({ component, loadedBytes, totalBytes }: LoadProgress): void {
    if (loadedBytes === totalBytes) this.#stream.write(`loaded ${component}: ${megabytes(totalBytes)} MB\n`)
  }

  save({ component, savedBytes, totalBytes }: SaveProgress): void {
    if (savedBytes === totalBytes) this.#stream.write(`wrote ${component}: ${megabytes(totalBytes)} MB\n`)
  }

  step(done: number, total: number): void {
    this.#stream.write(`step ${done} / ${total}\n`)
  }

  stop(): void {}
}

/** Decimal megabytes with one digit. */
export function megabytes(bytes: number): string {
  return (bytes / 1e6).toFixed(1)
}
