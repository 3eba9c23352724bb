import type { Tensor } from '@rankwise/core'
import { Flux2Transformer2DModel, type Flux2TransformerInputs, parseFlux2TransformerConfig } from '../src/index.ts'

/** A transformer that returns what every block computes, under the names of the goldens. */
export class TappedTransformer extends Flux2Transformer2DModel {
  static override fromConfig(config: unknown): TappedTransformer {
    return new TappedTransformer(parseFlux2TransformerConfig(config))
  }

  taps(inputs: Flux2TransformerInputs): Promise<Record<string, Tensor>> {
    return this.execute('taps', this.tensorsOf(inputs), (traced) => {
      const { sample, temb, doubleBlocks, singleBlocks } = this.forward(traced)
      const doubles = doubleBlocks.flatMap(({ text, image }, i) => [
        [`mid.double${i}.0`, text],
        [`mid.double${i}.1`, image],
      ])
      const singles = singleBlocks.map((joined, i) => [`mid.single${i}`, joined])
      return { out: sample, 'mid.temb': temb, ...Object.fromEntries([...doubles, ...singles]) }
    })
  }
}
