import { Tensor } from '@rankwise/core'
import { ELEMENT_TYPES } from '../onnx/model.ts'
import { OnnxBuilder } from '../onnx/onnx-builder.ts'
import type { Engine } from './engine.ts'
import { engineError } from './engine-error.ts'
import { messageOf } from './session-error.ts'

const X = [0, 1, -2.5, 65_536]
/** The bits of 1, 2, -0.5 and 2^-16 as bfloat16. */
const SCALE = [0x3f80, 0x4000, 0xbf00, 0x3780]
const PRODUCT = [0, 2, 1.25, 1]
/** X as columns of 2 each, by SCALE as rows of 2. */
const LINEAR = [-5, -2.5 * 2 ** -16, 131_073, 0.5]

/**
 * Loads, runs and unloads a graph, and has one refused and one fail: every function of the C API that an engine uses has
 * to be where our header says.
 *
 * @throws RankwiseError `ORT_ENGINE` saying what went wrong
 */
export async function checkEngine(engine: Engine): Promise<void> {
  const problem = await engineProblem(engine, { checksIndices: true })
  if (problem === undefined) return
  throw engineError(`ONNX Runtime does not do what it should: ${problem}`, { remedy: 'install onnxruntime-node anew' })
}

/**
 * What of that an engine does otherwise; undefined where there is nothing.
 *
 * @param options - whether an index outside of what it is looked up in is an error there
 */
export async function engineProblem(
  engine: Engine,
  { checksIndices }: { readonly checksIndices: boolean },
): Promise<string | undefined> {
  try {
    const values = (await productProblem(engine)) ?? (engine.target.hasLinear ? await linearProblem(engine) : undefined)
    const refusal = values ?? (await refusalProblem(engine))
    return refusal ?? (checksIndices ? await failureProblem(engine) : undefined)
  } catch (error) {
    return messageOf(error)
  }
}

/** A bfloat16 input is cast and multiplied. */
async function productProblem(engine: Engine): Promise<string | undefined> {
  const onnx = new OnnxBuilder()
  const x = onnx.input({ name: 'x', dtype: 'float32', shape: [4] })
  const scale = onnx.input({ name: 'scale', dtype: 'bfloat16', shape: [4] })
  const cast = onnx.op('Cast', [scale], { to: { i: ELEMENT_TYPES.float32 } })
  const product = onnx.op('Mul', [x, cast])
  const inputs = [Tensor.float32([4], X), new Tensor('bfloat16', [4], Uint16Array.from(SCALE))]
  const model = onnx.build('product', [{ name: product, dtype: 'float32', shape: [4] }])
  return valuesProblem(PRODUCT, await run(engine, model, inputs))
}

/** The operator of our own, on what is in two parts. */
async function linearProblem(engine: Engine): Promise<string | undefined> {
  const onnx = new OnnxBuilder(engine.target)
  const left = onnx.input({ name: 'left', dtype: 'float32', shape: [2, 1] })
  const right = onnx.input({ name: 'right', dtype: 'float32', shape: [2, 1] })
  const weight = onnx.input({ name: 'weight', dtype: 'bfloat16', shape: [2, 2] })
  const y = onnx.op('rankwise.Linear', [weight, left, right])
  const parts = [Tensor.float32([2, 1], X.slice(0, 2)), Tensor.float32([2, 1], X.slice(2))]
  const inputs = [...parts, new Tensor('bfloat16', [2, 2], Uint16Array.from(SCALE))]
  const model = onnx.build('linear', [{ name: y, dtype: 'float32', shape: [2, 2] }])
  return valuesProblem(LINEAR, await run(engine, model, inputs))
}

function valuesProblem(expected: readonly number[], [result]: readonly Tensor[]): string | undefined {
  const values = [...(result?.data ?? [])]
  return String(values) === String(expected) ? undefined : `${expected} were computed as ${values}`
}

/** A graph with an operator that there is not. */
async function refusalProblem(engine: Engine): Promise<string | undefined> {
  const onnx = new OnnxBuilder()
  const y = onnx.op('NoSuchOperator', [onnx.input({ name: 'x', dtype: 'float32', shape: [4] })])
  const model = onnx.build('refused', [{ name: y, dtype: 'float32', shape: [4] }])
  return errorProblem('NoSuchOperator', () => run(engine, model, [Tensor.float32([4], X)]))
}

/** An index outside of what it is looked up in. */
async function failureProblem(engine: Engine): Promise<string | undefined> {
  const onnx = new OnnxBuilder()
  const table = onnx.input({ name: 'table', dtype: 'float32', shape: [4] })
  const index = onnx.input({ name: 'index', dtype: 'int32', shape: [1] })
  const model = onnx.build('failing', [{ name: onnx.op('Gather', [table, index]), dtype: 'float32', shape: [1] }])
  return errorProblem('Gather', () => run(engine, model, [Tensor.float32([4], X), Tensor.int32([1], [4])]))
}

async function errorProblem(word: string, body: () => Promise<unknown>): Promise<string | undefined> {
  try {
    await body()
  } catch (error) {
    return messageOf(error).includes(word) ? undefined : `an error of ${word} says: ${messageOf(error)}`
  }
  return `there is no error of ${word}`
}

async function run(engine: Engine, model: Parameters<Engine['createSession']>[0], inputs: readonly Tensor[]) {
  const session = await engine.createSession(model)
  try {
    return await session.run(inputs)
  } finally {
    await session.release()
  }
}
