"""Byte streams: what they yield, and their errors."""

import json
import math
import sys
import sysconfig
import threading
import time
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from nsa.train import data
from nsa.train.data import (
    SYNTHETIC_BITS_PER_BYTE,
    ByteStream,
    DataError,
    Loader,
    bits_per_byte,
    fetches,
    open_stream,
    text_corpus,
    unigram_entropy,
)
from nsa.train.documents import HELD_OUT_EVERY


def documents(*texts: str) -> str:
    """A .jsonl file's content."""
    return "".join(json.dumps({"text": text, "url": "…"}) + "\n" for text in texts)


def first(dataset: str, *, seq_len: int = 8, batch_size: int = 1, **options) -> bytes:
    """The bytes of the first batch of a stream, closed again."""
    with open_stream(dataset, seq_len=seq_len, batch_size=batch_size, **options) as stream:
        return bytes(next(stream).flatten().tolist())


def loader_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "nsa-loader"]


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A stand-in for the `datasets` package; a test sets its `load_dataset`."""
    module = ModuleType("datasets")
    monkeypatch.setitem(sys.modules, "datasets", module)
    return module


# --- what a stream yields ----------------------------------------------------------------


@pytest.mark.parametrize("dataset", ["synthetic", "text"])
def test_a_batch_is_int64_bytes_one_longer_than_the_sequence(dataset: str) -> None:
    with open_stream(dataset, batch_size=3, seq_len=16) as stream:
        batch = next(stream)

    assert batch.shape == (3, 17)
    assert batch.dtype == torch.int64
    assert stream.description.startswith(dataset)
    assert 0 <= batch.min() <= batch.max() <= 255


@pytest.mark.parametrize("dataset", ["synthetic", "text"])
def test_seed_and_rank_decide_the_stream(dataset: str) -> None:
    plain = first(dataset, seq_len=64)

    assert first(dataset, seq_len=64) == plain
    assert first(dataset, seq_len=64, seed=1) != plain
    assert first(dataset, seq_len=64, rank=1, world_size=2) != plain
    assert first(dataset, seq_len=64, split="held_out") != plain


def test_a_stream_does_not_repeat_its_batch() -> None:
    with open_stream("text", batch_size=1, seq_len=64) as stream:
        assert not torch.equal(next(stream), next(stream))


@pytest.mark.parametrize("dataset", ["synthetic", "text"])
def test_batches_drawn_ahead_are_those_that_were_next(dataset: str) -> None:
    with (
        open_stream(dataset, batch_size=2, seq_len=16) as plain,
        open_stream(dataset, batch_size=2, seq_len=16) as ahead,
    ):
        for drawn in (0, 1, 3, 2, 0):
            ahead.prepare(drawn)
            assert torch.equal(next(ahead), next(plain))


def test_what_a_stream_draws_ahead_is_drawn_once_and_only_from_memory() -> None:
    drawn: list[NDArray[np.uint8]] = []

    def draw() -> NDArray[np.uint8]:
        drawn.append(np.full((1, 2), len(drawn), np.uint8))
        return drawn[-1]

    ahead = ByteStream("memory", draw, in_memory=True)
    ahead.prepare(2)
    ahead.prepare(2)
    assert len(drawn) == 2
    assert [next(ahead)[0, 0].item() for _ in range(3)] == [0, 1, 2]

    ByteStream("disk", draw).prepare(2)
    assert len(drawn) == 3


def test_synthetic_has_eight_bits_without_context_and_two_with_it() -> None:
    with open_stream("synthetic", batch_size=8, seq_len=8191) as stream:
        data = next(stream).numpy().astype(np.uint8)
    steps = data[:, 1:] - data[:, :-1]  # uint8 wraps, as the stream does

    assert unigram_entropy(data) == pytest.approx(8, abs=0.01)
    assert unigram_entropy(steps) == pytest.approx(SYNTHETIC_BITS_PER_BYTE, abs=0.01)


def test_text_is_standard_library_source() -> None:
    window = first("text", seq_len=200)

    assert window in text_corpus("train").tobytes()
    assert b"def dataclass(" in text_corpus("train").tobytes() + text_corpus("held_out").tobytes()


def test_held_out_text_is_not_in_the_training_text() -> None:
    train, held_out = text_corpus("train").tobytes(), text_corpus("held_out").tobytes()

    assert len(train) > 5 * len(held_out) > 0
    places = range(0, len(held_out) - 500, len(held_out) // 20)
    shared = [place for place in places if held_out[place : place + 500] in train]
    assert len(shared) <= len(places) // 4  # tables of encodings repeat each other


def test_every_20th_source_is_held_out_of_the_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the order of their names, counted from 1: the split decides which losses compare. What
    differs between installations is not among them."""
    (tmp_path / "email/tests").mkdir(parents=True)
    for other in ("email/tests/m00.py", "_sysconfigdata__linux.py", "m00.txt"):
        (tmp_path / other).write_bytes(b"\xff")
    for number in range(1, 42):
        (tmp_path / f"m{number:02}.py").write_bytes(bytes([number]))
    monkeypatch.setattr(sysconfig, "get_path", lambda _: str(tmp_path))

    held_out, training = (text_corpus.__wrapped__(split) for split in ("held_out", "train"))

    assert held_out.tolist() == [20, 40]
    assert training.tolist() == [n for n in range(1, 42) if n % 20]


def test_a_row_may_be_the_whole_text() -> None:
    corpus = np.arange(9, dtype=np.uint8)

    rows = data._windows(corpus, np.random.default_rng(0), (2, 9))

    assert (rows == corpus).all()


@pytest.mark.parametrize(
    ("dataset", "fetched"),
    [("synthetic", False), ("text", False), ("fineweb_edu", True), ("fineweb_edu:a.txt", True)],
)
def test_only_documents_are_fetched(dataset: str, fetched: bool) -> None:
    assert fetches(dataset) is fetched


def test_a_row_longer_than_the_text_is_refused() -> None:
    with pytest.raises(DataError, match="Lower --seq-len"):
        first("text", seq_len=10**9)


# --- entropy -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("data", "bits"),
    [
        pytest.param(b"aaaa", 0.0, id="one symbol"),
        pytest.param(b"abab", 1.0, id="two even symbols"),
        pytest.param(bytes(range(256)), 8.0, id="every byte"),
        pytest.param(b"aaab", 0.811278, id="three to one"),
    ],
)
def test_unigram_entropy(data: bytes, bits: float) -> None:
    assert unigram_entropy(np.frombuffer(data, np.uint8)) == pytest.approx(bits, abs=1e-6)


def test_a_model_that_guesses_evenly_has_eight_bits_a_byte() -> None:
    even = torch.nn.functional.cross_entropy(torch.zeros(1, 256), torch.tensor([7]))
    assert bits_per_byte(even.item()) == pytest.approx(8)


# --- local files -------------------------------------------------------------------------


def test_jsonl_documents_are_joined_whole(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text(documents("alpha", "", "beta") + "\n", encoding="utf-8")

    read = first(f"fineweb_edu:{file}", seq_len=21, loader=Loader(doc_batch=1))

    assert read == b"alpha\0beta\0alpha\0beta\0", "empty documents skipped, then the file again"


def test_txt_and_a_folder(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "b.txt").write_bytes("naïve".encode())
    (tmp_path / "a.jsonl").write_text(documents("alpha"), encoding="utf-8")
    (tmp_path / "README.md").write_text("not data")

    read = first(f"fineweb_edu:{tmp_path}", seq_len=12, loader=Loader(doc_batch=1))

    assert read == b"alpha\0" + "naïve\0".encode()


def test_parquet(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    good, bad = tmp_path / "good.parquet", tmp_path / "bad.parquet"
    parquet.write_table(pyarrow.table({"id": [1, 2], "text": ["alpha", "beta"]}), good)
    parquet.write_table(pyarrow.table({"id": [1], "body": ["alpha"]}), bad)

    assert first(f"fineweb_edu:{good}", seq_len=10, loader=Loader(doc_batch=1)) == b"alpha\0beta\0"
    with pytest.raises(DataError, match=r'bad\.parquet: no string in the field "text".*id, body'):
        first(f"fineweb_edu:{bad}")
    good.write_bytes(good.read_bytes()[:-20])
    with pytest.raises(DataError, match=r"good\.parquet row 0: "):
        first(f"fineweb_edu:{good}")

    data = [None, *map(pyarrow.py_buffer, (b"\0\0\0\0\1\0\0\0", b"\xff"))]
    not_utf8 = pyarrow.Array.from_buffers(pyarrow.string(), 1, data)
    parquet.write_table(pyarrow.table({"text": not_utf8}), bad)
    with pytest.raises(DataError, match=r"bad\.parquet row 0: .*utf-8"):
        first(f"fineweb_edu:{bad}")


def test_parquet_without_pyarrow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("pyarrow", "pyarrow.parquet"):
        monkeypatch.setitem(sys.modules, name, None)  # as if it was not installed
    (tmp_path / "a.parquet").write_bytes(b"PAR1")
    with pytest.raises(DataError, match=r"a\.parquet: .*`pyarrow`(?s:.*)pip install"):
        first(f"fineweb_edu:{tmp_path}")


def test_the_ranks_share_the_documents(tmp_path: Path) -> None:
    texts = [f"{i:03}" for i in range(30)]
    (tmp_path / "a.jsonl").write_text(documents(*texts), encoding="utf-8")
    dataset = f"fineweb_edu:{tmp_path}"

    seen = [
        first(dataset, seq_len=4 * 15 - 1, rank=rank, world_size=2, loader=Loader(doc_batch=1))
        for rank in (0, 1)
    ]
    held_out = first(dataset, seq_len=3, split="held_out").rstrip(b"\0")

    assert held_out == b"%03d" % (HELD_OUT_EVERY - 1)
    mine, theirs = (set(data.split(b"\0")) - {b""} for data in seen)
    assert not mine & theirs
    assert mine | theirs == {text.encode() for text in texts} - {held_out}


def test_the_seed_shuffles_within_a_fetch(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(documents(*"abcdefghij"), encoding="utf-8")

    def order(seed: int) -> bytes:
        return first(f"fineweb_edu:{tmp_path}", seq_len=19, seed=seed, loader=Loader(doc_batch=10))

    assert order(0) == order(0) != order(1)
    assert sorted(order(0)) == sorted(order(1)) == sorted(b"abcdefghij" + b"\0" * 10)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        pytest.param('{"text": "a"}\n{"text": \n', r"a\.jsonl:2: not JSON", id="cut short"),
        pytest.param('{"body": "a"}\n', r'a\.jsonl:1: .*"text".*has body', id="no text field"),
        pytest.param(
            '{"text": 7}\n', r'a\.jsonl:1: no string in the field "text"; but int', id="number"
        ),
        pytest.param("[" * 100_000, r"a\.jsonl:1: not JSON", id="too deep"),
        pytest.param('["a"]\n', r"a\.jsonl:1: .*has a list", id="not an object"),
        pytest.param('{"text": "\\ud800"}\n', r"a\.jsonl:1: not Unicode", id="half a pair"),
        pytest.param(b'{"text": "\xff"}\n', r"a\.jsonl:1: not JSON", id="not UTF-8"),
        pytest.param("\n\n", "no document for rank 0 of 1", id="empty"),
    ],
)
def test_malformed_jsonl_names_the_line(tmp_path: Path, content: str | bytes, message: str) -> None:
    file = tmp_path / "a.jsonl"
    file.write_bytes(content if isinstance(content, bytes) else content.encode())

    with pytest.raises(DataError, match=message):
        first(f"fineweb_edu:{file}", seq_len=64)
    assert not loader_threads()


def test_the_longest_timeout_is_no_timeout(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("alpha")
    loader = Loader(timeout_s=math.inf)
    with open_stream(f"fineweb_edu:{tmp_path}/a.txt", batch_size=1, seq_len=2, loader=loader) as s:
        assert next(s).shape == (1, 3)


def test_an_error_stays_an_error(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("no\n")
    with open_stream(f"fineweb_edu:{tmp_path}", batch_size=1, seq_len=4) as stream:
        for _ in range(2):
            with pytest.raises(DataError, match=":1: not JSON"):
                next(stream)


@pytest.mark.parametrize(
    ("dataset", "message"),
    [
        pytest.param("txt", "Did you mean 'text'", id="near a name"),
        pytest.param("c4", "known are synthetic, text, fineweb_edu", id="unknown"),
        pytest.param("text:/tmp", "only fineweb_edu takes a path", id="path for text"),
        pytest.param("fineweb_edu:", "only fineweb_edu takes a path, after", id="no path"),
        pytest.param("fineweb_edu:/nowhere", "/nowhere: no such file", id="absent"),
        pytest.param("fineweb_edu:" + "a" * 999, "File name too long", id="too long"),
        pytest.param("fineweb_edu:~nobody here/a", "home directory", id="no such user"),
    ],
)
def test_a_bad_name_or_path(dataset: str, message: str) -> None:
    with pytest.raises(DataError, match=message):
        open_stream(dataset, batch_size=1, seq_len=4)


def test_a_folder_without_data(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl.gz").write_bytes(b"")
    with pytest.raises(DataError, match=r"holds no \.jsonl, \.parquet, \.txt file"):
        open_stream(f"fineweb_edu:{tmp_path}", batch_size=1, seq_len=4)


# --- the hub, and the loader thread ------------------------------------------------------


def test_without_the_datasets_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(DataError, match=r"`datasets` package(?s:.*)fineweb_edu:PATH"):
        open_stream("fineweb_edu", batch_size=1, seq_len=4)


def test_the_hub_is_asked_for_the_sample_and_streamed(hub: ModuleType) -> None:
    calls = []

    def load_dataset(*args, **options):
        calls.append((args, options))
        return iter([{"text": "alpha"}, {"text": "beta"}])

    hub.load_dataset = load_dataset  # type: ignore[attr-defined]

    assert first("fineweb_edu", seq_len=10, loader=Loader(doc_batch=1)) == b"alpha\0beta\0"
    assert calls[0] == (
        ("HuggingFaceFW/fineweb-edu",),
        {"name": "sample-10BT", "split": "train", "streaming": True},
    )


def test_offline(hub: ModuleType) -> None:
    def load_dataset(*_, **__):
        raise ConnectionError("Couldn't reach the Hub")

    hub.load_dataset = load_dataset  # type: ignore[attr-defined]

    with pytest.raises(DataError, match=r"cannot be streamed: ConnectionError(?s:.*)network"):
        first("fineweb_edu")


def test_the_http_clients_errors_are_data_errors(
    hub: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    class HTTPError(Exception):
        pass

    def load_dataset(*_, **__):
        yield {"text": "alpha"}
        raise HTTPError("reset by peer")

    httpx = ModuleType("httpx")
    httpx.HTTPError = HTTPError  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "httpx", httpx)
    hub.load_dataset = load_dataset  # type: ignore[attr-defined]

    with pytest.raises(DataError, match="HTTPError: reset by peer"):
        first("fineweb_edu")


@pytest.mark.parametrize("prefetch", [True, False], ids=["prefetch", "on demand"])
def test_a_silent_source_is_an_error_and_closing_does_not_wait(
    hub: ModuleType, prefetch: bool
) -> None:
    silence = threading.Event()

    def load_dataset(*_, **__):
        yield {"text": "alpha"}
        silence.wait()

    hub.load_dataset = load_dataset  # type: ignore[attr-defined]
    loader = Loader(timeout_s=0.2, doc_batch=8, prefetch=prefetch)
    stream = open_stream("fineweb_edu", batch_size=1, seq_len=64, loader=loader)

    began = time.monotonic()
    with pytest.raises(DataError, match=r"no data for 0\.2 s, after Hugging.* document 0"):
        next(stream)
    stream.close()

    assert time.monotonic() - began < 5
    silence.set()
    for thread in loader_threads():
        thread.join(5)
    assert not loader_threads()


def test_a_defect_in_the_thread_is_not_taken_for_silence(
    hub: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []
    monkeypatch.setattr(threading, "excepthook", lambda args: seen.append(args.exc_type))
    hub.load_dataset = lambda *_, **__: [{"text": "alpha"}, 1 / 0]  # type: ignore[attr-defined]

    with pytest.raises(RuntimeError, match="loader thread died"):
        first("fineweb_edu")
    assert seen == [ZeroDivisionError]


def read_ahead(hub: ModuleType, prefetch: bool) -> int:
    """Documents read while the first of many waits to be used."""
    count = 0

    def load_dataset(*_, **__):
        nonlocal count
        while True:
            count += 1
            yield {"text": "alphabet"}

    hub.load_dataset = load_dataset  # type: ignore[attr-defined]
    loader = Loader(doc_batch=3, queue_depth=2, prefetch=prefetch)
    with open_stream("fineweb_edu", batch_size=1, seq_len=8, loader=loader) as stream:
        next(stream)
        time.sleep(0.2)
        return count


def test_prefetch_reads_queue_depth_fetches_ahead_and_no_more(hub: ModuleType) -> None:
    assert read_ahead(hub, prefetch=False) == 3
    assert read_ahead(hub, prefetch=True) == 3 * (1 + 2)


@pytest.mark.parametrize("prefetch", [True, False], ids=["prefetch", "on demand"])
def test_closing_stops_a_thread_that_waits_to_be_asked(tmp_path: Path, prefetch: bool) -> None:
    (tmp_path / "a.txt").write_text("alpha")
    loader = Loader(doc_batch=1, queue_depth=1, prefetch=prefetch)
    stream = open_stream(f"fineweb_edu:{tmp_path}", batch_size=1, seq_len=4, loader=loader)
    next(stream)
    time.sleep(0.1)  # time enough to fetch all it may
    assert len(loader_threads()) == 1

    stream.close()

    assert not loader_threads()
    with pytest.raises(RuntimeError, match="the stream is closed"):
        [next(stream) for _ in range(9)]


@pytest.mark.parametrize("name", ["doc_batch", "queue_depth", "timeout_s"])
def test_a_loader_that_could_not_load_cannot_be_made(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name}=0 must be positive"):
        Loader(**{name: 0})  # type: ignore[arg-type]
