# SPDX-License-Identifier: Apache-2.0
"""How fast blocks come from another process's pool, digests included.

python benchmarks/bench_kv_transfer.py [--transport nixl|cuda-ipc] [--megabytes 1024] [--run 32]
    [--repeats 5] [--out FILE]

Each case is a model's block of 16 tokens. A second process fills a pool and shares it; this one
reads runs of `--run` blocks, as a prompt's chunks come, into a pool of its own. Both pools have
been written to before, so no page is new. The other side's digest is timed apart: it is taken
there, beside the copies. Each run's two digests must be equal, or there is no record.

Machines differ and change by the hour, so each pass over the pool is followed by NumPy's plain copy
of as many bytes, by one thread, from this process's memory: run by run, and the whole pool at once,
for which the C library may write past the cache. With `--transport cuda-ipc` the pools lie on two
GPUs, and there are no such copies; on one, where there is no other, which shows what a read takes
beside the way between them. The same runs are then read block by block, as into a pool in which no
two free blocks are neighbours. With `--transport nixl`, NIXL alone is timed as well: the same
blocks, straight into the pool and without digests. Both go over what UCX chooses; for TCP set
UCX_TLS=tcp UCX_NET_DEVICES=lo.
"""

import argparse
import mmap
import os
import statistics
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from pelton.bench.figures import write_figures
from pelton.bench.machine import describe_machine
from pelton.engine.kv.shared_memory import PAGE_BYTES, SharedMemory
from pelton.serving.kv_transfer.host_blocks import Blocks, HostBlocks
from pelton.serving.kv_transfer.nixl import NixlPool, NixlTransport
from pelton.serving.kv_transfer.shared_memory import SharedMemoryTransport
from pelton.serving.kv_transfer.transport import KVTransport, PoolHandle, Read, RemotePool
from pelton.serving.process import take_over_stdout

SCATTER = 5
"""How far apart a run's blocks come to lie, where none may follow another."""
BLOCK_BYTES = {
    "smollm2-135m float32": 30 * 2 * 16 * 3 * 64 * 4,
    "llama-3.1-8b bfloat16": 32 * 2 * 16 * 8 * 128 * 2,
    "gpt-oss-20b bfloat16, one group": 12 * 2 * 16 * 8 * 64 * 2,
    "deepseek-v3 latents bfloat16": 61 * 16 * 576 * 2,
}


class Digested(msgspec.Struct, array_like=True, frozen=True):
    """What the other process says of its own pool."""

    bytes_per_s: float
    digests: list[bytes]
    """Of each run."""


def make_transport(name: str, num_blocks: int, block_bytes: int, *, is_shared: bool) -> KVTransport:
    """Of a new pool whose pages have been written to; on GPUs the shared one is on the second."""
    if name == "cuda-ipc":
        import torch

        from pelton.serving.kv_transfer.cuda_ipc import CudaTransport

        # On one GPU, where there is no other, to see what a read costs beside the bytes.
        torch.cuda.set_device(int(is_shared) % torch.cuda.device_count())
        pool = torch.randint(0, 256, (num_blocks, block_bytes), dtype=torch.uint8, device="cuda")
        torch.cuda.synchronize()
        return CudaTransport([pool], is_shared=is_shared)
    memory = None
    if is_shared:
        memory = SharedMemory(-(-num_blocks * block_bytes // PAGE_BYTES) * PAGE_BYTES)
        blocks = np.frombuffer(memory.buffer, np.uint8, num_blocks * block_bytes)
        blocks = blocks.reshape(num_blocks, block_bytes)
        blocks[:] = np.random.default_rng(0).integers(0, 256, block_bytes, np.uint8)
        blocks[:, :4] = np.arange(num_blocks, dtype="<u4").view(np.uint8).reshape(-1, 4)
    else:
        blocks = make_blocks(num_blocks, block_bytes)
    if name == "nixl":
        return NixlTransport(HostBlocks([blocks]), is_shared=is_shared)
    return SharedMemoryTransport(HostBlocks([blocks]), memory, os.getpid())


def make_blocks(num_blocks: int, block_bytes: int) -> Blocks:
    """Aligned as a worker's pool is."""
    blocks = np.frombuffer(mmap.mmap(-1, num_blocks * block_bytes), np.uint8)
    blocks[:] = 1
    return blocks.reshape(num_blocks, block_bytes)


def share_pool(name: str, num_blocks: int, block_bytes: int, run: int) -> None:
    """The second process: prints the pool's handle, then its digest's rate and the digests of all
    runs, and waits."""
    report = take_over_stdout()  # NIXL prints, too
    transport = make_transport(name, num_blocks, block_bytes, is_shared=True)
    report(transport.handle())
    transport.digest(0, range(1, 1 + run), b"")
    started = time.perf_counter()
    digests = [
        transport.digest(0, range(first, first + run), b"") for first in range(1, num_blocks, run)
    ]
    took_s = time.perf_counter() - started
    report(Digested((num_blocks - 1) * block_bytes / took_s, digests))
    sys.stdin.read()


def read_runs(
    pool: RemotePool, num_blocks: int, run: int, digests: list[bytes], scatter: int, pause_s: float
) -> None:
    """Two reads are open at a time, as where chunks are computed faster than they move. With
    `scatter`, no two blocks of a run lie one behind the other where they come. Raises `SystemExit`
    for a run whose digest is another than in `digests`."""
    reads: deque[Read] = deque()
    found = []
    for first in range(1, num_blocks, run):
        ids = range(first, first + run)
        targets = [first + place * scatter % run for place in range(run)] if scatter else ids
        reads.append(pool.read(0, ids, targets, b""))
        if len(reads) == 2:
            found.append(finish(reads.popleft(), pause_s))
    found.append(finish(reads.popleft(), pause_s))
    if found != digests:
        raise SystemExit("blocks did not arrive as they were")


def finish(read: Read, pause_s: float) -> bytes:
    while True:
        try:
            if not next(read) and pause_s:
                time.sleep(pause_s)
        except StopIteration as end:
            return bytes(end.value)


def read_plain(
    transport: NixlTransport[Blocks], pool: NixlPool[Blocks], num_blocks: int, run: int
) -> None:
    """As in `read_runs`, a run is under way while another is waited for."""
    agent, payload = transport.agent, pool.payload
    start, size = transport.blocks.addresses[0], payload.shapes[0][1]
    handles: deque[Any] = deque()

    def wait() -> None:
        while agent.check_xfer_state(handles[0]) == "PROC":
            time.sleep(0.0002)
        agent.release_xfer_handle(handles.popleft())

    for first in range(1, num_blocks, run):
        offset = first * size
        local = agent.get_xfer_descs([(start + offset, run * size, 0)], "DRAM")
        remote = agent.get_xfer_descs([(payload.addresses[0] + offset, run * size, 0)], "DRAM")
        handles.append(agent.initialize_xfer("READ", local, remote, payload.name))
        agent.transfer(handles[-1])
        if len(handles) == 2:
            wait()
    wait()


def copy_runs(source: Blocks, target: Blocks, run: int) -> None:
    for first in range(1, len(source), run):
        np.copyto(target[first : first + run], source[first : first + run])


def time_rates(
    works: dict[str, Callable[[], None]], num_bytes: int, repeats: int
) -> dict[str, list[float]]:
    """Bytes a second of each, by turns."""
    rates: dict[str, list[float]] = {name: [] for name in works}
    for work in works.values():
        work()  # connects
    for _ in range(repeats):
        for name, work in works.items():
            started = time.perf_counter()
            work()
            rates[name].append(num_bytes / (time.perf_counter() - started))
    return rates


def list_works(
    transport_name: str,
    transport: KVTransport,
    pool: RemotePool,
    num_blocks: int,
    block_bytes: int,
    run: int,
    digests: list[bytes],
) -> dict[str, Callable[[], None]]:
    # On a CPU the pause is for other threads; a GPU's copies need none of the host.
    pause_s = 0.0 if transport_name == "cuda-ipc" else 0.0002
    works: dict[str, Callable[[], None]] = {
        "copy and check": lambda: read_runs(pool, num_blocks, run, digests, 0, pause_s)
    }
    if transport_name == "cuda-ipc":
        works["block by block"] = lambda: read_runs(
            pool, num_blocks, run, digests, SCATTER, pause_s
        )
    if isinstance(transport, NixlTransport) and isinstance(pool, NixlPool):
        transport.register(transport.blocks.addresses[0], num_blocks * block_bytes)
        works["NIXL alone"] = lambda: read_plain(transport, pool, num_blocks, run)
    if isinstance(transport, NixlTransport | SharedMemoryTransport):
        source, target = (make_blocks(num_blocks, block_bytes) for _ in range(2))
        works["plain copy of a run"] = lambda: copy_runs(source, target, run)
        works["of the pool"] = lambda: np.copyto(target, source)
    return works


def measure(
    transport_name: str, name: str, block_bytes: int, num_bytes: int, run: int, repeats: int
) -> dict[str, Any]:
    num_runs = max(2, num_bytes // (run * block_bytes))
    num_blocks = 1 + num_runs * run
    arguments = ["--transport", transport_name, "--share", str(num_blocks), str(block_bytes)]
    arguments += ["--run", str(run)]
    command = [sys.executable, __file__, *arguments]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        handle = msgspec.json.decode(child.stdout.readline(), type=PoolHandle)
        digested = msgspec.json.decode(child.stdout.readline(), type=Digested)
        transport = make_transport(transport_name, num_blocks, block_bytes, is_shared=False)
        pool = transport.open(handle)
        works = list_works(
            transport_name, transport, pool, num_blocks, block_bytes, run, digested.digests
        )
        rates = time_rates(works, (num_blocks - 1) * block_bytes, repeats)
        pool.close()
        child.kill()
    ours, *others = ((key, statistics.median(values) / 1e9) for key, values in rates.items())
    print(
        f"{name}: {block_bytes:,} bytes a block: {ours[0]} {ours[1]:.2f} GB/s",
        *(f"{key} {rate:.2f} ({ours[1] / rate:.0%} of it)" for key, rate in others),
        f"the other side's digest {digested.bytes_per_s / 1e9:.2f}",
        sep=", ",
        flush=True,
    )
    return {
        "case": name,
        "block_bytes": block_bytes,
        "blocks": num_blocks - 1,
        "bytes_per_s": rates,
        "digest_bytes_per_s": digested.bytes_per_s,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--transport", choices=["shared-memory", "nixl", "cuda-ipc"], default="shared-memory"
    )
    parser.add_argument("--megabytes", type=int, default=1024, help="size of each pool")
    parser.add_argument(
        "--run", type=int, default=32, help="blocks of 16 tokens that a prompt's chunk has"
    )
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--commit", default="", help="of the source, where there is no git")
    parser.add_argument("--out", type=Path, help="write a JSON record here")
    parser.add_argument("--share", type=int, nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.run < SCATTER or arguments.run % SCATTER == 0:
        parser.error(f"--run must be above {SCATTER}, and no multiple of it")
    if arguments.share:
        share_pool(arguments.transport, *arguments.share, arguments.run)
        return
    num_bytes = arguments.megabytes * 2**20
    print(describe_machine().cpu)
    cases = [
        measure(arguments.transport, name, block_bytes, num_bytes, arguments.run, arguments.repeats)
        for name, block_bytes in BLOCK_BYTES.items()
    ]
    if arguments.out is not None:
        settings = {name: value for name, value in os.environ.items() if name.startswith("UCX_")}
        figures = {
            "transport": arguments.transport,
            "ucx": settings,
            "blocks_in_a_run": arguments.run,
        }
        write_figures(
            arguments.out,
            "kv-transfer",
            {**figures, "cases": cases},
            commit=arguments.commit or None,
        )


if __name__ == "__main__":
    main()
