import { chmod, mkdir, writeFile } from 'node:fs/promises'
import { homedir } from 'node:os'
import { join } from 'node:path'
import { describe, expect, it } from 'vitest'
import { hubSettings, hubToken } from '../../src/hub/hub-settings.ts'
import { expectCode, temporaryFolder } from '../checkpoint/files.ts'

describe('hubSettings', () => {
  it.each([
    [{}, join(homedir(), '.cache', 'huggingface', 'hub')],
    [{ XDG_CACHE_HOME: '/xdg' }, '/xdg/huggingface/hub'],
    [{ HF_HOME: '/home/hf', XDG_CACHE_HOME: '/xdg' }, '/home/hf/hub'],
    [{ HUGGINGFACE_HUB_CACHE: '/old', HF_HOME: '/home/hf' }, '/old'],
    [{ HF_HUB_CACHE: '/new', HUGGINGFACE_HUB_CACHE: '/old', HF_HOME: '/home/hf' }, '/new'],
    [{ HF_HOME: '~/hf' }, join(homedir(), 'hf', 'hub')],
    [{ HF_HUB_CACHE: `$DISK/$\{NAME}/hub`, DISK: '/disk', NAME: 'me' }, '/disk/me/hub'],
    [{ HF_HUB_CACHE: '/a/$UNSET' }, '/a/$UNSET'],
    [{ HF_HUB_CACHE: '' }, join(homedir(), '.cache', 'huggingface', 'hub')],
  ])('finds the cache from %j where huggingface_hub does', (env, cacheDir) => {
    expect(hubSettings({ env }).cacheDir).toBe(cacheDir)
  })

  it('prefers options to variables', () => {
    const env = {
      HF_HUB_CACHE: '/variable',
      HF_ENDPOINT: 'https://variable',
      HF_HUB_OFFLINE: '1',
      HF_HUB_DOWNLOAD_TIMEOUT: '3',
    }
    expect(hubSettings({ env })).toMatchObject({
      cacheDir: '/variable',
      endpoint: 'https://variable',
      offline: true,
      timeoutMs: 3000,
    })
    const options = { env, cacheDir: '/option', endpoint: 'https://option/', localFilesOnly: false, timeoutMs: 5 }
    expect(hubSettings(options)).toMatchObject({
      cacheDir: '/option',
      endpoint: 'https://option',
      offline: false,
      timeoutMs: 5,
    })
  })

  it.each(['1', 'on', 'YES', 'true'])('takes %s for offline', (value) => {
    expect(hubSettings({ env: { HF_HUB_OFFLINE: value } }).offline).toBe(true)
    expect(hubSettings({ env: { TRANSFORMERS_OFFLINE: value } }).offline).toBe(true)
  })

  it.each(['0', '', 'off', 'no'])('takes %j for online', (value) => {
    expect(hubSettings({ env: { HF_HUB_OFFLINE: value } }).offline).toBe(false)
  })

  it.each(['https://user:secret@hub.example', 'ftp://hub.example', 'hub.example', 'https://hub.example?token=secret'])(
    'refuses the endpoint %s without quoting it',
    async (endpoint) => {
      await expectCode(() => hubSettings({ env: {}, endpoint }), 'HUB_ENDPOINT')
      await expectCode(() => hubSettings({ env: { HF_ENDPOINT: endpoint } }), 'HUB_ENDPOINT')
      expect(() => hubSettings({ env: {}, endpoint })).not.toThrow(/secret/)
    },
  )

  it('refuses timeouts and retries that are none', async () => {
    await expectCode(
      () => hubSettings({ env: { HF_HUB_DOWNLOAD_TIMEOUT: 'soon' } }),
      'HUB_OPTION',
      'HF_HUB_DOWNLOAD_TIMEOUT',
    )
    await expectCode(() => hubSettings({ env: {}, timeoutMs: Number.NaN }), 'HUB_OPTION', 'timeoutMs')
    await expectCode(() => hubSettings({ env: {}, retry: { attempts: 0 } }), 'HUB_OPTION', 'retry.attempts')
  })
})

describe('hubToken', () => {
  it('comes from the option, HF_TOKEN, its old name, or the file of a login, in this order', async () => {
    const home = await temporaryFolder()
    await writeFile(join(home, 'token'), 'hf_file\n')
    const file = { HF_HOME: home }
    const old = { ...file, HUGGING_FACE_HUB_TOKEN: 'hf_old' }
    const env = { ...old, HF_TOKEN: ' hf_variable ' }
    expect(await hubToken({ env, token: 'hf_option' })).toBe('hf_option')
    expect(await hubToken({ env })).toBe('hf_variable')
    expect(await hubToken({ env: old })).toBe('hf_old')
    expect(await hubToken({ env: file })).toBe('hf_file')
    await writeFile(join(home, 'other'), 'hf_other')
    expect(await hubToken({ env: { ...file, HF_TOKEN_PATH: join(home, 'other') } })).toBe('hf_other')
  })

  it('is none without a login, and when it is switched off', async () => {
    const home = await temporaryFolder()
    expect(await hubToken({ env: { HF_HOME: home } })).toBeUndefined()
    await writeFile(join(home, 'token'), ' \n')
    expect(await hubToken({ env: { HF_HOME: home } })).toBeUndefined()
    expect(await hubToken({ env: { HF_TOKEN: 'hf_variable' }, token: false })).toBeUndefined()
    const env = { HF_TOKEN: 'hf_variable', HF_HUB_DISABLE_IMPLICIT_TOKEN: '1' }
    expect(await hubToken({ env })).toBeUndefined()
    expect(await hubToken({ env, token: 'hf_option' })).toBe('hf_option')
  })

  it.each(['', 'hf_secret\r\nx: y', 'hf_sec ret', 'hf_secrét'])('refuses %j without quoting it', async (token) => {
    await expectCode(() => hubToken({ env: {}, token }), 'HUB_TOKEN', 'the option token')
    const error = await hubToken({ env: {}, token }).catch((thrown: Error) => thrown)
    expect(String((error as Error).stack)).not.toContain('hf_sec')
  })

  it('names the file that cannot be read', async () => {
    const home = await temporaryFolder()
    await mkdir(join(home, 'token'))
    await chmod(home, 0o700)
    await expectCode(() => hubToken({ env: { HF_HOME: home } }), 'HUB_TOKEN', join(home, 'token'), 'EISDIR')
  })
})
