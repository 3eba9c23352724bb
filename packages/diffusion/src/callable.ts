interface Generates {
  generate(...args: never[]): unknown
}

/** A pipeline that is also a function, as in diffusers: calling it calls its `generate`. */
export type Callable<P extends Generates> = P & P['generate']

/**
 * Makes a pipeline callable: `await pipeline({ prompt })`. The result is a function that inherits everything else from
 * the pipeline.
 */
export function callable<P extends Generates>(pipeline: P): Callable<P> {
  const call = (...args: never[]) => pipeline.generate(...args)
  return Object.setPrototypeOf(call, pipeline)
}
