"""One rank of gloo through torch.distributed: started by main.ts, as rank.ts is.

Rank 0 prints the times of every size as one line of JSON.
"""

import json
import sys
import time

import torch
import torch.distributed as dist

# As in pattern.ts.
PERIOD = 251


def reduce(tensor, operations):
    dist.barrier()
    started = time.perf_counter()
    for _ in range(operations):
        dist.all_reduce(tensor, op=dist.ReduceOp.SUM)
    return (time.perf_counter() - started) * 1e6


def measure(elements, operations, batches):
    rank, ranks = dist.get_rank(), dist.get_world_size()
    numbers = torch.arange(elements) % PERIOD
    own = (numbers * (rank + 1) + rank).float()
    sums = (numbers * (ranks * (ranks + 1) // 2) + ranks * (ranks - 1) // 2).float() * float(ranks) ** (operations - 1)
    tensor = torch.empty(elements)
    microseconds = torch.empty(batches, dtype=torch.float64)
    for batch in range(batches):
        tensor.copy_(own)
        microseconds[batch] = reduce(tensor, operations) / operations
        if not torch.equal(tensor, sums):
            sys.exit(f"wrong sum of {elements} elements after {operations} operations")
    dist.all_reduce(microseconds, op=dist.ReduceOp.MAX)
    return microseconds.tolist()


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    for plan in sys.argv[1:]:
        size, operations, batches = map(int, plan.split(":"))
        microseconds = measure(size // 4, operations, batches)
        if dist.get_rank() == 0:
            print(json.dumps({"bytes": size, "microseconds": microseconds}), flush=True)
    dist.destroy_process_group()


main()
