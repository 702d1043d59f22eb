"""Names of a folder's layers in the model, as transformers' loader maps them."""

from __future__ import annotations

import functools
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from lookonce.errors import ModelFolderError

# A layer of one expert: the expert's number, and the layer.
_EXPERT = re.compile(r"\.experts\.(\d+)\.(gate_proj|up_proj|down_proj)$")

# The number of an expert, and the name of one of its layers.
ExpertLayer = tuple[int, str]


@dataclass(frozen=True, slots=True)
class Names:
    """The layers that a model has, out of those of a folder."""

    # Name in the folder -> name in the model.
    linears: Mapping[str, str]
    # Name of a module with experts in the model -> layer of an expert -> name in the folder.
    experts: Mapping[str, Mapping[ExpertLayer, str]]


def names_in(model: Any, layers: Iterable[str]) -> Names:
    """Finds the layers in a model that is not loaded yet.

    Raises ModelFolderError for a layer that is merged with others in the model, other than experts.
    """
    try:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key
    except ImportError as error:
        raise ModelFolderError("quantized folders need another release of transformers (5.23 was tested)") from error

    mapping = get_model_conversion_mapping(model)
    renamings = [one for one in mapping if isinstance(one, WeightRenaming)]
    converters = [one for one in mapping if isinstance(one, WeightConverter)]
    own = model.state_dict()

    @functools.cache
    def renamed(key: str) -> tuple[str, bool]:
        name, merged = rename_source_key(key, renamings, converters, model.base_model_prefix, own)
        return name, merged is not None

    linears: dict[str, str] = {}
    experts: defaultdict[str, dict[ExpertLayer, str]] = defaultdict(dict)
    for layer in layers:
        if (expert := _EXPERT.search(layer)) is not None:
            # In the model, all experts of a layer are one tensor; some have no gates.
            prefix = f"{layer[: expert.start()]}.experts"
            keys = (renamed(f"{prefix}.{name}")[0] for name in ("gate_up_proj", "up_proj"))
            if (key := next((key for key in keys if key in own), None)) is not None:
                experts[key.rpartition(".")[0]][int(expert[1]), expert[2]] = layer
                continue
        key, is_merged = renamed(f"{layer}.weight")
        if key not in own:
            continue
        if is_merged:
            raise ModelFolderError(
                f"the quantized layer {layer} is not served: it is merged with others; use the unquantized model"
            )
        linears[layer] = key.removesuffix(".weight")
    return Names(linears, experts)
