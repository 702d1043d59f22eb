"""The name under which an encoder reports health to those who need exactly its rows."""

from __future__ import annotations

from lookonce.content_key import EncoderFingerprint
from lookonce.encoder.v1 import encoder_service_pb2

ENCODER_SERVICE: str = encoder_service_pb2.DESCRIPTOR.services_by_name["EncoderService"].full_name


def health_name(fingerprint: EncoderFingerprint) -> str:
    """Returns the health name that only encoders with this fingerprint know.

    A channel that watches it sends calls to those encoders only, whatever else is behind its target.
    """
    return f"{ENCODER_SERVICE}/{fingerprint}"
