"""Quotas per tenant: calls in flight, and calls, image bytes, image pixels and tokens per second. Event loop only.

Rates are token buckets that may go into debt. A call is admitted while its tenant's bucket is not empty, and is charged
the real amount once that is known. So nobody has to guess the length of an answer, no image is too large for a bucket,
and on average a tenant gets its rate.
"""

from __future__ import annotations

import enum
import time
import tomllib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from prometheus_client import CollectorRegistry, Counter
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from lookonce.errors import InvalidParameterError, OverloadedError
from lookonce.identity import CallerRole, Identity
from lookonce.server.settings import ServiceSettings
from lookonce.server.watched_files import Current, WatchedFiles

# Capacity of a bucket, in seconds of its rate.
_BURST_S = 2.0
# Advised delay for callers at their limit of calls in flight, seconds.
_RETRY_S = 0.5
# Tenants to keep in memory. Beyond that, idle ones are forgotten, which loses nothing: their buckets are full.
_MAX_TENANTS = 4096


class Resource(enum.Enum):
    """A rate that a quota limits. The value is its name in quota files."""

    REQUESTS = "requests_per_s"
    IMAGE_BYTES = "image_bytes_per_s"
    # Width times height as the files' headers claim them: decoding takes time by pixels, not by bytes.
    IMAGE_PIXELS = "image_pixels_per_s"
    TOKENS = "tokens_per_s"


class Quota(BaseModel):
    """The limits of one tenant. An absent value means no limit."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    max_in_flight: int | None = Field(None, ge=1)
    requests_per_s: float | None = Field(None, gt=0)
    image_bytes_per_s: float | None = Field(None, gt=0)
    image_pixels_per_s: float | None = Field(None, gt=0)
    tokens_per_s: float | None = Field(None, gt=0)

    def rate(self, resource: Resource) -> float | None:
        """Returns the allowed amount per second, or None for no limit."""
        rate: float | None = getattr(self, resource.value)
        return rate


class QuotaTable(BaseModel):
    """A parsed quota file: a quota for each named tenant, and a default quota for each other tenant."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    default: Quota = Field(default_factory=lambda: Quota.model_validate({}))
    tenants: Mapping[str, Quota] = {}


def parse_quotas(content: bytes) -> QuotaTable:
    """Parses a quota file: TOML with `[default]` and `[tenants.NAME]`. Raises ValueError."""
    try:
        return QuotaTable.model_validate(tomllib.loads(content.decode()))
    except ValidationError as error:
        wrong = "; ".join(f"{'.'.join(map(str, item['loc']))}: {item['msg']}" for item in error.errors())
        raise ValueError(f"is no table of quotas: {wrong}") from None


def load_quotas(settings: ServiceSettings, registry: CollectorRegistry) -> Quotas:
    """Returns the quotas of the settings' file. Raises ConfigurationError for a file that cannot be used."""
    path = settings.quotas_file
    return Quotas(None if path is None else WatchedFiles("quotas_file", (path,), parse_quotas), registry)


class _Usage:
    """The current use of one tenant."""

    def __init__(self, now_s: float) -> None:
        self.num_in_flight = 0
        # Level of each bucket in seconds of its rate; negative: debt.
        self.levels_s = dict.fromkeys(Resource, _BURST_S)
        self._filled_s = now_s

    def fill(self, now_s: float) -> None:
        for resource, level_s in self.levels_s.items():
            self.levels_s[resource] = min(_BURST_S, level_s + now_s - self._filled_s)
        self._filled_s = now_s

    @property
    def is_idle(self) -> bool:
        return self.num_in_flight == 0 and all(level_s >= _BURST_S for level_s in self.levels_s.values())


class Quotas:
    """The quotas of all tenants in one process. Replicas do not share their counts."""

    def __init__(
        self,
        table: Current[QuotaTable] | None,
        registry: CollectorRegistry,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """With `table` None there are no limits."""
        self._table = table
        self._clock = clock
        self._usages: dict[str, _Usage] = {}
        self._refused = Counter(
            "lookonce_quota_refusals",
            "Calls refused because their tenant had used up its quota, by limit.",
            labelnames=("limit",),
            registry=registry,
        )

    @contextmanager
    def admitted(self, identity: Identity) -> Iterator[None]:
        """Counts a call for the duration of the block.

        Raises OverloadedError, with the time after which to retry, when one of the tenant's quotas is used up.
        """
        if self._table is None or identity.role is not CallerRole.CLIENT:
            yield
            return
        quota, usage = self._state(identity.tenant)
        if quota.max_in_flight is not None and usage.num_in_flight >= quota.max_in_flight:
            raise self._refusal("max_in_flight", f"{usage.num_in_flight} calls are in flight", _RETRY_S)
        for resource in Resource:
            self._check(quota, usage, resource)
        self.charge(identity, Resource.REQUESTS, 1)
        usage.num_in_flight += 1
        try:
            yield
        finally:
            usage.num_in_flight -= 1

    @contextmanager
    def more_in_flight(self, identity: Identity, count: int, field: str) -> Iterator[None]:
        """Counts a call that is in flight `count` times more for the duration of the block.

        `field` of the request has the number. Raises OverloadedError, as `admitted` does, and InvalidParameterError
        where the quota can never allow it.
        """
        if count == 0 or self._table is None or identity.role is not CallerRole.CLIENT:
            yield
            return
        quota, usage = self._state(identity.tenant)
        if quota.max_in_flight is not None:
            if count >= quota.max_in_flight:
                raise InvalidParameterError(
                    field, f"must be at most {quota.max_in_flight}, this tenant's quota of calls in flight"
                )
            if usage.num_in_flight + count > quota.max_in_flight:
                raise self._refusal("max_in_flight", f"{usage.num_in_flight} calls are in flight", _RETRY_S)
        usage.num_in_flight += count
        try:
            yield
        finally:
            usage.num_in_flight -= count

    def has_limit(self, identity: Identity, resource: Resource) -> bool:
        """Whether charges of this resource have an effect, so that the amount has to be found out."""
        if self._table is None or identity.role is not CallerRole.CLIENT:
            return False
        return self._state(identity.tenant)[0].rate(resource) is not None

    def check(self, identity: Identity, resource: Resource) -> None:
        """Checks one quota during a call, for example before each item of a stream. Raises OverloadedError."""
        if self._table is not None and identity.role is CallerRole.CLIENT:
            self._check(*self._state(identity.tenant), resource)

    def charge(self, identity: Identity, resource: Resource, amount: float) -> None:
        """Takes the amount that a call really used from the tenant's bucket, which may go into debt."""
        if self._table is None or identity.role is not CallerRole.CLIENT:
            return
        quota, usage = self._state(identity.tenant)
        rate = quota.rate(resource)
        if rate is not None:
            usage.levels_s[resource] -= amount / rate

    def _check(self, quota: Quota, usage: _Usage, resource: Resource) -> None:
        level_s = usage.levels_s[resource]
        if quota.rate(resource) is not None and level_s <= 0:
            raise self._refusal(resource.value, f"{resource.value} is used up", -level_s)

    def _state(self, tenant: str) -> tuple[Quota, _Usage]:
        assert self._table is not None, "callers check that there are quotas"
        table, now_s = self._table.value, self._clock()
        usage = self._usages.get(tenant)
        if usage is None:
            if len(self._usages) >= _MAX_TENANTS:
                self._forget_idle(now_s)
            usage = self._usages[tenant] = _Usage(now_s)
        usage.fill(now_s)
        return table.tenants.get(tenant, table.default), usage

    def _forget_idle(self, now_s: float) -> None:
        for usage in self._usages.values():
            usage.fill(now_s)
        self._usages = {tenant: usage for tenant, usage in self._usages.items() if not usage.is_idle}

    def _refusal(self, limit: str, what: str, retry_after_s: float) -> OverloadedError:
        self._refused.labels(limit).inc()
        return OverloadedError(
            f"quota of this tenant: {what}; come again later", retry_after_s=max(0.001, retry_after_s)
        )
