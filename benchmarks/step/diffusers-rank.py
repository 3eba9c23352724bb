"""One rank that runs steps of diffusers' transformer: started by main.ts, as rank.ts is.

Its argument is a job (see job.ts).
"""

import json
import os
import sys
import time

import accelerate  # noqa: F401  Loaded here because diffusers imports it during the first load.
import torch
import torch.distributed as dist
from diffusers import Flux2Transformer2DModel, TensorParallelConfig
from diffusers.hooks import tensor_parallel


def allow_cpu():
    """diffusers 0.42 names no CPU among its devices for tensor parallelism, though its code runs there.

    `device_count` is 0 where there is no accelerator, and diffusers divides by it.
    """
    tensor_parallel._SUPPORTED_TP_DEVICES = (*tensor_parallel._SUPPORTED_TP_DEVICES, "cpu")
    torch.accelerator.device_count = lambda: 1


def load(job, dtype):
    if job["tp"] == 1:
        return Flux2Transformer2DModel.from_pretrained(job["folder"], torch_dtype=dtype)
    config = TensorParallelConfig(tp_degree=job["tp"])
    return Flux2Transformer2DModel.from_pretrained(job["folder"], torch_dtype=dtype, parallel_config=config)


def step_inputs(job, config, dtype):
    image, text = job["tokens"]["image"], job["tokens"]["text"]
    side = round(image**0.5)
    generator = torch.Generator().manual_seed(0)
    image_ids = torch.cartesian_prod(torch.arange(1), torch.arange(side), torch.arange(side), torch.arange(1))
    text_ids = torch.cartesian_prod(torch.arange(1), torch.arange(1), torch.arange(1), torch.arange(text))
    return {
        "hidden_states": torch.randn(1, image, config.in_channels, generator=generator).to(dtype),
        "encoder_hidden_states": torch.randn(1, text, config.joint_attention_dim, generator=generator).to(dtype),
        "timestep": torch.tensor([0.5], dtype=dtype),
        "img_ids": image_ids[None],
        "txt_ids": text_ids[None],
        "guidance": None,
        "return_dict": False,
    }


def goes_on(wanted):
    answer = torch.tensor([int(wanted)])
    dist.broadcast(answer, 0)
    return bool(answer.item())


def times_of(run, limit):
    """Seconds of every step. The ranks stop together: rank 0 says when."""
    times = []
    end = time.perf_counter() + limit["seconds"]
    while not times or (len(times) < limit["most"] and goes_on(time.perf_counter() < end)):
        started = time.perf_counter()
        run()
        times.append(time.perf_counter() - started)
    return times


@torch.inference_mode()
def main():
    job = json.loads(sys.argv[1])
    torch.set_num_threads(job["threads"])
    torch.set_num_interop_threads(1)
    dist.init_process_group("gloo")
    allow_cpu()
    dtype = getattr(torch, job["dtype"])
    model = load(job, dtype).eval()
    inputs = step_inputs(job, model.config, dtype)

    def run():
        model(**inputs)

    times_of(run, job["warmUp"])
    os.write(3, b"warm\n")
    sys.stdin.readline()
    seconds = times_of(run, job["timed"])
    report = {"seconds": seconds, "allReduceSeconds": None, "readBytes": None, "eventLoopMilliseconds": None}
    os.write(3, f"{json.dumps(report)}\n".encode())
    dist.destroy_process_group()


main()
