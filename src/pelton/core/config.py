# SPDX-License-Identifier: Apache-2.0
"""The configuration tree: frozen nodes that mirror the packages, each class built from its own.

Each field's help text and allowed values are in its metadata; the command line and
`docs/configuration.md` are generated from them. A value the machine or model decides is `AUTO`
until `engine.resolve` fills it; after that nothing changes the tree.
"""

import dataclasses
import hashlib
import json
import math
from dataclasses import dataclass
from enum import Enum, StrEnum
from typing import Any, Literal, TypeVar

from pelton.core.errors import ConfigError


class Auto(StrEnum):
    AUTO = "auto"


AUTO = Auto.AUTO

Value = TypeVar("Value")
_INT64 = range(-(2**63), 2**63)
"""What a message can carry."""


def resolved(value: Value | Auto) -> Value:
    """The value of a setting in a tree that went through `engine.resolve`."""
    assert not isinstance(value, Auto), "this tree was not resolved"
    return value


class DType(StrEnum):
    AUTO = "auto"
    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"


class KVCacheDType(StrEnum):
    AUTO = "auto"
    """The activations' format, which a resolved tree names."""
    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FP8 = "fp8"
    """e4m3 with a scale a layer for keys and one for values: half the bytes of bfloat16."""


class Device(StrEnum):
    AUTO = "auto"
    CPU = "cpu"
    CUDA = "cuda"


class Quantization(StrEnum):
    NONE = "none"
    INT8 = "int8"
    INT4 = "int4"


def setting(default: Any, help: str, *, low: float | None = None, high: float | None = None) -> Any:
    """A field with its help text and the range its number must lie in."""
    return dataclasses.field(default=default, metadata={"help": help, "low": low, "high": high})


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """A node of the tree: checks the ranges that its fields declare, and that every value can
    travel to another process."""

    def __post_init__(self) -> None:
        for item in dataclasses.fields(self):
            value = getattr(self, item.name)
            if isinstance(value, str) and not isinstance(value, Enum):
                allowed = None if _is_text(value) else "text without control characters"
            elif isinstance(value, (int, float)):
                allowed = _range_broken(value, item.metadata.get("low"), item.metadata.get("high"))
            else:
                continue
            if allowed is not None:
                is_argument = item.name == "model"
                option = "MODEL" if is_argument else "--" + item.name.replace("_", "-")
                raise ConfigError(f"{option} must be {allowed}, got {value!r}.", param=item.name)


def _is_text(value: str) -> bool:
    """Without what no header, path or message should carry: control characters, and the lone
    surrogates that stand for bytes of the command line that are not UTF-8."""
    return not any(char < " " or char == "\x7f" or "\ud800" <= char <= "\udfff" for char in value)


def _range_broken(value: float, low: float | None, high: float | None) -> str | None:
    """What the number must be, if it is not."""
    if low is None:
        low = _INT64.start
    is_in_range = low <= value < _INT64.stop if high is None else low <= value <= high
    if is_in_range and math.isfinite(value):
        return None
    return f"a number of at least {low}" if high is None else f"between {low} and {high}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig(Node):
    model: str = setting("smollm2", "'smollm2', a GGUF file, or a Hugging Face folder.")
    dtype: DType = setting(DType.AUTO, "Number format of activations and KV.")
    quantization: Quantization = setting(
        Quantization.NONE, "Weight-only quantisation done while loading (CPU)."
    )
    max_model_len: int | Auto = setting(
        AUTO, "Longest prompt plus output in tokens; auto: what the model allows.", low=2
    )
    seed: int = setting(0, "Seeds everything that no request seeds.")
    random_weights: str = setting(
        "",
        "Run random weights of this geometry, such as gpt-oss-20b, for measuring speed; MODEL"
        " then gives the tokenizer alone. Empty: MODEL's own weights.",
    )
    layers: int | Auto = setting(
        AUTO, "With --random-weights: only the first so many layers; auto: all.", low=1
    )

    @property
    def label(self) -> str:
        """What runs, for names and records: random weights are always called so."""
        return f"{self.random_weights} (random weights)" if self.random_weights else self.model


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheConfig(Node):
    block_size: int = setting(16, "Tokens in a KV block.", low=1, high=256)
    num_blocks: int | Auto = setting(
        AUTO,
        "KV blocks, fewer for windowed layers; auto: as many as kv_memory holds.",
        low=2,
    )
    kv_memory_bytes: int | Auto = setting(
        AUTO, "Memory for KV; auto: what the card has left, or up to 2 GiB on a CPU.", low=1
    )
    memory_fraction: float = setting(
        0.92, "Share of a GPU's memory that weights, buffers and KV may take.", low=0.1, high=0.99
    )
    kv_cache_dtype: KVCacheDType = setting(
        KVCacheDType.AUTO,
        "Number format of keys and values; auto: that of the activations; fp8: e4m3, half of"
        " bfloat16 (models with grouped-query attention).",
    )
    prefix_cache: bool = setting(True, "Reuse KV blocks between requests with the same prefix.")


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig(Node):
    max_num_requests: int | Auto = setting(
        AUTO, "Requests that run at once; auto: 64 on a CPU, 512 on a GPU.", low=1, high=4096
    )
    max_num_batched_tokens: int | Auto = setting(
        AUTO, "Token budget of a step; auto: 512 on a CPU, 8192 on a GPU.", low=1, high=2**20
    )
    overlap: bool | Auto = setting(
        AUTO, "Launch step N+1 before the results of N are read; auto: on a GPU."
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecutorConfig(Node):
    device: Device = setting(Device.AUTO, "Where the model runs; auto: a GPU if there is one.")
    num_threads: int | Auto = setting(
        AUTO, "CPU threads; auto: one a physical core.", low=1, high=1024
    )
    cuda_graphs: bool = setting(
        True, "Replay decodes, and small steps with prompts, as CUDA graphs (GPU)."
    )
    deterministic: bool = setting(
        False,
        "Give a request the same bits whatever runs beside it, however its prompt is cut or cached"
        " (Hopper GPUs).",
    )


class DraftMethod(StrEnum):
    OFF = "off"
    NGRAM = "ngram"
    """What followed the last tokens where they came before in the same request."""
    MTP = "mtp"
    """The multi-token prediction layer that came with the model, run once a draft."""


MAX_DRAFTS = {DraftMethod.NGRAM: 8, DraftMethod.MTP: 4}


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculativeConfig(Node):
    speculative: str = setting(
        "off",
        "Drafts verified in a decode step: `off`, `ngram:K` (K up to 8, looked up in the request's"
        " own tokens) or `mtp:K` (K up to 4, from the model's MTP layer).",
    )

    def __post_init__(self) -> None:
        # Not super(): a class with slots is made twice, and super() means the first one.
        Node.__post_init__(self)
        method, _, number = self.speculative.partition(":")
        if self.speculative != DraftMethod.OFF and not (
            method in MAX_DRAFTS
            and number in map(str, range(1, MAX_DRAFTS[DraftMethod(method)] + 1))
        ):
            allowed = ", ".join(
                f"'{name}:K' with K from 1 to {most}" for name, most in MAX_DRAFTS.items()
            )
            raise ConfigError(
                f"--speculative must be 'off', {allowed}, got {self.speculative!r}.",
                param="speculative",
            )

    @property
    def method(self) -> DraftMethod:
        return DraftMethod(self.speculative.partition(":")[0])

    @property
    def num_drafts(self) -> int:
        """The most tokens drafted for one request in one step; 0: off."""
        return int(self.speculative.partition(":")[2] or 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig(Node):
    model: ModelConfig = dataclasses.field(default_factory=ModelConfig)
    cache: CacheConfig = dataclasses.field(default_factory=CacheConfig)
    scheduler: SchedulerConfig = dataclasses.field(default_factory=SchedulerConfig)
    executor: ExecutorConfig = dataclasses.field(default_factory=ExecutorConfig)
    speculative: SpeculativeConfig = dataclasses.field(default_factory=SpeculativeConfig)


class Role(StrEnum):
    MIXED = "mixed"
    """Prefills and decodes."""
    PREFILL = "prefill"
    DECODE = "decode"


KVTransportName = Literal["auto", "shared-memory", "cuda-ipc", "nixl"]


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerPlace:
    """Which one an engine is of those that share the cores, memory and GPUs of a machine."""

    index: int = 0
    num_workers: int = 1
    role: Role = Role.MIXED
    kv_transport: KVTransportName = "auto"
    """How KV gets from workers that prefill to those that decode."""


RouterPolicy = Literal["round-robin", "random", "least-loaded", "input-length", "kv-aware"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig(Node):
    host: str = setting("127.0.0.1", "Address to listen on.")
    port: int = setting(8000, "Port to listen on; 0 picks a free one.", low=0, high=65535)
    api_key: str = setting("", "Bearer token that every request must carry; empty: none.")
    served_model_name: str = setting("", "Name in /v1/models; empty: the MODEL argument.")
    frontends: int = setting(
        1,
        "Frontend processes, which share the port and all workers. Each has its share of"
        " --max-queue.",
        low=1,
        high=16,
    )
    workers: int = setting(
        1,
        "Worker processes behind the frontends; each has a GPU, or its share of the CPU.",
        low=1,
        high=64,
    )
    prefill: int = setting(
        0,
        "Worker processes that only compute prompts, for those of --decode, in place of --workers.",
        low=0,
        high=64,
    )
    decode: int = setting(
        0,
        "Worker processes that decode what those of --prefill have computed the prompts of.",
        low=0,
        high=64,
    )
    listen_workers: str = setting(
        "",
        "Run the workers on machines that join at this address, such as tcp://10.0.0.1:7000, with"
        " 'pelton worker --join'; empty: on this machine.",
    )
    launcher: Literal["local", "ray"] = setting(
        "local",
        "Who starts the workers: this server, or Ray on the nodes of a cluster. ray needs pip"
        " install 'pelton[cluster]'.",
    )
    ray_address: str = setting(
        "local",
        "With --launcher ray: the cluster's head, such as 10.0.0.1:6379, where this machine is a"
        " node of it; local: a cluster of this machine alone, which ends with the server.",
    )
    ray_timeout_s: float = setting(
        60.0,
        "How long Ray may look for room for a worker; longer where nodes are added on demand.",
        low=1,
    )
    worker_key: str = setting(
        "",
        "File with the key that this server and its machines share, for --listen-workers and"
        " --launcher ray: made by 'pelton worker --new-key FILE'.",
    )
    min_remote_prefill: int = setting(
        64,
        "With --prefill: a prompt with fewer tokens to compute, after cached blocks, is computed"
        " where it is decoded.",
        low=2,
    )
    kv_transport: KVTransportName = setting(
        "auto",
        "How KV gets from --prefill to --decode workers. auto: through shared memory on a CPU, by"
        " CUDA IPC between GPUs of one host, by nixl on several machines. nixl also works between"
        " hosts (RDMA, TCP) and needs pip install 'pelton[kv]'.",
    )
    router: RouterPolicy = setting(
        "kv-aware",
        "Which worker takes a request: each in turn, any, the one with the fewest requests, the one"
        " with the fewest prompt tokens to compute, or the one with the least work when what it has"
        " cached of the prompt is counted.",
    )
    router_temperature: float = setting(
        0.0,
        "Above 0, the router draws among workers by their costs, and the higher it is the less they"
        " matter; 0: the least cost. Not for round-robin and random.",
        low=0,
        high=100,
    )
    router_transfer_weight: float = setting(
        0.0,
        "With --prefill and kv-aware: what a KV block costs that a decode worker would have to"
        " fetch, in blocks that its requests hold.",
        low=0,
        high=1000,
    )
    max_worker_losses: int = setting(
        2,
        "Workers that may be lost under a request before it fails; until then it goes on on another"
        " worker. With one worker it fails with it.",
        low=0,
    )
    max_queue: int = setting(
        1024,
        "Requests in flight before new ones get 429; one of higher priority takes the place of the"
        " last that waits.",
        low=1,
    )
    max_body_bytes: int = setting(32 * 2**20, "Largest request body.", low=1024)
    request_timeout_s: float = setting(600.0, "Deadline of a request that names none.", low=0.001)
    drain_timeout_s: float = setting(30.0, "How long SIGTERM lets requests finish.", low=0)
    stream_interval: int = setting(
        1, "Tokens in a streamed event after the first token, which goes out at once.", low=1
    )
    worker_timeout_s: float = setting(
        300.0,
        "How long a living worker may answer nothing, as in a very long step, before it counts as"
        " hung and is replaced.",
        low=1,
    )
    worker_heartbeat_s: float = setting(
        5.0,
        "How often the process of a worker or a frontend shows that it lives; silent twice as"
        " long, it is replaced.",
        low=0.05,
    )
    start_timeout_s: float = setting(
        600.0, "How long a worker or a frontend may take to load.", low=1
    )
    tool_parser: Literal["auto", "hermes", "llama3", "deepseek", "harmony", "none"] = setting(
        "auto", "How the model writes tool calls; auto: as its chat template says."
    )
    reasoning_parser: Literal["auto", "deepseek", "harmony", "none"] = setting(
        "auto", "How the model marks its reasoning; auto: as its chat template says."
    )
    otlp_endpoint: str = setting(
        "",
        "OpenTelemetry collector that gets a trace of each request (OTLP over HTTP), such as"
        " http://localhost:4318; empty: what OTEL_EXPORTER_OTLP_ENDPOINT says, or none.",
    )
    log_level: Literal["debug", "info", "warning", "error"] = setting("info", "Least level logged.")

    def __post_init__(self) -> None:
        Node.__post_init__(self)
        if bool(self.prefill) != bool(self.decode):
            raise ConfigError(
                "--prefill and --decode belong together: give both, or --workers alone.",
                param="prefill",
            )
        if self.prefill and self.workers != 1:
            raise ConfigError(
                "--workers starts workers that prefill and decode, so it cannot be combined with"
                " --prefill and --decode: leave one of them out.",
                param="workers",
            )
        if self.launcher == "ray" and self.listen_workers:
            raise ConfigError(
                "With --launcher ray the workers run where Ray places them: leave --listen-workers"
                " out.",
                param="listen_workers",
            )
        if self.launcher != "ray" and self.ray_address != "local":
            raise ConfigError(
                "--ray-address is of the cluster that --launcher ray uses: give both, or neither.",
                param="ray_address",
            )
        if self.worker_key and not self.has_machines:
            raise ConfigError(
                "--worker-key is for workers on other machines: give --listen-workers or --launcher"
                " ray too, or leave it out.",
                param="worker_key",
            )

    @property
    def has_machines(self) -> bool:
        """Workers may run on other machines, and are reached over a network."""
        return bool(self.listen_workers) or self.launcher == "ray"

    @property
    def kv_transport_of_workers(self) -> KVTransportName:
        """What `kv_transport` stands for, as far as it depends on where workers run."""
        is_nixl = self.has_machines and self.prefill > 0 and self.kv_transport == "auto"
        return "nixl" if is_nixl else self.kv_transport

    @property
    def roles(self) -> tuple[Role, ...]:
        """Of each worker, by its number."""
        if not self.prefill:
            return (Role.MIXED,) * self.workers
        return (Role.PREFILL,) * self.prefill + (Role.DECODE,) * self.decode


@dataclass(frozen=True, slots=True, kw_only=True)
class HostConfig(Node):
    """A machine that runs workers of a server on another."""

    join: str = setting("", "Where the server takes machines in: its --listen-workers.")
    worker_key: str = setting("", "File with the key of the server, of its --worker-key.")
    num_workers: int = setting(
        1,
        "Workers that this machine runs at most; each has a GPU, or its share of the CPU.",
        low=1,
        high=64,
    )
    role: Literal["any", "mixed", "prefill", "decode"] = setting(
        "any", "What its workers do; any: what the server has no machine for yet."
    )
    host: str = setting(
        "",
        "Address of this machine that others reach it by; empty: the one that leads to the server.",
    )
    log_level: Literal["debug", "info", "warning", "error"] = setting("info", "Least level logged.")


def to_dict(node: Any) -> dict[str, Any]:
    """The tree as plain JSON values, secrets blanked: for logs and records."""
    values = dataclasses.asdict(node)
    _blank_secrets(values)
    return values


def _blank_secrets(values: dict[str, Any]) -> None:
    for name, value in values.items():
        if isinstance(value, dict):
            _blank_secrets(value)
        elif name == "api_key" and value:
            values[name] = "(set)"


def config_hash(node: Any) -> str:
    """12 hex digits that change when any setting of the resolved tree does."""
    canonical = json.dumps(to_dict(node), sort_keys=True, default=str)
    return hashlib.sha256(canonical.encode()).hexdigest()[:12]
