"""A sentence embedding model from an ONNX file and its tokenizer, run by onnxruntime on the CPU."""

import json
import mmap
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, Literal

import msgspec
import numpy as np
import onnxruntime
from numpy.typing import NDArray
from onnxruntime.capi import onnxruntime_pybind11_state as ort_errors
from tokenizers import Encoding

from muniment.adapters.embedders.tokens import TokenizerFile, file_digest, load_tokenizer, token_offsets
from muniment.adapters.embedders.vectors import unit_rows
from muniment.errors import ConfigError, ExecutorFailed
from muniment.model.plan import ModelIdentity
from muniment.ports.embedder import Advance, unobserved

WINDOW_TOKENS_DEFAULT: Final = 512
WINDOW_TOKENS_MIN: Final = 8
INFERENCE_TOKENS_MAX: Final = 2048
"""Most tokens of one inference, padding included: peak memory grows with them, speed does not (ADR 0011)."""
INFERENCE_TEXTS_MAX: Final = 16
INFERENCE_COST_TOKENS: Final = 12
"""What starting an inference costs, in tokens: 3.5 ms beside 0.29 ms a token, with the bundled model."""
POOLING_FILE: Final = "1_Pooling/config.json"
LOCATION: Final = re.compile(rb"\x0a\x08location\x12(.)", re.DOTALL)
"""The protobuf entry with key ``location``, up to the length of its value (``StringStringEntryProto``)."""
LOCATION_BYTES_MAX: Final = 127
INPUTS: Final = frozenset({"input_ids", "attention_mask", "token_type_ids"})
LOAD_ERRORS: Final = (
    ort_errors.Fail,
    ort_errors.InvalidArgument,
    ort_errors.InvalidGraph,
    ort_errors.InvalidProtobuf,
    ort_errors.NoSuchFile,
    ort_errors.NotImplemented,
    ort_errors.RuntimeException,
)

Pooling = Literal["mean", "first"]


class ModelFiles(msgspec.Struct, frozen=True, kw_only=True):
    """Where a model lies and how it is read. ``digests`` are those of all files that shape a vector."""

    name: str
    graph: Path
    tokenizer: Path
    digests: dict[str, str]
    window_tokens: int
    """Most tokens of a planned part, special tokens included."""
    inference_tokens_max: int
    """Most tokens that the graph can read; a longer text is refused."""
    pooling: Pooling = "mean"


class OnnxEmbedder:
    """An ``Embedder`` over one onnxruntime session.

    For the bundled fp32 model the bytes of a vector depend on its text alone, not on the batch or the thread
    count.
    """

    def __init__(self, files: ModelFiles, threads: int) -> None:
        """Load tokenizer and graph. Raises ``ConfigError`` when one is missing, damaged or of no use."""
        self._files = files
        self._tokenizer, self._pad_id = load_tokenizer(files.tokenizer)
        self._tokenizer_file = TokenizerFile(files.tokenizer, files.digests[files.tokenizer.name])
        self._session = _session(files.graph, threads)
        self._inputs = {one.name for one in self._session.get_inputs()}
        if not {"input_ids"} <= self._inputs <= INPUTS:
            raise ConfigError(
                "embedder_dir", f"{files.graph} has the inputs {', '.join(sorted(self._inputs))}"
            )
        output = self._session.get_outputs()[0]
        if len(output.shape) not in (2, 3) or not isinstance(output.shape[-1], int):
            raise ConfigError("embedder_dir", f"{files.graph} answers with shape {output.shape}")
        self._output: str = output.name
        self._specials: int = self._tokenizer.num_special_tokens_to_add(is_pair=False)
        self._identity = ModelIdentity(
            name=files.name,
            dimensions=output.shape[-1],
            window_tokens=files.window_tokens,
            files=files.digests,
            tokenizer_digest=files.digests[files.tokenizer.name],
        )

    @property
    def identity(self) -> ModelIdentity:
        """Name, sizes and file hashes."""
        return self._identity

    @property
    def text_tokens_max(self) -> int:
        """The window without its special tokens."""
        return self._files.window_tokens - self._specials

    def tokenizer_problem(self) -> str | None:
        """Whether the tokenizer file is still the one that was loaded."""
        return self._tokenizer_file.problem()

    def offsets(self, text: str, advance: Advance = unobserved) -> NDArray[np.int64]:
        """Code point ranges of the tokens."""
        return token_offsets(self._tokenizer, text, advance)

    def embed(self, texts: Sequence[str], advance: Advance = unobserved) -> NDArray[np.float32]:
        """Unit vectors, computed in order of length so that little is padded."""
        encodings = [self._encode(text) for text in texts]
        rows = np.empty((len(texts), self._identity.dimensions), dtype=np.float32)
        for group in inference_groups([len(encoding) for encoding in encodings]):
            rows[group] = unit_rows(self._infer([encodings[index] for index in group]))
            advance()
        return rows

    def _encode(self, text: str) -> Encoding:
        encoding = self._tokenizer.encode(text)
        if len(encoding) > self._files.inference_tokens_max:
            raise ExecutorFailed(
                f"a text has {len(encoding)} tokens, more than the {self._files.inference_tokens_max} "
                f"that model {self._files.name} can read; it was not cut"
            )
        return encoding

    def _infer(self, encodings: Sequence[Encoding]) -> NDArray[np.float32]:
        width = max(len(encoding) for encoding in encodings)
        ids = np.full((len(encodings), width), self._pad_id, dtype=np.int64)
        mask = np.zeros((len(encodings), width), dtype=np.int64)
        for row, encoding in enumerate(encodings):
            ids[row, : len(encoding)] = encoding.ids
            mask[row, : len(encoding)] = 1
        feed = {"input_ids": ids, "attention_mask": mask, "token_type_ids": np.zeros_like(ids)}
        hidden = self._session.run([self._output], {name: feed[name] for name in self._inputs})[0]
        return _pooled(np.asarray(hidden, dtype=np.float32), mask, self._files.pooling)


def inference_groups(lengths: Sequence[int]) -> list[list[int]]:
    """Indexes of texts grouped into inferences: rising length, at least cost, padding counted as tokens.

    A large group pads short texts to its longest one, a small one pays for one more start; of all ways to cut
    the sorted texts into groups within the limits this is a cheapest. The same lengths give the same groups.
    """
    order = sorted(range(len(lengths)), key=lengths.__getitem__)
    costs, begins = [0], [0]  # Of the first so many texts: the least cost, and where its last group begins.
    for end in range(1, len(order) + 1):
        width = lengths[order[end - 1]]
        size_max = max(1, min(INFERENCE_TEXTS_MAX, INFERENCE_TOKENS_MAX // max(width, 1), end))
        cost, size = min(
            (costs[end - size] + INFERENCE_COST_TOKENS + size * width, size)
            for size in range(1, size_max + 1)
        )
        costs.append(cost)
        begins.append(end - size)
    groups: list[list[int]] = []
    end = len(order)
    while end:
        groups.append(order[begins[end] : end])
        end = begins[end]
    return groups[::-1]


def _pooled(hidden: NDArray[np.float32], mask: NDArray[np.int64], pooling: Pooling) -> NDArray[np.float32]:
    if hidden.ndim == 2:
        return hidden  # the graph pools by itself
    if pooling == "first":
        return hidden[:, 0]
    rows = np.empty((hidden.shape[0], hidden.shape[2]), dtype=np.float32)
    for row, length in enumerate(mask.sum(axis=1)):
        # Over its own length: the padding of a batch mate must not change the order of the additions.
        rows[row] = hidden[row, :length].sum(axis=0) / np.float32(length)
    return rows


def _session(graph: Path, threads: int) -> Any:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.log_severity_level = 3
    # Threads that spin between inferences would take the cores that the server needs for its own work.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    try:
        return onnxruntime.InferenceSession(os.fspath(graph), options, providers=["CPUExecutionProvider"])
    except LOAD_ERRORS as error:
        raise ConfigError("embedder", f"onnxruntime cannot load {graph}: {error}") from error


def directory_files(directory: Path) -> ModelFiles:
    """Find the files of a model directory, hash them, and read its limits and pooling.

    Wanted: ``model.onnx`` or ``onnx/model.onnx`` (with the data files that it names) and ``tokenizer.json``.
    Read where present: ``config.json``, ``tokenizer_config.json``, ``sentence_bert_config.json``,
    ``1_Pooling/config.json``. Raises ``ConfigError`` that names what is missing or not supported.
    """
    graph = next(
        (path for path in (directory / "model.onnx", directory / "onnx/model.onnx") if path.is_file()), None
    )
    if graph is None:
        raise ConfigError("embedder_dir", f"{directory} has neither model.onnx nor onnx/model.onnx")
    tokenizer = directory / "tokenizer.json"
    pooling = directory / POOLING_FILE
    digests = {path.name: file_digest(path) for path in (graph, *external_data(graph), tokenizer)}
    if pooling.is_file():
        digests[POOLING_FILE] = file_digest(pooling)
    readable = min(
        _limit(directory / "config.json", "max_position_embeddings"),
        _limit(directory / "tokenizer_config.json", "model_max_length"),
    )
    return ModelFiles(
        name=directory.resolve().name,
        graph=graph,
        tokenizer=tokenizer,
        digests=digests,
        window_tokens=min(readable, _limit(directory / "sentence_bert_config.json", "max_seq_length")),
        inference_tokens_max=readable,
        pooling=_pooling(pooling),
    )


def external_data(graph: Path) -> list[Path]:
    """The files beside an ONNX graph that hold its tensors, as the graph names them: part of its identity.

    Looks for the one protobuf entry that names such a file instead of reading the whole format.
    Raises ``ConfigError`` for a name that is no plain file name or longer than 127 bytes.
    """
    if graph.stat().st_size == 0:
        raise ConfigError("embedder_dir", f"{graph} is empty")
    names: set[bytes] = set()
    with graph.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as octets:
        for entry in LOCATION.finditer(octets):
            length = entry[1][0]
            name = octets[entry.end() : entry.end() + length]
            if length > LOCATION_BYTES_MAX or b"/" in name or name in (b"", b".", b".."):
                raise ConfigError("embedder_dir", f"{graph} keeps tensors in {name!r}, no file beside it")
            names.add(name)
    return [graph.with_name(os.fsdecode(name)) for name in sorted(names)]


def _settings(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        settings = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise ConfigError("embedder_dir", f"cannot read {path}: {error}") from error
    if not isinstance(settings, dict):
        raise ConfigError("embedder_dir", f"{path} holds no object")
    return settings


def _limit(path: Path, key: str) -> int:
    """A token limit from a model's settings, at most 512: a larger window only makes facts harder to find."""
    value = _settings(path).get(key)
    if not isinstance(value, int) or value < WINDOW_TOKENS_MIN:
        return WINDOW_TOKENS_DEFAULT  # absent, or one of the "no limit" values that such files hold
    return min(value, WINDOW_TOKENS_DEFAULT)


def _pooling(path: Path) -> Pooling:
    chosen = sorted(
        name for name, on in _settings(path).items() if name.startswith("pooling_mode_") and on is True
    )
    if chosen in ([], ["pooling_mode_mean_tokens"]):
        return "mean"
    if chosen == ["pooling_mode_cls_token"]:
        return "first"
    raise ConfigError("embedder_dir", f"{path} asks for {', '.join(chosen)}; mean and cls are supported")
