import type { Engine } from '../src/engine.ts'
import { findAddons, loadAddon } from '../src/native/addon.ts'
import { NativeEngine, type NativeEngineOptions } from '../src/native/native-engine.ts'
import { WasmEngine } from '../src/wasm/wasm-engine.ts'
import { WasmRuntime } from '../src/wasm/wasm-runtime.ts'

/** Whether a native library is there; where it is not, the tests of it are skipped. */
export const hasNative: boolean = findAddons().length > 0

/** With `RANKWISE_REQUIRE_TFJS_NATIVE=1`, tests of the native library that would be skipped fail. */
export const nativeRequired: boolean = process.env.RANKWISE_REQUIRE_TFJS_NATIVE === '1'

/** The engines that can be tested here. */
export const ENGINES: readonly ('wasm' | 'native')[] = hasNative ? ['wasm', 'native'] : ['wasm']

export async function engineOf(name: 'wasm' | 'native'): Promise<Engine> {
  return name === 'wasm' ? new WasmEngine(await WasmRuntime.load()) : nativeEngine('cast')
}

/** An engine that treats bfloat16 in one way, whatever the CPU is good at. */
export function nativeEngine(bfloat16: NativeEngineOptions['bfloat16']): NativeEngine {
  const { binding, threads } = loadAddon(1)
  return new NativeEngine(binding, { threads, bfloat16 })
}
