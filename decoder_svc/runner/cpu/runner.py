"""The model runner for CPUs."""

from __future__ import annotations

import functools
import logging
import os
from contextlib import nullcontext
from dataclasses import replace

import torch

from decoder_svc.runner.adapters.adapter_table import AdaptedModules
from decoder_svc.runner.attention import PAGED_ATTENTION
from decoder_svc.runner.base import ModelRunnerBase
from decoder_svc.runner.cpu.attention import NativeBackend, cpu_attention
from decoder_svc.runner.cpu.native_convolution import NativeConvolutionStep
from decoder_svc.runner.cpu.native_delta import NativeDeltaStep
from decoder_svc.runner.cpu.native_experts import replace_experts
from decoder_svc.runner.cpu.native_mamba2 import NativeScanStep
from decoder_svc.runner.cpu.native_model import install_kernels
from decoder_svc.runner.cpu.native_sampler import NativeSampler
from decoder_svc.runner.cpu.native_stack import NativeStack
from decoder_svc.runner.free_memory import free_bytes, measured_peak
from decoder_svc.runner.parallel.gloo_engine import GlooEngine
from decoder_svc.runner.parallel.rank_group import RankGroup
from decoder_svc.runner.parallel.split_adapters import SplitAdapters
from decoder_svc.runner.parallel.split_model import split_model
from decoder_svc.runner.recurrent.kernel_trial import wrong_kernel_reason
from decoder_svc.runner.recurrent.recurrent_layers import RecurrentKernels
from decoder_svc.runner.worst_case import WorstCase
from lookonce.model.half_model import load_text_half, text_child
from lookonce.model.kernels.kernel_choice import NATIVE
from lookonce.model.kernels.linear_layers import replace_linears
from lookonce.model.kernels.linear_trial import choose_step_linear
from lookonce.model.kernels.native_linear import native_linear
from lookonce.model.kernels.quantized_layers import has_quantized_layers, make_layers_whole, quantize_linears
from lookonce.model.kernels.quantized_weight import stored_tensors
from lookonce.model.kernels.read_ahead import read_ahead
from lookonce.model.text_support import recurrent_kinds

logger = logging.getLogger(__name__)


class CPUModelRunner(ModelRunnerBase):
    """Runs steps on the CPUs that this process may use."""

    serves_recurrent_layers = True
    rank_engine = GlooEngine()
    computes_any_tokens = True

    def _cache_device_properties(self) -> None:
        self.device = torch.device("cpu")
        num_threads = self.config.num_threads or len(os.sched_getaffinity(0))
        torch.set_num_threads(num_threads)
        logger.info("tensor work on %d CPU threads", num_threads)

    def load_model(self) -> None:
        """Loads the language half and installs native kernels if the machine and the model allow it."""
        self.model = load_text_half(self.config.folder, self.config.dtype, PAGED_ATTENTION, keep_codes=True)
        if self.config.ranks is not None:
            self._split(self.config.ranks)
            return
        # The check of the kernels is the first that reads all weights. A rank needs only a part of them.
        read_ahead(stored_tensors(self.model))
        if self.config.quantize_bits is not None:
            quantize_linears(self.model, getattr(self.model.model, text_child(self.model)), self.config.quantize_bits)
        self.adapters = self._adapter_table()
        self._choose_backend()
        linear = choose_step_linear(self.model.dtype)
        # Codes are for the kernels, even where PyTorch is faster with whole weights.
        is_native = linear.implementation == NATIVE or has_quantized_layers(self.model)
        if isinstance(self.backend, NativeBackend) and is_native:
            spec, num_axes = self.get_kv_cache_spec(), self.family.num_position_axes
            self.is_batch_invariant = install_kernels(self.model, self.backend, spec, num_axes, self.adapters)
        else:
            logger.info("language model: transformers' modules, whose linear layers are PyTorch's here")
        self._make_others_whole()
        self._check_recurrent_kernels()
        text_model = getattr(self.model.model, text_child(self.model))
        if self.adapters is not None and not isinstance(text_model, NativeStack):
            self.adapters.apply_to(AdaptedModules(text_model, self.adapters, self.device, self.model.dtype))

    def _split(self, ranks: RankGroup) -> None:
        """Leaves this rank's part of the model: transformers' modules, with our linear layers and experts."""
        if self.config.quantize_bits is not None:
            text_model = getattr(self.model.model, text_child(self.model))
            # This rank's part of a layer is cut out of the codes of the whole layer.
            quantize_linears(self.model, text_model, self.config.quantize_bits, is_lazy=True)
        self.adapters = self._adapter_table()
        self.num_kv_heads = split_model(self.model, ranks)
        self._choose_backend()
        has_codes = has_quantized_layers(self.model)
        is_native = choose_step_linear(self.model.dtype).implementation == NATIVE or has_codes
        if isinstance(self.backend, NativeBackend) and is_native:
            make = functools.partial(native_linear, num_threads=torch.get_num_threads())
            text_model = getattr(self.model.model, text_child(self.model))
            replace_experts(text_model, self.backend)
            replace_linears(text_model, make)
            if has_quantized_layers(self.model.lm_head):
                replace_linears(self.model.lm_head, make)
        self._make_others_whole()
        if self.adapters is not None:
            text_model = getattr(self.model.model, text_child(self.model))
            self.adapters.apply_to(SplitAdapters(text_model, self.adapters, ranks, self.device, self.model.dtype))
        logger.info("rank %d of %d has its part of the language model", ranks.rank, ranks.size)

    def _make_others_whole(self) -> None:
        """Expands the codes of layers that have no kernel, which PyTorch would expand in each step."""
        has_no_kernel = self.model.dtype is torch.float16
        make_layers_whole(self.model, "give --dtype bfloat16 to encoder and decoder" if has_no_kernel else None)

    def _check_recurrent_kernels(self) -> None:
        """Leaves the kernels of recurrent layers only where they agree with PyTorch's operators."""
        text_model = getattr(self.model.model, text_child(self.model))
        if not recurrent_kinds(text_model.config):
            return
        reason = wrong_kernel_reason(text_model, self.model.dtype, self.recurrent_kernels, self.device)
        if reason is not None:
            logger.warning("recurrent layers: operators of PyTorch: %s", reason)
            self.recurrent_kernels = RecurrentKernels()

    def _choose_backend(self) -> None:
        """Sets the attention backend, and with our own the sampler and the kernels of recurrent layers."""
        num_threads = torch.get_num_threads()
        sizes = [size for shape in self.head_shapes for size in (shape.head_dim, shape.value_dim) if size is not None]
        self.backend = cpu_attention(self.model.dtype, sizes, self.config.block_size, num_threads)
        if isinstance(self.backend, NativeBackend):
            self.sampler = NativeSampler(self.backend.library, num_threads)
            self.recurrent_kernels = RecurrentKernels(
                NativeDeltaStep(self.backend.library, num_threads),
                NativeConvolutionStep(self.backend.library, num_threads),
                NativeScanStep(self.backend.library, num_threads),
            )

    def profile_run(self, worst: WorstCase) -> int:
        """Measures resident memory, and the free memory of machine and container."""
        if isinstance(self.backend, NativeBackend):
            # The kernel reads keys in place: a longer context costs time but no memory, so measure a short one.
            worst = replace(worst, context_tokens=min(worst.context_tokens, worst.num_tokens))
        text_model = getattr(self.model.model, text_child(self.model))
        abridged = text_model.last_layer_only() if isinstance(text_model, NativeStack) else nullcontext()
        with measured_peak() as peak, abridged:
            free = free_bytes()
            self._dummy_run(worst)
        logger.info("the heaviest step takes %d MiB of %d MiB that were free", peak.extra_bytes >> 20, free >> 20)
        # Ranks share this machine's memory, and each takes about as much as this one.
        num_ranks = 1 if self.config.ranks is None else self.config.ranks.size
        return max(0, free // num_ranks - peak.extra_bytes)

    def capture_model(self) -> None:
        """Does nothing: CPUs have no graphs."""
