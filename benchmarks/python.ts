import { spawnSync } from 'node:child_process'

/** On the CPU, with one thread as our ranks, and without asking a hub about a folder. */
export const PYTHON_ENVIRONMENT = {
  CUDA_VISIBLE_DEVICES: '',
  GLOO_SOCKET_IFNAME: 'lo',
  HF_HUB_OFFLINE: '1',
  OMP_NUM_THREADS: '1',
}

/** What a program printed, or why it could not. */
export type PythonAnswer = { readonly output: string } | { readonly missing: string }

/**
 * Runs a program that imports what a peer needs and prints its versions.
 *
 * @param what what this Python lacks if the program fails
 */
export function askPython(python: string, program: string, what: string): PythonAnswer {
  const { status, error, stdout, stderr } = spawnSync(python, ['-c', program], {
    encoding: 'utf8',
    env: { ...process.env, ...PYTHON_ENVIRONMENT },
  })
  if (error !== undefined) return { missing: `${python} does not start: ${error.message}` }
  // The last line of a traceback is the exception.
  if (status !== 0) return { missing: `${python} has no ${what}: ${stderr.trim().split('\n').at(-1)}` }
  return { output: stdout.trim() }
}
