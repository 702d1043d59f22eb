"""A digest by which ranks on several machines tell that they have one model, without reading all of it."""

from __future__ import annotations

import hashlib

from lookonce.model.model_folder import ModelFolder
from lookonce.model.safetensors_header import read_header

# Bytes that are read of each tensor at its beginning and in its middle. Models of one architecture that were trained
# apart differ in every tensor. Two reads also tell those apart whose tensors begin with zeros, as some tables do.
_SAMPLE_BYTES = 4096


def model_digest(folder: ModelFolder) -> str:
    """Returns the digest of a configuration and of samples of all tensors, whatever files these are divided into.

    Raises ModelFolderError for a broken weight file, and OSError.
    """
    digest = hashlib.sha256((folder.path / "config.json").read_bytes())
    samples = []
    for file in folder.weight_files:
        with file.open("rb") as stream:
            for name, tensor in read_header(file).items():
                one = hashlib.sha256(f"{name} {tensor.dtype} {tensor.shape}".encode())
                for offset in (0, tensor.num_bytes // 2):
                    stream.seek(tensor.start + offset)
                    one.update(stream.read(min(_SAMPLE_BYTES, tensor.num_bytes - offset)))
                samples.append(one.digest())
    digest.update(b"".join(sorted(samples)))
    return digest.hexdigest()
