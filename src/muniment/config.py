"""One frozen ``Config``, read once: flag > environment (``MUNIMENT_*``) > TOML file > default.

Every limit of the server is a field here, with its unit last in its name.
``docs/reference/configuration.md`` lists them all; a test compares the two.
"""

import ipaddress
import math
import os
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta

from muniment.errors import ConfigError

SEED_HOST: Final = "127.0.0.1"
SEED_PORT: Final = 23001
ENVIRONMENT_PREFIX: Final = "MUNIMENT_"

EmbedderKind = Literal["bundled", "onnx", "endpoint", "synthetic"]
LogFormat = Literal["auto", "console", "json"]
Positive = Annotated[int, Meta(ge=1)]
NotNegative = Annotated[int, Meta(ge=0)]
Seconds = Annotated[float, Meta(gt=0)]


def described(text: str) -> Meta:
    """Attach the sentence that the reference page and ``config show`` print for a setting."""
    return Meta(description=text)


class Config(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All settings, checked when :func:`load` makes them; nothing reads the environment later."""

    host: Annotated[str, described("Address to listen on. Only loopback addresses are accepted.")] = SEED_HOST
    port: Annotated[int, Meta(ge=0, le=65535), described("Port to listen on; 0 takes a free one.")] = (
        SEED_PORT
    )
    data_dir: Annotated[str, described("Directory that holds the whole memory. One process owns it.")] = (
        "~/.local/share/muniment"
    )

    embedder: Annotated[
        EmbedderKind,
        described(
            "bundled: the model inside the installed weight package. onnx: a local model directory. "
            "endpoint: an OpenAI-compatible embeddings endpoint. "
            "synthetic: hashed words, for load tests only."
        ),
    ] = "bundled"
    embedder_dir: Annotated[
        str | None, described("With onnx: directory with model.onnx (or onnx/model.onnx) and tokenizer.json.")
    ] = None
    embedder_url: Annotated[
        str | None, described("With endpoint: base URL, to which /embeddings is added.")
    ] = None
    embedder_model: Annotated[str | None, described("With endpoint: model name to ask for.")] = None
    embedder_tokenizer: Annotated[
        str | None, described("With endpoint: path of the tokenizer.json that plans parts.")
    ] = None
    embedder_key_env: Annotated[
        str | None, described("With endpoint: name of the environment variable that holds the API key.")
    ] = None
    embedder_dimensions: Annotated[
        Positive | None, described("With endpoint: length of its vectors. Checked on every answer.")
    ] = None
    embedder_timeout_seconds: Annotated[
        Seconds, described("With endpoint: time for one request, connect included.")
    ] = 30.0

    part_tokens_max: Annotated[
        Positive, Meta(le=510), described("Most tokens in one part; parts end at sentences where that fits.")
    ] = 64
    embed_batch_tokens_max: Annotated[Positive, described("Most tokens in one embedding request.")] = 512
    embed_threads: Annotated[Positive, described("Threads of one inference.")] = 1
    operations_in_flight_max: Annotated[
        Positive, described("Memories that are planned and embedded at one time; stuck ones do not count.")
    ] = 64
    operations_stuck_max: Annotated[
        Positive, described("Stuck memories that are kept in mind beside; with more, new ones wait.")
    ] = 1024
    executor_startup_seconds: Annotated[
        Seconds, described("Time from starting the executor child to its ready frame.")
    ] = 300.0
    executor_heartbeat_seconds: Annotated[Seconds, described("Pause between heartbeats of the child.")] = 0.5
    executor_silence_seconds: Annotated[
        Seconds, described("Without a heartbeat for this long, readiness calls the model executor down.")
    ] = 3.0
    executor_stall_seconds: Annotated[
        Seconds,
        described("Time without progress on a request, or without any sign of life, until a child is ended."),
    ] = 60.0
    executor_backoff_seconds_max: Annotated[Seconds, described("Longest pause before a new child.")] = 30.0
    ingest_nice: Annotated[
        int, Meta(ge=0, le=19), described("How far the ingesting child steps back for others (nice value).")
    ] = 10
    ingest_requests_max: Annotated[
        Positive,
        described("Requests with the ingesting child at one time: one is computed, the rest wait there."),
    ] = 2
    ingest_retry_seconds_max: Annotated[
        Seconds, described("Longest pause between tries of a part that failed alone.")
    ] = 300.0
    executor_tally: Annotated[
        str | None, described("File to which the child appends one line for each part that it embeds.")
    ] = None

    body_bytes_max: Annotated[Positive, described("Longest request body.")] = 16 * 1024 * 1024
    content_bytes_max: Annotated[Positive, described("Longest content of one memory, in UTF-8 bytes.")] = (
        8 * 1024 * 1024
    )
    attributes_bytes_max: Annotated[
        Positive, described("Longest payload without its content, as canonical JSON.")
    ] = 256 * 1024
    operation_id_bytes_max: Annotated[
        Positive, Meta(le=4096), described("Longest operation ID, in UTF-8 bytes.")
    ] = 1024
    dependencies_max: Annotated[NotNegative, described("Most dependencies of one operation.")] = 1024
    parts_max: Annotated[Positive, described("Most parts of one memory; more is rejected when planned.")] = (
        200_000
    )
    page_rows_max: Annotated[Positive, described("Most rows in one page of a list.")] = 200
    recall_limit_max: Annotated[Positive, described("Largest limit of one recall.")] = 200
    query_bytes_max: Annotated[Positive, described("Longest recall query, in UTF-8 bytes.")] = 100 * 1024
    followers_max: Annotated[Positive, described("Event streams open at one time.")] = 4096
    write_queue_max: Annotated[
        Positive, described("Writes waiting for the ledger before POST answers 503.")
    ] = 100_000
    commit_batch_commands_max: Annotated[Positive, described("Most commands in one ledger transaction.")] = (
        256
    )
    commit_batch_bytes_max: Annotated[
        Positive, described("Most payload bytes in one ledger transaction.")
    ] = 4 * 1024 * 1024
    wal_pages_max: Annotated[
        Positive, described("Pages in the write-ahead log before it is checkpointed and reused.")
    ] = 8000
    storage_reserve_bytes: Annotated[
        NotNegative, described("Free bytes below which the storage capability is false.")
    ] = 1024 * 1024
    probe_seconds: Annotated[
        Seconds, described("Age after which a readiness measurement is taken again.")
    ] = 1.0
    recall_wait_seconds: Annotated[
        Seconds, described("How long a recall waits for the device to reach the journal.")
    ] = 5.0
    recall_embed_seconds: Annotated[
        Seconds, described("How long a recall waits for the model to read its query before it answers 503.")
    ] = 15.0
    drain_seconds: Annotated[Seconds, described("Time that open requests get after SIGTERM.")] = 10.0
    event_keepalive_seconds: Annotated[
        Seconds, described("Pause between comment lines of an idle stream.")
    ] = 15.0

    log_format: Annotated[LogFormat, described("auto: console on a terminal, JSON lines elsewhere.")] = "auto"
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"], described("Least severe level that is logged.")
    ] = "info"

    @property
    def data_path(self) -> Path:
        """The data directory, absolute, with ``~`` expanded."""
        return Path(self.data_dir).expanduser().absolute()


def field_names() -> tuple[str, ...]:
    """Every setting, in the order of the reference page."""
    return Config.__struct_fields__


def _from_environment(environ: Mapping[str, str]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name in field_names():
        text = environ.get(ENVIRONMENT_PREFIX + name.upper())
        if text is not None and text != "":
            found[name] = text
    return found


def _from_file(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            table = tomllib.load(file)
    except OSError as error:
        raise ConfigError("config", f"cannot read {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:  # Also a number of 4,300 digits, and a thousand brackets.
        raise ConfigError("config", f"{path} is not TOML: {error}") from error
    for name in table:
        if name not in field_names():
            raise ConfigError(name, f"unknown setting in {path}")
    return table


def _expanded(setting: str, text: str) -> Path:
    """A path with ``~`` expanded; ``ConfigError`` where that names nobody."""
    try:
        return Path(text).expanduser()
    except RuntimeError as error:
        raise ConfigError(setting, f"{text} names no home directory") from error


def _check(config: Config) -> None:  # noqa: C901 one rule after the other
    """Settings that are wrong together."""
    for name in ("data_dir", "embedder_dir", "embedder_tokenizer"):
        if (path := getattr(config, name)) is not None:
            _expanded(name, path)
    if not is_loopback(config.host):
        raise ConfigError(
            "host",
            f"{config.host} is not a loopback address; other addresses need API keys, which do not exist yet",
        )
    if config.embedder == "onnx" and config.embedder_dir is None:
        raise ConfigError("embedder_dir", "is needed with embedder = 'onnx'")
    if config.embedder == "endpoint":
        for name in ("embedder_url", "embedder_model", "embedder_tokenizer", "embedder_dimensions"):
            if getattr(config, name) is None:
                raise ConfigError(name, "is needed with embedder = 'endpoint'")
        if config.executor_stall_seconds <= config.embedder_timeout_seconds:
            raise ConfigError(
                "executor_stall_seconds",
                f"must be more than embedder_timeout_seconds ({config.embedder_timeout_seconds}), "
                "else an endpoint that is slow ends the child that asks it",
            )
    if config.executor_stall_seconds <= 2 * config.executor_heartbeat_seconds:
        raise ConfigError(
            "executor_stall_seconds",
            f"must be more than twice executor_heartbeat_seconds ({config.executor_heartbeat_seconds})",
        )
    for name in field_names():
        if isinstance(getattr(config, name), float) and not math.isfinite(getattr(config, name)):
            raise ConfigError(name, "must be finite")
    if config.content_bytes_max > config.body_bytes_max:
        raise ConfigError("content_bytes_max", "is larger than body_bytes_max")


def is_loopback(host: str) -> bool:
    """Whether a bind address can only be reached from this machine."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def load(
    flags: Mapping[str, Any] | None = None,
    *,
    file: str | None = None,
    environ: Mapping[str, str] | None = None,
) -> Config:
    """Merge flags, environment and file into one checked ``Config``.

    ``flags`` holds only what was given on the command line. ``file`` falls back to ``MUNIMENT_CONFIG``.
    Raises ``ConfigError`` that names the setting and where it came from.
    """
    environ = os.environ if environ is None else environ
    file = file or environ.get(ENVIRONMENT_PREFIX + "CONFIG") or None
    layers: list[tuple[str, Mapping[str, Any], bool]] = []
    if file:
        layers.append((file, _from_file(_expanded("config", file)), True))
    layers.append(("environment", _from_environment(environ), False))
    layers.append(("command line", dict(flags or {}), True))
    merged: dict[str, Any] = {}
    for origin, layer, strict in layers:
        for name, value in layer.items():
            if name not in field_names():
                raise ConfigError(name, f"unknown setting from {origin}")
            merged[name] = _converted(name, value, origin, strict=strict)
    config = Config(**merged)
    _check(config)
    return config


def _converted(name: str, value: Any, origin: str, *, strict: bool) -> Any:
    try:
        checked = msgspec.convert({name: value}, Config, strict=strict)
    except msgspec.ValidationError as error:
        problem = str(error).split(" - at ")[0]
        raise ConfigError(name, f"{problem} (from {origin}, which says {value!r})") from error
    return getattr(checked, name)
