# SPDX-License-Identifier: Apache-2.0
"""Unit tests compute on tensors so small that a second thread only waits for the first."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
