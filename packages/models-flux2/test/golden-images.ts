import { Image } from '@rankwise/diffusion'
import { loadGolden } from '@rankwise/fixtures'

/** The reference images that a pipeline golden was computed with. */
export async function goldenImages(golden: string, count: number): Promise<readonly Image[]> {
  const tensors = await loadGolden(golden)
  return Array.from({ length: count }, (_, i) => {
    const { shape, data } = tensors.get(`ref_image_u8.${i}`)
    const [height, width] = shape as readonly [number, number]
    return new Image(width, height, data as Uint8Array)
  })
}
