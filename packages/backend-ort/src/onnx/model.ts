import type { Shape } from '@rankwise/core'

/** Element types that the graphs use, and their numbers in `TensorProto.DataType` of onnx.proto. */
export const ELEMENT_TYPES = {
  float32: 1,
  uint16: 4,
  int32: 6,
  int64: 7,
  bool: 9,
  float16: 10,
  float64: 11,
  bfloat16: 16,
} as const

/** The domain of operators of our own: native/linear.c has them. */
export const OWN_DOMAIN = 'rankwise'

export type OnnxDType = keyof typeof ELEMENT_TYPES

/** Bytes of one element. */
export const ELEMENT_BYTES: Readonly<Record<OnnxDType, number>> = {
  float32: 4,
  uint16: 2,
  int32: 4,
  int64: 8,
  bool: 1,
  float16: 2,
  float64: 8,
  bfloat16: 2,
}

/** An attribute; the fields are those of `AttributeProto`, because a JavaScript number does not say which it is. */
export type OnnxAttribute =
  | { readonly f: number }
  | { readonly i: number }
  | { readonly s: string }
  | { readonly ints: readonly number[] }
export type OnnxAttributes = Readonly<Record<string, OnnxAttribute>>

export interface OnnxNode {
  /** Unique, and starts with the module path, so that ORT's own messages say where they come from. */
  readonly name: string
  /** Path of the module whose operation it is part of. */
  readonly path: string
  readonly opType: string
  /** Empty for the standard operators. */
  readonly domain: string
  /** Names of values; an empty name leaves an optional input out. */
  readonly inputs: readonly string[]
  readonly outputs: readonly string[]
  readonly attributes: OnnxAttributes
}

/** Name and type of a value that enters or leaves the graph. */
export interface OnnxValueInfo {
  readonly name: string
  readonly dtype: OnnxDType
  readonly shape: Shape
}

/** A constant of the graph. */
export interface OnnxInitializer extends OnnxValueInfo {
  /** The elements, little-endian. */
  readonly bytes: Uint8Array
}

export interface OnnxModel {
  readonly name: string
  readonly inputs: readonly OnnxValueInfo[]
  readonly initializers: readonly OnnxInitializer[]
  readonly nodes: readonly OnnxNode[]
  /** Of what operators of our own compute: ONNX Runtime does not know their shapes. */
  readonly values: readonly OnnxValueInfo[]
  readonly outputs: readonly OnnxValueInfo[]
}
