"""Writes docs/contract.md, the reference of the gRPC contract, from the comments of the .proto files: `make docs`."""

from __future__ import annotations

import pathlib
import tempfile
from collections.abc import Iterator, Sequence

from google.protobuf.descriptor_pb2 import (
    DescriptorProto,
    EnumDescriptorProto,
    FieldDescriptorProto,
    FileDescriptorProto,
    FileDescriptorSet,
    ServiceDescriptorProto,
)
from grpc_tools import protoc

ROOT = pathlib.Path(__file__).parents[1]
PAGE = pathlib.Path(__file__).parent / "contract.md"
_INTRODUCTION = """\
<!-- Written by `make docs` from the comments in protos/. Edit those instead of this page. -->

# gRPC contract

These are all services, messages and enums, with the comments of the files in [`protos/`](../protos).
[Other languages](other-languages.md) has the templates for stubs and says what a client does. *Optional* fields
distinguish unset from zero.
"""
# Numbers of fields in descriptor.proto, which make up the path of a comment.
_MESSAGES, _ENUMS, _SERVICES = 4, 5, 6
_FIELDS, _NESTED_MESSAGES, _NESTED_ENUMS = 2, 3, 4
_VALUES, _METHODS = 2, 2
_PREFIX_OF_A_TYPE = "TYPE_"

Path = tuple[int, ...]


def contract_page() -> str:
    """Returns the whole page. Raises ValueError if the files do not compile."""
    sections = [section for file in _compiled() for section in _File(file).sections()]
    return "\n".join([_INTRODUCTION, *sections])


def _compiled() -> list[FileDescriptorProto]:
    """Returns the files of the contract, with their comments."""
    files = sorted(str(path.relative_to(ROOT / "protos")) for path in (ROOT / "protos").rglob("*.proto"))
    with tempfile.TemporaryDirectory() as folder:
        output = pathlib.Path(folder) / "contract.binpb"
        includes = [f"-I{ROOT / 'protos'}", f"-I{pathlib.Path(protoc.__file__).parent / '_proto'}"]
        arguments = ["protoc", *includes, "--include_source_info", f"--descriptor_set_out={output}", *files]
        if protoc.main(arguments) != 0:
            raise ValueError("the contract does not compile")
        return list(FileDescriptorSet.FromString(output.read_bytes()).file)


class _File:
    """The sections of one .proto file."""

    def __init__(self, file: FileDescriptorProto) -> None:
        self._file = file
        self._comments = {
            tuple(location.path): " ".join(location.leading_comments.split())
            for location in file.source_code_info.location
        }

    def sections(self) -> Iterator[str]:
        """Yields Markdown: the services, then messages and enums in the order of the file."""
        yield f"## {self._file.package}\n"
        for number, service in enumerate(self._file.service):
            yield self._service(service, (_SERVICES, number))
        for number, message in enumerate(self._file.message_type):
            yield from self._message(message, (_MESSAGES, number), "")
        for number, enum in enumerate(self._file.enum_type):
            yield self._enum(enum, (_ENUMS, number), "")

    def _service(self, service: ServiceDescriptorProto, path: Path) -> str:
        rows = []
        for number, method in enumerate(service.method):
            request = ("stream of " if method.client_streaming else "") + _link(method.input_type)
            response = ("stream of " if method.server_streaming else "") + _link(method.output_type)
            rows.append((f"`{method.name}`", request, response, self._comment((*path, _METHODS, number))))
        return self._section(service.name, path, ("call", "request", "response", "meaning"), rows)

    def _message(self, message: DescriptorProto, path: Path, prefix: str) -> Iterator[str]:
        name = f"{prefix}{message.name}"
        # Entries of maps are messages that protoc makes up.
        nested = [nested for nested in message.nested_type if not nested.options.map_entry]
        rows = [
            (f"`{field.name}`", str(field.number), _type(field, message), self._comment((*path, _FIELDS, number)))
            for number, field in enumerate(message.field)
        ]
        yield self._section(name, path, ("field", "number", "type", "meaning"), rows)
        for number, child in enumerate(message.nested_type):
            if child in nested:
                yield from self._message(child, (*path, _NESTED_MESSAGES, number), f"{name}.")
        for number, enum in enumerate(message.enum_type):
            yield self._enum(enum, (*path, _NESTED_ENUMS, number), f"{name}.")

    def _enum(self, enum: EnumDescriptorProto, path: Path, prefix: str) -> str:
        rows = [
            (f"`{value.name}`", str(value.number), self._comment((*path, _VALUES, number)))
            for number, value in enumerate(enum.value)
        ]
        return self._section(f"{prefix}{enum.name}", path, ("value", "number", "meaning"), rows)

    def _section(self, name: str, path: Path, head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
        table = [_row(head), _row(["---"] * len(head)), *map(_row, rows)] if rows else ["It has no fields."]
        return "\n".join([f"### {name}", "", self._comment(path), "", *table, ""])

    def _comment(self, path: Path) -> str:
        return self._comments.get(path, "")


def _type(field: FieldDescriptorProto, message: DescriptorProto) -> str:
    entry = next(
        (nested for nested in message.nested_type if _is_type(field, nested) and nested.options.map_entry), None
    )
    if entry is not None:
        key, value = entry.field
        return f"map of {_plain_type(key)} to {_plain_type(value)}"
    if field.label == FieldDescriptorProto.LABEL_REPEATED:
        return f"list of {_plain_type(field)}"
    if field.proto3_optional:
        return f"optional {_plain_type(field)}"
    if field.HasField("oneof_index"):
        return f"{_plain_type(field)}, one of `{message.oneof_decl[field.oneof_index].name}`"
    return _plain_type(field)


def _is_type(field: FieldDescriptorProto, nested: DescriptorProto) -> bool:
    return field.type_name.endswith(f".{nested.name}")


def _plain_type(field: FieldDescriptorProto) -> str:
    if field.type_name:
        return _link(field.type_name)
    return FieldDescriptorProto.Type.Name(field.type).removeprefix(_PREFIX_OF_A_TYPE).lower()


def _link(type_name: str) -> str:
    """Returns a link to the section of a type; types of Google have none."""
    name = type_name.lstrip(".")
    if not name.startswith("lookonce."):
        return f"`{name}`"
    # lookonce.PART.v1.Name, or Name.Nested
    local = ".".join(name.split(".")[3:])
    return f"[{local}](#{local.lower().replace('.', '')})"


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


if __name__ == "__main__":
    PAGE.write_text(contract_page(), "utf-8")
