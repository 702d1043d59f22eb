"""The vision half of a checkpoint: weights, fingerprint and forward pass. No threads, no queue, no cache."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import PIL.Image
import torch

from encoder_svc.images.image_inputs import PixelInputs, VisionAdapter
from encoder_svc.vision.row_transfer import FetchRows, NotFiniteError, rows_on_host
from encoder_svc.vision.vision_config import VisionConfig
from lookonce.content_key import ProcessorOptions
from lookonce.devices.base import DevicePlatform
from lookonce.devices.registry import chosen_platform, imported_part
from lookonce.embedding_meta import RowDtype
from lookonce.errors import ModelFolderError
from lookonce.logs import get_logger
from lookonce.model.family_model import processor_file
from lookonce.model.faults.build_faults import in_one_line
from lookonce.model.half_model import load_vision_half
from lookonce.model.kernels.openmp import run_in_short_lived_thread
from lookonce.model.kernels.read_ahead import read_ahead
from lookonce.model.lack_of_memory import is_lack_of_memory
from lookonce.model.model_folder import CONFIGURATION_FAULTS, ModelFolder
from lookonce.model.vision_fingerprint import dtype_name, raw_bytes, vision_fingerprint
from lookonce.model.weight_bytes import weight_bytes
from lookonce.store.int8_rows import quantise

_DTYPES = {None: None, "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_ROW_DTYPES = {"native": None, "int8": RowDtype.INT8_SCALED}
_WARM_UP_SIZES = ((64, 64), (96, 64))

_log = get_logger(__name__)


class VisionModel:
    """Vision tower and projector of one model, which turn images into embedding rows."""

    def __init__(
        self,
        folder: ModelFolder,
        model: Any,
        adapter: VisionAdapter,
        platform: DevicePlatform,
        row_dtype: RowDtype | None = None,
    ) -> None:
        """`model` is the vision half, in evaluation mode. `row_dtype` None: rows are stored in the model's type."""
        # The kind of device that the passes run on.
        self.platform = platform
        self.model_type = folder.model_type
        self.adapter = adapter
        # Element type of the forward pass and of its output.
        self.dtype = RowDtype(dtype_name(model))
        # Element type of rows as they are stored and sent; row_format.py converts them.
        self.row_dtype = row_dtype or self.dtype
        self.hidden_size: int = model.config.get_text_config().hidden_size
        # Extra feature levels (DeepStack) beside the rows.
        self.num_levels = adapter.num_levels
        self.fingerprint = vision_fingerprint(folder, model, adapter.model, self.row_dtype)
        fetch = platform.fetch_rows
        self._fetch_rows: FetchRows = rows_on_host if fetch is None else imported_part(platform, fetch)
        self._processor_file = processor_file(folder.path)
        self._model = model
        self._is_warm = False

    @classmethod
    def load(cls, config: VisionConfig) -> VisionModel:
        """Checks the folder and loads its vision half onto its device.

        Raises ModelFolderError for a folder that cannot be served, ConfigurationError for a missing device.
        """
        platform = chosen_platform(config.device)
        folder = ModelFolder.open(config.model)
        adapter = VisionAdapter.load(folder)
        model = load_vision_half(folder.path, _DTYPES[platform.dtype_for(config.dtype)])
        read_ahead(model.parameters())
        loaded = cls(folder, model, adapter, platform, _ROW_DTYPES[config.row_format])
        # After the fingerprint, which is computed from the weights as they were read.
        if platform.prepare_vision is None:
            model.to(platform.torch_device())
        else:
            imported_part(platform, platform.prepare_vision)(model)
        _log.info(
            "vision model loaded",
            model_type=loaded.model_type,
            device=str(loaded.device),
            dtype=loaded.dtype.value,
            row_dtype=loaded.row_dtype.value,
            weight_bytes=loaded.weight_bytes,
            encoder_fingerprint=loaded.fingerprint,
        )
        return loaded

    @classmethod
    def load_warm(cls, config: VisionConfig) -> VisionModel:
        """Loads and warms up a model in a thread that ends afterwards; another thread will run the passes.

        The OpenMP threads used for loading end with it. Raises the errors of `load` and `warm_up`.
        """
        return run_in_short_lived_thread(functools.partial(cls._loaded_and_warm, config))

    @classmethod
    def _loaded_and_warm(cls, config: VisionConfig) -> VisionModel:
        model = cls.load(config)
        try:
            model.warm_up()
        except (MemoryError, RuntimeError) as error:
            if not is_lack_of_memory(error):
                raise
            raise ModelFolderError(
                "there is no memory for two small images as the image processor makes them; use a machine with more "
                f"memory, or the {processor_file(config.model)} that belongs to the weights"
            ) from error
        return model

    @property
    def device(self) -> torch.device:
        """The device of forward passes."""
        device: torch.device = self._model.device
        return device

    @property
    def weight_bytes(self) -> int:
        """Bytes that the weights take on the device."""
        return weight_bytes(self._model)

    def warm_up(self) -> None:
        """Encodes two grey images of different shapes, and an entry of frames if the model takes videos.

        Raises ModelFolderError when the folder's parts do not fit together, so that it is never served.
        """
        images = [PIL.Image.new("RGB", size, (127, 127, 127)) for size in _WARM_UP_SIZES]
        inputs: list[PixelInputs] = []
        try:
            inputs = [self.adapter.pixel_inputs(image, ProcessorOptions()) for image in images]
            if (video := self.adapter.model.video) is not None:
                number = video.frames_per_entry
                options = ProcessorOptions(frame_size=video.frame_size(*images[0].size, number, None))
                inputs.append(self.adapter.frame_inputs(images[:1] * number, options))
            outputs = [rows for part in _joinable(inputs) for rows in self.forward(part)]
        except NotFiniteError as error:
            raise ModelFolderError(_not_finite(inputs, self.dtype, self._processor_file)) from error
        except CONFIGURATION_FAULTS as error:
            if is_lack_of_memory(error):
                raise
            reason = in_one_line(error)
            raise ModelFolderError(f"the image processor does not fit the vision tower: {reason}") from error
        if self.row_dtype is RowDtype.INT8_SCALED and not self._is_warm:
            errors = [quantise(rows, self.num_levels).relative_error for rows in outputs]
            _log.info("rows are rounded to int8", relative_error=round(max(errors), 5))
        self._is_warm = True

    def forward(self, batch: Sequence[PixelInputs]) -> list[torch.Tensor]:
        """Runs one pass. Returns rows [num_rows, (1 + num_levels) * hidden_size] of each image.

        Each tensor is contiguous in main memory of its own. Raises ValueError when the model gives another shape or
        element type, and NotFiniteError for NaN and infinity: such rows must never be stored.
        """
        with torch.inference_mode():
            outputs = self.adapter.image_rows(self._model, batch)
            if len(outputs) != len(batch):
                raise ValueError(f"{len(batch)} images gave {len(outputs)} outputs")
            for rows in outputs:
                self._check_form(rows)
            return self._fetch_rows(outputs)

    def _check_form(self, rows: torch.Tensor) -> None:
        width = (1 + self.num_levels) * self.hidden_size
        if rows.ndim != 2 or not len(rows) or rows.shape[1] != width:
            raise ValueError(f"rows have the shape {tuple(rows.shape)}, not [num_rows, {width}]")
        if rows.dtype != self._model.dtype:
            raise ValueError(f"rows have the element type {rows.dtype}, not {self._model.dtype}")


def _not_finite(inputs: Sequence[PixelInputs], dtype: RowDtype, file: str) -> str:
    """Returns why rows of these inputs are not finite. `file` is that of the image processor."""
    if not all(bool(each.pixel_values.isfinite().all()) for each in inputs):
        return f"the image processor makes pixels of NaN or infinity: a number in {file} is damaged; download it again"
    overflow = ", or numbers overflow: set dtype to bfloat16 or float32" if dtype is RowDtype.FLOAT16 else ""
    return (
        "the vision tower computes NaN or infinity: a weight or a value in config.json is damaged; download the model "
        f"again{overflow}"
    )


def _joinable(batch: Sequence[PixelInputs]) -> list[list[PixelInputs]]:
    """Splits a batch, in order, into parts that fit into one pass each."""
    parts: list[list[PixelInputs]] = []
    for inputs in batch:
        if parts and parts[-1][0].goes_with(inputs):
            parts[-1].append(inputs)
        else:
            parts.append([inputs])
    return parts


def row_bytes(rows: torch.Tensor) -> memoryview:
    """The raw little-endian bytes of contiguous rows, read-only and without a copy."""
    return raw_bytes(rows).toreadonly()
