// Compiles and runs graphs that ORT warns and complains about; run by silence.test.ts.
import { normal, opGraph, segmentOf } from '@rankwise/conformance'
import { RankwiseError, Tensor } from '@rankwise/core'
import { ort } from '../../src/index.ts'

await using backend = await ort({ device: 'cpu', threads: 2 })
const codes: string[] = []

async function collectCode(body: () => Promise<unknown>): Promise<void> {
  try {
    await body()
  } catch (error) {
    codes.push(error instanceof RankwiseError ? error.code : String(error))
  }
}

await collectCode(() => backend.compile(segmentOf(opGraph('silu', [Tensor.int32([2], [1, 2])], {}))))

const lookup = segmentOf(opGraph('embedding', [Tensor.int32([1], [0]), normal([5, 3], 0)], {}))
const executable = await backend.compile(lookup)
await collectCode(() => executable.run([backend.upload(Tensor.int32([1], [9])), backend.upload(normal([5, 3], 0))], []))

const graph = opGraph('transpose', [normal([2, 3], 0)], { permutation: [1, 0] })
const wrong = { ...graph, nodes: graph.nodes.map((node) => ({ ...node, attributes: { permutation: [0, 1] } })) }
const mismatched = await backend.compile(segmentOf(wrong))
await collectCode(() => mismatched.run([backend.upload(normal([2, 3], 0))], []))

process.stdout.write(codes.join(' '))
