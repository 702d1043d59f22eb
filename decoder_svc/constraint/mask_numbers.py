"""The numbers of masks that a process with llguidance has sent, so that it sends none twice.

Both sides keep the newest masks. A number is given once, so an old one never names another mask.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence

# 3 MiB for 49,152 tokens, 16 MiB for 262,144. The answers of a JSON schema need some dozens.
MAX_MASKS = 512


class MaskNumbers:
    """Numbers the masks, in the process."""

    def __init__(self) -> None:
        self._numbers: dict[bytes, int] = {}
        self._newest: deque[bytes] = deque()
        self._next = 0

    def number(self, mask: bytes, new_masks: dict[int, bytes]) -> int:
        """Returns the number of a mask. If it has none, it gets one and is added to `new_masks`."""
        known = self._numbers.get(mask)
        if known is not None:
            return known
        number = self._next
        self._next += 1
        self._numbers[mask] = number
        new_masks[number] = mask
        self._newest.append(mask)
        if len(self._newest) > MAX_MASKS:
            del self._numbers[self._newest.popleft()]
        return number


class NumberedMasks:
    """Knows the masks by their numbers, outside the process."""

    def __init__(self) -> None:
        self._masks: dict[int, bytes] = {}

    def masks(self, numbers: Sequence[int], new_masks: Mapping[int, bytes]) -> list[bytes]:
        """Returns the masks with these numbers, which come from one outcome. Outcomes must be read in order."""
        self._masks |= new_masks
        found = [self._masks[number] for number in numbers]
        # A mask may be named before newer ones of the same outcome replace it, so that it is dropped afterwards.
        while len(self._masks) > MAX_MASKS:
            del self._masks[next(iter(self._masks))]
        return found
