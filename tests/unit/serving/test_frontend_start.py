# SPDX-License-Identifier: Apache-2.0
"""What a frontend process says of an order that it does not understand."""

import pytest

import pelton
from pelton.serving.http import main


def test_an_order_of_another_version_is_answered_with_what_to_do(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(main, "read_first_line", lambda: b'["StartFrontend",{"model":1}]')
    text = f"runs Pelton {pelton.__version__}, and its order is of another.*restart the server"
    with pytest.raises(SystemExit, match=text):
        main.read_start()
