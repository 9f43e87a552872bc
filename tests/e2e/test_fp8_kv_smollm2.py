# SPDX-License-Identifier: Apache-2.0
"""SmolLM2's perplexity on real text with its keys and values in FP8, beside those in float32."""

import json
import pydoc_data.topics
from pathlib import Path

import pytest
from typer.testing import CliRunner

from pelton.cli.main import make_app
from tolerance import FP8_KV_PERPLEXITY_REL

pytestmark = pytest.mark.slow

TOPICS = ("class", "strings", "customization")


def perplexity(task: Path, kv_cache_dtype: str) -> float:
    options = ["--dtype", "float32", "--kv-memory-bytes", "100MiB", "--max-model-len", "1024"]
    arguments = ["eval", "smollm2", "--task", str(task), "--kv-cache-dtype", kv_cache_dtype]
    result = CliRunner().invoke(make_app(), [*arguments, *options])
    assert result.exit_code == 0, result.output
    scores = json.loads(result.stdout)
    assert scores["config"]["cache"]["kv_cache_dtype"] == kv_cache_dtype
    assert scores["perplexity"]["num_tokens"] >= 1000
    return scores["perplexity"]["perplexity"]


def test_perplexity_rises_by_little(tmp_path: Path) -> None:
    task = tmp_path / "task.jsonl"
    texts = [pydoc_data.topics.topics[topic][:2600] for topic in TOPICS]
    task.write_text("\n".join(json.dumps({"text": text}) for text in texts))

    exact, fp8 = (perplexity(task, kind) for kind in ("float32", "fp8"))

    assert 0 < abs(fp8 / exact - 1) <= FP8_KV_PERPLEXITY_REL
