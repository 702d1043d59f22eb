"""The decoder behind the gateway, asked with the key of each caller. The decoder alone decides who the caller is."""

from __future__ import annotations

import time
from collections.abc import Sequence

from gateway_svc.errors import UnknownModelError
from gateway_svc.settings import GatewaySettings
from lookonce import AsyncClient, ImageFetcher
from lookonce.decoder_info import ModelInfo
from lookonce.errors import ConfigurationError, InvalidParameterError, UnauthenticatedError
from lookonce.images import ImageRef
from lookonce.logs import get_logger
from lookonce.sdk.connection.channel import ConnectionOptions

# Time after which the decoder is asked again for its model, seconds: a roll-out may have changed the name.
_MODEL_AGE_S = 10.0
# gRPC servers refuse longer ones with all other metadata, and the SDK would try again.
_MAX_KEY_LENGTH = 4096

_log = get_logger(__name__)


class Backend:
    """A client of the decoder, and the fetcher of images by URL. Use it from one event loop."""

    def __init__(self, settings: GatewaySettings) -> None:
        """Raises ConfigurationError for unusable TLS files and names of hosts."""
        self._client = AsyncClient.connect(
            settings.decoder_target,
            timeout_s=settings.request_timeout_s,
            tls_ca=settings.decoder_tls_ca,
            tls_cert=settings.decoder_tls_cert,
            tls_key=settings.decoder_tls_key,
            token_over_plaintext=settings.token_over_plaintext,
        )
        self._sends_keys = _keys_are_safe(settings)
        if not self._sends_keys:
            _log.warning(
                "keys of callers are not sent to the decoder, which is another machine and has no TLS; set "
                "decoder_tls_ca, or token_over_plaintext if the network is safe",
                decoder_target=settings.decoder_target,
            )
        hosts, private_hosts = settings.image_host_names, settings.private_image_host_names
        self._fetcher: ImageFetcher | None = None
        if hosts or private_hosts:
            self._fetcher = ImageFetcher(
                hosts,
                private_hosts=private_hosts,
                max_bytes=settings.max_image_bytes,
                timeout_s=settings.image_timeout_s,
            )
        self._info: ModelInfo | None = None
        self._info_s = 0.0
        # Texts of single tokens, of the model of `_info`.
        self._token_texts: dict[int, str] = {}

    def as_caller(self, key: str | None) -> AsyncClient:
        """Returns a client whose calls carry a key. Raises UnauthenticatedError for a key that no call could carry."""
        if key is not None and len(key) > _MAX_KEY_LENGTH:
            raise UnauthenticatedError("the key is too long")
        if key is None or not self._sends_keys:
            return self._client
        try:
            return self._client.with_options(token=key)
        except ConfigurationError:
            raise UnauthenticatedError("the key must be printable ASCII without spaces") from None

    async def model_info(self, client: AsyncClient, *, fresh: bool = False) -> ModelInfo:
        """Returns the decoder's model, as it is now, or as it was at most ten seconds ago."""
        now_s = time.monotonic()
        if fresh or self._info is None or now_s - self._info_s > _MODEL_AGE_S:
            info = await client.model_info(fresh=True)
            if self._info is None or info.model != self._info.model or info.vocab_size != self._info.vocab_size:
                self._token_texts = {}
            self._info, self._info_s = info, now_s
        return self._info

    async def check_model(self, client: AsyncClient, name: str) -> ModelInfo:
        """Returns the decoder's model. Raises UnknownModelError if the name is neither its nor an adapter's."""
        info = await self.model_info(client)
        if name != info.model and name not in info.adapters:
            # The names are for callers with a key that the decoder accepts.
            await client.load()
            # Adapters come and go.
            info = await self.model_info(client, fresh=True)
        if name != info.model and name not in info.adapters:
            known = " or ".join(map(repr, (info.model, *info.adapters)))
            raise UnknownModelError(
                f"the model {name[:100]!r} is not served here; this is {known}", metadata={"field": "model"}
            )
        return info

    async def fetch(self, url: str) -> ImageRef:
        """Returns the image at a URL. Raises as ImageFetcher, and InvalidParameterError if none are fetched here."""
        if self._fetcher is None:
            raise InvalidParameterError(
                "image_url", "this gateway fetches no images; send the image as a data URL, data:image/png;base64,…"
            )
        return ImageRef.from_bytes(await self._fetcher.afetch(url))

    async def token_texts(self, client: AsyncClient, token_ids: Sequence[int]) -> list[str]:
        """Returns the text of each token. Those that were asked for before are remembered."""
        limit = (await self.model_info(client)).max_context_tokens
        # The model may change between two calls.
        remembered = self._token_texts
        texts = {token_id: remembered[token_id] for token_id in token_ids if token_id in remembered}
        unknown = sorted(set(token_ids) - texts.keys())
        for start in range(0, len(unknown), limit):
            chunk = unknown[start : start + limit]
            texts.update(zip(chunk, await client.token_texts(chunk), strict=True))
        remembered.update(texts)
        return [texts[token_id] for token_id in token_ids]

    async def wait_until_ready(self, timeout_s: float) -> None:
        """Waits until a decoder says that it serves. Raises DeadlineError if none does."""
        await self._client.wait_until_ready(timeout_s=timeout_s)

    async def aclose(self) -> None:
        """Ends all calls and closes the connections."""
        await self._client.aclose()


def _keys_are_safe(settings: GatewaySettings) -> bool:
    options = ConnectionOptions(
        tls_ca=settings.decoder_tls_ca, token="any", token_over_plaintext=settings.token_over_plaintext
    )
    try:
        options.check_token_is_safe(settings.decoder_target)
    except ConfigurationError:
        return False
    return True
