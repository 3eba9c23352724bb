import { fileURLToPath } from 'node:url'
import { type DType, isFloatingPoint, itemSize, readSafetensors, type Tensor } from '@rankwise/core'
import type { TinyInputs } from './tiny-transformer.ts'

/** Folder of the tiny transformer's checkpoint, as diffusers writes one. */
export const TINY_DIRECTORY: string = fileURLToPath(new URL('../goldens/tiny-transformer', import.meta.url))

/** What torch 2.15 computes in float64 with `torch.nn.functional`, from weights and inputs that bfloat16 has. */
export interface TinyGolden {
  /** In float32. */
  readonly inputs: TinyInputs
  /** Of both blocks and of the model, by the names of its outputs. */
  readonly outputs: Readonly<Record<string, Tensor>>
}

/** Reads the golden. @throws RankwiseError `SAFETENSORS_*` when the package is not complete */
export async function loadTinyGolden(): Promise<TinyGolden> {
  const tensors = [...(await readSafetensors(`${TINY_DIRECTORY}/golden.safetensors`))]
  const named = (prefix: string) =>
    Object.fromEntries(
      tensors.flatMap(([name, tensor]) => (name.startsWith(prefix) ? [[name.slice(prefix.length), tensor]] : [])),
    )
  return { inputs: named('in.') as unknown as TinyInputs, outputs: named('out.') }
}

/**
 * The inputs in another dtype. Beside 16 bits the rotary tables stay float32, as those of diffusers do, where float32 is
 * one of the dtypes that are `declared`.
 */
export function tinyInputsIn(inputs: TinyInputs, dtype: DType, declared: readonly DType[]): TinyInputs {
  const keepsTables = itemSize(dtype) === 2 && declared.includes('float32')
  const stays = (name: string, x: Tensor) => !isFloatingPoint(x.dtype) || (keepsTables && /^(cos|sin)$/.test(name))
  return Object.fromEntries(
    Object.entries(inputs).map(([name, x]) => [name, stays(name, x) ? x : x.cast(dtype)]),
  ) as TinyInputs
}

/** The tiny transformer's weights, in bfloat16. */
export async function loadTinyWeights(): Promise<Readonly<Record<string, Tensor>>> {
  return Object.fromEntries(await readSafetensors(`${TINY_DIRECTORY}/diffusion_pytorch_model.safetensors`))
}
