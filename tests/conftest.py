"""Set before any test module imports anything."""

from __future__ import annotations

import os

# Triton looks at it once, when it is first imported, which transformers does. Its kernels are tested in its
# interpreter, on the CPU; `make gpu-check` tests them on a GPU.
os.environ.setdefault("TRITON_INTERPRET", "1")
