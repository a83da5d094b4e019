"""The inference session of the bundled model with nothing around it: token IDs in, hidden states out."""

import os
import time
from collections.abc import Sequence
from typing import Any, Final

import msgspec
import numpy as np
import onnxruntime
from numpy.typing import NDArray
from tokenizers import Tokenizer

from muniment.adapters.embedders.weights import bundled_files

INFERENCE_TOKENS: Final = 512
INFERENCE_TEXTS: Final = 8
"""More at one time are not faster with this model, and pad more."""
SPECIAL_TOKENS: Final = 2
Feed = dict[str, NDArray[np.int64]]


class Ran(msgspec.Struct, frozen=True):
    """One run over all batches."""

    tokens: int
    """Special ones not counted, as in a plan."""
    seconds: float
    cpu_seconds: float


class BareSession:
    """Texts are made into batches beforehand; only inference is timed."""

    def __init__(self, threads: int) -> None:
        files = bundled_files()
        self._tokenizer = Tokenizer.from_file(os.fspath(files.tokenizer))
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        options.inter_op_num_threads = 1
        options.log_severity_level = 3
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        self._session: Any = onnxruntime.InferenceSession(
            os.fspath(files.graph), options, providers=["CPUExecutionProvider"]
        )
        self._names = [each.name for each in self._session.get_inputs()]
        self._output = [self._session.get_outputs()[0].name]
        self._batches: list[Feed] = []
        self._tokens = 0

    def prepare(self, texts: Sequence[str]) -> None:
        """Take these texts for all runs from now on."""
        encoded = [self._tokenizer.encode(text).ids for text in texts]
        self._batches = [self._feed(batch) for batch in batches(encoded)]
        for feed in self._batches[:1]:
            self._session.run(self._output, feed)
        self._tokens = sum(len(ids) - SPECIAL_TOKENS for ids in encoded)

    def run(self) -> Ran:
        """Infer every batch once."""
        began, cpu = time.perf_counter(), time.process_time()
        for feed in self._batches:
            self._session.run(self._output, feed)
        return Ran(self._tokens, time.perf_counter() - began, time.process_time() - cpu)

    def close(self) -> None:
        """Nothing is held that outlives the process."""

    def _feed(self, batch: Sequence[Sequence[int]]) -> Feed:
        width = max(len(ids) for ids in batch)
        values = np.zeros((len(batch), width), dtype=np.int64)
        mask = np.zeros_like(values)
        for row, ids in enumerate(batch):
            values[row, : len(ids)] = ids
            mask[row, : len(ids)] = 1
        whole = {"input_ids": values, "attention_mask": mask, "token_type_ids": np.zeros_like(values)}
        return {name: whole[name] for name in self._names}


def batches(encoded: Sequence[Sequence[int]]) -> list[list[Sequence[int]]]:
    """All texts by length, cut into inferences: hardly anything is padded, which no server can do better."""
    found: list[list[Sequence[int]]] = []
    for ids in sorted(encoded, key=len):
        if found and len(found[-1]) < INFERENCE_TEXTS and len(ids) * (len(found[-1]) + 1) <= INFERENCE_TOKENS:
            found[-1].append(ids)
        else:
            found.append([ids])
    return found
