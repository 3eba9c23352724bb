/**
 * Box-Muller in float32 with the exact roundings of torch's AVX2 kernel: log, sine and cosine by the polynomials of
 * Moshier's Cephes library (`logf`, `sinf`, `cosf`; https://www.netlib.org/cephes), whose multiply-adds the compiler
 * contracts to fused ones. `Math.log`, `Math.sin` and `Math.cos` rounded to float32 would give another last bit for one
 * sample in six.
 */

const { fround } = Math

const TWO_PI = fround(2 * Math.PI)
const SQRT_HALF = fround(Math.SQRT1_2)
const LN2_HIGH = 0.693359375
const LN2_LOW = fround(-2.1219444e-4)
const LOG_COEFFICIENTS = [
  7.0376836292e-2, -1.151461031e-1, 1.167699874e-1, -1.2420140846e-1, 1.4249322787e-1, -1.6668057665e-1,
  2.0000714765e-1, -2.4999993993e-1, 3.3333331174e-1,
].map(fround)

const FOUR_OVER_PI = fround(4 / Math.PI)
/** -pi/4 in three parts, so that the argument reduction loses no bits. */
const QUARTER_PI_PARTS = [-0.78515625, -2.4187564849853516e-4, -3.774894977445941e-8].map(fround)
const SINE_COEFFICIENTS = [-1.9515295891e-4, 8.3321608736e-3, -1.6666654611e-1].map(fround)
const COSINE_COEFFICIENTS = [2.443315711809948e-5, -1.388731625493765e-3, 4.166664568298827e-2].map(fround)

/** Adding the mean, though it is zero, is what makes a radius of -0 (the uniform 0) a +0, as in torch. */
const MEAN = 0

const floats = new Float32Array(1)
const bits = new Int32Array(floats.buffer)

/**
 * Turns 16 uniforms of [0, 1) in `data`, from `offset` on, into 16 standard normals in place: value j gives the radius
 * and value j + 8 the angle; j becomes the cosine part and j + 8 the sine part.
 */
export function boxMuller16(data: Float32Array, offset: number): void {
  for (let j = offset; j < offset + 8; j++) {
    const radius = fround(Math.sqrt(-2 * log(fround(1 - (data[j] as number)))))
    const angle = fround(TWO_PI * (data[j + 8] as number))
    const { octant, remainder } = reduceAngle(angle)
    const sine = sinePolynomial(remainder)
    const cosine = cosinePolynomial(remainder)
    const swapped = (octant & 2) !== 0
    const cosineSign = octant === 2 || octant === 4 ? -1 : 1
    const sineSign = (octant & 4) === 0 ? 1 : -1
    data[j] = radius * cosineSign * (swapped ? sine : cosine) + MEAN
    data[j + 8] = radius * sineSign * (swapped ? cosine : sine) + MEAN
  }
}

/**
 * a * b + c rounded once. The product of two float32 is exact in a double; the sum is rounded to a double first, which
 * changed no result here for any of the 2^24 uniforms.
 */
function fma(a: number, b: number, c: number): number {
  return fround(a * b + c)
}

function horner(coefficients: readonly number[], x: number): number {
  return coefficients.reduce((sum, coefficient) => fma(sum, x, coefficient))
}

/** Natural logarithm of a float32 in (0, 1]. */
function log(value: number): number {
  floats[0] = value
  const word = bits[0] as number
  bits[0] = (word & 0x007fffff) | 0x3f000000
  const mantissa = floats[0]
  const belowRoot = mantissa < SQRT_HALF
  const exponent = (word >>> 23) - 126 - (belowRoot ? 1 : 0)
  const x = belowRoot ? fround(fround(mantissa - 1) + mantissa) : fround(mantissa - 1)

  const square = fround(x * x)
  const cubic = fround(horner(LOG_COEFFICIENTS, x) * x)
  const tail = fma(-0.5, square, fma(cubic, square, fround(exponent * LN2_LOW)))
  return fma(exponent, LN2_HIGH, fround(x + tail))
}

/** An angle in [0, 2 pi) as an even octant 0 … 8 and what remains, in [-pi/4, pi/4]. */
function reduceAngle(angle: number): { octant: number; remainder: number } {
  const octant = (Math.trunc(fround(angle * FOUR_OVER_PI)) + 1) & ~1
  const remainder = QUARTER_PI_PARTS.reduce((rest, part) => fma(octant, part, rest), angle)
  return { octant, remainder }
}

function sinePolynomial(x: number): number {
  const square = fround(x * x)
  return fma(fround(horner(SINE_COEFFICIENTS, square) * square), x, x)
}

function cosinePolynomial(x: number): number {
  const square = fround(x * x)
  const quartic = fround(horner(COSINE_COEFFICIENTS, square) * square)
  return fround(fma(quartic, square, fround(-0.5 * square)) + 1)
}

/** `boxMuller16` in float64, with the platform's `log`, `sin` and `cos`. */
export function boxMuller16Float64(data: Float64Array, offset: number): void {
  for (let j = offset; j < offset + 8; j++) {
    const radius = Math.sqrt(-2 * Math.log(1 - (data[j] as number)))
    const angle = 2 * Math.PI * (data[j + 8] as number)
    data[j] = radius * Math.cos(angle) + MEAN
    data[j + 8] = radius * Math.sin(angle) + MEAN
  }
}
