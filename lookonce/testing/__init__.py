"""A stand-in for the services, for the tests of programs that use the SDK. Needs no model, no Redis and no torch."""

from lookonce.testing.fake_request import FakeRequest
from lookonce.testing.fake_server import FakeServer

__all__ = ["FakeRequest", "FakeServer"]
