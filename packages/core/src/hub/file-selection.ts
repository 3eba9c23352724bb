import type { FileListing } from './file-listing.ts'
import type { HubFile } from './remote-file.ts'

/** Which files of a repository are needed. Nothing else is downloaded, and never weights in other formats. */
export interface FileSelection {
  /** Single files, such as `model_index.json`. They have to be there. */
  readonly files?: readonly string[]
  /** Folders, without those below them; '' is the root of the repository. They have to be there. */
  readonly folders?: readonly string[]
  /** Whether the safetensors files of the folders are needed too. @default true */
  readonly weights?: boolean
  /** Base names of the weights. @default ['diffusion_pytorch_model', 'model'], those of diffusers and transformers */
  readonly weightsNames?: readonly string[]
}

/** What diffusers and transformers call weights. */
export const WEIGHTS_NAMES: readonly string[] = ['diffusion_pytorch_model', 'model']

/** Configs, vocabularies and chat templates. */
const SMALL_FILES = /\.(json|jinja|txt)$/

/** Files and folders of a selection that a listing lacks. */
export function missingFrom(listing: FileListing, { files = [], folders = [] }: FileSelection): readonly string[] {
  const present = new Set([...listing.keys()].map(folderOf))
  return [
    ...files.filter((path) => !listing.has(path)),
    ...folders.filter((folder) => !present.has(folder)).map((folder) => `${folder}/`),
  ]
}

/** What a selection needs beside the weights; indices of weights only where they are of its names. */
export function selectSmallFiles(listing: FileListing, selection: FileSelection): readonly HubFile[] {
  const { files = [], folders = [], weightsNames = WEIGHTS_NAMES } = selection
  const indices = new Set(folders.flatMap((folder) => weightsNames.map((name) => indexPath(folder, name))))
  return [...listing.values()].filter(({ path }) => {
    if (files.includes(path) || indices.has(path)) return true
    return folders.includes(folderOf(path)) && SMALL_FILES.test(path) && !path.endsWith('.index.json')
  })
}

/** Whether a file names the files of weights. */
export function isIndex({ path }: HubFile): boolean {
  return path.endsWith('.safetensors.index.json')
}

/** Folder of a path in a repository; '' for the root. */
export function folderOf(path: string): string {
  return path.slice(0, Math.max(0, path.lastIndexOf('/')))
}

/** A folder as paths begin: `./vae/` is `vae`. */
export function withoutSlashes(folder: string): string {
  return folder.replace(/^\.?\/+|\/+$/g, '')
}

/** Path of a file in a folder of a repository. */
export function pathIn(folder: string, name: string): string {
  return folder === '' ? name : `${folder}/${name}`
}

/** Path of the index of weights that are split over several files. */
export function indexPath(folder: string, weightsName: string): string {
  return pathIn(folder, `${weightsName}.safetensors.index.json`)
}
