/** The Node.js binding of ONNX Runtime. */
export type Onnxruntime = typeof import('onnxruntime-node')

/** Loads the binding, with the telemetry of ONNX Runtime off. */
export async function loadOnnxruntime(): Promise<Onnxruntime> {
  // ONNX Runtime sends usage data to Microsoft unless it is told not to before it is loaded, which an import at the top of
  // a module would come before. Whoever wants it sets ORT_DISABLE_TELEMETRY=0.
  process.env.ORT_DISABLE_TELEMETRY ??= '1'
  return import('onnxruntime-node')
}
