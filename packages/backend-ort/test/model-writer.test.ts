import fc from 'fast-check'
import { InferenceSession } from 'onnxruntime-node'
import { PbfReader } from 'pbf'
import { describe, expect, it } from 'vitest'
import type { OnnxModel } from '../src/onnx/model.ts'
import { writeModel } from '../src/onnx/model-writer.ts'
import { OnnxBuilder } from '../src/onnx/onnx-builder.ts'

/** The attribute of the first node of a serialised model, by the field numbers of onnx.proto. */
function attributeOf(bytes: Uint8Array): Record<string, unknown> {
  const attribute: Record<string, unknown> = { ints: [] }
  const message = (field: number, read: (field: number, pbf: PbfReader) => void) => {
    return (tag: number, _result: null, pbf: PbfReader) => {
      if (tag === field) pbf.readMessage((inner, _, reader) => read(inner, reader), null)
    }
  }
  const readAttribute = (tag: number, pbf: PbfReader) => {
    if (tag === 1) attribute.name = pbf.readString()
    if (tag === 2) attribute.f = pbf.readFloat()
    if (tag === 3) attribute.i = pbf.readVarint(true)
    if (tag === 4) attribute.s = pbf.readString()
    if (tag === 8) (attribute.ints as number[]).push(pbf.readVarint(true))
    if (tag === 20) attribute.type = pbf.readVarint()
  }
  const readNode = (tag: number, pbf: PbfReader) => message(5, readAttribute)(tag, null, pbf)
  const readGraph = (tag: number, pbf: PbfReader) => message(1, readNode)(tag, null, pbf)
  new PbfReader(bytes).readFields(message(7, readGraph), null)
  return attribute
}

function modelWith(name: string, attribute: OnnxModel['nodes'][number]['attributes'][string]): OnnxModel {
  const onnx = new OnnxBuilder()
  onnx.op('Any', [], { [name]: attribute })
  return onnx.build('test', [])
}

describe('writeModel', () => {
  it('writes integers of either sign up to 2^53', () => {
    fc.assert(
      fc.property(fc.maxSafeInteger(), fc.array(fc.maxSafeInteger()), (i, ints) => {
        expect(attributeOf(writeModel(modelWith('axis', { i })))).toEqual({ name: 'axis', i, ints: [], type: 2 })
        expect(attributeOf(writeModel(modelWith('axes', { ints })))).toEqual({ name: 'axes', ints, type: 7 })
      }),
    )
  })

  it('writes floats and strings', () => {
    expect(attributeOf(writeModel(modelWith('eps', { f: 0.5 })))).toEqual({ name: 'eps', f: 0.5, ints: [], type: 1 })
    expect(attributeOf(writeModel(modelWith('mode', { s: 'ä' })))).toEqual({ name: 'mode', s: 'ä', ints: [], type: 3 })
  })

  it('writes what ONNX Runtime reads', async () => {
    const onnx = new OnnxBuilder()
    onnx.input({ name: 'x', dtype: 'float32', shape: [2, 0, 3] })
    onnx.input({ name: 'ids', dtype: 'int32', shape: [] })
    const sum = onnx.within('a.0', () => onnx.op('Cast', ['ids'], { to: { i: 1 } }))
    const model = onnx.build('test', [{ name: sum, dtype: 'float32', shape: [] }])
    const session = await InferenceSession.create(writeModel(model))
    expect(session.inputMetadata).toMatchObject([
      { name: 'x', type: 'float32', shape: [2, 0, 3] },
      { name: 'ids', type: 'int32', shape: [] },
    ])
    expect(session.outputMetadata).toMatchObject([{ name: 'a.0/Cast_0:0', type: 'float32', shape: [] }])
    await session.release()
  })
})

describe('OnnxBuilder', () => {
  it('stores equal constants once', () => {
    const onnx = new OnnxBuilder()
    const names = [onnx.scalar(1), onnx.scalar(2), onnx.scalar(1), onnx.integers([1]), onnx.integers([1])]
    expect(new Set(names).size).toBe(3)
    // The same bytes under another type are another constant.
    expect(onnx.constant('int32', [], Int32Array.of(0))).not.toBe(onnx.scalar(0))
    expect(onnx.constant('float32', [1], Float32Array.of(1))).not.toBe(names[0])
  })
})
