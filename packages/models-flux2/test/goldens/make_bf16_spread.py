"""How far diffusers is from itself in bfloat16: runs of FLUX.2-dev on 1, 2 and 4 gloo ranks and with other kernels.

    python make_bf16_spread.py REFERENCE

REFERENCE is the folder of `flux2-tiny`, `flux2-tiny-bf16` and `goldens`. Writes bf16-spread.json: for every tensor of the
pipeline's golden, for the output of the transformer's golden and for the image of the VAE's, the largest difference
between any two runs, the goldens being one of them. Needs torch, diffusers and transformers; tensor parallelism on CPUs is not one of diffusers' supported devices, so that is patched.
"""

import itertools
import json
import os
import pathlib
import platform
import socket
import subprocess
import sys
import tempfile

import torch
from safetensors.torch import load_file

HERE = pathlib.Path(__file__).resolve().parent
PIPELINE = "goldens/pipeline/dev.t2i.64x96.bf16.safetensors"
TRANSFORMER = "goldens/transformer/flux2-tiny-bf16.a.bf16.safetensors"
VAE = "goldens/vae/flux2-tiny.bf16.safetensors"
CALL = dict(
    prompt="a photo of a cat holding a sign that says hello world",
    height=64, width=96, max_sequence_length=128, guidance_scale=4.0, num_inference_steps=4,
)  # fmt: skip

# Kernels that CPUs without AVX-512, without bfloat16 instructions or without either use, and attention in plain steps.
KERNELS = {
    "avx2": {"ATEN_CPU_CAPABILITY": "avx2"},
    "no vectors": {"ATEN_CPU_CAPABILITY": "default"},
    "oneDNN avx2": {"ONEDNN_MAX_CPU_ISA": "AVX2"},
    "plain attention": {"PLAIN_ATTENTION": "1"},
    "plain attention, avx2": {"PLAIN_ATTENTION": "1", "ATEN_CPU_CAPABILITY": "avx2"},
}


def pipeline(reference):
    import diffusers
    from transformers import Mistral3ForConditionalGeneration, PreTrainedTokenizerFast

    base = reference / "flux2-tiny"
    kw = dict(torch_dtype=torch.bfloat16)
    # The tokenizer alone: the processor needs torchvision.
    tokenizer = PreTrainedTokenizerFast.from_pretrained(base / "tokenizer")
    tokenizer.padding_side = "left"
    pipe = diffusers.Flux2Pipeline(
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler.from_pretrained(base / "scheduler"),
        vae=diffusers.AutoencoderKLFlux2.from_pretrained(base / "vae", **kw).eval(),
        text_encoder=Mistral3ForConditionalGeneration.from_pretrained(base / "text_encoder", dtype=torch.bfloat16).eval(),
        tokenizer=tokenizer,
        transformer=diffusers.Flux2Transformer2DModel.from_pretrained(base / "transformer", **kw).eval(),
    )
    pipe.set_progress_bar_config(disable=True)
    return pipe


def transformer_of(reference):
    from diffusers import Flux2Transformer2DModel

    return Flux2Transformer2DModel.from_pretrained(
        reference / "flux2-tiny-bf16/transformer", torch_dtype=torch.bfloat16
    ).eval()


def run(reference, split=lambda model: None):
    """`split` splits a transformer over ranks."""
    pipe, transformer = pipeline(reference), transformer_of(reference)
    split(pipe.transformer)
    split(transformer)
    inputs = {k[3:]: v for k, v in load_file(reference / TRANSFORMER).items() if k.startswith("in.")}
    latents = load_file(reference / VAE)["dec.unpatchified"]
    return draw(pipe) | {
        "transformer": whole(transformer(**inputs, return_dict=False)[0]),
        "vae": pipe.vae.decode(latents, return_dict=False)[0],
    }


def whole(tensor):
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def draw(pipe):
    tensors, steps, forward = {}, [], pipe.transformer.forward

    def record(**kw):
        out = forward(**kw)
        tensors.setdefault("prompt_embeds", kw["encoder_hidden_states"].clone())
        tensors[f"noise_pred.{len(steps)}"] = whole(out[0]).clone()
        return out

    def on_step(_pipe, _i, _t, values):
        steps.append(values["latents"].clone())
        tensors[f"latents.{len(steps)}"] = steps[-1]
        return {}

    pipe.transformer.forward = record
    out = pipe(generator=torch.Generator().manual_seed(42), output_type="np", callback_on_step_end=on_step, **CALL)
    return tensors | {"image": torch.from_numpy(out.images[0])}


def rank(number, ranks, port, reference, out):
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    import diffusers.hooks.tensor_parallel as tensor_parallel
    from diffusers import TensorParallelConfig

    prepare()
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": str(number), "WORLD_SIZE": str(ranks)}
    dist.init_process_group("gloo", rank=number, world_size=ranks)
    torch.accelerator.device_count = lambda: 1
    tensor_parallel._SUPPORTED_TP_DEVICES = (*tensor_parallel._SUPPORTED_TP_DEVICES, "cpu")
    config = TensorParallelConfig(mesh=init_device_mesh("cpu", (ranks,), mesh_dim_names=("tp",)))
    tensors = run(reference, lambda model: model.enable_parallelism(config=config))
    torch.save(tensors, out / f"rank{number}.pt")
    dist.barrier()
    dist.destroy_process_group()


def prepare():
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    torch.use_deterministic_algorithms(True, warn_only=True)


def on_ranks(ranks, reference):
    with tempfile.TemporaryDirectory() as out, socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
        s.close()
        torch.multiprocessing.spawn(rank, (ranks, port, reference, pathlib.Path(out)), nprocs=ranks)
        results = [torch.load(f"{out}/rank{i}.pt") for i in range(ranks)]
    assert all(torch.equal(results[0][k], r[k]) for r in results for k in r), "ranks differ"
    return results[0]


def with_kernels(environment, reference):
    with tempfile.TemporaryDirectory() as out:
        subprocess.run([sys.executable, __file__, str(reference), f"{out}/run.pt"], env=os.environ | environment, check=True)
        return torch.load(f"{out}/run.pt")


def one(reference, out):
    from torch.nn.attention import SDPBackend, sdpa_kernel

    prepare()
    backends = [SDPBackend.MATH] if "PLAIN_ATTENTION" in os.environ else list(SDPBackend.__members__.values())
    with sdpa_kernel(backends):
        torch.save(run(reference), out)


def main(reference):
    import diffusers
    import transformers

    golden = load_file(reference / PIPELINE)
    golden["transformer"] = load_file(reference / TRANSFORMER)["out"]
    golden["vae"] = load_file(reference / VAE)["dec.image"]
    runs = {"golden": golden, "1 rank": with_kernels({}, reference)}
    runs |= {f"{ranks} ranks": on_ranks(ranks, reference) for ranks in (2, 4)}
    runs |= {name: with_kernels(environment, reference) for name, environment in KERNELS.items()}
    spread = {}
    for name in runs["1 rank"]:
        worst = {"maxAbs": 0.0, "relativeRms": 0.0, "of": runs["golden"][name].abs().max().item()}
        for a, b in itertools.permutations(runs.values(), 2):
            x, y = a[name].float(), b[name].float()
            worst["maxAbs"] = max(worst["maxAbs"], (x - y).abs().max().item())
            worst["relativeRms"] = max(worst["relativeRms"], ((x - y).norm() / y.norm()).item())
        spread[name] = worst
    source = {
        "what": "largest differences between any two runs of diffusers in bfloat16, the goldens being one of them",
        "script": pathlib.Path(__file__).name,
        "runs": list(runs),
        "versions": {"torch": torch.__version__, "diffusers": diffusers.__version__, "transformers": transformers.__version__},
        "cpu": platform.machine() + (" with AVX512_BF16" if "avx512_bf16" in pathlib.Path("/proc/cpuinfo").read_text() else ""),
    }
    text = json.dumps({"source": source, "spread": spread}, indent=2)
    (HERE / "bf16-spread.json").write_text(text + "\n")


if __name__ == "__main__":
    reference = pathlib.Path(sys.argv[1]).resolve()
    if len(sys.argv) == 3:
        one(reference, sys.argv[2])
    else:
        main(reference)
