import { activeTrace } from './active-trace.ts'
import { RankwiseError } from './errors.ts'
import { Parameter } from './parameter.ts'

/**
 * A part of a model. Its parameters and submodules are its properties, under the names that the checkpoint has for
 * them, so a weight's name is the path to it.
 */
export abstract class Module {
  /** Describes the computation on traced tensors. Call it through `call`, so that the trace knows the module. */
  abstract forward(...args: never[]): unknown

  /** Runs `forward`, with this module as the place that errors and printed graphs name. @throws RankwiseError `TRACE_INACTIVE`, `TRACE_MODULE` */
  call(...args: Parameters<this['forward']>): ReturnType<this['forward']> {
    const forward = this.forward as (...args: unknown[]) => ReturnType<this['forward']>
    return activeTrace().within(this, () => forward.apply(this, args))
  }

  /** Direct submodules by property name. */
  *children(): IterableIterator<[name: string, module: Module]> {
    for (const [name, value] of Object.entries(this)) {
      if (value instanceof Module) yield [name, value]
    }
  }

  /** The module itself under the empty path, then everything below it, in order of construction. */
  *namedModules(prefix = ''): IterableIterator<[path: string, module: Module]> {
    yield [prefix, this]
    for (const [name, child] of this.children()) yield* child.namedModules(join(prefix, name))
  }

  /**
   * Every weight of this module and of those below it, by its name in the checkpoint. One that is used in two places has
   * the name of the first, as in torch.
   */
  *namedParameters(): IterableIterator<[name: string, parameter: Parameter]> {
    const seen = new Set<Parameter>()
    for (const [path, module] of this.namedModules()) {
      for (const [name, value] of Object.entries(module)) {
        if (!(value instanceof Parameter) || seen.has(value)) continue
        seen.add(value)
        yield [join(path, name), value]
      }
    }
  }

  /** The module at a dotted path. @throws RankwiseError `MODULE_NOT_FOUND` */
  getSubmodule(path: string): Module {
    let module: Module = this
    for (const name of path === '' ? [] : path.split('.')) {
      const child = new Map(module.children()).get(name)
      if (child === undefined) {
        throw new RankwiseError('MODULE_NOT_FOUND', `there is no module '${name}' in a ${module.constructor.name}`, {
          where: path,
          actual: { known: [...module.children()].map(([known]) => known) },
        })
      }
      module = child
    }
    return module
  }
}

/** A list of modules named by their index: `transformer_blocks.0`, `transformer_blocks.1`, … */
export class ModuleList<M extends Module = Module> extends Module implements Iterable<M> {
  readonly #modules: readonly M[]

  constructor(modules: readonly M[]) {
    super()
    this.#modules = modules
  }

  get length(): number {
    return this.#modules.length
  }

  /** @throws RankwiseError `MODULE_NOT_FOUND` */
  at(index: number): M {
    const module = this.#modules[index]
    if (module === undefined) {
      throw new RankwiseError(
        'MODULE_NOT_FOUND',
        `index ${index} is outside of a list of ${this.#modules.length} modules`,
      )
    }
    return module
  }

  override *children(): IterableIterator<[name: string, module: M]> {
    for (const [i, module] of this.#modules.entries()) yield [String(i), module]
  }

  /** The modules in their order. */
  [Symbol.iterator](): Iterator<M> {
    return this.#modules[Symbol.iterator]()
  }

  override forward(): never {
    throw new RankwiseError('MODULE_LIST_FORWARD', 'a ModuleList has no forward', {
      remedy: 'call its modules one by one',
    })
  }
}

function join(prefix: string, name: string): string {
  return prefix === '' ? name : `${prefix}.${name}`
}
