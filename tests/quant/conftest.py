"""One thread: the machines that run the tests are small, and the bytes must not depend on it (a test says so)."""

from __future__ import annotations

import torch

torch.set_num_threads(1)
