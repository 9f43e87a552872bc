# SPDX-License-Identifier: Apache-2.0
"""Workers on the nodes of a Ray cluster.

Ray finds a node with room and runs there, in an actor, what an operator would start by hand: the
agent of `agent`, for one worker alone. Orders, requests, tokens and KV go as to any machine that
joins. An actor lives as long as its worker; whoever keeps the workers launches the next, which Ray
places anew. Actors end with this process, however it ends, and workers with their actors.
"""

import importlib
import logging
import os
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any

from pelton.core.config import AUTO, Device, EngineConfig, HostConfig, ServerConfig
from pelton.core.env import send_no_ray_statistics
from pelton.core.errors import ConfigError, UnavailableError
from pelton.serving import messages
from pelton.serving.hosts.agent import HostAgent
from pelton.serving.hosts.launcher import HostsLauncher, RemoteWorker
from pelton.serving.process import raise_file_limit, set_up_logging
from pelton.serving.wire_keys import read_keys

_CONNECT_TIMEOUT_S = 5.0
_OBJECT_STORE_BYTES = 80 * 2**20
"""The least that Ray takes; nothing goes through it."""
_MAX_ERROR_CHARACTERS = 500
_log = logging.getLogger("pelton.serving")


class RayAgent:
    """What an actor is."""

    def run(self, config: HostConfig, worker: int, num_cpus: int, directory: str) -> None:
        """Until the actor is killed. `num_cpus`: what a worker on CPUs takes of the node, 0 for one
        on a GPU. Relative paths are from `directory`, where the server was started. Raises what
        `HostAgent` raises."""
        with suppress(OSError):  # a node without it finds what has an absolute path
            os.chdir(directory)
        set_up_logging(config.log_level)
        raise_file_limit()
        if num_cpus:
            share = max(1, len(os.sched_getaffinity(0)) // num_cpus)
            config = replace(config, num_workers=share)
        HostAgent(config, worker).run()


class RayLauncher:
    """Implements `Launcher`."""

    def __init__(self, engine: EngineConfig, server: ServerConfig) -> None:
        """Raises `ConfigError` where Ray is missing or its cluster cannot be used."""
        keys = read_keys(server.worker_key)
        self._ray = _connect(server.ray_address)
        try:
            cluster = self._ray.cluster_resources()
            self._num_gpus, self._num_cpus = _count_resources(engine, cluster.get("GPU", 0) > 0)
            address = f"tcp://{self._ray.util.get_node_ip_address()}:*"
            self._hosts = HostsLauncher(address, keys, f"a node of Ray with {self._needs}")
        except BaseException:
            self._ray.shutdown()
            raise
        self._timeout_s = server.ray_timeout_s
        self._config = HostConfig(
            join=self._hosts.endpoint, worker_key=server.worker_key, log_level=server.log_level
        )
        self._agent = self._ray.remote(RayAgent)
        self._is_closed = False

    def launch(
        self,
        start: messages.StartWorker,
        generation: int,
        *,
        on_progress: Callable[[str], None],
        on_exit: Callable[[int], None],
    ) -> RemoteWorker:
        """Raises `UnavailableError` where Ray starts no actor."""
        name = f"pelton-worker-{start.place.index}-{generation}"
        options = self._agent.options(
            name=name,
            num_gpus=self._num_gpus,
            num_cpus=self._num_cpus,
            scheduling_strategy="SPREAD",
        )
        try:
            actor = options.remote()
        except self._ray.exceptions.RayError as error:
            raise UnavailableError(f"Ray starts no actor for the worker: {error}.") from error

        def note_exit(code: int) -> None:
            try:
                self._ray.kill(actor)
            except self._ray.exceptions.RayError as error:
                _log.error("event=ray_actor_not_killed actor=%s error=%r", name, str(error))
            on_exit(code)

        worker = self._hosts.launch(start, generation, on_progress=on_progress, on_exit=note_exit)
        placed = actor.__ray_ready__.remote()
        num_cpus = 0 if self._num_gpus else self._num_cpus
        ended = actor.run.remote(self._config, worker.number, num_cpus, os.getcwd()).future()
        ended.add_done_callback(
            lambda done: self._hosts.order(lambda: self._note_end(worker, done.exception()))
        )
        deadline = threading.Timer(
            self._timeout_s, lambda: self._hosts.order(lambda: self._refuse(worker, placed))
        )
        deadline.daemon = True
        deadline.start()
        return worker

    def close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            self._hosts.close()
            self._ray.shutdown()

    @property
    def _needs(self) -> str:
        gpus = f"{self._num_gpus} GPU and " if self._num_gpus else ""
        return f"{gpus}{self._num_cpus} CPU free"

    # On the thread of `HostsLauncher`

    def _note_end(self, worker: RemoteWorker, error: BaseException | None) -> None:
        if isinstance(error, self._ray.exceptions.ActorUnavailableError):
            return  # Ray's connection broke; the agent's own says whether it lives
        if worker.returncode is None:
            cause = getattr(error, "cause", None) or error
            reason = (str(cause).strip() or repr(cause)).splitlines()[-1]  # after any traceback
            text = f"Ray's actor for the worker has ended: {reason[:_MAX_ERROR_CHARACTERS]}"
            self._hosts.fail(worker, ConfigError(text))

    def _refuse(self, worker: RemoteWorker, placed: Any) -> None:
        """The time in which the worker should have been placed is over."""
        if worker.host or worker.returncode is not None:
            return
        if self._ray.wait([placed], timeout=0)[0]:
            text = (
                f"Ray has placed the worker and its node does not reach {self._config.join} within"
                f" {self._timeout_s:g} s: let the nodes connect to this machine."
            )
        else:
            text = (
                f"Ray found no node with {self._needs} within {self._timeout_s:g} s for the worker:"
                f" the cluster has {self._describe_cluster()}; add a node or run fewer workers."
            )
        self._hosts.fail(worker, ConfigError(text, param="launcher"))

    def _describe_cluster(self) -> str:
        nodes = [node["Resources"] for node in self._ray.nodes() if node["Alive"]]
        free = self._ray.available_resources()
        texts = [
            f"{sum(node.get(kind, 0) for node in nodes):g} {kind} ({free.get(kind, 0):g} free, at"
            f" most {max(node.get(kind, 0) for node in nodes):g} on a node)"
            for kind in ("GPU", "CPU")
        ]
        return f"{' and '.join(texts)} on {len(nodes)} node{'s' * (len(nodes) > 1)}"


def _connect(address: str) -> Any:
    """The module, once this process is a driver. Raises `ConfigError`."""
    send_no_ray_statistics()
    try:
        ray = importlib.import_module("ray")
    except ImportError as error:
        raise ConfigError(
            f"--launcher ray needs Ray, which cannot be imported ({error}): run"
            " pip install 'pelton[cluster]'.",
            param="launcher",
        ) from error
    options: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR"}
    if address == "local":
        options |= {"include_dashboard": False, "object_store_memory": _OBJECT_STORE_BYTES}
    try:
        if address != "local":
            host, _, port = address.rpartition(":")
            if not (host and port.isdecimal()):
                raise ValueError("it is not HOST:PORT")
            # Ray itself asks for a minute before it gives up.
            socket.create_connection((host, int(port)), _CONNECT_TIMEOUT_S).close()
        ray.init(address, **options)
    except (OSError, ValueError, RuntimeError, OverflowError, ray.exceptions.RayError) as error:
        raise ConfigError(
            f"The Ray cluster at {address} cannot be used: {error}; name its head with"
            " --ray-address HOST:PORT, on a machine where 'ray start' has run.",
            param="ray_address",
        ) from error
    return ray


def _count_resources(engine: EngineConfig, has_gpus: bool) -> tuple[int, int]:
    """GPUs and CPUs that a worker takes. Raises `ConfigError`."""
    device, num_threads = engine.executor.device, engine.executor.num_threads
    num_gpus = int(device is Device.CUDA or (device is Device.AUTO and has_gpus))
    if num_threads is AUTO:
        if not num_gpus:
            raise ConfigError(
                "Ray places workers without a GPU by the CPUs that they take: say how many with"
                " --num-threads.",
                param="num_threads",
            )
        return num_gpus, 1
    return num_gpus, int(num_threads)
