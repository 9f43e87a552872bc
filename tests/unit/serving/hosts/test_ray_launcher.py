# SPDX-License-Identifier: Apache-2.0
"""Workers that Ray places: a stand-in for Ray, real agents and sockets, workers of a stand-in."""

import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pelton.core.config import (
    AUTO,
    Auto,
    Device,
    EngineConfig,
    ExecutorConfig,
    HostConfig,
    ModelConfig,
    ServerConfig,
    WorkerPlace,
)
from pelton.core.errors import ConfigError, UnavailableError
from pelton.serving import messages
from pelton.serving.hosts import ray_launcher
from pelton.serving.hosts.agent import HostAgent
from pelton.serving.hosts.launcher import RemoteWorker
from pelton.serving.hosts.ray_launcher import RayAgent, RayLauncher
from pelton.serving.wire_keys import write_new_keys


class Actor:
    """Runs an agent in a thread, once there is room."""

    def __init__(self, ray: "Ray", options: dict[str, Any]) -> None:
        self.options = options
        self.is_placed = ray.num_free >= options["num_cpus"]
        if self.is_placed:
            ray.num_free -= options["num_cpus"]
        self._ray = ray
        self.ended: Future[None] = Future()
        self.agent: HostAgent | None = None
        self.run = SimpleNamespace(remote=self._run)
        self.__ray_ready__ = SimpleNamespace(remote=lambda: self)

    def _run(self, config: HostConfig, worker: int, *rest: object) -> Any:
        self.thread = threading.Thread(target=lambda: self._serve(config, worker))
        if self.is_placed and self._ray.reaches_server:
            self.thread.start()
        return SimpleNamespace(future=lambda: self.ended)

    def _serve(self, config: HostConfig, worker: int) -> None:
        self.agent = HostAgent(config, worker)
        self.agent.run()
        if not self.ended.done():
            self.ended.set_exception(RuntimeError("Traceback:\nThe actor is dead."))

    def end(self) -> None:
        if self in self._ray.actors:
            self._ray.actors.remove(self)
            self._ray.num_free += self.options["num_cpus"] if self.is_placed else 0
        if self.agent is not None:
            self.agent.stop.set()


class Ray:
    """One node."""

    exceptions = SimpleNamespace(RayError=RuntimeError, ActorUnavailableError=TimeoutError)
    util = SimpleNamespace(get_node_ip_address=lambda: "127.0.0.1")

    def __init__(self, num_cpus: int) -> None:
        self.num_cpus = self.num_free = num_cpus
        self.reaches_server = True
        self.actors: list[Actor] = []
        self.is_running = False

    def init(self, address: str, **options: object) -> None:
        self.is_running = True

    def shutdown(self) -> None:
        self.is_running = False

    def cluster_resources(self) -> dict[str, float]:
        return {"CPU": self.num_cpus}

    def available_resources(self) -> dict[str, float]:
        return {"CPU": self.num_free} if self.num_free else {}

    def nodes(self) -> list[dict[str, Any]]:
        return [{"Alive": True, "Resources": {"CPU": self.num_cpus}}]

    def remote(self, actor_class: type) -> Any:
        assert actor_class is RayAgent
        return SimpleNamespace(options=self._options)

    def _options(self, **options: Any) -> Any:
        def start() -> Actor:
            self.actors.append(Actor(self, options))
            return self.actors[-1]

        return SimpleNamespace(remote=start)

    def kill(self, actor: Actor) -> None:
        assert self.is_running
        actor.end()

    def wait(self, actors: list[Actor], timeout: float) -> tuple[list[Actor], list[Actor]]:
        return [a for a in actors if a.is_placed], [a for a in actors if not a.is_placed]


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> Ray:
    ray = Ray(num_cpus=3)
    monkeypatch.setitem(sys.modules, "ray", ray)
    return ray


def make_launcher(tmp_path: Path, **settings: Any) -> RayLauncher:
    if not (tmp_path / "key").exists():
        write_new_keys(tmp_path / "key")
    server = ServerConfig(
        launcher="ray", worker_key=str(tmp_path / "key"), ray_timeout_s=60.0, **settings
    )
    return RayLauncher(make_engine(num_threads=2), server)


def make_engine(num_threads: int | Auto = AUTO, device: Device = Device.AUTO) -> EngineConfig:
    return EngineConfig(
        model=ModelConfig(model="stand-in:smollm2", max_model_len=512),
        executor=ExecutorConfig(device=device, num_threads=num_threads),
    )


@pytest.fixture
def launcher(ray: Ray, tmp_path: Path) -> Iterator[RayLauncher]:
    launcher = make_launcher(tmp_path)
    yield launcher
    launcher.close()
    launcher.close()
    assert not ray.is_running
    assert not ray.actors
    assert ray.num_free == 3


def launch(launcher: RayLauncher, codes: list[int], generation: int = 1) -> RemoteWorker:
    start = messages.StartWorker(make_engine(), WorkerPlace(), heartbeat_s=0.05)
    return launcher.launch(start, generation, on_progress=lambda phase: None, on_exit=codes.append)


def wait_until(condition: Callable[[], object]) -> None:
    deadline_s = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline_s, "the condition never came true"
        time.sleep(0.01)


def test_an_actor_lives_as_long_as_its_worker(launcher: RayLauncher, ray: Ray) -> None:
    codes: list[int] = []
    worker = launch(launcher, codes)
    worker.wait_ready(60)
    (actor,) = ray.actors
    assert actor.options == {
        **{"name": "pelton-worker-0-1", "scheduling_strategy": "SPREAD"},
        **{"num_gpus": 0, "num_cpus": 2},
    }
    worker.stop()
    assert codes == [0]
    assert not ray.actors
    wait_until(lambda: not actor.thread.is_alive())

    # The next one has its room, until somebody kills its actor.
    worker = launch(launcher, codes, generation=2)
    worker.wait_ready(60)
    ray.actors[0].end()
    wait_until(lambda: codes == [0, -9])


def test_ray_losing_sight_of_an_actor_costs_no_worker(launcher: RayLauncher, ray: Ray) -> None:
    codes: list[int] = []
    worker = launch(launcher, codes)
    worker.wait_ready(60)
    ray.actors[0].ended.set_exception(TimeoutError("The actor is unavailable."))
    time.sleep(0.1)
    worker.stop()
    assert codes == [0]


def test_an_actor_that_ray_does_not_kill_keeps_nobody_from_hearing_of_the_end(
    launcher: RayLauncher, ray: Ray, monkeypatch: pytest.MonkeyPatch
) -> None:
    def kill(actor: Actor) -> None:
        actor.end()
        raise RuntimeError("The actor is not known.")

    monkeypatch.setattr(ray, "kill", kill)
    codes: list[int] = []
    workers = [launch(launcher, codes), launch(launcher, codes, generation=2)]
    workers[0].wait_ready(60)
    for worker in workers:
        worker.stop()
    wait_until(lambda: sorted(codes) == [-9, 0])


def test_an_actor_that_ray_does_not_start_is_a_worker_that_does_not(
    launcher: RayLauncher, ray: Ray, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start() -> Actor:
        raise RuntimeError("The head does not answer")

    monkeypatch.setattr(
        launcher, "_agent", SimpleNamespace(options=lambda **_: SimpleNamespace(remote=start))
    )
    with pytest.raises(UnavailableError, match=r"no actor for the worker: The head does not"):
        launch(launcher, [])


def test_without_room_the_start_is_refused_with_what_there_is(
    launcher: RayLauncher, ray: Ray
) -> None:
    codes: list[int] = []
    first = launch(launcher, codes)
    first.wait_ready(60)
    launcher._timeout_s = 0.2
    second = launch(launcher, codes)
    with pytest.raises(ConfigError) as caught:
        second.wait_ready(60)
    assert caught.value.message == (
        "Ray found no node with 2 CPU free within 0.2 s for the worker: the cluster has 0 GPU (0"
        " free, at most 0 on a node) and 3 CPU (1 free, at most 3 on a node) on 1 node; add a node"
        " or run fewer workers."
    )
    wait_until(lambda: codes == [-9])
    assert len(ray.actors) == 1
    first.stop()


def test_a_node_that_does_not_reach_the_server_is_told_of(launcher: RayLauncher, ray: Ray) -> None:
    ray.reaches_server = False
    launcher._timeout_s = 0.2
    worker = launch(launcher, [])
    with pytest.raises(ConfigError, match=r"does not reach tcp://127\.0\.0\.1:\d+ within 0.2 s"):
        worker.wait_ready(60)
    wait_until(lambda: worker.returncode == -9)


def test_an_actor_that_cannot_start_says_why(launcher: RayLauncher, ray: Ray) -> None:
    ray.reaches_server = False
    worker = launch(launcher, [])
    text = "The actor died:\n  File node.py\nModuleNotFoundError: No module named 'pelton'"
    ray.actors[0].ended.set_exception(RuntimeError(text))
    with pytest.raises(ConfigError, match="has ended: ModuleNotFoundError: No module named 'pel"):
        worker.wait_ready(60)
    wait_until(lambda: worker.returncode == -9)


@pytest.mark.parametrize(
    ("engine", "has_gpus", "takes"),
    [
        (make_engine(4), False, (0, 4)),
        (make_engine(), True, (1, 1)),
        (make_engine(8), True, (1, 8)),
        (make_engine(2, Device.CPU), True, (0, 2)),
        (make_engine(AUTO, Device.CUDA), False, (1, 1)),
    ],
)
def test_what_a_worker_takes(engine: EngineConfig, has_gpus: bool, takes: tuple[int, int]) -> None:
    assert ray_launcher._count_resources(engine, has_gpus) == takes


def test_workers_on_cpus_say_how_many(ray: Ray, tmp_path: Path) -> None:
    write_new_keys(tmp_path / "key")
    server = ServerConfig(launcher="ray", worker_key=str(tmp_path / "key"))
    with pytest.raises(ConfigError, match="--num-threads"):
        RayLauncher(make_engine(), server)
    assert not ray.is_running


def test_without_ray_the_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigError, match=r"pip install 'pelton\[cluster\]'"):
        make_launcher(tmp_path)


def test_a_cluster_that_is_not_there_is_named(ray: Ray, tmp_path: Path) -> None:
    with socket.socket() as deaf:  # has the port, and does not listen
        deaf.bind(("127.0.0.1", 0))
        port = deaf.getsockname()[1]
        for address in (f"127.0.0.1:{port}", "nonsense", "127.0.0.1:99999"):
            with pytest.raises(ConfigError, match=f"cluster at {address} cannot be used"):
                make_launcher(tmp_path, ray_address=address)
    with pytest.raises(ConfigError, match="cannot be used: it is not HOST:PORT"):
        make_launcher(tmp_path, ray_address="nonsense")
    assert not ray.is_running


def test_a_worker_on_cpus_has_its_share_of_the_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[tuple[HostConfig, int]] = []

    class Agent:
        def __init__(self, config: HostConfig, worker: int) -> None:
            made.append((config, worker))

        def run(self) -> None:
            assert os.getcwd() == str(tmp_path)

    monkeypatch.setattr(ray_launcher, "HostAgent", Agent)
    monkeypatch.setattr(ray_launcher, "set_up_logging", lambda level: None)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(9)))
    monkeypatch.chdir("/")
    config = HostConfig(join="tcp://127.0.0.1:1")
    for num_cpus, directory in ((4, tmp_path), (16, tmp_path / "none"), (0, tmp_path)):
        RayAgent().run(config, 7, num_cpus, str(directory))
    assert [(config.num_workers, worker) for config, worker in made] == [(2, 7), (1, 7), (1, 7)]


def test_what_goes_with_ray() -> None:
    assert ServerConfig(launcher="ray", prefill=1, decode=1).kv_transport_of_workers == "nixl"
    with pytest.raises(ConfigError, match="leave --listen-workers out"):
        ServerConfig(launcher="ray", listen_workers="tcp://10.0.0.1:7000")
    with pytest.raises(ConfigError, match="--launcher ray uses: give both"):
        ServerConfig(ray_address="10.0.0.1:6379")
    with pytest.raises(ConfigError, match="or leave it out"):
        ServerConfig(worker_key="pelton.key")
