import { conv2d } from '../functional.ts'
import { Module } from '../module.ts'
import { Parameter } from '../parameter.ts'
import type { TracedTensor } from '../traced-tensor.ts'

/** Stride and padding of a convolution. */
export interface Conv2dOptions {
  /** @default 1 */
  readonly stride?: number
  /** Zeros on every side, or on [top, bottom, left, right]. @default 0 */
  readonly padding?: number | readonly [top: number, bottom: number, left: number, right: number]
}

/** 2-d convolution with a square kernel and a bias. */
export class Conv2d extends Module {
  readonly weight: Parameter
  readonly bias: Parameter
  readonly #stride: number
  readonly #padding: readonly [number, number, number, number]

  constructor(inChannels: number, outChannels: number, kernel: number, options: Conv2dOptions = {}) {
    super()
    const { stride = 1, padding = 0 } = options
    this.weight = new Parameter([outChannels, inChannels, kernel, kernel])
    this.bias = new Parameter([outChannels])
    this.#stride = stride
    this.#padding = typeof padding === 'number' ? [padding, padding, padding, padding] : padding
  }

  /** `[batch, inChannels, height, width]` to `[batch, outChannels, height', width']`. */
  override forward(x: TracedTensor): TracedTensor {
    return conv2d(x, this.weight, this.bias, { stride: this.#stride, padding: this.#padding })
  }
}
