import contextlib
import contextvars
import io
import json
import logging
import os
import sys

import pytest

from hayata_supervisor import worker_logging
from hayata_supervisor.worker_logging import LINE_BYTES, MARK, WorkerLogHandler, current_task


@pytest.fixture
def pipe():
    read, write = os.pipe()
    os.set_blocking(read, False)
    yield read, write
    os.close(read)
    os.close(write)


@pytest.fixture
def logger(pipe):
    logger = logging.getLogger("tests.worker")
    handler = WorkerLogHandler(pipe[1], ids={"agent_id": "a", "node_id": "n"})
    logger.addHandler(handler)
    logger.propagate = False
    logger.setLevel(logging.DEBUG)
    yield logger
    logger.removeHandler(handler)


def _records(pipe):
    lines = os.read(pipe[0], 1 << 20).split(b"\n")
    assert lines.pop() == b""
    assert all(line.startswith(MARK.encode()) for line in lines)
    return [json.loads(line[1:]) for line in lines]


def test_record_is_one_line_with_ids_and_fields(pipe, logger):
    def task():
        current_task.set({"execution_id": "x.1.1", "attempt": 2, "nothing": None})
        logger.warning("hello %s", "wor\nld", extra={"count": 3, "odd": {1}})

    contextvars.copy_context().run(task)
    logger.critical("outside")
    first, second = _records(pipe)
    assert first == {
        "level": "warning",
        "logger": "tests.worker",
        "event": "hello wor\nld",
        "agent_id": "a",
        "node_id": "n",
        "execution_id": "x.1.1",
        "attempt": 2,
        "count": 3,
        "odd": [1],
    }
    assert (second["level"], second["event"]) == ("error", "outside")
    assert "execution_id" not in second


def test_fields_of_ctx_log_are_fields(pipe, logger):
    logger.info("step", extra={"hayata_fields": {"name": "Ann", "message": "m", "event": "e", 3: "three"}})
    (record,) = _records(pipe)
    assert record["event"] == "step"
    assert (record["name"], record["message"], record["3"]) == ("Ann", "m", "three")
    assert "hayata_fields" not in record


def test_exception_arrives_as_text(pipe, logger):
    try:
        raise ValueError("no")
    except ValueError:
        logger.exception("failed", stack_info=True)
    (record,) = _records(pipe)
    assert record["exception"].endswith("ValueError: no")
    assert "test_exception_arrives_as_text" in record["stack"]


class _Odd:
    def __repr__(self):
        return "odd \udcff"


def test_what_json_can_not_hold_is_said_in_words(pipe):
    cycle = []
    cycle.append(cycle)
    fields = {"msg": "surrogate \udcff", "levelno": 20, "cycle": cycle, "odd": _Odd(), "big": 2**70}
    # Not by a logger: pytest would take part, and send the surrogate to where it can't go.
    WorkerLogHandler(pipe[1]).handle(logging.makeLogRecord(fields))
    (record,) = _records(pipe)
    assert record["event"] == "surrogate \\udcff"
    assert record["cycle"] == "[[...]]"
    assert record["odd"] == "odd \\udcff"


class _Hostile:
    def __repr__(self):
        raise RuntimeError("no repr")


def test_value_that_refuses_to_be_shown_is_reported_and_does_not_end_the_task(pipe, logger, monkeypatch):
    monkeypatch.setattr(sys, "stderr", said := io.StringIO())
    logger.info("x", extra={"hostile": _Hostile()})
    logger.info("after")
    assert "no repr" in said.getvalue()
    assert [record["event"] for record in _records(pipe)] == ["after"]


@pytest.mark.parametrize("text", ["x" * 1_000_000, "\x01" * 1_000_000, "\U0001f600" * 300_000])
def test_huge_record_fits_a_line_and_keeps_its_ids(pipe, logger, text):
    logger.info(text, extra={"more": text})
    data = os.read(pipe[0], 1 << 20)
    assert len(data) <= LINE_BYTES + 1
    record = json.loads(data[1:])
    assert record["agent_id"] == "a"
    assert record["cut_from_bytes"] > LINE_BYTES
    assert record["event"][:1000] == text[:1000]


@contextlib.contextmanager
def _bare_root():
    """The root logger without pytest's handlers, which it puts there for each phase of a test."""
    root = logging.getLogger()
    before, level = root.handlers[:], root.level
    root.handlers[:] = []
    try:
        yield root
    finally:
        root.handlers[:] = before
        root.setLevel(level)


def test_install_takes_the_place_of_handlers_for_standard_streams(pipe, tmp_path):
    with _bare_root() as root, contextlib.closing(logging.FileHandler(tmp_path / "log")) as file:
        logging.basicConfig(level=logging.INFO, stream=sys.stderr)
        root.handlers[0].setLevel(logging.ERROR)
        root.handlers[0].addFilter(lambda record: "secret" not in record.getMessage())
        root.addHandler(file)
        handler = worker_logging.install("a", fd=pipe[1])
        assert root.handlers == [file, handler]
        for event in ("one", "secret"):
            logging.getLogger("x").error(event)
        logging.getLogger("x").warning("below the handler's level")
        assert [record["event"] for record in _records(pipe)] == ["one"]
        assert root.level == logging.INFO


def test_install_twice_leaves_one_handler(pipe):
    with _bare_root() as root:
        worker_logging.install("a", "n", fd=pipe[1])
        handler = worker_logging.install("b", "m", fd=pipe[1])
        assert root.handlers == [handler]
        logging.getLogger("x").warning("once")
    (record,) = _records(pipe)
    assert (record["agent_id"], record["node_id"]) == ("b", "m")


def test_closed_stderr_is_no_error(logger, pipe):
    handler = WorkerLogHandler(fd=10**6)
    logger.addHandler(handler)
    logger.info("x")
    logger.removeHandler(handler)
