"""The description that an encoder gives of itself, and the check that the decoder can use its rows."""

from __future__ import annotations

from dataclasses import dataclass

from decoder_svc.rows.encoder_wire import row_dtype
from lookonce.content_key import DEFAULT_TENANT, EncoderFingerprint
from lookonce.embedding_meta import RowDtype
from lookonce.encoder.v1 import encoder_service_pb2
from lookonce.errors import FingerprintMismatchError


@dataclass(frozen=True, slots=True)
class ExpectedRows:
    """The kind of rows that the decoder's language model needs."""

    # Hugging Face model type, e.g. "llava".
    model_type: str
    # Width of one level of one row.
    hidden_size: int
    # Extra levels per row.
    num_levels: int = 0
    # Tag of the tenant whose secret the encoder uses to store rows.
    tenant_tag: str = DEFAULT_TENANT.tag


@dataclass(frozen=True, slots=True)
class EncoderInfo:
    """An encoder's description of itself, checked against the decoder's `ExpectedRows`."""

    fingerprint: EncoderFingerprint
    model_type: str
    hidden_size: int
    num_levels: int
    # Element type of the rows.
    dtype: RowDtype
    # Largest image file, bytes.
    max_image_bytes: int
    # Largest image in pixels, width times height.
    max_image_pixels: int

    @property
    def row_bytes(self) -> int:
        """Bytes of one row, including its extra levels."""
        return self.dtype.row_bytes(self.hidden_size, self.num_levels)


def checked_info(response: encoder_service_pb2.GetEncoderInfoResponse, expected: ExpectedRows) -> EncoderInfo:
    """Returns an encoder's answer. Raises FingerprintMismatchError if its rows are not of the expected kind."""
    found = ExpectedRows(response.model_type, response.hidden_size, response.num_levels, response.tenant_tag)
    if found.tenant_tag != expected.tenant_tag:
        raise FingerprintMismatchError(
            "the encoder service uses another tenant secret; tenant_secret_file must be the same on both services"
        )
    if found != expected:
        raise FingerprintMismatchError(
            f"the encoder service makes rows for {found.model_type} of width {found.hidden_size} with "
            f"{found.num_levels} levels; this decoder serves {expected.model_type} of width "
            f"{expected.hidden_size} with {expected.num_levels} levels"
        )
    return EncoderInfo(
        fingerprint=EncoderFingerprint(response.encoder_fingerprint),
        model_type=response.model_type,
        hidden_size=response.hidden_size,
        num_levels=response.num_levels,
        dtype=row_dtype(response.dtype),
        max_image_bytes=response.max_image_bytes,
        max_image_pixels=response.max_image_pixels,
    )
