"""One rank of a load with diffusers: started by main.ts, as rank.ts is.

Reports one line of JSON on descriptor 3 and waits for the end of its input.
"""

import json
import os
import re
import sys
import time

import accelerate  # noqa: F401  Loaded here because diffusers imports it during the first load.
import torch
import torch.distributed as dist
import torch.distributed.tensor.parallel  # noqa: F401  As above.
from diffusers import Flux2Transformer2DModel, TensorParallelConfig
from diffusers.hooks import tensor_parallel
from torch.distributed.tensor import DTensor


def allow_cpu():
    """diffusers 0.42 names no CPU among its devices for tensor parallelism, though its code runs there.

    `device_count` is 0 where there is no accelerator, and diffusers divides by it.
    """
    tensor_parallel._SUPPORTED_TP_DEVICES = (*tensor_parallel._SUPPORTED_TP_DEVICES, "cpu")
    torch.accelerator.device_count = lambda: 1


def kernel_count(path, pattern):
    with open(path) as file:
        return int(re.search(pattern, file.read(), re.MULTILINE).group(1))


def storage_bytes():
    return kernel_count("/proc/self/io", r"^read_bytes: (\d+)$")


def load(directory, mode, config):
    if mode == "sharded":
        return Flux2Transformer2DModel.from_pretrained(directory, torch_dtype=torch.bfloat16, parallel_config=config)
    model = Flux2Transformer2DModel.from_pretrained(directory, torch_dtype=torch.bfloat16)
    model.enable_parallelism(config=config)
    return model


def local_bytes(model):
    tensors = (p.to_local() if isinstance(p, DTensor) else p for p in model.parameters())
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def main():
    directory, mode = sys.argv[1:]
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    allow_cpu()
    config = TensorParallelConfig(tp_degree=dist.get_world_size())
    start_anon_bytes = 1024 * kernel_count("/proc/self/smaps_rollup", r"^Anonymous: +(\d+) kB$")
    dist.barrier()
    storage_before = storage_bytes()
    started = time.perf_counter()
    model = load(directory, mode, config)
    dist.barrier()
    report = {
        "seconds": time.perf_counter() - started,
        "shardBytes": local_bytes(model),
        # It maps the file and counts nothing.
        "readBytes": None,
        "storageBytes": storage_bytes() - storage_before,
        "startAnonBytes": start_anon_bytes,
    }
    os.write(3, f"{json.dumps(report)}\n".encode())
    sys.stdin.read()
    dist.destroy_process_group()


main()
