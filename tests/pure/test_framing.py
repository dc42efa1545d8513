"""Bytes to frames: however the bytes are cut, the frames are the same."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hayata.framing import HEADER, FrameReader, FrameTooLarge, frame


@given(st.lists(st.binary(max_size=300), max_size=20), st.data())
def test_frames_cut_anywhere_come_out_whole_and_in_order(bodies: list[bytes], data: st.DataObject) -> None:
    stream = b"".join(frame(body) for body in bodies)
    reader = FrameReader()
    found = []
    while stream:
        size = data.draw(st.integers(1, len(stream)))
        found += list(reader.feed(stream[:size]))
        stream = stream[size:]
    assert found == bodies
    assert not reader.pending


def test_frame_cut_in_half_stays_pending():
    reader = FrameReader()
    assert list(reader.feed(frame(b"abc")[:-1])) == []
    assert reader.pending
    assert list(reader.feed(b"c")) == [b"abc"]
    assert not reader.pending


def test_header_of_four_gigabytes_is_refused_before_a_body_comes():
    reader = FrameReader()
    with pytest.raises(FrameTooLarge) as refused:
        list(reader.feed(frame(b"ok") + b"\xff\xff\xff\xff"))
    assert refused.value.details["size_bytes"] == 2**32 - 1


def test_frames_before_one_that_is_too_large_are_handed_out():
    reader = FrameReader(cap_bytes=10)
    bodies = reader.feed(frame(b"one") + (11).to_bytes(HEADER, "big"))
    assert next(bodies) == b"one"
    with pytest.raises(FrameTooLarge):
        next(bodies)


def test_sender_is_refused_a_body_over_the_cap():
    assert len(frame(b"x" * 10, 10)) == 14
    with pytest.raises(FrameTooLarge):
        frame(b"x" * 11, 10)
