# SPDX-License-Identifier: Apache-2.0
"""Automatic choices: filled for the machine, or refused with the figures."""

import dataclasses

import pytest
from engine_harness import make_geometry

from pelton.core.config import (
    AUTO,
    CacheConfig,
    Device,
    DType,
    EngineConfig,
    KVCacheDType,
    ModelConfig,
    SchedulerConfig,
    SpeculativeConfig,
)
from pelton.core.errors import CapacityError, ConfigError
from pelton.engine.factory import make_engine
from pelton.engine.resolve import CPU_KV_BYTES, resolve

# One block of 16 tokens in float32: 1 layer * 2 * 1 head * 1 wide * 16 * 4 bytes.
BLOCK_BYTES = 128


def resolve_cpu(
    *,
    kv_bytes: int = 2**20,
    model: dict[str, object] | None = None,
    cache: dict[str, object] | None = None,
    scheduler: dict[str, object] | None = None,
    windows: tuple[int, ...] = (0,),
    max_context: int = 1024,
    device: str = "cpu",
) -> EngineConfig:
    config = EngineConfig(
        model=ModelConfig(**(model or {})),  # type: ignore[arg-type]
        cache=CacheConfig(**(cache or {})),  # type: ignore[arg-type]
        scheduler=SchedulerConfig(**(scheduler or {})),  # type: ignore[arg-type]
    )
    return resolve(
        config,
        make_geometry(windows, max_context=max_context),
        kv_bytes_available=kv_bytes,
        device=device,
        element_bytes=4,
    )


def find_auto(node: object) -> list[str]:
    found = []
    for item in dataclasses.fields(node):  # type: ignore[arg-type]
        value = getattr(node, item.name)
        if dataclasses.is_dataclass(value):
            found += find_auto(value)
        elif value is AUTO or value in (DType.AUTO, Device.AUTO):
            found.append(item.name)
    return found


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_nothing_automatic_is_left(device: str) -> None:
    assert find_auto(EngineConfig()) != []
    assert find_auto(resolve_cpu(device=device)) == []


def test_a_cache_in_fp8_has_a_byte_a_number() -> None:
    plain = resolve_cpu(cache={"kv_memory_bytes": 100 * BLOCK_BYTES})
    fp8 = resolve_cpu(
        cache={"kv_memory_bytes": 100 * BLOCK_BYTES, "kv_cache_dtype": KVCacheDType.FP8}
    )

    assert plain.cache.num_blocks == 100
    assert fp8.cache.num_blocks == 400
    assert fp8.cache.kv_memory_bytes == 400 * BLOCK_BYTES // 4
    assert (plain.cache.kv_cache_dtype, fp8.cache.kv_cache_dtype) == ("float32", "fp8")
    assert fp8.model.dtype is DType.FLOAT32
    assert resolve_cpu(cache={"kv_cache_dtype": KVCacheDType.FLOAT32}) == resolve_cpu()
    with pytest.raises(ConfigError, match="bfloat16 with activations in float32"):
        resolve_cpu(cache={"kv_cache_dtype": KVCacheDType.BFLOAT16})


def test_a_cache_that_does_not_go_with_the_activations_is_refused_before_loading() -> None:
    config = EngineConfig(
        model=ModelConfig(dtype=DType.BFLOAT16),
        cache=CacheConfig(kv_cache_dtype=KVCacheDType.FLOAT32),
    )

    with pytest.raises(ConfigError, match=r"float32 with activations in bfloat16.* use auto"):
        make_engine(config, load=lambda *_: pytest.fail("it loaded"))


def test_latents_are_not_kept_in_fp8() -> None:
    geometry = make_geometry()
    (group,) = geometry.kv_groups
    latent = dataclasses.replace(group, is_latent=True)
    geometry = dataclasses.replace(geometry, kv_groups=(latent,))
    config = EngineConfig(cache=CacheConfig(kv_cache_dtype=KVCacheDType.FP8))

    with pytest.raises(ConfigError, match=r"fp8 is for grouped-query attention .* use auto"):
        resolve(config, geometry, kv_bytes_available=2**20, device="cpu", element_bytes=4)


def test_defaults_of_a_cpu() -> None:
    config = resolve_cpu()
    assert config.scheduler == SchedulerConfig(
        max_num_requests=64, max_num_batched_tokens=512, overlap=False
    )
    assert config.model.dtype is DType.FLOAT32
    assert config.model.max_model_len == 1024


def test_defaults_of_a_gpu() -> None:
    assert resolve_cpu(device="cuda").scheduler == SchedulerConfig(
        max_num_requests=512, max_num_batched_tokens=8192, overlap=True
    )


def test_no_more_requests_than_the_budget_can_decode_in_a_step() -> None:
    config = resolve_cpu(scheduler={"max_num_batched_tokens": 7})
    assert config.scheduler.max_num_requests == 7


def test_what_is_given_stays() -> None:
    config = resolve_cpu(
        model={"max_model_len": 100, "dtype": DType.BFLOAT16},
        cache={"num_blocks": 50},
        scheduler={"max_num_requests": 3, "max_num_batched_tokens": 5, "overlap": True},
    )
    assert config.model.max_model_len == 100
    assert config.model.dtype is DType.BFLOAT16
    assert config.cache.num_blocks == 50
    assert config.cache.kv_memory_bytes == 50 * BLOCK_BYTES
    assert config.scheduler == SchedulerConfig(
        max_num_requests=3, max_num_batched_tokens=5, overlap=True
    )


def test_kv_takes_the_memory_there_is_shared_over_groups() -> None:
    config = resolve_cpu(kv_bytes=100 * 2 * BLOCK_BYTES + 1, windows=(0, 32))
    assert config.cache.num_blocks == 100


def test_kv_takes_no_more_than_all_requests_can_use() -> None:
    config = resolve_cpu(kv_bytes=2**40, scheduler={"max_num_requests": 2})
    assert config.cache.num_blocks == 2 * 1024 // 16 + 1


def test_a_cpu_gives_kv_two_gib_unless_told_otherwise() -> None:
    huge = {"kv_bytes": 2**40, "max_context": 2**24}
    assert resolve_cpu(**huge).cache.kv_memory_bytes == CPU_KV_BYTES  # type: ignore[arg-type]
    named = resolve_cpu(**huge, cache={"kv_memory_bytes": 2**32})  # type: ignore[arg-type]
    assert named.cache.kv_memory_bytes == 2**32


def test_an_automatic_context_shrinks_to_what_the_pool_holds() -> None:
    assert resolve_cpu(cache={"num_blocks": 11}).model.max_model_len == 160


def test_a_window_needs_only_itself_and_the_tokens_in_flight() -> None:
    scheduler = {"max_num_batched_tokens": 32}
    config = resolve_cpu(cache={"num_blocks": 9}, windows=(64,), scheduler=scheduler)
    assert config.model.max_model_len == 1024


def test_memory_that_a_window_cannot_use_goes_to_full_attention() -> None:
    """64 requests of a window of 64 tokens, 5 blocks and one more each; 512 tokens in flight."""
    window_bytes = (1 + 64 * 6 + 32) * BLOCK_BYTES
    config = resolve_cpu(
        kv_bytes=window_bytes + 1000 * BLOCK_BYTES + 1,
        cache={"prefix_cache": False},
        windows=(0, 64),
    )
    assert config.cache.num_blocks == 1000
    assert config.cache.kv_memory_bytes == window_bytes + 1000 * BLOCK_BYTES


def test_groups_share_memory_that_is_too_small_for_a_bound() -> None:
    config = resolve_cpu(kv_bytes=201 * BLOCK_BYTES, cache={"prefix_cache": False}, windows=(0, 64))
    assert config.cache.num_blocks == 100


def test_cached_prefixes_keep_their_windows() -> None:
    config = resolve_cpu(kv_bytes=2 * 2**20, windows=(0, 64))
    num_blocks = config.cache.num_blocks
    window_blocks = 1 + 64 * 6 + 32 + num_blocks // 8
    assert config.cache.kv_memory_bytes == (num_blocks + window_blocks) * BLOCK_BYTES


def test_a_context_that_was_asked_for_and_does_not_fit_is_refused_with_both_figures() -> None:
    with pytest.raises(CapacityError) as error:
        resolve_cpu(model={"max_model_len": 161}, cache={"num_blocks": 11})
    assert error.value.message == (
        "One request of 161 tokens needs 1,536 bytes of KV, and there are 1,408 bytes, which hold"
        " 160 tokens. Raise --kv-memory-bytes or lower --max-model-len to at most 160."
    )


@pytest.mark.parametrize("kv_bytes", [-5, 0, BLOCK_BYTES])
def test_no_room_for_two_tokens_is_refused(kv_bytes: int) -> None:
    with pytest.raises(CapacityError, match=r"hold 0 tokens\. Raise --kv-memory-bytes\."):
        resolve_cpu(kv_bytes=kv_bytes)


def test_more_context_than_the_model_has_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"at most 1024.*got 1025") as error:
        resolve_cpu(model={"max_model_len": 1025})
    assert error.value.param == "max_model_len"


def test_more_memory_than_is_left_is_refused() -> None:
    with pytest.raises(CapacityError, match="asks for 2,000,000 bytes and 1,048,576 are left"):
        resolve_cpu(cache={"kv_memory_bytes": 2_000_000})


def test_more_blocks_than_memory_are_refused() -> None:
    with pytest.raises(CapacityError, match="at most 10") as error:
        resolve_cpu(cache={"num_blocks": 11, "kv_memory_bytes": 10 * BLOCK_BYTES})
    assert error.value.param == "num_blocks"


def test_more_tokens_than_31_bits_count_are_refused_with_what_to_lower() -> None:
    with pytest.raises(CapacityError, match=r"lower --max-num-requests to at most 2046") as error:
        resolve_cpu(
            kv_bytes=2**40,
            max_context=2**20 - 1,
            scheduler={"max_num_requests": 4096, "max_num_batched_tokens": 4096},
        )
    assert error.value.param == "max_num_requests"


@pytest.mark.parametrize(
    "text", ["", "on", "mtp", "mtp:0", "mtp:5", "ngram:9", "ngram:-1", "ngram:01"]
)
def test_drafting_that_is_not_supported_is_refused_with_what_is(text: str) -> None:
    with pytest.raises(
        ConfigError, match=r"'ngram:K' with K from 1 to 8, 'mtp:K' with K from 1 to 4"
    ):
        SpeculativeConfig(speculative=text)


def test_mtp_on_a_model_without_its_layer_is_refused() -> None:
    config = EngineConfig(speculative=SpeculativeConfig(speculative="mtp:3"))
    geometry = make_geometry()
    with pytest.raises(ConfigError, match="needs a model with an MTP layer, which tiny has not"):
        resolve(config, geometry, kv_bytes_available=2**20, device="cpu", element_bytes=4)


@pytest.mark.parametrize(("num_cores", "num_threads"), [(8, 4), (5, 2), (1, 1)])
def test_workers_share_the_cores(
    num_cores: int, num_threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(num_cores)))
    monkeypatch.setattr("psutil.cpu_count", lambda logical: num_cores)
    resolved = resolve(
        EngineConfig(),
        make_geometry((0,)),
        kv_bytes_available=2**20,
        device="cpu",
        element_bytes=4,
        num_workers=2,
    )
    assert resolved.executor.num_threads == num_threads
