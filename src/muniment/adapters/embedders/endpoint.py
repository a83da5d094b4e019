"""Vectors from an endpoint that speaks OpenAI's embeddings format; a tokenizer file plans the parts here."""

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

import httpx
import msgspec
import numpy as np
from numpy.typing import NDArray

from muniment.adapters.embedders.tokens import TokenizerFile, file_digest, load_tokenizer, token_offsets
from muniment.adapters.embedders.vectors import unit_rows
from muniment.errors import ConfigError, ExecutorFailed
from muniment.model.plan import ModelIdentity
from muniment.ports.embedder import Advance, unobserved

TEXT_TOKENS_MAX: Final = 512
"""Most tokens of a text, specials included. Some endpoints cut longer texts silently, so they get none."""
ANSWER_BYTES_PER_NUMBER: Final = 64
ERROR_CHARACTERS_MAX: Final = 300


class _Row(msgspec.Struct):
    index: int
    embedding: list[float]


class _Answer(msgspec.Struct):
    data: list[_Row]


class EndpointEmbedder:
    """An ``Embedder`` that asks ``POST {url}/embeddings``. The API key is a bearer token, shown nowhere."""

    def __init__(
        self,
        *,
        url: str,
        model: str,
        tokenizer: Path,
        dimensions: int,
        timeout_seconds: float,
        key: str | None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Load the tokenizer; nothing is sent. Raises ``ConfigError`` for a URL or key of no use."""
        self._url = _checked(url).rstrip("/") + "/embeddings"
        self._model = model
        self._tokenizer, _ = load_tokenizer(tokenizer)
        self._specials: int = self._tokenizer.num_special_tokens_to_add(is_pair=False)
        self._timeout_seconds = timeout_seconds
        self._key = key
        self._clock = clock
        # Redirects are not followed: the key is for this host alone.
        self._client = httpx.Client(
            headers={"authorization": f"Bearer {_sendable(key)}"} if key else {},
            timeout=timeout_seconds,
            follow_redirects=False,
        )
        self._identity = ModelIdentity(
            name=model,
            dimensions=dimensions,
            window_tokens=TEXT_TOKENS_MAX,
            files={self._url: model},
            tokenizer_digest=file_digest(tokenizer),
        )
        self._tokenizer_file = TokenizerFile(tokenizer, self._identity.tokenizer_digest)

    @property
    def identity(self) -> ModelIdentity:
        """URL and model name stand in the place of file hashes: what answers there cannot be checked."""
        return self._identity

    @property
    def text_tokens_max(self) -> int:
        """512 less the special tokens of the tokenizer file."""
        return TEXT_TOKENS_MAX - self._specials

    def tokenizer_problem(self) -> str | None:
        """Whether the tokenizer file is still the one that was loaded."""
        return self._tokenizer_file.problem()

    def offsets(self, text: str, advance: Advance = unobserved) -> NDArray[np.int64]:
        """Code point ranges of the tokens of the configured tokenizer."""
        return token_offsets(self._tokenizer, text, advance)

    def embed(self, texts: Sequence[str], advance: Advance = unobserved) -> NDArray[np.float32]:
        """One request. Every answer that is not exactly one finite vector a text is an ``ExecutorFailed``."""
        if not texts:
            return np.empty((0, self._identity.dimensions), dtype=np.float32)
        for text in texts:
            tokens = len(self._tokenizer.encode(text))
            if tokens > TEXT_TOKENS_MAX:
                raise ExecutorFailed(
                    f"a text has {tokens} tokens, more than {TEXT_TOKENS_MAX}; it was not sent"
                )
        try:
            answer = msgspec.json.decode(self._post(texts, advance), type=_Answer)
        except msgspec.DecodeError as error:
            raise ExecutorFailed(
                f"{self._url} answered with something else than embeddings: {error}"
            ) from error
        return self._rows(answer, len(texts))

    def close(self) -> None:
        """Close kept connections."""
        self._client.close()

    def _post(self, texts: Sequence[str], advance: Advance) -> bytes:
        """The body of a 200; time and size of the answer are bounded.

        Each phase of the exchange (connected, sent, headers read) counts as progress: each may take the whole
        timeout.
        """

        def trace(event: str, _info: object) -> None:
            if event.endswith(".complete"):
                advance()

        deadline = self._clock() + self._timeout_seconds
        bytes_max = 65_536 + len(texts) * self._identity.dimensions * ANSWER_BYTES_PER_NUMBER
        body = {"model": self._model, "input": list(texts), "encoding_format": "float"}
        received = bytearray()
        try:
            with self._client.stream("POST", self._url, json=body, extensions={"trace": trace}) as response:
                for chunk in response.iter_bytes():
                    received += chunk
                    if len(received) > bytes_max:
                        raise ExecutorFailed(f"{self._url} answered with more than {bytes_max} bytes")
                    if self._clock() > deadline:
                        raise ExecutorFailed(
                            f"{self._url} did not finish within {self._timeout_seconds} seconds"
                        )
        except httpx.TimeoutException as error:
            raise ExecutorFailed(
                f"{self._url} did not answer within {self._timeout_seconds} seconds"
            ) from error
        except httpx.HTTPError as error:
            raise ExecutorFailed(f"{self._url} cannot be asked: {type(error).__name__}: {error}") from error
        if response.status_code != httpx.codes.OK:
            raise ExecutorFailed(f"{self._url} answered {response.status_code}: {self._shown(received)}")
        return bytes(received)

    def _rows(self, answer: _Answer, expected: int) -> NDArray[np.float32]:
        rows = sorted(answer.data, key=lambda row: row.index)
        if [row.index for row in rows] != list(range(expected)):
            raise ExecutorFailed(
                f"{self._url} answered with {len(rows)} vectors or false indexes for {expected} texts"
            )
        for row in rows:
            if len(row.embedding) != self._identity.dimensions:
                raise ExecutorFailed(
                    f"{self._url} answered with {len(row.embedding)} dimensions, "
                    f"not {self._identity.dimensions} as configured"
                )
        return unit_rows(np.array([row.embedding for row in rows], dtype=np.float64))

    def _shown(self, body: bytearray) -> str:
        """The start of an error body, in one line, without the key should the endpoint repeat it."""
        text = " ".join(body.decode("utf-8", "replace").split())
        if self._key:
            text = text.replace(self._key, "[key]")
        return text[:ERROR_CHARACTERS_MAX]


def _checked(url: str) -> str:
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError("embedder_url", "is not an http or https URL")  # not shown: it may hold a password
    if parts.username or parts.password or parts.query or parts.fragment:
        raise ConfigError(
            "embedder_url",
            "must hold no user, password, query or fragment; the key goes into embedder_key_env",
        )
    return url


def _sendable(key: str) -> str:
    if not key.isascii() or not key.isprintable():
        raise ConfigError("embedder_key_env", "names a variable whose value cannot stand in an HTTP header")
    return key
