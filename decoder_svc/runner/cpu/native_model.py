"""Puts our own kernels in the place of a loaded language model's modules: all its layers at once, or one by one."""

from __future__ import annotations

import logging
from typing import Any

import torch

from decoder_svc.runner.attention import KVCacheSpec
from decoder_svc.runner.cpu.attention import NativeBackend
from decoder_svc.runner.cpu.native_stack import NativeStack, unlike_llama
from decoder_svc.runner.cpu.packed_weights import NativeLinear, packable, packed, replace_linears
from decoder_svc.runner.cpu.stack_check import TOLERANCES, RecordingBackend, distance, recorded_options, trial
from lookonce.model.half_model import leave_file, text_child

logger = logging.getLogger(__name__)


def use_kernels(model: Any, backend: NativeBackend, spec: KVCacheSpec, num_position_axes: int) -> bool:
    """Changes the model in place: its layers to a stack where they are like Llama's, else its linear layers.

    The weights that were loaded are let go. Returns whether a token's logits are the same bits in any company.
    """
    name = text_child(model)
    stack = _checked_stack(getattr(model.model, name), backend, spec, num_position_axes)
    if stack is not None:
        setattr(model.model, name, stack)
    else:
        num_replaced = replace_linears(backend.library, getattr(model.model, name), backend.num_threads)
        logger.info("language model: transformers' modules, %d linear layers by our kernel", num_replaced)
    head = model.lm_head
    if type(head) is torch.nn.Linear and packable(head.weight):
        # Logits are not rounded: what is greedy is decided by small differences.
        weights = packed(head.weight, head.bias)
        model.lm_head = NativeLinear(backend.library, weights, backend.num_threads, torch.float32)
    table = model.get_input_embeddings().weight
    # Matrices that stay as they are, such as experts, stay in the file: processes share its pages.
    if all(tensor is table or tensor.ndim < 2 for tensor in model.parameters()):
        leave_file(model)
    return stack is not None and isinstance(model.lm_head, NativeLinear)


def _checked_stack(
    text_model: Any, backend: NativeBackend, spec: KVCacheSpec, num_position_axes: int
) -> NativeStack | None:
    reason = unlike_llama(text_model)
    if reason is not None:
        logger.info("language model: no stack of our own: %s", reason)
        return None
    a_few = trial(text_model.config.hidden_size, num_position_axes, spec)
    reference = RecordingBackend()
    wanted = a_few.run(text_model, reference)
    stack = NativeStack(text_model, backend, recorded_options(reference))
    found = distance(a_few.run(stack, backend), wanted)
    # Not a number is not below it.
    if not found <= TOLERANCES[spec.dtype]:
        logger.warning("language model: no stack of our own: its numbers are off by %.2g of the largest", found)
        return None
    logger.info("language model: a stack of our own, within %.2g of transformers' modules", found)
    return stack
