"""Tests that the page of the contract is that of the .proto files, and that each of its links finds its section."""

from __future__ import annotations

import re
from collections.abc import Iterator

from google.protobuf.descriptor import Descriptor

from docs.generate_contract import PAGE, contract_page
from lookonce.common.v1 import common_pb2
from lookonce.decoder.v1 import decoder_service_pb2
from lookonce.encoder.v1 import encoder_service_pb2

FILES = [module.DESCRIPTOR for module in (common_pb2, decoder_service_pb2, encoder_service_pb2)]


def messages(message: Descriptor) -> Iterator[Descriptor]:
    yield message
    for nested in message.nested_types:
        yield from messages(nested)


def test_the_committed_page_is_current() -> None:
    assert contract_page() == PAGE.read_text("utf-8"), "run `make docs`"


def test_every_call_field_and_value_is_on_the_page_with_a_meaning() -> None:
    rows = re.findall(r"^\| `(\w+)` \|.*\| ([^|]*) \|$", PAGE.read_text("utf-8"), re.MULTILINE)
    expected = [
        part.name
        for file in FILES
        for part in (
            *(method for service in file.services_by_name.values() for method in service.methods),
            *(field for top in file.message_types_by_name.values() for message in messages(top)
              if not message.GetOptions().map_entry for field in message.fields),
            *(value for enum in file.enum_types_by_name.values() for value in enum.values),
            *(value for top in file.message_types_by_name.values() for message in messages(top)
              for enum in message.enum_types for value in enum.values),
        )
    ]  # fmt: skip
    assert sorted(name for name, _ in rows) == sorted(expected)
    assert [name for name, meaning in rows if not meaning.endswith(".")] == []


def test_a_section_has_one_name_of_its_own() -> None:
    page = PAGE.read_text("utf-8")
    sections = [heading.lower().replace(".", "") for heading in re.findall(r"^### (.+)$", page, re.MULTILINE)]
    assert len(sections) == len(set(sections)) > 50
    assert set(re.findall(r"\]\(#([^)]+)\)", page)) <= set(sections)
