/** libjpeg-turbo, compiled to WebAssembly by Emscripten. */
declare module '@cornerstonejs/codec-libjpeg-turbo-8bit/decodewasmjs' {
  /** An Embind object: what it holds lies in the memory of its module. */
  interface JPEGDecoder {
    /** Memory of that many bytes, for the file. */
    getEncodedBuffer(bytes: number): Uint8Array
    /** Throws the address of a C++ exception, a number. */
    decode(): void
    getFrameInfo(): { readonly width: number; readonly height: number; readonly componentCount: number }
    /** `[height, width, componentCount]`; lives as long as the decoder. */
    getDecodedBuffer(): Uint8ClampedArray
  }

  function createModule(): Promise<{ readonly JPEGDecoder: new () => JPEGDecoder }>
  export = createModule
}
