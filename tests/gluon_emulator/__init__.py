# SPDX-License-Identifier: Apache-2.0
"""Runs Gluon kernels for Hopper on the CPU: their modules' own source, by their own launchers.

Modelled: the partitions of a program, and beside them copies and products that are under way until
somebody waits for them. A seed chooses who goes on, and when a copy lands or a product reads its
operands; the same seed chooses the same. Barriers have phases, counts of arrivals and bytes
awaited. Shared memory holds NaN until something is written, and again from the start of a copy
until it lands. Panels of shared memory lie as the copy engine writes them. Tiles are torch tensors
and round as on the card; products are summed in float32. A hang ends at once and says who waits for
which barrier, and what that misses. Faults end it too: an address outside a tensor, an arrival or
byte too many, a product that reads what no fence has shown it or that nobody waited for.

Not modelled: layouts of registers, and the swizzle inside panels; threads of a partition, hence
`thread_barrier`; the fence that shows barriers once they are initialised; programs side by side;
the matrix units' narrower sums of FP8; how much there is of registers and shared memory; time.
Kernels with inline PTX (MXFP4's, and attention over an FP8 cache) are left out, because their
instructions see which thread holds which number.
"""

from gluon_emulator.launch import load_emulated, make_gluon
from gluon_emulator.schedule import Fault, Hang

__all__ = ["Fault", "Hang", "load_emulated", "make_gluon"]
