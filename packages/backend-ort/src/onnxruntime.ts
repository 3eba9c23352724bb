// ONNX Runtime sends usage data to Microsoft unless it is told not to before it is loaded, which an import at the top of
// a module would come before. Whoever wants it sets ORT_DISABLE_TELEMETRY=0.
process.env.ORT_DISABLE_TELEMETRY ??= '1'

/** ONNX Runtime, with its telemetry off. */
export const onnxruntime: typeof import('onnxruntime-node') = await import('onnxruntime-node')
