"""Writes images.safetensors, resize.json and tiling.safetensors: what Pillow and diffusers make of the same input.

    pip install torch diffusers pillow safetensors numpy
    python make_images.py ../../../fixtures/reference/flux2-tiny/vae
"""

import hashlib
import io
import json
import struct
import sys
import zlib
from pathlib import Path

import diffusers
import numpy as np
import PIL
import torch
from diffusers import AutoencoderKLFlux2
from diffusers.utils import load_image
from PIL import Image
from safetensors.torch import save_file

HERE = Path(__file__).parent


def noise(width, height):
    """Bytes that are easily made in any language: a hash of their index."""
    i = np.arange(width * height * 3, dtype=np.uint64)
    mixed = (i * 2654435761) & 0xFFFFFFFF
    mixed = ((mixed ^ (mixed >> 15)) * 2246822519) & 0xFFFFFFFF
    return Image.fromarray((mixed >> 24).astype(np.uint8).reshape(height, width, 3))


def smooth(width, height):
    """Low frequencies and a hard edge, so that JPEG and interpolation have something to get wrong."""
    y, x = np.mgrid[0:height, 0:width].astype(np.float64)
    pixels = np.stack([x / width * 255, y / height * 255, 127 + 120 * np.sin(x / 3 + y / 5)], -1)
    pixels[height // 4 : height // 2, width // 3 : width // 2] = (250, 20, 60)
    return Image.fromarray(np.clip(pixels, 0, 255).astype(np.uint8))


def saved(image, file_format, **options):
    out = io.BytesIO()
    image.save(out, file_format, **options)
    return out.getvalue()


def png(width, height, depth, color_type, rows):
    """A PNG of a kind that Pillow does not write."""

    def chunk(name, content):
        return struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))

    header = struct.pack(">IIBBBBB", width, height, depth, color_type, 0, 0, 0)
    pixels = zlib.compress(b"".join(b"\0" + row for row in rows))
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", pixels) + chunk(b"IEND", b"")


def oriented(image, file_format, orientation):
    exif = Image.Exif()
    exif[0x0112] = orientation
    return saved(image, file_format, exif=exif)


def files():
    picture = smooth(37, 29)
    yield "jpeg.420", saved(picture, "JPEG", quality=85, subsampling=2)
    yield "jpeg.422", saved(picture, "JPEG", quality=85, subsampling=1)
    yield "jpeg.444", saved(picture, "JPEG", quality=95, subsampling=0)
    yield "jpeg.progressive", saved(picture, "JPEG", progressive=True)
    yield "jpeg.restart", saved(picture, "JPEG", restart_marker_rows=1)
    yield "jpeg.grey", saved(picture.convert("L"), "JPEG")
    yield "jpeg.rgb", saved(picture, "JPEG", keep_rgb=True)
    small = smooth(9, 7)
    for orientation in range(1, 9):
        yield f"jpeg.orientation{orientation}", oriented(smooth(19, 10), "JPEG", orientation)
        yield f"png.orientation{orientation}", oriented(small, "PNG", orientation)
    yield "png.rgb", saved(small, "PNG")
    yield "png.rgba", saved(Image.merge("RGBA", (*small.split(), noise(9, 7).getchannel(0))), "PNG")
    yield "png.grey", saved(small.convert("L"), "PNG")
    yield "png.greyAlpha", saved(small.convert("LA"), "PNG")
    for bits in (1, 2, 4, 8):
        yield f"png.palette{bits}", saved(small.quantize(2**bits), "PNG", bits=bits)
    transparent = small.quantize(4)
    yield "png.paletteAlpha", saved(transparent, "PNG", transparency=bytes([0, 90, 255, 255]))
    rows = np.random.RandomState(1).bytes(4 * 7 * 8)
    for bits in (1, 2, 4):
        row = -(-13 * bits // 8)
        yield f"png.grey{bits}", png(13, 4, bits, 0, [rows[i * row : (i + 1) * row] for i in range(4)])
    for name, color_type, channels in (("rgb", 2, 3), ("greyAlpha", 4, 2), ("rgba", 6, 4)):
        row = 7 * channels * 2
        yield f"png.{name}16", png(7, 4, 16, color_type, [rows[i * row : (i + 1) * row] for i in range(4)])


def make_images():
    tensors = {}
    for name, content in files():
        path = HERE / "picture.tmp"
        path.write_bytes(content)
        tensors[name] = torch.frombuffer(bytearray(content), dtype=torch.uint8)
        tensors[f"{name}.rgb"] = torch.from_numpy(np.asarray(load_image(str(path))).copy())
        path.unlink()
    # What has no picture here, but must be told from the others.
    tensors["jpeg.cmyk"] = torch.frombuffer(bytearray(saved(smooth(9, 7).convert("CMYK"), "JPEG")), dtype=torch.uint8)
    save_file(tensors, HERE / "images.safetensors")


SIZES = [
    ((101, 75), (63, 47)), ((101, 75), (101, 40)), ((101, 75), (50, 75)), ((101, 75), (101, 75)), ((101, 75), (1, 1)),
    ((64, 64), (63, 63)), ((64, 64), (65, 127)), ((7, 5), (90, 61)), ((1, 1), (5, 3)), ((3, 200), (2, 11)),
    ((90, 300), (60, 200)), ((100, 140), (90, 120)), ((100, 141), (90, 120)), ((100, 80), (120, 79)), ((100, 80), (120, 81)),
    ((997, 601), (331, 200)), ((1500, 800), (1402, 747)),
]  # fmt: skip


def make_resize():
    cases = []
    for size, target in SIZES:
        resized = noise(*size).resize(target, Image.Resampling.LANCZOS)
        cases.append({"from": size, "to": target, "sha256": hashlib.sha256(resized.tobytes()).hexdigest()})
    lines = ",\n".join("    " + json.dumps(case) for case in cases)
    source = f"Image.resize(to, LANCZOS) of Pillow {PIL.__version__}"
    (HERE / "resize.json").write_text(f'{{\n  "source": "{source}",\n  "cases": [\n{lines}\n  ]\n}}\n')


TILINGS = {"quarter": (64, 0.25, 11, 14), "half": (32, 0.5, 9, 5), "none": (32, 0.0, 5, 9), "eighth": (64, 0.125, 8, 17)}


@torch.no_grad()
def make_tiling(folder):
    vae = AutoencoderKLFlux2.from_pretrained(folder).eval()
    vae.enable_tiling()
    tensors = {}
    generator = torch.Generator().manual_seed(7)
    for name, (tile, overlap, rows, columns) in TILINGS.items():
        vae.tile_sample_min_size, vae.tile_latent_min_size, vae.tile_overlap_factor = tile, tile // 8, overlap
        latents = torch.randn(1, 32, rows, columns, generator=generator)
        image = vae.decode(latents).sample
        tensors[f"{name}.latents"], tensors[f"{name}.image"] = latents, image
        tensors[f"{name}.mode"] = vae.encode(image).latent_dist.mode()
    source = f"diffusers {diffusers.__version__}, torch {torch.__version__}"
    save_file(tensors, HERE / "tiling.safetensors", {"source": source})


if __name__ == "__main__":
    make_images()
    make_resize()
    make_tiling(sys.argv[1])
