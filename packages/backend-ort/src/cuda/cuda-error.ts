import { RankwiseError } from '@rankwise/core'

/** An error that says why nothing can be computed on a GPU here. */
export function cudaError(
  reason: string,
  {
    where,
    actual = {},
    remedy,
    cause,
  }: {
    readonly where?: string
    readonly actual?: Readonly<Record<string, unknown>>
    readonly remedy: string
    readonly cause?: unknown
  },
): RankwiseError {
  const detail = cause instanceof Error ? `: ${cause.message.split('\n', 1)[0]}` : ''
  return new RankwiseError('ORT_CUDA', `the backend ort cannot compute on a GPU: ${reason}${detail}`, {
    ...(where === undefined ? {} : { where }),
    actual: { platform: process.platform, arch: process.arch, ...actual },
    rule: "device: 'cuda' computes on an NVIDIA GPU or is refused; nothing falls back to the CPU",
    remedy: `${remedy}; or take device: 'cpu'`,
    cause,
  })
}
