import { PbfWriter } from 'pbf'
import {
  ELEMENT_TYPES,
  type OnnxAttribute,
  type OnnxInitializer,
  type OnnxModel,
  type OnnxNode,
  type OnnxValueInfo,
  OWN_DOMAIN,
} from './model.ts'

// Field numbers and enum values are those of onnx.proto (ONNX 1.21, https://github.com/onnx/onnx/blob/v1.21.0/onnx/onnx.proto).

/** The first IR version that allows opset 26. */
const IR_VERSION = 13

/** BitCast is a standard operator since opset 26; RMSNormalization and RotaryEmbedding are since 23. */
const OPSETS = [
  { domain: '', version: 26 },
  { domain: 'com.microsoft', version: 1 },
]

const ATTRIBUTE_TYPE = { f: 1, i: 2, s: 3, ints: 7 } as const

/** Serialises a model as a `ModelProto`. */
export function writeModel(model: OnnxModel): Uint8Array {
  const pbf = new PbfWriter()
  pbf.writeVarintField(1, IR_VERSION)
  pbf.writeStringField(2, 'rankwise')
  pbf.writeMessage(7, writeGraph, model)
  const hasOwn = model.nodes.some(({ domain }) => domain === OWN_DOMAIN)
  for (const opset of hasOwn ? [...OPSETS, OWN_OPSET] : OPSETS) pbf.writeMessage(8, writeOpset, opset)
  return pbf.finish()
}

/** Operators of our own, which only the engine 'capi' has. */
const OWN_OPSET = { domain: OWN_DOMAIN, version: 1 }

function writeOpset({ domain, version }: { domain: string; version: number }, pbf: PbfWriter): void {
  pbf.writeStringField(1, domain)
  pbf.writeVarintField(2, version)
}

function writeGraph({ name, inputs, initializers, nodes, values, outputs }: OnnxModel, pbf: PbfWriter): void {
  for (const node of nodes) pbf.writeMessage(1, writeNode, node)
  pbf.writeStringField(2, name)
  for (const initializer of initializers) pbf.writeMessage(5, writeTensor, initializer)
  for (const input of inputs) pbf.writeMessage(11, writeValueInfo, input)
  for (const output of outputs) pbf.writeMessage(12, writeValueInfo, output)
  for (const value of values) pbf.writeMessage(13, writeValueInfo, value)
}

function writeNode({ inputs, outputs, name, opType, attributes, domain }: OnnxNode, pbf: PbfWriter): void {
  for (const input of inputs) pbf.writeStringField(1, input)
  for (const output of outputs) pbf.writeStringField(2, output)
  pbf.writeStringField(3, name)
  pbf.writeStringField(4, opType)
  for (const attribute of Object.entries(attributes)) pbf.writeMessage(5, writeAttribute, attribute)
  pbf.writeStringField(7, domain)
}

function writeAttribute([name, value]: [string, OnnxAttribute], pbf: PbfWriter): void {
  pbf.writeStringField(1, name)
  if ('f' in value) {
    pbf.writeFloatField(2, value.f)
    pbf.writeVarintField(20, ATTRIBUTE_TYPE.f)
  } else if ('i' in value) {
    pbf.writeVarintField(3, value.i)
    pbf.writeVarintField(20, ATTRIBUTE_TYPE.i)
  } else if ('s' in value) {
    pbf.writeStringField(4, value.s)
    pbf.writeVarintField(20, ATTRIBUTE_TYPE.s)
  } else {
    for (const i of value.ints) pbf.writeVarintField(8, i)
    pbf.writeVarintField(20, ATTRIBUTE_TYPE.ints)
  }
}

function writeTensor({ name, dtype, shape, bytes }: OnnxInitializer, pbf: PbfWriter): void {
  for (const size of shape) pbf.writeVarintField(1, size)
  pbf.writeVarintField(2, ELEMENT_TYPES[dtype])
  pbf.writeStringField(8, name)
  pbf.writeBytesField(9, bytes)
}

function writeValueInfo({ name, dtype, shape }: OnnxValueInfo, pbf: PbfWriter): void {
  pbf.writeStringField(1, name)
  pbf.writeMessage(2, writeType, { dtype, shape })
}

function writeType(type: Omit<OnnxValueInfo, 'name'>, pbf: PbfWriter): void {
  pbf.writeMessage(1, writeTensorType, type)
}

function writeTensorType({ dtype, shape }: Omit<OnnxValueInfo, 'name'>, pbf: PbfWriter): void {
  pbf.writeVarintField(1, ELEMENT_TYPES[dtype])
  pbf.writeMessage(2, writeShape, shape)
}

function writeShape(shape: readonly number[], pbf: PbfWriter): void {
  for (const size of shape) pbf.writeMessage(1, writeDimension, size)
}

function writeDimension(size: number, pbf: PbfWriter): void {
  pbf.writeVarintField(1, size)
}
