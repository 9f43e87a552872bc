# SPDX-License-Identifier: Apache-2.0
"""What is measured, as a protocol; and the kind that is there already: a server at a URL."""

from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from typing import Any, Protocol

import aiohttp

from pelton.bench.config import BenchConfig
from pelton.bench.engine_metrics import read_engine_stats
from pelton.bench.load_messages import HttpTarget, WorkerTarget
from pelton.bench.record import TargetInfo
from pelton.bench.traffic import Sample
from pelton.core.errors import ConfigError
from pelton.core.stats import EngineStats

_PROBE_TIMEOUT_S = 10.0


class Target(Protocol):
    @property
    def info(self) -> TargetInfo: ...

    @property
    def address(self) -> HttpTarget | WorkerTarget:
        """For the load process."""
        ...

    @property
    def vocab_size(self) -> int | None: ...

    def prepare(self, samples: Sequence[Sample]) -> list[Sample]:
        """The samples in the form this target takes. Not part of the measured time."""
        ...

    async def read_stats(self) -> EngineStats | None:
        """None where the target gives no statistics."""
        ...


def check_lengths(samples: Sequence[Sample], limit: int) -> None:
    """A sample of token ids that cannot fit the model's context is a `ConfigError`."""
    for number, sample in enumerate(samples, start=1):
        length = len(sample.input_tokens or ())
        if length and length + sample.max_tokens > limit:
            raise ConfigError(
                f"Prompt {number} of the data set has {length} tokens and may get "
                f"{sample.max_tokens} more; the model takes {limit} in all. Shorten it or lower "
                "its max_tokens.", param="dataset",
            )  # fmt: skip


class ServerTarget:
    def __init__(
        self,
        info: TargetInfo,
        address: HttpTarget,
        session: aiohttp.ClientSession,
        vocab_size: int | None,
    ) -> None:
        self.info = info
        self.address = address
        self.vocab_size = vocab_size
        self._session = session
        self._has_metrics = True

    def prepare(self, samples: Sequence[Sample]) -> list[Sample]:
        if self.info.max_model_len is not None:
            check_lengths(samples, self.info.max_model_len)
        return list(samples)

    async def read_stats(self) -> EngineStats | None:
        if not self._has_metrics:
            return None
        try:
            async with self._session.get(f"{self.address.url}/metrics") as response:
                text = await response.text()
        except (aiohttp.ClientError, TimeoutError):
            return None
        stats = read_engine_stats(text) if response.status == 200 else None
        self._has_metrics = stats is not None
        return stats


@asynccontextmanager
async def find_server(config: BenchConfig, model: str) -> AsyncGenerator[ServerTarget, None]:
    """The server at `config.url`. One that cannot be measured is a `ConfigError` that says why."""
    url = config.url.rstrip("/").removesuffix("/v1")
    if not url.startswith(("http://", "https://")):
        raise ConfigError(
            f"--url must start with http:// or https://, got {config.url!r}.", param="url"
        )
    headers = {"Authorization": f"Bearer {config.api_key}"} if config.api_key else {}
    timeout = aiohttp.ClientTimeout(total=_PROBE_TIMEOUT_S)
    async with aiohttp.ClientSession(headers=headers, timeout=timeout) as session:
        card = _find_model(await _list_models(session, url), url, model)
        info = TargetInfo(
            kind="server", model=card["id"], url=url, max_model_len=card.get("max_model_len"),
            config=card.get("config"), config_hash=card.get("config_hash"),
        )  # fmt: skip
        address = HttpTarget(url=url, model=card["id"], api_key=config.api_key)
        yield ServerTarget(info, address, session, card.get("vocab_size"))


async def _list_models(session: aiohttp.ClientSession, url: str) -> list[dict[str, Any]]:
    try:
        async with session.get(f"{url}/v1/models") as response:
            if response.status != 200:
                raise ConfigError(
                    f"{url}/v1/models answers with HTTP {response.status}"
                    f"{'; see --api-key' if response.status == 401 else ''}.", param="url",
                )  # fmt: skip
            body = await response.json()
            return [card for card in body["data"] if isinstance(card["id"], str)]
    except TimeoutError:
        raise ConfigError(
            f"{url} did not answer within {_PROBE_TIMEOUT_S:g} s.", param="url"
        ) from None
    except aiohttp.ClientConnectionError as error:
        raise ConfigError(f"{url} cannot be reached: {error}.", param="url") from error
    except (aiohttp.ClientError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{url}/v1/models is not what an OpenAI-compatible server answers: {error!r}.",
            param="url",
        ) from error


def _find_model(cards: list[dict[str, Any]], url: str, model: str) -> dict[str, Any]:
    for card in cards:
        if card["id"] == model:
            return card
    names = ", ".join(card["id"] for card in cards) or "nothing"
    raise ConfigError(
        f"The server at {url} serves {names}, not {model}: name what it serves as MODEL.",
        param="model",
    )
