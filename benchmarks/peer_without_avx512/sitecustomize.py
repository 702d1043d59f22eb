"""Makes the peer's interpreter and its child processes take their libraries for processors without AVX-512.

Python imports a module of this name at start-up if its folder is on PYTHONPATH. Only benchmarks/forced_level.py puts it
there: the peer asks PyTorch for the processor's instructions, and PyTorch cannot be told otherwise by a variable.
"""

from __future__ import annotations

import torch.cpu


def _never() -> bool:
    return False


torch.cpu._is_avx512_supported = _never
torch.cpu._is_avx512_bf16_supported = _never
