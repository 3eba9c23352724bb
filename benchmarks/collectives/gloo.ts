import { fileURLToPath } from 'node:url'
import { askPython, PYTHON_ENVIRONMENT } from '../python.ts'
import { rankEnvironment } from '../rank-environment.ts'
import type { Found } from './engine.ts'

const PROGRAM = fileURLToPath(new URL('gloo-rank.py', import.meta.url))

const PROBE = `
import torch, torch.distributed
assert torch.distributed.is_gloo_available(), "this torch has no gloo"
print(f"torch {torch.__version__}")
`

/** The gloo of a Python's torch, over the loopback. */
export function findGloo(python: string, program = PROGRAM): Found {
  const answer = askPython(python, PROBE, 'torch.distributed with gloo')
  if ('missing' in answer) return answer
  const commands = async (ranks: number, plans: readonly string[]) =>
    (await rankEnvironment(ranks)).map((env) => ({
      file: python,
      args: [program, ...plans],
      env: { ...PYTHON_ENVIRONMENT, ...env },
    }))
  return { engines: [{ name: 'gloo', commands }], about: answer.output }
}
