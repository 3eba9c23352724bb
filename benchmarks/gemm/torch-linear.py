"""Times torch.nn.functional.linear as bench.c times the kernels. Arguments: m n k threads repeats."""

import json
import sys
import time

import torch

WEIGHT_BYTES = 512 << 20

m, n, k, threads, repeats = map(int, sys.argv[1:])
torch.set_num_threads(threads)


def measure(name, dtype):
    x = torch.randn(m, k).to(dtype)
    copies = WEIGHT_BYTES // (n * k * dtype.itemsize) + 1
    weights = [torch.randn(n, k).to(dtype) for _ in range(copies)]
    wall, cpu = [], []
    with torch.inference_mode():
        for i in range(repeats + 1):
            wall_start, cpu_start = time.monotonic(), time.process_time()
            torch.nn.functional.linear(x, weights[i % copies])
            cpu.append((time.process_time() - cpu_start) * 1e3)
            wall.append((time.monotonic() - wall_start) * 1e3)
    wall = sorted(wall[1:])
    row = {
        "kernel": name,
        "milliseconds": wall[repeats // 2],
        "minMilliseconds": wall[0],
        "maxMilliseconds": wall[-1],
        "minCpuMilliseconds": min(cpu[1:]),
    }
    print(json.dumps(row), flush=True)


measure("torch float32", torch.float32)
measure("torch bfloat16", torch.bfloat16)
