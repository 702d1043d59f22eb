"""`python -m lookonce.model.fingerprint_process FOLDER ROW_DTYPE DTYPE…` prints a folder's fingerprints, one in a line.

There is one for each type of the forward pass. A process that must not load weights itself starts this one.
"""

from __future__ import annotations

import gc
import pathlib
import sys


def main(arguments: list[str]) -> None:
    """Prints the fingerprints of the folder that `arguments` name. Ends the process with the reason if it has none."""
    # Imported here, after the garbage collector has been switched off: torch and transformers make a million objects.
    from lookonce.model.libraries.lean_transformers import import_lean_transformers
    from lookonce.model.model_folder import ModelFolder, needs_torchvision

    path, row_dtype, *dtypes = arguments
    import_lean_transformers(needs_torchvision=needs_torchvision(pathlib.Path(path)))
    from lookonce.embedding_meta import RowDtype
    from lookonce.errors import LookonceError
    from lookonce.model.family_model import FamilyModel
    from lookonce.model.folder_fingerprint import folder_fingerprint

    try:
        folder = ModelFolder.open(pathlib.Path(path))
        model = FamilyModel.load(folder)
        for dtype in dtypes:
            print(folder_fingerprint(folder, model, RowDtype(dtype), RowDtype(row_dtype))[0])
    except LookonceError as error:
        # The process that started this one logs it.
        sys.exit(str(error))


if __name__ == "__main__":
    # The process is short, and collecting among these objects took a fifth of its time.
    gc.disable()
    main(sys.argv[1:])
