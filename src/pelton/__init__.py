# SPDX-License-Identifier: Apache-2.0
"""Pelton: an LLM serving system that can be read, and that shows what each technique is worth.

`LLM`, `SamplingParams` and `Grammar` load on first use, so that `import pelton` stays cheap.
"""

from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pelton.core.grammar import Grammar
    from pelton.core.request import SamplingParams
    from pelton.serving.llm import LLM

__all__ = ["LLM", "Grammar", "SamplingParams"]
try:
    __version__ = version("pelton")
except PackageNotFoundError:
    __version__ = "unknown"  # A source tree that was never installed.


def __getattr__(name: str) -> object:
    if name == "LLM":
        from pelton.serving.llm import LLM

        return LLM
    if name == "Grammar":
        from pelton.core.grammar import Grammar

        return Grammar
    if name == "SamplingParams":
        from pelton.core.request import SamplingParams

        return SamplingParams
    raise AttributeError(f"module 'pelton' has no attribute {name!r}")
