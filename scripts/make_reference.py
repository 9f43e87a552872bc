# SPDX-License-Identifier: Apache-2.0
"""Writes docs/configuration.md from the configuration tree and docs/metrics.md from what `/metrics`
says; --check only says if one is stale."""

import dataclasses
import sys
import typing
from enum import Enum
from pathlib import Path
from typing import Any

from pelton.bench.config import BenchConfig
from pelton.core.config import EngineConfig, HostConfig, Node, ServerConfig
from pelton.serving.http.metrics import Metrics
from pelton.serving.router.types import RouterConfig
from pelton.serving.worker_pool import WorkerPool

DOCS = Path(__file__).parent.parent / "docs"
METRICS_INTRODUCTION = """\
# Metrics

Generated from `pelton.serving.http.metrics` by `make reference`: what `GET /metrics` says, in
Prometheus' text format. A name ends in its unit, `_seconds`, `_bytes` or `_ratio`; others count
what they name. `worker` is a worker's number: its counters start again with its process
(`pelton_worker_generation`), its gauges are 0 while it is down, and `pelton_worker_info` has its
role, for joins such as

    rate(pelton_kv_pulled_bytes_total[1m]) * on(worker) group_left(role) pelton_worker_info

With `--frontends` above 1, what is one frontend's own has the label `frontend` as well, and
`pelton_frontend_up` is 0 for those that did not answer; `sum by (...)` adds them up.

The router's scores belong to requests: see `x-pelton-route`, `/debug/route` and
[traces](serving.md#traces).

| metric | type | labels | meaning |
|---|---|---|---|
"""
INTRODUCTION = """\
# Configuration

Generated from `pelton.core.config` by `make reference`. Each setting is a command-line option:
`max_num_requests` is `--max-num-requests`. `auto` is filled at start from the model and the
machine; the resolved values are logged once and stored in every record.
"""


def make_page() -> str:
    sections = [INTRODUCTION]
    for root in (EngineConfig, ServerConfig, HostConfig, BenchConfig):
        for node in _nodes(root):
            sections.append(_section(node))
    return "\n".join(sections)


def _nodes(root: type[Node]) -> list[type[Node]]:
    hints = typing.get_type_hints(root)
    children = [
        hint for hint in hints.values() if isinstance(hint, type) and issubclass(hint, Node)
    ]
    return children or [root]


def _section(node: type[Node]) -> str:
    hints = typing.get_type_hints(node)
    lines = [f"## {node.__name__}\n", "| setting | type | default | meaning |", "|---|---|---|---|"]
    for item in dataclasses.fields(node):
        hint = hints[item.name]
        shown = " or ".join(_type_words(hint))
        default = "(empty)" if item.default == "" else item.default
        lines.append(f"| `{item.name}` | {shown} | `{default}` | {item.metadata['help']} |")
    return "\n".join(lines) + "\n"


def _type_words(hint: Any) -> list[str]:
    """What a value of this type may be: the members of an enum, else the type's name."""
    if isinstance(hint, type):
        is_enum = issubclass(hint, Enum)
        return [f"`{member.value}`" for member in hint] if is_enum else [hint.__name__]
    if typing.get_origin(hint) is typing.Literal:
        return [f"`{choice}`" for choice in typing.get_args(hint)]
    return [word for option in typing.get_args(hint) for word in _type_words(option)]


def make_metrics_page() -> str:
    lines = []
    for family in Metrics().families(WorkerPool((), RouterConfig())):
        name = f"{family.name}_total" if family.type == "counter" else family.name
        labels = ", ".join(f"`{label}`" for label in getattr(family, "_labelnames", ()))
        lines.append(f"| `{name}` | {family.type} | {labels} | {family.documentation} |")
    return METRICS_INTRODUCTION + "\n".join(sorted(lines)) + "\n"


def main() -> None:
    for name, page in (("configuration.md", make_page()), ("metrics.md", make_metrics_page())):
        if "--check" not in sys.argv:
            (DOCS / name).write_text(page)
        elif (DOCS / name).read_text() != page:
            sys.exit(f"docs/{name} is stale: run `make reference`")


if __name__ == "__main__":
    main()
