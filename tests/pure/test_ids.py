"""Ids: what they say, and that they sort by time."""

from __future__ import annotations

import uuid

import pytest

from hayata.errors import HayataError
from hayata.ids import RisingIds, check_name, execution_id, new_uuid7, parse_execution_id


def test_rising_ids_rise_within_a_millisecond_and_when_the_clock_steps_back():
    ids = RisingIds()
    times = [1000] * 5000 + [900] * 10 + [2000, 2001]
    made = [ids.new(at) for at in times]
    assert made == sorted(made)
    assert len(set(made)) == len(made)
    assert {uuid.UUID(bytes=each).version for each in made} == {7}


def test_uuid7_begins_with_its_time():
    made = new_uuid7(0x0123456789AB)
    assert made[:6].hex() == "0123456789ab"
    assert uuid.UUID(bytes=made).variant == uuid.RFC_4122


def test_execution_id_can_be_taken_apart():
    invocation = new_uuid7(5)
    assert parse_execution_id(execution_id(invocation, 7, 2)) == (invocation, 7, 2, -1)
    assert parse_execution_id(execution_id(invocation, 7, 2, 0)) == (invocation, 7, 2, 0)
    assert execution_id(invocation, 7, 2, 0) == f"{invocation.hex()}.7-0.2"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "x",
        "00" * 16 + ".1-.1",
        "00" * 16 + ".1--1.1",
        "1.2.3",
        "zz" * 16 + ".1.1",
        "00" * 16 + ".a.1",
        "00" * 16 + ".1",
    ],
)
def test_what_is_no_execution_id_is_none(text):
    assert parse_execution_id(text) is None


@pytest.mark.parametrize("name", ["", "x" * 129, " a", "-a", "a b", "é", 3, None, "a\n"])
def test_what_can_be_no_name_is_refused(name):
    with pytest.raises(HayataError) as refused:
        check_name("session", name)
    assert refused.value.code == "invalid_options"
