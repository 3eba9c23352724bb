import { ELEMENT_TYPES } from '../onnx/model.ts'
import type { OnnxBuilder } from '../onnx/onnx-builder.ts'
import type { Lowered } from './rule.ts'

/** A float32 value rounded to the nearest bfloat16, ties to even, as float32. ORT 1.30 folds no casts that lose bits. */
export function roundToBfloat16(onnx: OnnxBuilder, name: string): string {
  return onnx.op('Cast', [castToBfloat16(onnx, name)], { to: { i: ELEMENT_TYPES.float32 } })
}

/** A result of a rule, each of its parts rounded; an unused one has no name. */
export function roundLowered(onnx: OnnxBuilder, lowered: Lowered): Lowered {
  if (typeof lowered === 'string') return lowered === '' ? '' : roundToBfloat16(onnx, lowered)
  if (lowered.isRounded === true) return lowered
  const parts = lowered.parts.map(({ name, size }) => ({ name: roundToBfloat16(onnx, name), size }))
  return { dim: lowered.dim, parts }
}

/** A float32 value as it leaves a graph as bfloat16: the Node binding of ORT gives none, but its bits. */
export function toBfloat16(onnx: OnnxBuilder, name: string): string {
  const rounded = castToBfloat16(onnx, name)
  if (onnx.target.halfInputs === 'floats') return rounded
  return onnx.op('BitCast', [rounded], { to: { i: ELEMENT_TYPES.uint16 } })
}

function castToBfloat16(onnx: OnnxBuilder, name: string): string {
  return onnx.op('Cast', [name], { to: { i: ELEMENT_TYPES.bfloat16 } })
}
