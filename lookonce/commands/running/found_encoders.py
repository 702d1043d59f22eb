"""Waits until decoders have found their encoder, so that nobody's first picture fails."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence

from lookonce.client import Client
from lookonce.errors import LookonceError

# Longest time for all decoders, and the pause between two looks, seconds.
_TIMEOUT_S = 10.0
_LOOK_S = 0.1


def wait_until_encoders_are_found(decoder_targets: Sequence[str]) -> None:
    """Waits some seconds at most, and not at all for a decoder that wants a token.

    A decoder is ready without an encoder, since it can answer text. If it became ready before its encoder, it tries to
    connect again every other second, and requests with new images fail meanwhile.
    """
    deadline_s = time.monotonic() + _TIMEOUT_S
    for target in decoder_targets:
        with contextlib.suppress(LookonceError), Client.connect(target) as client:
            while (left_s := deadline_s - time.monotonic()) > 0:
                if client.model_info(fresh=True, timeout_s=left_s).encoder_fingerprint:
                    break
                time.sleep(_LOOK_S)
