# SPDX-License-Identifier: Apache-2.0
"""What `pelton workers` says where there is no server to ask."""

import pytest

from pelton.cli import workers
from pelton.core.errors import ConfigError


@pytest.mark.parametrize(
    "url", ["http://127.0.0.1:1", "http://a b", "http://[::1", "http://127.0.0.1:x", "x", ""]
)
def test_what_is_no_server_is_named(url: str) -> None:
    with pytest.raises(ConfigError, match=r"cannot be asked: .*; see --url"):
        workers._call(url, "", "GET", "/admin/workers")


@pytest.mark.parametrize("key", ["a\nb", "\u0416"])
def test_what_cannot_be_a_key_is_a_sentence(key: str) -> None:
    with pytest.raises(ConfigError):
        workers._call("http://127.0.0.1:1", key, "GET", "/admin/workers")
