"""What a check says, and how checks are run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TypeAlias

from hayata.errors import HayataError
from hayata.messages import Finding

Check: TypeAlias = Callable[[], Iterable[Finding]]


def ok(check: str, message: str) -> Finding:
    """All is well."""
    return Finding(check, "ok", message)


def warn(check: str, message: str, hint: str = "") -> Finding:
    """It works, and may not always."""
    return Finding(check, "warn", message, hint)


def fail(check: str, message: str, hint: str = "") -> Finding:
    """A daemon can't work here."""
    return Finding(check, "fail", message, hint)


def of_error(check: str, error: HayataError) -> Finding:
    """What the runtime itself would have refused."""
    return fail(check, f"{error.code}: {error.message}", error.hint)


def run(checks: Iterable[tuple[str, Check]]) -> Iterator[Finding]:
    """Run checks one after the other; each is given under its name if it breaks down."""
    for name, check in checks:
        try:
            yield from check()
        except HayataError as error:
            yield of_error(name, error)
        except Exception as error:  # noqa: BLE001 - whatever breaks one check must not hide what the others find
            yield fail(name, f"the check itself broke: {type(error).__name__}: {error}", "please report it")
