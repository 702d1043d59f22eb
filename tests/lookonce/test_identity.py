"""The current identity belongs to a block and to the tasks that start in it."""

from __future__ import annotations

import asyncio

import pytest

from lookonce.identity import ANYBODY, TENANT_NAME, CallerRole, Identity, acting_for, current_identity

SHOP = Identity("shop", "acme", CallerRole.CLIENT)
DECODER = Identity("decoder", "", CallerRole.SERVICE)


def test_without_authentication_the_caller_may_do_everything() -> None:
    assert current_identity() == ANYBODY
    assert ANYBODY.role is CallerRole.OPERATOR


def test_the_identity_ends_with_its_block_also_by_an_error() -> None:
    def fail() -> None:
        with acting_for(DECODER):
            assert current_identity() == DECODER
            raise ValueError("inside")

    with acting_for(SHOP):
        with pytest.raises(ValueError, match="inside"):
            fail()
        assert current_identity() == SHOP
    assert current_identity() == ANYBODY


async def test_a_task_keeps_the_identity_of_the_block_that_started_it() -> None:
    go_on = asyncio.Event()

    async def later() -> Identity:
        await go_on.wait()
        return current_identity()

    with acting_for(SHOP):
        task = asyncio.create_task(later())
    with acting_for(DECODER):
        go_on.set()
        assert await task == SHOP


@pytest.mark.parametrize("name", ["", "acme", "a.b-c_1", "x" * 64])
def test_tenants_names_are_short_and_plain(name: str) -> None:
    assert TENANT_NAME.fullmatch(name)


@pytest.mark.parametrize("name", ["x" * 65, "a b", "../x", "ä", "a\n"])
def test_other_names_are_no_tenants(name: str) -> None:
    assert not TENANT_NAME.fullmatch(name)
