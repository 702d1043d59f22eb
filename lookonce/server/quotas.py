"""How much each tenant may ask for: calls at a time, calls, image bytes and tokens per second. Event loop only.

Rates are token buckets that may go into debt: a call is admitted while its tenant's bucket holds anything and pays what
it really took once that is known, so nobody has to guess the length of an answer, and no single image is too large for
a bucket. In the mean a tenant gets its rate.
"""

from __future__ import annotations

import enum
import time
import tomllib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from prometheus_client import CollectorRegistry, Counter
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from lookonce.errors import OverloadedError
from lookonce.identity import CallerRole, Identity
from lookonce.server.settings import ServiceSettings
from lookonce.watched_files import Current, WatchedFiles

# A bucket holds so many seconds of its rate.
_BURST_S = 2.0
# Callers at their limit of calls are told to come again after this time.
_RETRY_S = 0.5
# Idle tenants beyond so many are forgotten: their buckets are full.
_MAX_TENANTS = 4096


class Resource(enum.Enum):
    """What is counted."""

    REQUESTS = "requests_per_s"
    IMAGE_BYTES = "image_bytes_per_s"
    TOKENS = "tokens_per_s"


class Quota(BaseModel):
    """Of one tenant; absent: no limit."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    max_in_flight: int | None = Field(None, ge=1)
    requests_per_s: float | None = Field(None, gt=0)
    image_bytes_per_s: float | None = Field(None, gt=0)
    tokens_per_s: float | None = Field(None, gt=0)

    def rate(self, resource: Resource) -> float | None:
        """Per second."""
        rate: float | None = getattr(self, resource.value)
        return rate


class QuotaTable(BaseModel):
    """A quota file: one for each tenant named, one for all others."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    default: Quota = Field(default_factory=lambda: Quota.model_validate({}))
    tenants: Mapping[str, Quota] = {}


def parse_quotas(content: bytes) -> QuotaTable:
    """TOML with `[default]` and `[tenants.NAME]`. Raises ValueError."""
    try:
        return QuotaTable.model_validate(tomllib.loads(content.decode()))
    except ValidationError as error:
        wrong = "; ".join(f"{'.'.join(map(str, item['loc']))}: {item['msg']}" for item in error.errors())
        raise ValueError(f"is no table of quotas: {wrong}") from None


def load_quotas(settings: ServiceSettings, registry: CollectorRegistry) -> Quotas:
    """What the settings ask for. Raises ConfigurationError for a file that cannot be used."""
    path = settings.quotas_file
    return Quotas(None if path is None else WatchedFiles("quotas_file", (path,), parse_quotas), registry)


class _Usage:
    """What one tenant has taken."""

    def __init__(self, now_s: float) -> None:
        self.num_in_flight = 0
        # Seconds of its rate that each bucket holds; negative: debt.
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
    """All tenants of one process: with several replicas each counts for itself."""

    def __init__(
        self,
        table: Current[QuotaTable] | None,
        registry: CollectorRegistry,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`table` None: nobody has a limit."""
        self._table = table
        self._clock = clock
        self._usages: dict[str, _Usage] = {}
        self._refused = Counter(
            "lookonce_quota_refusals",
            "Calls refused since their tenant had used up its quota, by the limit.",
            labelnames=("limit",),
            registry=registry,
        )

    @contextmanager
    def admitted(self, identity: Identity) -> Iterator[None]:
        """One call. Raises OverloadedError, with the time after which to come again, when a quota is used up."""
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

    def check(self, identity: Identity, resource: Resource) -> None:
        """For what comes while a call goes on, as the items of a stream do. Raises OverloadedError as `admitted`."""
        if self._table is not None and identity.role is CallerRole.CLIENT:
            self._check(*self._state(identity.tenant), resource)

    def charge(self, identity: Identity, resource: Resource, amount: float) -> None:
        """What a call took, once that is known; it may leave a debt."""
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
        assert self._table is not None, "asked only where there are quotas"
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
