import { once } from 'node:events'
import { type AddressInfo, createServer } from 'node:net'

/** The variables by which `worldSize` processes of this machine find each other. */
export async function rankEnvironment(worldSize: number): Promise<readonly Record<string, string>[]> {
  const server = createServer().listen(0, '127.0.0.1')
  await once(server, 'listening')
  const { port } = server.address() as AddressInfo
  server.close()
  await once(server, 'close')
  return Array.from({ length: worldSize }, (_, rank) => ({
    RANK: String(rank),
    LOCAL_RANK: String(rank),
    WORLD_SIZE: String(worldSize),
    LOCAL_WORLD_SIZE: String(worldSize),
    MASTER_ADDR: '127.0.0.1',
    MASTER_PORT: String(port),
  }))
}
