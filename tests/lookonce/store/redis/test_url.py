"""Redis URLs are parsed, and the error for an unusable one does not contain its password."""

from __future__ import annotations

import pytest

from lookonce.errors import ConfigurationError
from lookonce.store.embedding_store import EmbeddingStore
from lookonce.store.redis.url import Address, DeploymentKind, parse_redis_url


@pytest.mark.parametrize("url", ["redis://:pw@host:1/2", "rediss://host", "unix:///socket?db=3", "nonsense", ""])
def test_the_url_of_a_single_server_is_left_to_redis_py(url: str) -> None:
    parsed = parse_redis_url(url)
    assert (parsed.kind, parsed.node_url, parsed.addresses) == (DeploymentKind.SINGLE, url, ())


def test_sentinels_have_a_service_and_perhaps_a_database() -> None:
    parsed = parse_redis_url("redis+sentinel://me:p%2Fw@a,b.example:5000,[::1]:7/my%20cache/3?client_name=x")
    assert parsed.kind is DeploymentKind.SENTINEL
    assert parsed.addresses == (Address("a", 26379), Address("b.example", 5000), Address("::1", 7))
    assert parsed.service == "my cache"
    assert parsed.node_url == "redis://me:p%2Fw@/3?client_name=x"
    assert parsed.seed_url == "redis://:@/?"
    assert parse_redis_url("redis+sentinel://a/cache").node_url == "redis:///0?"


def test_sentinels_have_credentials_and_encryption_of_their_own() -> None:
    own = "sentinel_username=watcher&sentinel_password=a%26b&sentinel_ssl=yes"
    parsed = parse_redis_url(f"rediss+sentinel://:pw@a/cache?{own}&ssl_ca_certs=/ca.pem")
    assert parsed.node_url == "rediss://:pw@/0?ssl_ca_certs=%2Fca.pem"
    assert parsed.seed_url == "rediss://watcher:a%26b@/?ssl_ca_certs=%2Fca.pem"
    plain = parse_redis_url("rediss+sentinel://:pw@a/cache?ssl_ca_certs=/ca.pem")
    assert plain.node_url.startswith("rediss://")
    assert plain.seed_url == "redis://:@/?"


@pytest.mark.parametrize("path", ["", "/", "/0"])
def test_a_cluster_has_nodes_and_one_database(path: str) -> None:
    parsed = parse_redis_url(f"rediss+cluster://me:pw@a,b:7000{path}?ssl_ca_certs=/ca.pem")
    assert parsed.kind is DeploymentKind.CLUSTER
    assert parsed.addresses == (Address("a", 6379), Address("b", 7000))
    assert parsed.node_url == parsed.seed_url == "rediss://me:pw@/0?ssl_ca_certs=%2Fca.pem"


@pytest.mark.parametrize(
    "url",
    [
        "redis+sentinel://:hunter2@a:1,b:2",
        "redis+sentinel://:hunter2@a:1/",
        "redis+sentinel://:hunter2@a:1/cache/first",
        "redis+sentinel://:hunter2@a:1/cache/0/1",
        "redis+sentinel://:hunter2@/cache",
        "redis+sentinel://:hunter2@a:1,,b:2/cache",
        "redis+sentinel://:hunter2@a:99999/cache",
        "redis+sentinel://:hunter2@a:0/cache",
        "redis+sentinel://:hunter2@a:x/cache",
        "redis+sentinel://:hunter2@a..b:1/cache",
        "redis+sentinel://:hunter2@[::1/cache",
        "redis+sentinel://:hunter2@a/cache?no_such_option=1",
        "redis+sentinel://:hunter2@a/cache?sentinel_no_such_option=1",
        "redis+sentinel://:hunter2@a/cache?host=b",
        "rediss+sentinel://:hunter2@a/cache?sentinel_ssl=yes&ssl_no_such_option=1",
        "redis+cluster://:hunter2@",
        "redis+cluster://:hunter2@a/1",
        "redis+cluster://:hunter2@a?db=1",
        "redis+cluster://:hunter2@a?path=/socket",
        "redis+cluster://:hunter2@a?no_such_option=1",
        "redis+cluster://:hunter2@a#fragment",
        "redis+proxy://:hunter2@a",
        "unix+cluster://:hunter2@a",
        "redis+://:hunter2@a",
    ],
)
def test_the_error_for_an_unusable_url_does_not_contain_its_password(url: str) -> None:
    with pytest.raises(ConfigurationError, match=r"redis\+cluster://host:port,…") as caught:
        EmbeddingStore(url, 1.0, 60, 1 << 20)
    assert "hunter2" not in str(caught.value)
    assert caught.value.__cause__ is None


def test_the_repr_of_a_parsed_url_shows_no_secrets() -> None:
    shown = repr(parse_redis_url("redis+sentinel://:hunter2@a/cache?sentinel_password=swordfish"))
    assert "hunter2" not in shown
    assert "swordfish" not in shown
