// The WebAssembly kernel as text. One function per dtype and reduction: `(ranks, stride, count)` combines `count`
// elements, a multiple of a vector, of `ranks` contributions that start `stride` bytes apart at 0, into the first.
// Arithmetic is the one of native/reduce.c: in rank order, in float32 for 16-bit floats, and with one NaN only.

interface DTypeText {
  /** Loads the vector of one contribution at $at. */
  readonly vector: string
  /** Stores $total at $out. */
  readonly store: string
  /** Bytes and elements of a vector. */
  readonly bytes: number
  readonly elements: number
  readonly sum: string
  readonly max: string
  readonly min: string
  /** Replaces NaNs of $total. */
  readonly canonical: string
}

const FLOAT32: DTypeText = {
  vector: '(v128.load (local.get $at))',
  store: '(v128.store (local.get $out) (local.get $total))',
  bytes: 16,
  elements: 4,
  sum: 'f32x4.add',
  // As Math.max and Math.min: NaN wins, and -0 is less than 0.
  max: 'f32x4.max',
  min: 'f32x4.min',
  canonical: canonical('f32x4', '(v128.const i32x4 0x7fc00000 0x7fc00000 0x7fc00000 0x7fc00000)'),
}

const FLOAT64: DTypeText = {
  ...FLOAT32,
  elements: 2,
  sum: 'f64x2.add',
  max: 'f64x2.max',
  min: 'f64x2.min',
  canonical: canonical('f64x2', '(v128.const i64x2 0x7ff8000000000000 0x7ff8000000000000)'),
}

const INT32: DTypeText = { ...FLOAT32, sum: 'i32x4.add', max: 'i32x4.max_s', min: 'i32x4.min_s', canonical: '' }

// Four halves become one vector; what $encode leaves in the lanes is below 2^16, so narrowing changes nothing.
const HALVES: DTypeText = { ...FLOAT32, bytes: 8, elements: 4 }
const narrow = (encode: string) =>
  `(v128.store64_lane 0 (local.get $out) (i16x8.narrow_i32x4_u (call $${encode} (local.get $total)) (v128.const i64x2 0 0)))`

const FLOAT16: DTypeText = {
  ...HALVES,
  vector: '(call $decode_float16 (v128.load16x4_u (local.get $at)))',
  store: narrow('encode_float16'),
}

const BFLOAT16: DTypeText = {
  ...HALVES,
  vector: '(i32x4.shl (v128.load16x4_u (local.get $at)) (i32.const 16))',
  store: narrow('encode_bfloat16'),
}

const DTYPES = { float32: FLOAT32, float64: FLOAT64, float16: FLOAT16, bfloat16: BFLOAT16, int32: INT32 }

/** The module, in the WebAssembly text format. */
export function reduceWat(): string {
  const functions = Object.entries(DTYPES).flatMap(([name, dtype]) =>
    (['sum', 'max', 'min'] as const).map((op) => reduction(`${name}_${op}`, dtype, dtype[op])),
  )
  return `(module\n  (memory (export "memory") 1)\n${HELPERS}\n${functions.join('\n')}\n)\n`
}

function reduction(name: string, { vector, store, bytes, elements, canonical }: DTypeText, combine: string): string {
  return `
  (func (export "${name}") (param $ranks i32) (param $stride i32) (param $count i32)
    (local $out i32) (local $at i32) (local $rank i32) (local $total v128)
    (block $done
      (loop $vectors
        (br_if $done (i32.le_s (local.get $count) (i32.const 0)))
        (local.set $at (local.get $out))
        (local.set $total ${vector})
        (local.set $rank (i32.const 1))
        (loop $next
          (local.set $at (i32.add (local.get $at) (local.get $stride)))
          (local.set $total (${combine} (local.get $total) ${vector}))
          (local.set $rank (i32.add (local.get $rank) (i32.const 1)))
          (br_if $next (i32.lt_s (local.get $rank) (local.get $ranks))))
        ${canonical}
        ${store}
        (local.set $out (i32.add (local.get $out) (i32.const ${bytes})))
        (local.set $count (i32.sub (local.get $count) (i32.const ${elements})))
        (br $vectors))))`
}

/** Replaces every NaN of $total, which equals nothing, by `nan`. */
function canonical(type: string, nan: string): string {
  return `(local.set $total
          (v128.bitselect (local.get $total) ${nan} (${type}.eq (local.get $total) (local.get $total))))`
}

const splat = (value: string) => `(v128.const i32x4 ${Array(4).fill(value).join(' ')})`

const HELPERS = `
  ;; The exponent moves from bias 15 to bias 127 by a multiplication, which also normalises subnormal halves; it is exact.
  (func $decode_float16 (param $halves v128) (result v128)
    (local $magnitude v128)
    (local.set $magnitude (i32x4.shl (v128.and (local.get $halves) ${splat('0x7fff')}) (i32.const 13)))
    (v128.or
      (i32x4.shl (v128.and (local.get $halves) ${splat('0x8000')}) (i32.const 16))
      (v128.bitselect
        (v128.or (local.get $magnitude) ${splat('0x7f800000')})
        (f32x4.mul (local.get $magnitude) (v128.const f32x4 ${Array(4).fill('0x1p112').join(' ')}))
        (i32x4.ge_u (local.get $magnitude) ${splat('0x0f800000')}))))

  ;; As encode_float16 in native/reduce.c; below 2^-14 the half is subnormal, and adding 0.5 rounds to its unit.
  (func $encode_float16 (param $floats v128) (result v128)
    (local $magnitude v128) (local $result v128)
    (local.set $magnitude (v128.and (local.get $floats) ${splat('0x7fffffff')}))
    (local.set $result
      (v128.bitselect
        (i32x4.sub
          (f32x4.add (local.get $magnitude) (v128.const f32x4 0.5 0.5 0.5 0.5))
          ${splat('0x3f000000')})
        (i32x4.shr_u
          (i32x4.add
            (i32x4.sub (local.get $magnitude) ${splat('0x37fff001')})
            (v128.and (i32x4.shr_u (local.get $magnitude) (i32.const 13)) ${splat('1')}))
          (i32.const 13))
        (i32x4.lt_u (local.get $magnitude) ${splat('0x38800000')})))
    (local.set $result
      (v128.bitselect ${splat('0x7c00')} (local.get $result)
        (i32x4.ge_u (local.get $magnitude) ${splat('0x477ff000')})))
    (v128.bitselect ${splat('0x7e00')}
      (v128.or
        (local.get $result)
        (v128.and (i32x4.shr_u (local.get $floats) (i32.const 16)) ${splat('0x8000')}))
      (i32x4.gt_u (local.get $magnitude) ${splat('0x7f800000')})))

  (func $encode_bfloat16 (param $floats v128) (result v128)
    (v128.bitselect
      (i32x4.shr_u
        (i32x4.add
          (i32x4.add (local.get $floats) ${splat('0x7fff')})
          (v128.and (i32x4.shr_u (local.get $floats) (i32.const 16)) ${splat('1')}))
        (i32.const 16))
      ${splat('0x7fc0')}
      (f32x4.eq (local.get $floats) (local.get $floats))))
`
