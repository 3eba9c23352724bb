import { describe, expect, test } from 'vitest'
import { loadMpiLibrary, startedByOpenMpi } from '../src/library.ts'

describe('loadMpiLibrary', () => {
  test.each([
    ['MPICH', {}, /libmpich12/],
    ['OpenMPI', { OMPI_COMM_WORLD_SIZE: '2' }, /openmpi-bin/],
  ])('a library that does not exist: says how to get %s', (_, env, remedy) => {
    const load = () => loadMpiLibrary({ ...env, RANKWISE_MPI_LIBRARY: '/nowhere/libmpi.so' })
    expect(load).toThrow(expect.objectContaining({ code: 'MPI_NOT_FOUND', remedy: expect.stringMatching(remedy) }))
    expect(load).toThrow('/nowhere/libmpi.so: ')
  })

  test('a library that is none of MPI', () => {
    const load = () => loadMpiLibrary({ RANKWISE_MPI_LIBRARY: 'libc.so.6' })
    expect(load).toThrow(expect.objectContaining({ code: 'MPI_UNSUPPORTED', where: 'libc.so.6' }))
  })

  test('mpirun of OpenMPI is known by its variables', () => {
    expect(startedByOpenMpi({ OMPI_COMM_WORLD_SIZE: '2' })).toBe(true)
    expect(startedByOpenMpi({ PMI_SIZE: '2' })).toBe(false)
  })
})
