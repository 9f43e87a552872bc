# SPDX-License-Identifier: Apache-2.0
"""How deterministic mode's kernels share out work: what may follow the rows, and what must not."""

import json

import pytest

from pelton.kernels import invariant_product
from pelton.kernels.fp8 import invariant_linear
from pelton.kernels.mla.triton import tune_invariant
from pelton.kernels.paged_attention.triton_invariant import choose_parts
from pelton.kernels.tuning import TABLE


def test_chunks_are_shared_out_where_queries_are_few_and_memory_allows() -> None:
    assert choose_parts(8, 4, 2048, 264) == 4
    assert choose_parts(8, 500, 2048, 264) == 32
    assert choose_parts(2048, 4, 2048, 264) == 1
    assert choose_parts(64, 4096, 2048, 264) == 1


@pytest.mark.parametrize(
    ("shape", "num_parts"),
    [((2880, 128), 15), ((7168, 256), 16), ((576, 32), 9), ((61, 5), 1), ((4096, 4096), 1)],
    ids=str,
)
def test_narrow_products_are_cut_by_their_shape(shape, num_parts) -> None:
    assert invariant_product.count_parts(*shape) == num_parts


@pytest.mark.parametrize("in_features", [40, 128, 192, 2880, 4096])
@pytest.mark.parametrize("out_features", [128, 4096, 28672, 128256])
def test_a_products_tile_is_no_wider_than_its_tokens_need(out_features, in_features) -> None:
    for num_tokens in (1, 16, 17, 64, 65, 128, 129, 256, 8192):
        tiles = invariant_product.tune(num_tokens, in_features, out_features, 1, 2, 132)

        assert tiles.block_t <= max(2 * num_tokens, 16)
        assert tiles.block_f % 64 == 0, "the matrix instruction would be another"
        size = 2 * tiles.block_d * (tiles.block_f + tiles.block_t) * tiles.num_stages
        assert size <= 227 * 1024, "shared memory of a multiprocessor"
        is_few = num_tokens <= 64
        assert tiles.num_stages <= max(-(-in_features // tiles.block_d), 1) or not is_few


@pytest.mark.parametrize("out_features", [128, 2112, 7168, 24576])
def test_an_fp8_products_tile_fits_and_meets_one_matrix_instruction(out_features) -> None:
    for num_tokens in (1, 16, 17, 64, 65, 128, 129, 256, 8192):
        tile = invariant_linear.tune(num_tokens, out_features, 132)

        assert tile["BLOCK_T"] <= max(2 * num_tokens, 16)
        assert tile["BLOCK_F"] % 64 == 0
        ahead = tile["num_stages"] * tile["PIECES"]
        assert 128 * (tile["BLOCK_F"] + tile["BLOCK_T"]) * ahead <= 227 * 1024


def test_latent_attention_has_one_tile_and_no_splits() -> None:
    sizes = [(1, 128), (128, 128), (3, 128 * 4096)]

    assert len({tune_invariant(*size, 512, 2, 132) for size in sizes}) == 1


def test_tuned_tiles_of_experts_meet_one_matrix_instruction() -> None:
    for card in json.loads(TABLE.read_text()).values():
        for shape, settings in card.get("fp8_experts", {}).items():
            assert settings.get("BLOCK_F", 64) % 64 == 0, (shape, settings)
