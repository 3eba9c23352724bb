// `pnpm build:native`: compiles the addons of all packages that have one; each says in one line what came of it.
for (const name of ['collectives-local', 'backend-ort']) await import(`../packages/${name}/native/build.mjs`)
