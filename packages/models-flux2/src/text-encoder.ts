import type { FromPretrainedOptions, TensorParallelConfig } from '@rankwise/core'
import { FirstRankTextEncoder, type HiddenStateEncoder } from '@rankwise/diffusion'

/**
 * Where the weights of a text encoder are: all of them on every rank, those of each rank's heads and columns, or all of
 * them on rank 0, which sends the others what it encodes.
 */
export type TextEncoderPlacement = 'replicated' | 'sharded' | 'rank0'

/** Loads a text encoder, with a `parallelConfig` split. */
export type LoadTextEncoder = (pathOrId: string, options: FromPretrainedOptions) => Promise<HiddenStateEncoder>

/** Loads a text encoder whose weights are not on every rank; all ranks call it together. */
export async function loadSharedTextEncoder(
  load: (options: Pick<FromPretrainedOptions, 'signal' | 'parallelConfig'>) => Promise<HiddenStateEncoder>,
  placement: Exclude<TextEncoderPlacement, 'replicated'>,
  {
    parallelConfig,
    signal,
  }: { readonly parallelConfig: TensorParallelConfig; readonly signal: AbortSignal | undefined },
): Promise<HiddenStateEncoder> {
  if (placement === 'sharded') return load({ parallelConfig, signal })
  return FirstRankTextEncoder.create((stop) => load({ signal: stop }), { signal })
}
