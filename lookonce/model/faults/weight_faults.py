"""Errors for weights that do not fit config.json: the tensor, its shapes, and fields of config.json with their numbers.

Works on names and shapes alone.
"""

from __future__ import annotations

import pathlib
import re
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from lookonce.errors import ModelFolderError
from lookonce.model.faults.read_fields import listed, part_name, read_fields, source_of
from lookonce.model.number_ranges import is_numeric
from lookonce.model.safetensors_header import read_header

_EXPERT = re.compile(r"(.+\.experts)\.(\d+)\.(.+)")
_LAYER = re.compile(r"(.+?\.(?:layers|blocks|layer))\.(\d+)\.")
_LAYER_COUNT = re.compile(r"num_hidden_layers|num_layers|depth|n_layers?")
_ADVICE = "download the model again, with the config.json that belongs to it"


def report_fault(half: str, model: Any, report: Mapping[str, Any], files: Sequence[pathlib.Path]) -> str | None:
    """Returns why a half whose weights were loaded with this report of transformers is refused, None if it is complete.

    `half` is its name.
    """
    missing, unexpected = (sorted(map(str, report.get(f"{name}_keys", ()))) for name in ("missing", "unexpected"))
    mismatched = sorted(
        (str(name), tuple(stored), tuple(wanted)) for name, stored, wanted in report.get("mismatched_keys", ())
    )
    wrong = [
        f"{len(names)} {problem} ({names[0]}{' …' if len(names) > 1 else ''})"
        for problem, names in (("missing", missing), ("unexpected", unexpected))
        if names
    ]
    if mismatched:
        more = " …" if len(mismatched) > 1 else ""
        wrong.append(f"{len(mismatched)} mismatched ({_described(mismatched[0], model)}{more})")
    if not wrong:
        return None
    layers = [*_layer_counts(model, missing, unexpected), *_layer_kinds(model, missing, unexpected)]
    expert = expert_fault(files) if mismatched else None
    reason = ", ".join([*wrong, *layers, *([expert] if expert else [])])
    return f"the {half} weights do not fit the configuration: {reason}; {_ADVICE}"


def is_merge_fault(error: Exception) -> bool:
    """Whether transformers raised an exception because it could not join tensors."""
    return isinstance(error, RuntimeError) and "conversion of the weights" in str(error)


def merge_fault(half: str, files: Sequence[pathlib.Path]) -> ModelFolderError:
    """Returns the error for weights that transformers cannot join, such as those of the experts of a layer."""
    reason = expert_fault(files) or "tensors that belong together, such as those of experts, have other shapes"
    return ModelFolderError(f"the {half} weights do not fit the configuration: {reason}; {_ADVICE}")


def expert_fault(files: Sequence[pathlib.Path]) -> str | None:
    """Returns which matrix of one expert is missing in the files or has another shape than its layer's others; or None.

    Experts that are stored one by one have the same matrices in all layers.
    """
    shapes: dict[str, dict[tuple[int, str], tuple[int, ...]]] = defaultdict(dict)
    for file in files:
        for name, tensor in read_header(file).items():
            if (match := _EXPERT.fullmatch(name)) is not None:
                shapes[match[1]][int(match[2]), match[3]] = tuple(tensor.shape)
    wanted = Counter(matrix for of_layer in shapes.values() for matrix in of_layer)
    for layer, of_layer in shapes.items():
        parts = Counter(part for _, part in of_layer)
        for number, part in sorted(wanted):
            if (number, part) not in of_layer and parts[part]:
                return f"{layer}.{number}.{part} is missing"
        for part in sorted(parts):
            of_part = {number: shape for (number, each), shape in of_layer.items() if each == part}
            counts = Counter(of_part.values())
            alone = [shape for shape, count in counts.items() if count == 1]
            # Some layers have experts of two sizes.
            if len(alone) == 1 < len(counts):
                (odd,) = (number for number, shape in of_part.items() if shape == alone[0])
                usual = " or ".join(str(list(shape)) for shape in counts if shape != alone[0])
                return f"{layer}.{odd}.{part} is {list(alone[0])}, and those of other experts are {usual}"
    return None


def _described(problem: tuple[str, tuple[int, ...], tuple[int, ...]], model: Any) -> str:
    """Describes a tensor of another shape, with the fields of config.json that its shape may follow from."""
    name, stored, wanted = problem
    sizes = [size for found, size in zip(stored, wanted, strict=False) if found != size]
    # Most sizes are fields or products of fields, so factors come first.
    fields = dict(sorted(_fields_of(name, model).items(), key=lambda field: not _divides(field[1], sizes)))
    where = f" with {listed(fields)}" if fields else ""
    return f"{name} is {list(stored)} in the files, and {list(wanted)} by config.json{where}"


def _divides(value: Any, sizes: Sequence[int]) -> bool:
    return isinstance(value, int) and value > 1 and any(size % value == 0 for size in sizes)


def _fields_of(name: str, model: Any) -> dict[str, Any]:
    """Returns the fields with sizes that the innermost two modules read, of those around a tensor that read any."""
    path = name.rpartition(".")[0]
    fields: dict[str, Any] = {}
    num_reading = 0
    while num_reading < 2:
        module, config = _module(model, path), _config(model, path)
        part = part_name(model.config, config)
        read = {part + each: value for each, value in read_fields(config, source_of(type(module))).items()}
        fields |= {
            each: value
            for each, value in read.items()
            if is_numeric(each.rpartition(".")[2]) and not isinstance(value, float)
        }
        num_reading += bool(read)
        if not path:
            break
        path = path.rpartition(".")[0]
    return fields


def _module(model: Any, path: str) -> Any:
    """Returns the module of a tensor's owner; None if the half has none of this name."""
    try:
        return model.get_submodule(path)
    except AttributeError:
        return None


def _config(model: Any, path: str) -> Any:
    """Returns the configuration of the innermost module around a path that has one."""
    while path:
        if (config := getattr(_module(model, path), "config", None)) is not None:
            return config
        path = path.rpartition(".")[0]
    return model.config


def _layer_counts(model: Any, missing: Collection[str], unexpected: Collection[str]) -> list[str]:
    """Says where the files have another number of layers than config.json: whole layers are missing, or left."""
    told = []
    known = list(model.state_dict())
    for names, are_left in ((missing, False), (unexpected, True)):
        layers = sorted({(match[1], int(match[2])) for name in names if (match := _LAYER.match(name))})
        for path in dict.fromkeys(path for path, _ in layers):
            found = [number for each, number in layers if each == path]
            num_built = len({match[2] for name in known if (match := _LAYER.match(name)) and match[1] == path})
            num_stored = found[-1] + 1 if are_left else found[0]
            is_tail = found == list(range(num_built, num_stored) if are_left else range(num_stored, num_built))
            is_whole = are_left or all(name in names for name in known if name.startswith(f"{path}.{found[0]}."))
            config = _config(model, path)
            part = part_name(model.config, config)
            fields = {
                part + name: value
                for name, value in vars(config).items()
                if value == num_built and _LAYER_COUNT.fullmatch(name)
            }
            if is_tail and is_whole and fields:
                told.append(f"{path} has {num_stored} layers in the files, and config.json has {listed(fields)}")
    return told


def _layer_kinds(model: Any, missing: Collection[str], unexpected: Collection[str]) -> list[str]:
    """Names the fields that a layer reads whose tensors have other names in the files, such as one without experts."""
    layers = [{match[0] for name in names if (match := _LAYER.match(name))} for names in (missing, unexpected)]
    for layer in sorted(layers[0] & layers[1])[:1]:
        path = layer.rstrip(".")
        config = _config(model, path)
        part = part_name(model.config, config)
        fields = read_fields(config, source_of(type(_module(model, path))))
        if fields:
            return [f"the kind of {path} follows from {listed({part + each: fields[each] for each in fields})}"]
    return []
