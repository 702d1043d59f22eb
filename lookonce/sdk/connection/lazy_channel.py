"""A channel for asyncio that is opened at its first use, so that a client can be made before there is an event loop."""

from __future__ import annotations

import asyncio

import grpc.aio

from lookonce.errors import ConfigurationError
from lookonce.sdk.connection.channel import ConnectionOptions, channel_options


class LazyChannel:
    """The channel of one client to one target. It belongs to the event loop of its first use."""

    def __init__(self, target: str, service: str | None, options: ConnectionOptions) -> None:
        """`service` is the full name that health checks use; None: no health checks.

        Raises ConfigurationError for unusable TLS files, for a token that would go to another machine without TLS, and
        for a list of addresses with TLS.
        """
        options.check_token_is_safe(target)
        options.check_has_name(target)
        self._target = target
        self._options = channel_options(service, target=target)
        self._credentials = options.credentials()
        self._interceptors = list(options.interceptors)
        self._channel: grpc.aio.Channel | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    def opened(self) -> grpc.aio.Channel:
        """Returns the channel. Raises ConfigurationError in another event loop, where calls would hang or fail."""
        loop = asyncio.get_running_loop()
        if self._channel is None:
            self._loop = loop
            if self._credentials is None:
                self._channel = grpc.aio.insecure_channel(
                    self._target, options=self._options, interceptors=self._interceptors
                )
            else:
                self._channel = grpc.aio.secure_channel(
                    self._target, self._credentials, options=self._options, interceptors=self._interceptors
                )
        if loop is not self._loop:
            raise ConfigurationError("this client was first used in another event loop; connect one in each")
        return self._channel

    async def close(self) -> None:
        """Closes the channel if it was opened."""
        if self._channel is not None:
            await self._channel.close()
