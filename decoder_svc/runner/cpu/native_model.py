"""Replaces a loaded language model's modules with our kernels: all layers as one stack, or single linear layers."""

from __future__ import annotations

import dataclasses
import functools
import logging
from typing import Any

import torch

from decoder_svc.runner.adapters.adapter_table import AdapterTable
from decoder_svc.runner.cpu.attention import NativeBackend
from decoder_svc.runner.cpu.native_experts import replace_experts
from decoder_svc.runner.cpu.native_stack import NativeStack, unstackable_reason
from decoder_svc.runner.cpu.stack_check import (
    TOLERANCES,
    RecordingBackend,
    random_trial,
    recorded_options,
    relative_difference,
)
from decoder_svc.runner.kv_cache_spec import KVCacheSpec
from lookonce.errors import ModelFolderError
from lookonce.model.half_model import detach_from_file, text_child
from lookonce.model.kernels.linear_layers import replace_linears
from lookonce.model.kernels.native_linear import NativeLinear, native_linear, packable, packed
from lookonce.model.kernels.packed_embedding import replace_tied_embedding
from lookonce.model.kernels.quantized_weight import QuantizedLinear, weight_of
from lookonce.model.model_folder import NOT_A_NUMBER

logger = logging.getLogger(__name__)


def install_kernels(
    model: Any,
    backend: NativeBackend,
    spec: KVCacheSpec,
    num_position_axes: int,
    adapters: AdapterTable | None = None,
) -> bool:
    """Changes the model in place: Llama-like layers become one native stack; otherwise linear layers are replaced.

    The loaded weights are released. Only a stack applies `adapters`. Returns whether there is one whose logits are
    bit-equal in any batch.
    """
    name = text_child(model)
    stack = _checked_stack(getattr(model.model, name), backend, spec, num_position_axes, adapters)
    if stack is not None:
        setattr(model.model, name, stack)
    else:
        make = functools.partial(native_linear, num_threads=backend.num_threads)
        text_model = getattr(model.model, name)
        num_mixtures = replace_experts(text_model, backend)
        num_linears = replace_linears(text_model, make)
        logger.info(
            "language model: transformers' modules, %d linear layers and %d mixtures of experts by our kernels",
            num_linears,
            num_mixtures,
        )
    head = model.lm_head
    if type(head) in (torch.nn.Linear, QuantizedLinear) and packable(head):
        # Logits stay in float32: rounding them could change which token is the largest.
        weights = packed(weight_of(head), head.bias)
        if type(head) is torch.nn.Linear:
            replace_tied_embedding(model, weights)
        model.lm_head = NativeLinear(weights, backend.num_threads, torch.float32)
    table = model.get_input_embeddings().weight
    # Experts that were not copied stay in the mapped file: processes share its pages.
    if all(tensor is table or tensor.ndim < 3 for tensor in model.parameters()):
        detach_from_file(model)
    if stack is None or not isinstance(model.lm_head, NativeLinear):
        return False
    # It follows `detach_from_file`, which moves the table.
    stack.take_head(model.lm_head.weights, model.get_input_embeddings())
    return True


def _checked_stack(
    text_model: Any,
    backend: NativeBackend,
    spec: KVCacheSpec,
    num_position_axes: int,
    adapters: AdapterTable | None,
) -> NativeStack | None:
    reason = unstackable_reason(text_model)
    if reason is not None:
        logger.info("language model: no native stack: %s", reason)
        return None
    # Rounded keys would differ by more than mistakes do.
    whole = dataclasses.replace(spec, is_rounded=False)
    a_few = random_trial(text_model.config.hidden_size, num_position_axes, whole)
    reference = RecordingBackend()
    wanted = a_few.run(text_model, reference)
    if not wanted.isfinite().all():
        raise ModelFolderError(NOT_A_NUMBER)
    stack = NativeStack(text_model, backend, recorded_options(reference), num_position_axes, adapters)
    found = relative_difference(a_few.run(stack, backend), wanted)
    # Written with `not` so that NaN fails.
    if not found <= TOLERANCES[spec.dtype]:
        logger.warning(
            "language model: no native stack: results differ from transformers' by %.2g of the largest", found
        )
        return None
    logger.info("language model: native stack, within %.2g of transformers' modules", found)
    return stack
