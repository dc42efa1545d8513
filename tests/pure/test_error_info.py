"""Errors travel as data, whatever class they are of and whatever their details hold."""

from __future__ import annotations

import msgspec
import pytest

from hayata.error_info import MAX_MESSAGE, MAX_TRACEBACK, error_from, error_info, exception_info
from hayata.errors import CODES, HayataError, error_for
from hayata.messages import ErrorInfo


@pytest.mark.parametrize("code", sorted(CODES))
def test_an_error_of_each_code_comes_back_as_its_class(code):
    error = error_for(code, "what happened", details={"path": ("a", 1)}, hint="do this")
    back = error_from(msgspec.msgpack.decode(msgspec.msgpack.encode(error_info(error)), type=ErrorInfo))
    assert type(back) is type(error)
    assert (back.code, back.message, back.details, back.hint) == (
        code,
        "what happened",
        {"path": ("a", 1)},
        "do this",
    )


def test_a_detail_that_cannot_be_stored_is_kept_as_text():
    class Broken:
        def __str__(self) -> str:
            raise RuntimeError

    info = error_info(error_for("x", "m", details={"good": 1, "bad": object, "broken": Broken()}))
    details = error_from(info).details
    assert details["good"] == 1
    assert "object" in details["bad"]
    assert "Broken" in details["broken"]


def test_an_unknown_code_is_a_plain_error():
    assert type(error_from(ErrorInfo("from_the_future", "m"))) is HayataError


@pytest.mark.parametrize("details", [b"", b"\xc1", b"\x01", b"\x91" * 100_000])
def test_hostile_details_are_dropped(details):
    assert error_from(ErrorInfo("x", "m", details=msgspec.Raw(details))).details == {}


def test_texts_are_clean_and_bounded():
    info = exception_info("node_exception", ValueError("\ud800" + "x" * 1_000_000))
    msgspec.msgpack.encode(info)
    assert len(info.message) <= MAX_MESSAGE
    assert "\\ud800" in info.message
    assert len(error_from(info).details["traceback"]) <= MAX_TRACEBACK + 200


def test_the_cause_of_an_exception_is_in_its_traceback():
    error = ValueError("second")
    error.__cause__ = KeyError("first")
    traceback = error_from(exception_info("x", error)).details["traceback"]
    assert traceback.index("first") < traceback.index("second")
