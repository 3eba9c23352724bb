import type { Tensor } from '../tensor.ts'

/** What every reference kernel computes with, whatever the dtype of the model. */
export type Float64Tensor = Tensor<'float64'>

/**
 * One operation in float64, from its attributes and its operands in order. Kernels are pure: results never share memory
 * with operands or with each other. They rely on the operation's `infer` rule having accepted the operands.
 */
export type ReferenceKernel = (attributes: never, ...inputs: Float64Tensor[]) => readonly Float64Tensor[]
