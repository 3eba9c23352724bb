declare module 'node-gyp-build' {
  /** Loads the addon of the package in `folder`. @throws Error when there is none for this platform */
  function nodeGypBuild<T>(folder: string): T
  export = nodeGypBuild
}
