"""Which memory a session's next invocation begins with, when the last one's is not durable yet."""

from __future__ import annotations

from hayata_supervisor.memories import Memories

SESSION = ("agent", "session")


def test_memory_that_is_not_durable_is_newer_than_what_the_store_has():
    memories = Memories()
    memories.hold(SESSION)  # the ending
    memories.keep(SESSION, b"new")
    memories.hold(SESSION)  # the reader
    assert memories.newest(SESSION, b"old") == b"new"


def test_ending_between_a_reading_and_its_use_is_not_missed():
    memories = Memories()
    memories.hold(SESSION)  # the reader, who reads b"old"
    memories.hold(SESSION)
    memories.keep(SESSION, b"new")
    memories.release(SESSION)  # the ending is durable before the reader is heard
    assert memories.newest(SESSION, b"old") == b"new"


def test_what_nobody_holds_is_the_store_s():
    memories = Memories()
    memories.hold(SESSION)
    memories.keep(SESSION, b"new")
    memories.release(SESSION)
    memories.hold(SESSION)
    assert memories.newest(SESSION, b"stored") == b"stored"
    assert memories.newest(("agent", "other"), None) is None


def test_memory_of_a_refused_ending_is_lost():
    memories = Memories()
    memories.hold(SESSION)  # a reader
    memories.hold(SESSION)
    memories.keep(SESSION, b"new")
    memories.lose(SESSION)
    assert memories.newest(SESSION, b"old") == b"old"
