import { RankwiseError } from '@rankwise/core'

/** An error that says why the engine 'capi' cannot be used here. */
export function engineError(
  reason: string,
  { where, remedy, cause }: { readonly where?: string; readonly remedy: string; readonly cause?: unknown },
): RankwiseError {
  const detail = cause instanceof Error ? `: ${cause.message.split('\n', 1)[0]}` : ''
  return new RankwiseError('ORT_ENGINE', `the engine capi cannot be used: ${reason}${detail}`, {
    ...(where === undefined ? {} : { where }),
    actual: { platform: process.platform, arch: process.arch, node: process.version },
    rule: 'an engine that is asked for by name is used or refused',
    remedy: `${remedy}; or leave the choice to engine: 'auto'`,
    cause,
  })
}
