"""The form of one layer's weight (codes, groups, blocks), read from the types and shapes of its tensors."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from lookonce.errors import ModelFolderError
from lookonce.model.kernels.quantized_weight import CodeForm
from lookonce.model.quantized_folder.storage import Method, Storage
from lookonce.model.safetensors_header import StoredTensor

_FLOATS = ("BF16", "F16", "F32")
# Scales of activations, keys and values, which stay in the model's type.
_UNUSED = frozenset(
    {"input_scale", "input_zero_point", "output_scale", "output_zero_point", "activation_scale", "k_scale", "v_scale"}
)
_WORD_BITS = 32
_FORM_NAMES = {CodeForm.INT4: "int4", CodeForm.INT8: "int8", CodeForm.FLOAT8: "float8"}


@dataclass(frozen=True, slots=True)
class Layout:
    """The form of a layer's weight `[outputs, inputs]`."""

    # The layer's name in the folder, for errors.
    name: str
    storage: Storage
    num_outputs: int
    num_inputs: int
    form: CodeForm
    # Neighbouring inputs that share a scale; the last group may have fewer.
    group_inputs: int
    # Neighbouring outputs that share a scale.
    group_outputs: int

    @property
    def num_groups(self) -> int:
        """The number of scales of a row."""
        return -(-self.num_inputs // self.group_inputs)

    @property
    def description(self) -> str:
        """A description of the form for people."""
        groups = "each row" if self.num_groups == 1 else f"{self.group_inputs} inputs"
        return f"{_FORM_NAMES[self.form]} with a scale for {groups}"

    def error(self, problem: str) -> ModelFolderError:
        """Returns the error for a layer whose tensors cannot be read."""
        return _error(self.name, problem)


def read_layout(
    name: str, num_outputs: int, num_inputs: int, tensors: Mapping[str, StoredTensor], storage: Storage
) -> Layout:
    """Compares types and shapes with the layer's size. `tensors` has them by the last part of their names.

    Raises ModelFolderError if they do not fit, or if the form is not served.
    """
    reader = _LayoutReader(name, num_outputs, num_inputs, tensors, storage)
    bias = tensors.get("bias")
    if bias is not None and bias.shape != (num_outputs,):
        raise _error(name, f"bias has the shape {_shape(bias)}, not {num_outputs}")
    if storage.method in (Method.GPTQ, Method.AWQ):
        return reader.words()
    return reader.packed() if "weight_packed" in tensors else reader.plain()


@dataclass(frozen=True, slots=True)
class _LayoutReader:
    """Reads the layouts of different tools."""

    name: str
    num_outputs: int
    num_inputs: int
    tensors: Mapping[str, StoredTensor]
    storage: Storage

    def words(self) -> Layout:
        """GPTQ packs codes along inputs, AWQ along outputs; both pack zero points along outputs."""
        is_gptq = self.storage.method is Method.GPTQ
        self._check_names({"qweight", "qzeros", "scales"}, {"g_idx"} if is_gptq else set())
        scales, packed = self.tensors["scales"].shape, self.tensors["qweight"].shape
        if len(scales) != 2 or len(packed) != 2:
            raise _error(self.name, f"qweight and scales are {packed} and {scales}, which are not two matrices")
        group_inputs = self._group_inputs(scales[0])
        self._expect("scales", _FLOATS, (scales[0], self.num_outputs))
        bits = self._bits(packed[0], self.num_inputs) if is_gptq else self._bits(packed[1], self.num_outputs)
        if bits == 8 and not is_gptq:
            raise _error(self.name, "AWQ with 8 bits is not served")
        self._expect("qweight", ("I32",), (packed[0], self.num_outputs) if is_gptq else (self.num_inputs, packed[1]))
        self._expect("qzeros", ("I32",), (scales[0], _num_words(self.num_outputs, bits)))
        if "g_idx" in self.tensors:
            self._expect("g_idx", ("I32",), (self.num_inputs,))
        return self._layout(_integers(bits), group_inputs)

    def packed(self) -> Layout:
        """compressed-tensors packs codes along inputs, and zero points along outputs."""
        self._check_names({"weight_packed", "weight_scale"}, {"weight_shape", "weight_zero_point", "weight_g_idx"})
        num_words = self.tensors["weight_packed"].shape[-1:]
        bits = self._bits(num_words[0] if num_words else 0, self.num_inputs)
        self._expect("weight_packed", ("I32",), (self.num_outputs, *num_words))
        group_outputs, group_inputs = self._scales("weight_scale")
        if "weight_zero_point" in self.tensors:
            num_groups = -(-self.num_inputs // group_inputs)
            self._expect("weight_zero_point", ("I32",), (_num_words(self.num_outputs, bits), num_groups))
        if "weight_g_idx" in self.tensors:
            self._expect("weight_g_idx", ("I32", "I64"), (self.num_inputs,))
        return self._layout(_integers(bits), group_inputs, group_outputs)

    def plain(self) -> Layout:
        """A code is an element."""
        scale = "weight_scale_inv" if "weight_scale_inv" in self.tensors else "weight_scale"
        self._check_names({"weight", scale}, {"weight_zero_point"})
        self._expect("weight", ("I8", "F8_E4M3"), (self.num_outputs, self.num_inputs))
        group_outputs, group_inputs = self._scales(scale)
        form = CodeForm.FLOAT8 if self.tensors["weight"].dtype == "F8_E4M3" else CodeForm.INT8
        if "weight_zero_point" in self.tensors:
            if form is CodeForm.FLOAT8:
                raise _error(self.name, "weights of float8 with zero points are not served")
            self._expect("weight_zero_point", ("I8",), self.tensors[scale].shape)
        return self._layout(form, group_inputs, group_outputs)

    def _layout(self, form: CodeForm, group_inputs: int, group_outputs: int = 1) -> Layout:
        return Layout(self.name, self.storage, self.num_outputs, self.num_inputs, form, group_inputs, group_outputs)

    def _check_names(self, needed: set[str], optional: set[str]) -> None:
        if missing := needed - self.tensors.keys():
            raise _error(self.name, f"{min(missing)} is missing")
        if others := self.tensors.keys() - needed - optional - _UNUSED - {"bias"}:
            raise _error(self.name, f"{min(others)} is not known for {self.storage.method}")

    def _expect(self, part: str, dtypes: tuple[str, ...], shape: tuple[int, ...]) -> None:
        tensor = self.tensors[part]
        if tensor.dtype not in dtypes or tensor.shape != shape:
            wanted = f"{' or '.join(dtypes)} of {' × '.join(map(str, shape))}"
            raise _error(self.name, f"{part} is {tensor.dtype} of {_shape(tensor)}, not {wanted}")

    def _bits(self, num_words: int, num_codes: int) -> int:
        """Returns the bits per code of packed words."""
        for bits in (4, 8):
            if num_words == _num_words(num_codes, bits):
                return bits
        problem = f"{num_words} words for {num_codes} codes are neither 4 nor 8 bits each, which are served"
        raise _error(self.name, problem)

    def _scales(self, part: str) -> tuple[int, int]:
        """Checks scales of a tensor, of rows, of groups or of blocks; returns the outputs and inputs that share one."""
        scales = self.tensors[part]
        if scales.dtype not in _FLOATS:
            raise _error(self.name, f"{part} is {scales.dtype}, which is not served")
        if math.prod(scales.shape) == 1:
            return self.num_outputs, self.num_inputs
        if scales.shape in ((self.num_outputs,), (self.num_outputs, 1)):
            return 1, self.num_inputs
        for rows, columns in self.storage.block_shapes:
            if scales.shape == (-(-self.num_outputs // rows), -(-self.num_inputs // columns)):
                return rows, columns
        if len(scales.shape) != 2 or scales.shape[0] != self.num_outputs:
            problem = f"{part} has the shape {_shape(scales)}, which fits no form of scales that is served"
            raise _error(self.name, problem)
        return 1, self._group_inputs(scales.shape[1])

    def _group_inputs(self, num_groups: int) -> int:
        if num_groups == 1:
            return self.num_inputs
        for size in self.storage.group_sizes:
            if -(-self.num_inputs // size) == num_groups:
                return size
        if num_groups < 1 or self.num_inputs % num_groups:
            named = " or ".join(map(str, self.storage.group_sizes)) or "none"
            raise _error(
                self.name,
                f"{self.num_inputs} inputs are not {num_groups} groups of equal size, and a shorter last group needs "
                f"their size in config.json (group_size), which names {named}; use the config.json that belongs to the "
                "weights",
            )
        return self.num_inputs // num_groups


def _error(name: str, problem: str) -> ModelFolderError:
    return ModelFolderError(f"the quantized layer {name} cannot be loaded: {problem}")


def _integers(bits: int) -> CodeForm:
    return CodeForm.INT4 if bits == 4 else CodeForm.INT8


def _num_words(num_codes: int, bits: int) -> int:
    return -(-num_codes * bits // _WORD_BITS)


def _shape(tensor: StoredTensor) -> str:
    return " × ".join(map(str, tensor.shape)) or "no dimension"
