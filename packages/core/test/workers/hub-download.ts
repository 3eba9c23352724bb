import { type FileSelection, HubRepository } from '../../src/hub/index.ts'

/** What the program is started with, as JSON. */
interface Argument {
  readonly id: string
  readonly endpoint: string
  readonly cacheDir: string
  readonly selection: FileSelection
}

/** Downloads a snapshot and prints its folder, or the error. */
const { id, endpoint, cacheDir, selection } = JSON.parse(process.argv[2] ?? '') as Argument
const retry = { delayMs: 10 }
try {
  const repository = await HubRepository.open(id, { endpoint, cacheDir, env: {}, retry, timeoutMs: 2000 })
  process.stdout.write(JSON.stringify({ snapshot: await repository.download(selection) }))
} catch (error) {
  const { code, message } = error as { code?: string; message?: string }
  process.stdout.write(JSON.stringify({ code, message }))
}
