"""One process that runs a block of diffusers: started by main.ts, as rank.ts is.

Its argument is a job (see job.ts). In float64 it computes what the others are compared with.
"""

import json
import os
import sys
import time

import torch
from diffusers.models.transformers import transformer_flux2
from diffusers.models.transformers.transformer_flux2 import Flux2SingleTransformerBlock, Flux2TransformerBlock
from safetensors.torch import load_file, save_file

PREFIXES = {"single": "single_transformer_blocks.0.", "double": "transformer_blocks.0."}


def rotate(x, tables, sequence_dim):
    """As diffusers' `apply_rotary_emb`, which casts to float32, but in the dtype of x."""
    assert sequence_dim == 1
    cos, sin = (table.to(x.dtype)[None, :, None, :] for table in tables)
    real, imaginary = x.unflatten(-1, (-1, 2)).unbind(-1)
    return x * cos + torch.stack([-imaginary, real], -1).flatten(-2) * sin


def make_block(config, kind):
    block = Flux2SingleTransformerBlock if kind == "single" else Flux2TransformerBlock
    heads, head_dim = config["num_attention_heads"], config["attention_head_dim"]
    with torch.device("meta"):
        return block(
            dim=heads * head_dim,
            num_attention_heads=heads,
            attention_head_dim=head_dim,
            mlp_ratio=config["mlp_ratio"],
            eps=config["eps"],
        )


def own_share(name, weight, config, tp):
    """The part of a weight that rank 0 holds, as `_tp_plan` of diffusers' transformer splits it."""
    dim = config["num_attention_heads"] * config["attention_head_dim"]
    mlp = int(dim * config["mlp_ratio"])
    if weight.dim() == 1:
        return weight
    if "to_qkv_mlp_proj" in name:
        axis, blocks = 0, [dim] * 3 + [mlp] * 2
    elif "linear_in" in name:
        axis, blocks = 0, [mlp] * 2
    elif name == "attn.to_out.weight":
        axis, blocks = 1, [dim, mlp]
    elif "to_out" in name or "to_add_out" in name or "linear_out" in name:
        axis, blocks = 1, [weight.shape[1]]
    else:
        axis, blocks = 0, [weight.shape[0]]
    return torch.cat([part.narrow(axis, 0, part.shape[axis] // tp) for part in weight.split(blocks, axis)], axis)


def load_block(job, config, dtype):
    """diffusers' attention takes as many heads as its weights have, so a share runs in the same module as the whole."""
    block = make_block(config, job["block"])
    prefix = PREFIXES[job["block"]]
    weights = load_file(os.path.join(job["folder"], f"{job['block']}.safetensors"))
    assert {name.removeprefix(prefix) for name in weights} == set(block.state_dict())
    for name, weight in weights.items():
        name = name.removeprefix(prefix)
        # A copy: the file is mapped.
        share = own_share(name, weight, config, job["tp"]).to(dtype, copy=True)
        module, _, parameter = name.rpartition(".")
        # `load_state_dict` takes no other shapes.
        setattr(block.get_submodule(module), parameter, torch.nn.Parameter(share, requires_grad=False))
    return block.eval()


def load_inputs(job, dtype):
    inputs = load_file(os.path.join(job["folder"], f"{job['block']}-{job['tokens']}.inputs.safetensors"))
    tables = tuple(inputs.pop(name).repeat_interleave(2, dim=-1) for name in ("rotary_cos", "rotary_sin"))
    inputs = {name: tensor.to(dtype) for name, tensor in inputs.items()}
    if job["block"] == "single":
        inputs["encoder_hidden_states"] = None
    return {**inputs, "image_rotary_emb": tables}


def times_of(run, limit):
    times = []
    end = time.perf_counter() + limit["seconds"]
    while not times or (len(times) < limit["most"] and time.perf_counter() < end):
        started = time.perf_counter()
        run()
        times.append(1000 * (time.perf_counter() - started))
    return times


def results_of(job, outputs):
    if job["block"] == "single":
        return {"hidden_states": outputs}
    text, image = outputs
    return {"hidden_states": image, "encoder_hidden_states": text}


@torch.inference_mode()
def main():
    job = json.loads(sys.argv[1])
    torch.set_num_threads(job["threads"])
    torch.set_num_interop_threads(1)
    dtype = getattr(torch, job["dtype"])
    if dtype == torch.float64:
        transformer_flux2.apply_rotary_emb = rotate
    with open(os.path.join(job["folder"], "config.json")) as file:
        config = json.load(file)
    block = load_block(job, config, dtype)
    inputs = load_inputs(job, dtype)
    outputs = None

    def run():
        nonlocal outputs
        outputs = block(**inputs)

    timing = job.get("timing")
    if timing is None:
        run()
    else:
        times_of(run, timing["warmUp"])
        os.write(3, b"warm\n")
        sys.stdin.readline()
        os.write(3, f"{json.dumps(times_of(run, timing['timed']))}\n".encode())
    saved = torch.float64 if dtype == torch.float64 else torch.float32
    save_file(
        {name: result.to(saved).contiguous() for name, result in results_of(job, outputs).items()}, job["output"]
    )


main()
