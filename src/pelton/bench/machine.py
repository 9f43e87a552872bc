# SPDX-License-Identifier: Apache-2.0
"""What a record says of the machine, the software and the source tree it was made with."""

import os
import platform
import shlex
import shutil
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import msgspec

import pelton

_PACKAGES = (
    "torch", "triton", "numpy", "tokenizers", "mlcommons-loadgen", "aiohttp", "uvloop", "uvicorn",
    "msgspec", "pyzmq",
)  # fmt: skip
_COMMAND_TIMEOUT_S = 10.0


class Gpu(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    memory_mib: int
    power_limit_w: float | None
    driver: str


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    cpu: str
    num_cores: int
    """Physical."""
    num_threads: int
    """Logical processors this process may use."""
    memory_bytes: int
    gpus: list[Gpu]
    os: str
    load_average: float
    """Of the last minute, when the run began: what else was busy."""


class Source(msgspec.Struct, frozen=True, kw_only=True):
    """None where the package does not lie in a git work tree."""

    commit: str | None
    is_dirty: bool | None


def describe_machine() -> Machine:
    return Machine(
        cpu=cpu_name(),
        num_cores=_count_cores(),
        num_threads=len(os.sched_getaffinity(0)),
        memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        gpus=_list_gpus(),
        os=platform.platform(),
        load_average=round(os.getloadavg()[0], 2),
    )


def list_versions() -> dict[str, str]:
    versions = {"pelton": pelton.__version__, "python": platform.python_version()}
    for package in _PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue  # an extra that is not installed
    return versions


def describe_source() -> Source:
    folder = Path(pelton.__file__).parent
    commit = _run("git", "-C", str(folder), "rev-parse", "HEAD")
    # A package installed inside somebody's repository is not that repository's source.
    is_tracked = _run("git", "-C", str(folder), "ls-files", "--error-unmatch", "__init__.py")
    if commit is None or is_tracked is None:
        return Source(commit=None, is_dirty=None)
    changes = _run("git", "-C", str(folder), "status", "--porcelain", "--untracked-files=no")
    return Source(commit=commit, is_dirty=bool(changes))


def describe_command(secret: str = "") -> str:
    """The command line, with `secret` blanked and absolute paths cut to their last part: where
    things lie on one machine says nothing on another."""
    words = [Path(word).name if word.startswith("/") else word for word in sys.argv]
    command = shlex.join(words)
    return command.replace(secret, "(set)") if secret else command


def cpu_name() -> str:
    names = _cpu_fields("model name")
    return names[0] if names else platform.processor() or platform.machine()


def _count_cores() -> int:
    """Sockets times cores; where the kernel does not tell, logical processors."""
    cores = set(zip(_cpu_fields("physical id"), _cpu_fields("core id"), strict=False))
    return len(cores) or os.cpu_count() or 1


def _cpu_fields(name: str) -> list[str]:
    """The field of every processor in /proc/cpuinfo."""
    info = Path("/proc/cpuinfo")
    if not info.exists():
        return []
    fields = (line.partition(":") for line in info.read_text(errors="replace").splitlines())
    return [value.strip() for key, _, value in fields if key.strip() == name]


def _list_gpus() -> list[Gpu]:
    """By the driver's own tool: importing torch here would cost seconds and memory."""
    fields = "name,memory.total,power.limit,driver_version"
    text = _run("nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader,nounits")
    return [_parse_gpu(line) for line in (text or "").splitlines() if line.count(",") == 3]


def _parse_gpu(line: str) -> Gpu:
    name, memory, power, driver = (field.strip() for field in line.split(","))
    return Gpu(
        name=name,
        memory_mib=int(memory) if memory.isdigit() else 0,
        power_limit_w=float(power) if power.replace(".", "", 1).isdigit() else None,
        driver=driver,
    )


def _run(*command: str) -> str | None:
    """Standard output without its end of line; None when the command fails or is not there."""
    if shutil.which(command[0]) is None:
        return None
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_COMMAND_TIMEOUT_S, check=True
        )
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip()
