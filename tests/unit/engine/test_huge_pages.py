# SPDX-License-Identifier: Apache-2.0
"""Which memory the advice is for; what it is worth is measured elsewhere."""

from pathlib import Path

from pelton.engine.huge_pages import _large_anonymous, advise_huge_pages

MAPS = """\
55d0c0000000-55d0c0800000 rw-p 00000000 00:00 0                          [heap]
7f0000000000-7f0000100000 rw-p 00000000 00:00 0
7f0010000000-7f0020000000 rw-p 00000000 00:00 0
7f0030000000-7f0038000000 r--p 00000000 00:00 0
7f0040000000-7f0048000000 rw-p 00000000 fe:00 5384036                    /usr/lib/libexample.so
7f0050000000-7f0058000000 rw-s 00000000 00:01 2062                       /dev/shm/example (deleted)
7ffc00000000-7ffc00800000 rw-p 00000000 00:00 0                          [stack]
"""


def test_only_large_private_memory_that_belongs_to_no_file_is_taken() -> None:
    assert list(_large_anonymous(MAPS)) == [
        (0x55D0C0000000, 0x55D0C0800000),
        (0x7F0010000000, 0x7F0020000000),
    ]


def test_a_system_without_maps_is_left_alone(tmp_path: Path) -> None:
    assert advise_huge_pages(tmp_path / "maps") == 0


def test_a_refusal_of_the_kernel_counts_nothing(tmp_path: Path) -> None:
    """The address is the kernel's own."""
    maps = tmp_path / "maps"
    maps.write_text("ffff900000000000-ffff900000400000 rw-p 00000000 00:00 0\n")

    assert advise_huge_pages(maps) == 0
