import { Linear, type LinearOptions, Module, ModuleList, Parameter, type TensorInfo } from '../src/index.ts'

/** A module whose children and weights are known by their names only. */
class Container extends Module {
  constructor(members: Readonly<Record<string, Module | Parameter>>) {
    super()
    Object.assign(this, members)
  }

  override forward(): never {
    throw new Error('this model computes nothing')
  }
}

type Tree = Map<string, Tree | TensorInfo>

/**
 * The module tree that a checkpoint's weight names and shapes describe, to resolve plans against.
 *
 * @param linearOptions - by module path, for the blocks that a model's code would give its Linears
 */
export function modelOf(
  tensors: ReadonlyMap<string, TensorInfo>,
  linearOptions: (path: string) => LinearOptions = () => ({}),
): Module {
  const root: Tree = new Map()
  for (const [name, info] of tensors) {
    const path = name.split('.')
    const leaf = path.pop() as string
    let tree = root
    for (const part of path) {
      const child = tree.get(part) ?? new Map()
      tree.set(part, child)
      tree = child as Tree
    }
    tree.set(leaf, info)
  }
  return moduleOf(root, '', linearOptions)
}

function moduleOf(tree: Tree, path: string, linearOptions: (path: string) => LinearOptions): Module {
  const weight = tree.get('weight')
  if (weight !== undefined && !(weight instanceof Map) && weight.shape.length === 2) {
    const [out, features] = weight.shape as readonly [number, number]
    return new Linear(features, out, { bias: tree.has('bias'), ...linearOptions(path) })
  }
  const members = [...tree].map(([name, member]) => {
    if (!(member instanceof Map)) return [name, new Parameter(member.shape)] as const
    return [name, moduleOf(member, path === '' ? name : `${path}.${name}`, linearOptions)] as const
  })
  const isList = members.every(([name, member]) => /^\d+$/.test(name) && member instanceof Module)
  const indices = members.map(([name]) => Number(name)).sort((a, b) => a - b)
  if (isList && indices.every((index, i) => index === i)) {
    const byName = new Map(members as [string, Module][])
    return new ModuleList(indices.map((index) => byName.get(String(index)) as Module))
  }
  return new Container(Object.fromEntries(members))
}
