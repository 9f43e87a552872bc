# SPDX-License-Identifier: Apache-2.0
"""Who may talk to the processes of a server over a network: those that hold its key.

ZMQ's CURVE encrypts and authenticates every connection. One key pair is shared by all processes of
a server, on every machine; its secret half is a file that only its owner can read. A server side
takes clients with this pair only. Unix sockets need none of it: their directory is private.
"""

import os
import stat
from pathlib import Path

import msgspec
import zmq
from zmq.auth.thread import ThreadAuthenticator

from pelton.core.errors import ConfigError, reason_of

_SECRET_CHARACTERS = 40
_HEARTBEAT_MS = 2000
_HEARTBEAT_TIMEOUT_MS = 6000
"""After so long without a sign of life, a connection counts as broken."""


class WireKeys(msgspec.Struct, array_like=True, frozen=True):
    """A CURVE pair, in Z85."""

    public: str
    secret: str


def write_new_keys(path: Path) -> None:
    """Makes the file that every machine needs a copy of. Raises `ConfigError` if there is one."""
    _, secret = zmq.curve_keypair()
    try:
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError as error:
        raise ConfigError(f"{path} exists already: name another file.") from error
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}.") from error
    with os.fdopen(file, "wb") as output:
        output.write(secret + b"\n")


def read_keys(path: str) -> WireKeys:
    """Raises `ConfigError` for a file that is no key, or that others could read."""
    if not path:
        raise ConfigError(
            "Workers on other machines need a key, as whoever reaches a worker could use it: make"
            " one with 'pelton worker --new-key FILE', copy the file to every machine and name it"
            " with --worker-key FILE.",
            param="worker_key",
        )
    try:
        mode = os.stat(path).st_mode
        secret = Path(path).read_text("ascii").strip()
        public = zmq.curve_public(secret.encode()).decode()
    except (OSError, ValueError, zmq.ZMQError) as error:
        raise ConfigError(
            f"{path} holds no key ({reason_of(error)}): make one with"
            " 'pelton worker --new-key FILE'.",
            param="worker_key",
        ) from error
    if mode & (stat.S_IRWXG | stat.S_IRWXO) or len(secret) != _SECRET_CHARACTERS:
        raise ConfigError(
            f"{path} can be read by others or is no key: make it your own with 'chmod 600 {path}'.",
            param="worker_key",
        )
    return WireKeys(public, secret)


def secure_client(socket: "zmq.Socket[bytes]", keys: WireKeys | None) -> None:
    """Before it connects. None: the other end is on this machine."""
    if keys is None:
        return
    _keep_alive(socket)
    socket.setsockopt(zmq.CURVE_SERVERKEY, keys.public.encode())
    socket.setsockopt(zmq.CURVE_PUBLICKEY, keys.public.encode())
    socket.setsockopt(zmq.CURVE_SECRETKEY, keys.secret.encode())


class WireGuard:
    """Lets only holders of the key connect to server sockets of one context, until closed."""

    def __init__(self, context: "zmq.Context[zmq.Socket[bytes]]", keys: WireKeys) -> None:
        self._keys = keys
        self._authenticator = ThreadAuthenticator(context)
        self._authenticator.start()
        self._authenticator.configure_curve_callback("*", self)

    def callback(self, domain: str, key: bytes) -> bool:
        """Called by the authenticator, with a client's public key in Z85."""
        return key.decode() == self._keys.public

    def secure(self, socket: "zmq.Socket[bytes]") -> None:
        """Before it is bound."""
        _keep_alive(socket)
        socket.setsockopt(zmq.CURVE_SERVER, 1)
        socket.setsockopt(zmq.CURVE_SECRETKEY, self._keys.secret.encode())

    def close(self) -> None:
        self._authenticator.stop()


def _keep_alive(socket: "zmq.Socket[bytes]") -> None:
    socket.setsockopt(zmq.HEARTBEAT_IVL, _HEARTBEAT_MS)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, _HEARTBEAT_TIMEOUT_MS)
