"""The turns of images that wait to be decoded: tenants share the decoding processes by pixels.

Decoding takes time in proportion to pixels, and a file of 34 bytes can claim 49 million of them. So turns are counted
in pixels, which the file's header tells. `lookonce/turns/cost_turns.py` has the rule.
"""

from __future__ import annotations

from lookonce.turns.cost_turns import TurnRequest
from lookonce.turns.fair_queue import CallerId

# Pixels that an image counts at least: the smallest one, too, goes through a decoding process and the image processor.
MIN_PIXELS = 1 << 18


def decode_request(caller: CallerId, number: int, num_pixels: int) -> TurnRequest:
    """Returns the request of one image. `num_pixels` is width times height, summed over its files."""
    return TurnRequest(caller, number, max(MIN_PIXELS, num_pixels))
