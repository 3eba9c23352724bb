import {
  type Graph,
  Linear,
  ModelMixin,
  ModuleList,
  Tensor,
  type TensorParallelPlan,
  type TracedTensor,
  trace,
} from '../src/index.ts'

/** Two layers, one split by columns and one by rows. */
export class Mlp extends ModelMixin {
  static readonly tensorParallelPlan: TensorParallelPlan | undefined = { 'layers.0': 'colwise', 'layers.1': 'rowwise' }
  readonly layers = new ModuleList([new Linear(4, 8), new Linear(8, 4)])

  static fromConfig(): Mlp {
    return new Mlp()
  }

  override forward(x: TracedTensor): TracedTensor {
    return this.layers.at(1).call(this.layers.at(0).call(x).silu())
  }

  run(x: Tensor): Promise<Record<string, Tensor>> {
    return this.execute('run', { x }, ({ x }) => ({ y: this.forward(x) }))
  }

  override traceExample(): Graph {
    return trace('Mlp', this, { x: { dtype: 'float32', shape: [1, 4] } }, ({ x }) => ({ y: this.forward(x) }))
  }
}

/** Weights of an `Mlp` that differ everywhere. */
export function mlpWeights(): Map<string, Tensor> {
  const weights = new Map<string, Tensor>()
  for (const [name, { shape }] of new Mlp().namedParameters()) {
    const length = shape.reduce((product, size) => product * size, 1)
    weights.set(
      name,
      Tensor.float32(
        shape,
        Float32Array.from({ length }, (_, i) => Math.sin(i + weights.size)),
      ),
    )
  }
  return weights
}
