"""Entry of the executor child and the only place that names concrete embedders. Reaches no store, no stage.

The server imports this module for ``child_argv`` and ``spec``; what a model needs is imported in the child
alone.
"""

import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NoReturn, TypeVar

from muniment.errors import ConfigError
from muniment.executor.protocol import Spec

if TYPE_CHECKING:  # what only one side needs: numpy is for the child, the configuration for the server
    from muniment.config import Config
    from muniment.ports.embedder import Embedder, SentenceStarts

T = TypeVar("T")
Role = Literal["ingest", "query"]


def child_argv(role: Role) -> list[str]:
    """The command of a child; its role stands there for people who list processes.

    ``-P``: a file in the working directory cannot pass for a module of ours.
    """
    return [sys.executable, "-P", "-m", "muniment.executor_wiring", role]


def spec(config: "Config", role: Role) -> Spec:
    """What a child is told of the configuration. Only ingestion steps back for others."""
    return Spec(
        embedder=config.embedder,
        directory=config.embedder_dir,
        url=config.embedder_url,
        model=config.embedder_model,
        tokenizer=config.embedder_tokenizer,
        key_env=config.embedder_key_env,
        dimensions=config.embedder_dimensions,
        timeout_seconds=config.embedder_timeout_seconds,
        threads=config.embed_threads,
        part_tokens_max=config.part_tokens_max,
        heartbeat_seconds=config.executor_heartbeat_seconds,
        nice=config.ingest_nice if role == "ingest" else 0,
        tally=config.executor_tally,
    )


def load(spec: Spec) -> "tuple[Embedder, SentenceStarts]":
    """Make the embedder that ``spec`` names. Raises ``ConfigError`` or ``Corrupt`` if it cannot be loaded."""
    from muniment.adapters.embedders.sentences import sentence_starts

    return _embedder(spec), sentence_starts


def _embedder(spec: Spec) -> "Embedder":
    """Imports stand here so that a child pays only for the embedder it runs."""
    if spec.embedder == "synthetic":
        from muniment.adapters.embedders.synthetic import SyntheticEmbedder

        return SyntheticEmbedder()
    if spec.embedder == "endpoint":
        from muniment.adapters.embedders.endpoint import EndpointEmbedder

        return EndpointEmbedder(
            url=_given("embedder_url", spec.url),
            model=_given("embedder_model", spec.model),
            tokenizer=Path(_given("embedder_tokenizer", spec.tokenizer)).expanduser(),
            dimensions=int(_given("embedder_dimensions", spec.dimensions)),
            timeout_seconds=spec.timeout_seconds,
            key=_key(spec.key_env),
        )
    from muniment.adapters.embedders.onnx import OnnxEmbedder, directory_files

    if spec.embedder == "onnx":
        return OnnxEmbedder(
            directory_files(Path(_given("embedder_dir", spec.directory)).expanduser()), spec.threads
        )
    if spec.embedder == "bundled":
        from muniment.adapters.embedders.weights import bundled_files

        return OnnxEmbedder(bundled_files(), spec.threads)
    raise ConfigError("embedder", f"{spec.embedder!r} is not known")


def _key(variable: str | None) -> str | None:
    if variable is None:
        return None
    key = os.environ.get(variable)
    if not key:
        raise ConfigError("embedder_key_env", f"the environment has no {variable}")
    return key


def _given(setting: str, value: T | None) -> T:
    if value is None:
        raise ConfigError(setting, "is needed")
    return value


def main() -> NoReturn:
    """Run the child. Set before a library is imported: nothing is fetched, no tokenizer starts threads."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    os.environ["HF_HUB_OFFLINE"] = "1"
    os.environ["ORT_DISABLE_TELEMETRY"] = "1"  # Its official builds keep a device ID and upload by default.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    from muniment.executor import child

    child.run(load)


if __name__ == "__main__":
    main()
