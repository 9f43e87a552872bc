# SPDX-License-Identifier: Apache-2.0
"""The engines that `bench_cpu_peers` compares, each behind the same call.

A peer lives in a process of its own, so that no peer's threads or memory reach another. All get
the same prompts as token ids, decode greedily, and ignore the end-of-sequence token.
"""

import ctypes
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch

from pelton.core.config import (
    CacheConfig,
    DType,
    EngineConfig,
    ExecutorConfig,
    ModelConfig,
    Quantization,
    SchedulerConfig,
    config_hash,
    to_dict,
)
from pelton.core.request import GenerateRequest, SamplingParams
from pelton.engine.factory import make_engine
from pelton.models.checkpoint import Checkpoint, open_checkpoint

MODEL = "smollm2"
MAX_REQUESTS = 16
MAX_PROMPT = 128
MAX_TOKENS = 256


class PeerMissingError(Exception):
    """The peer's package is not installed; the message says which."""


@dataclass(frozen=True)
class Timing:
    prefill_s: float
    """From the prompts to the first token of every request."""
    decode_s: float
    """From there to the last token of every request."""
    token_ids: list[list[int]]


class Peer(Protocol):
    description: dict[str, Any]

    def generate(self, prompts: list[list[int]], num_tokens: int) -> Timing: ...


class Pelton:
    def __init__(self, num_threads: int, dtype: DType, quantization: Quantization) -> None:
        config = EngineConfig(
            model=ModelConfig(
                model=MODEL, dtype=dtype, quantization=quantization, max_model_len=MAX_TOKENS
            ),
            cache=CacheConfig(prefix_cache=False),
            # All prompts in one step, as the peers take them.
            scheduler=SchedulerConfig(
                max_num_requests=MAX_REQUESTS, max_num_batched_tokens=MAX_REQUESTS * MAX_PROMPT
            ),
            executor=ExecutorConfig(num_threads=num_threads),
        )
        self._engine = make_engine(config)
        resolved = self._engine.config
        self.description = {"config": to_dict(resolved), "config_hash": config_hash(resolved)}

    def generate(self, prompts: list[list[int]], num_tokens: int) -> Timing:
        params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
        start = time.perf_counter()
        for index, prompt in enumerate(prompts):
            self._engine.add(
                GenerateRequest(
                    request_id=str(index), prompt_token_ids=prompt, sampling=params, seed=0
                )
            )
        token_ids: list[list[int]] = [[] for _ in prompts]
        first_s = 0.0
        while self._engine.has_work:
            for output in self._engine.step():
                token_ids[int(output.request_id)] += output.token_ids
            if not first_s and all(token_ids):
                first_s = time.perf_counter()
        return Timing(first_s - start, time.perf_counter() - first_s, token_ids)


class Transformers:
    """LlamaForCausalLM on dequantised weights, driven without `generate`'s own overhead."""

    def __init__(self, num_threads: int, dtype: torch.dtype) -> None:
        try:
            from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM
        except ImportError as error:
            raise PeerMissingError("transformers is not installed (extra 'peers').") from error
        torch.set_num_threads(num_threads)
        checkpoint = open_checkpoint(MODEL)
        refused = ("architectures", "model_type", "dtype", "rope_scaling")
        config = {key: value for key, value in checkpoint.config.items() if key not in refused}
        model = LlamaForCausalLM(LlamaConfig(**config))
        model.load_state_dict(_read_all(checkpoint))
        self._model = model.to(dtype).eval()
        self._make_cache = DynamicCache
        attention = self._model.config._attn_implementation
        self.description = {"dtype": str(dtype), "attention": attention}

    @torch.inference_mode()
    def generate(self, prompts: list[list[int]], num_tokens: int) -> Timing:
        cache = self._make_cache(config=self._model.config)
        start = time.perf_counter()
        tokens = self._next(torch.tensor(prompts), cache)
        first_s = time.perf_counter()
        steps = [tokens]
        for _ in range(num_tokens - 1):
            tokens = self._next(tokens, cache)
            steps.append(tokens)
        end_s = time.perf_counter()
        return Timing(first_s - start, end_s - first_s, torch.cat(steps, dim=1).tolist())

    def _next(self, tokens: torch.Tensor, cache: Any) -> torch.Tensor:
        logits = self._model(tokens, cache=cache, use_cache=True, logits_to_keep=1).logits
        return logits[:, -1].argmax(dim=-1, keepdim=True)


def _read_all(checkpoint: Checkpoint) -> dict[str, torch.Tensor]:
    weights = {name: checkpoint.read(name).float() for name in checkpoint.tensor_names}
    return {"lm_head.weight": weights["model.embed_tokens.weight"], **weights}


class LlamaCpp:
    """The GGUF file as it is (Q4_1), by llama.cpp's batch interface: all requests in one batch."""

    def __init__(self, num_threads: int) -> None:
        try:
            import llama_cpp
        except ImportError as error:
            raise PeerMissingError("llama-cpp-python is not installed (extra 'peers').") from error
        self._api = llama_cpp
        llama_cpp.llama_log_set(_QUIET, ctypes.c_void_p(0))
        llama_cpp.llama_backend_init()
        path = str(open_checkpoint(MODEL).path).encode()
        params = llama_cpp.llama_model_default_params()
        # Its AMX products (an "extra buffer type") end in a segmentation fault at their first
        # ldtilecfg in 0.3.36; its other extra buffer types do not take Q4_1.
        params.use_extra_bufts = False
        self._model = llama_cpp.llama_model_load_from_file(path, params)
        assert self._model, path
        self._vocab_size = llama_cpp.llama_vocab_n_tokens(
            llama_cpp.llama_model_get_vocab(self._model)
        )
        params = llama_cpp.llama_context_default_params()
        params.n_ctx = MAX_REQUESTS * MAX_TOKENS
        params.n_batch = MAX_REQUESTS * MAX_PROMPT
        params.n_seq_max = MAX_REQUESTS
        params.n_threads = params.n_threads_batch = num_threads
        self._context = llama_cpp.llama_init_from_model(self._model, params)
        assert self._context, "llama.cpp made no context"
        self._batch = llama_cpp.llama_batch_init(params.n_batch, 0, 1)
        self.description = {
            "file": path.decode().rpartition("/")[2],
            "use_extra_bufts": False,
            "system_info": llama_cpp.llama_print_system_info().decode(),
        }

    def generate(self, prompts: list[list[int]], num_tokens: int) -> Timing:
        api = self._api
        api.llama_memory_clear(api.llama_get_memory(self._context), True)
        start = time.perf_counter()
        rows = [
            (token, position, sequence, position == len(prompt) - 1)
            for sequence, prompt in enumerate(prompts)
            for position, token in enumerate(prompt)
        ]
        tokens = self._decode(rows)
        first_s = time.perf_counter()
        steps = [tokens]
        for step in range(num_tokens - 1):
            rows = [
                (token, len(prompts[sequence]) + step, sequence, True)
                for sequence, token in enumerate(tokens)
            ]
            tokens = self._decode(rows)
            steps.append(tokens)
        end_s = time.perf_counter()
        return Timing(
            first_s - start, end_s - first_s, [list(row) for row in zip(*steps, strict=True)]
        )

    def _decode(self, rows: list[tuple[int, int, int, bool]]) -> list[int]:
        """The likeliest next token of each row that asks for logits, in order."""
        batch = self._batch
        batch.n_tokens = len(rows)
        for index, (token, position, sequence, has_logits) in enumerate(rows):
            batch.token[index] = token
            batch.pos[index] = position
            batch.n_seq_id[index] = 1
            batch.seq_id[index][0] = sequence
            batch.logits[index] = has_logits
        status = self._api.llama_decode(self._context, batch)
        assert status == 0, f"llama_decode returned {status}"
        tokens = []
        for index, row in enumerate(rows):
            if row[3]:
                pointer = self._api.llama_get_logits_ith(self._context, index)
                logits = np.ctypeslib.as_array(pointer, shape=(self._vocab_size,))
                tokens.append(int(logits.argmax()))
        return tokens


@ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)
def _QUIET(level: int, text: bytes, user_data: int) -> None:
    """Takes llama.cpp's log lines and drops them."""


PEERS: dict[str, Callable[[int], Peer]] = {
    "pelton bf16": lambda n: Pelton(n, DType.BFLOAT16, Quantization.NONE),
    "pelton int8": lambda n: Pelton(n, DType.BFLOAT16, Quantization.INT8),
    "pelton int4": lambda n: Pelton(n, DType.BFLOAT16, Quantization.INT4),
    "pelton fp32": lambda n: Pelton(n, DType.FLOAT32, Quantization.NONE),
    "transformers bf16": lambda n: Transformers(n, torch.bfloat16),
    "transformers fp32": lambda n: Transformers(n, torch.float32),
    "llama.cpp Q4_1": LlamaCpp,
}
