"""Model identity and planned parts: what a (source, model identity, profile) triple has (ruling 18)."""

import msgspec


class ModelIdentity(msgspec.Struct, frozen=True, kw_only=True):
    """What made a plan or a vector. Its digest is ``core.planning.model_digest``."""

    name: str
    dimensions: int
    window_tokens: int
    """Most tokens of a planned part, special tokens included."""
    files: dict[str, str]
    """File name -> lower-case SHA-256 hex; for an endpoint, its URL and model name stand here as the file."""
    tokenizer_digest: str


class PlannedPart(msgspec.Struct, frozen=True, array_like=True):
    """One window of a source. Ranges are half open; bytes are UTF-8 bytes of the source."""

    token_start: int
    token_end: int
    byte_start: int
    byte_end: int
