"""Services of models whose image processors or vision towers need torchvision."""

from __future__ import annotations

import pathlib

import pytest

from lookonce.client import Client
from lookonce.images import ImageRef
from lookonce.local.local_stack import LocalStack
from tests.conftest import SERVICE_FLAGS
from tests.e2e.pictures import fresh
from tests.tiny_families import ALL_FAMILIES


@pytest.mark.parametrize("name", ["fast_vlm", "lfm2_vl", "llama4", "muse_spark", "perception_lm", "step3p7"])
def test_pictures_are_told_apart_and_encoded_once(name: str, tmp_path: pathlib.Path) -> None:
    folder = ALL_FAMILIES[name].build(tmp_path / name)
    with (
        LocalStack(folder, encoder_arguments=SERVICE_FLAGS, decoder_arguments=SERVICE_FLAGS) as stack,
        Client.connect(stack.decoder_targets[0]) as client,
    ):
        pictures = [ImageRef.from_bytes(picture.data) for picture in fresh(4)]
        first = [client.generate("What is it?", images=[picture], max_tokens=8) for picture in pictures]
        again = [client.generate("What is it?", images=[picture], max_tokens=8) for picture in pictures]
    assert [one.token_ids for one in again] == [one.token_ids for one in first]
    assert len({one.token_ids for one in first}) > 1
    assert all(one.usage.encoded_image_tokens > 0 for one in first)
    assert all(one.usage.encoded_image_tokens == 0 for one in again)
