import type { LoweringContext, LoweringRules, Operand } from './rule.ts'

type Conv2dAttributes = { readonly stride: number; readonly padding: readonly number[] }

function conv2d(
  { onnx, attributes: { stride, padding } }: LoweringContext<Conv2dAttributes>,
  x: Operand,
  weight: Operand,
  bias: Operand,
): readonly string[] {
  const [top, bottom, left, right] = padding as [number, number, number, number]
  return [
    onnx.op('Conv', [x.name, weight.name, bias.name], {
      strides: { ints: [stride, stride] },
      pads: { ints: [top, left, bottom, right] },
    }),
  ]
}

function upsampleNearest2d(
  { onnx, attributes: { scale } }: LoweringContext<{ readonly scale: number }>,
  x: Operand,
): readonly string[] {
  const scales = onnx.constant('float32', [4], Float32Array.of(1, 1, scale, scale))
  // Output pixel i reads input pixel floor(i / scale).
  const nearest = { coordinate_transformation_mode: { s: 'asymmetric' }, nearest_mode: { s: 'floor' } }
  return [onnx.op('Resize', [x.name, '', scales], { mode: { s: 'nearest' }, ...nearest })]
}

export const spatialRules: LoweringRules = { conv2d, upsample_nearest2d: upsampleNearest2d }
