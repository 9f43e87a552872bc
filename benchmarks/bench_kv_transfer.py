# SPDX-License-Identifier: Apache-2.0
"""How fast blocks come from another process's pool through shared memory, digests included.

python benchmarks/bench_kv_transfer.py [--megabytes 1024] [--repeats 5] [--out FILE]

Each case is a model's block of 16 tokens. A second process fills a pool and shares it; this one
maps it and copies runs of `RUN` blocks, as a prompt's chunks come, into a pool of its own. Both
pools have been written to before, so no page is new. The other side's digest is timed apart: it is
taken there, beside the copies.
"""

import argparse
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from pelton.bench.figures import write_figures
from pelton.engine.kv.shared_memory import PAGE_BYTES, SharedMemory
from pelton.serving.kv_transfer.shared_memory import SharedMemoryTransport
from pelton.serving.kv_transfer.transport import PoolHandle

RUN = 32
"""Blocks that follow each other in both pools: a chunk of 512 tokens."""
BLOCK_BYTES = {
    "smollm2-135m float32": 30 * 2 * 16 * 3 * 64 * 4,
    "llama-3.1-8b bfloat16": 32 * 2 * 16 * 8 * 128 * 2,
    "gpt-oss-20b bfloat16, one group": 12 * 2 * 16 * 8 * 64 * 2,
    "deepseek-v3 latents bfloat16": 61 * 16 * 576 * 2,
}


def share_pool(num_blocks: int, block_bytes: int) -> None:
    """The second process: prints the pool's handle, then its digest's rate, and waits."""
    memory = SharedMemory(-(-num_blocks * block_bytes // PAGE_BYTES) * PAGE_BYTES)
    blocks = np.frombuffer(memory.buffer, np.uint8, num_blocks * block_bytes)
    blocks = blocks.reshape(num_blocks, block_bytes)
    row = np.random.default_rng(0).integers(0, 256, block_bytes, np.uint8)
    for number in range(num_blocks):
        blocks[number] = row
        blocks[number, :4] = np.frombuffer(number.to_bytes(4, "little"), np.uint8)
    transport = SharedMemoryTransport([blocks], memory, os.getpid())
    print(msgspec.json.encode(transport.handle()).decode(), flush=True)
    started = time.perf_counter()
    for first in range(1, num_blocks - RUN + 1, RUN):
        transport.digest(0, range(first, first + RUN), b"")
    num_bytes = (num_blocks - 1) // RUN * RUN * block_bytes
    print(num_bytes / (time.perf_counter() - started), flush=True)
    sys.stdin.read()


def measure(name: str, block_bytes: int, num_bytes: int, repeats: int) -> dict[str, Any]:
    num_runs = max(2, num_bytes // (RUN * block_bytes))
    num_blocks = 1 + num_runs * RUN
    command = [sys.executable, __file__, "--share", str(num_blocks), str(block_bytes)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        handle = msgspec.json.decode(child.stdout.readline(), type=PoolHandle)
        digest_rate = float(child.stdout.readline())
        target = np.ones((num_blocks, block_bytes), np.uint8)
        pool = SharedMemoryTransport([target], None, os.getpid()).open(handle)
        rates = []
        for _ in range(repeats):
            started = time.perf_counter()
            for first in range(1, num_blocks, RUN):
                ids = range(first, first + RUN)
                pool.read(0, ids, ids, b"")
            rates.append((num_blocks - 1) * block_bytes / (time.perf_counter() - started))
        pool.close()
        child.kill()
    best, middle = max(rates) / 1e9, statistics.median(rates) / 1e9
    print(
        f"{name}: {block_bytes:,} bytes a block: copy and check {middle:.2f} GB/s (best"
        f" {best:.2f}), the other side's digest {digest_rate / 1e9:.2f} GB/s"
    )
    return {
        "case": name,
        "block_bytes": block_bytes,
        "blocks": num_blocks - 1,
        "bytes_per_s": rates,
        "digest_bytes_per_s": digest_rate,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--megabytes", type=int, default=1024, help="size of each pool")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path, help="write a JSON record here")
    parser.add_argument("--share", type=int, nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.share:
        share_pool(*arguments.share)
        return
    num_bytes = arguments.megabytes * 2**20
    cases = [
        measure(name, block_bytes, num_bytes, arguments.repeats)
        for name, block_bytes in BLOCK_BYTES.items()
    ]
    if arguments.out is not None:
        write_figures(arguments.out, "kv-transfer", {"blocks_in_a_run": RUN, "cases": cases})


if __name__ == "__main__":
    main()
