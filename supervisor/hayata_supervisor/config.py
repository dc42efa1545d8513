"""Configuration of the daemon: ``hayata.toml``, then ``HAYATA_*`` in the environment, then the command line.

pydantic lives here and nowhere else in the runtime: `hayata_supervisor.main` loads this, makes a
`hayata.messages.Launch` of it, and becomes the guard, which has none of it in memory.
"""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import Field, ValidationError, field_validator
from pydantic_settings import (
    BaseSettings,
    InitSettingsSource,
    NoDecode,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
)

from hayata import durations
from hayata.address import check_socket_path, default_socket
from hayata.errors import HayataError, error_for
from hayata.framing import DEFAULT_CAP_BYTES
from hayata.messages import Launch
from hayata_supervisor.process.activation import Passed

DEFAULT_FILE = "hayata.toml"
PREFIX = "HAYATA_"
_NOT_SETTINGS = frozenset({"HAYATA_INSTANCE", "HAYATA_FAILPOINTS", "HAYATA_TEST_NO_PDEATHSIG"})
_MODULE = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*\Z")
_WEEK_S = 7 * 24 * 3600.0
_LEAST_FRAME_BYTES = 64 * 1024
_GREATEST_FRAME_BYTES = 2**31 - 1  # what the store and a signed 32-bit length can hold

Seconds: TypeAlias = Annotated[float, Field(gt=0, le=_WEEK_S, allow_inf_nan=False)]


class Config(BaseSettings):
    """Every setting. Durations are seconds; relative paths in a file are relative to that file.

    Attributes:
        apps: App references, ``module:attr`` or ``path.py[:attr]``; in the environment separated by blanks.
        data_dir: Where the store and the locks live.
        socket: Where clients connect; empty for the default.
        log_format: ``json`` or ``console``.
        log_level: Least level of the runtime's own log lines.
        drain_timeout: How long a stop waits for running executions.
        policy_timeout: How long one policy evaluation may take.
        start_timeout: How long a worker may take to get ready, the import of the app included.
        node_retry: How long a given-up node or agent rests before it is tried again.
        hang_timeout: How long a node worker or forkserver may be silent when it is asked whether it lives.
        stopped_timeout: How long a worker may be stopped (SIGSTOP) before it is killed.
        frame_cap_bytes: Largest message between processes and to clients.
        retention: How long invocations are kept after their end, for example ``30d``; empty for ever.
    """

    model_config = SettingsConfigDict(env_prefix=PREFIX, env_ignore_empty=True, extra="forbid", frozen=True)

    apps: Annotated[list[str], NoDecode] = []
    data_dir: str = Field(".hayata", min_length=1)
    socket: str = ""
    log_format: Literal["json", "console"] = "console"
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    drain_timeout: float = Field(25.0, ge=0, le=_WEEK_S, allow_inf_nan=False)
    policy_timeout: Seconds = 10.0
    start_timeout: Seconds = 60.0
    node_retry: Seconds = 60.0
    hang_timeout: Seconds = 10.0
    stopped_timeout: Seconds = 30.0
    frame_cap_bytes: int = Field(DEFAULT_CAP_BYTES, ge=_LEAST_FRAME_BYTES, le=_GREATEST_FRAME_BYTES)

    retention: str = ""

    @field_validator("retention")
    @classmethod
    def _check_retention(cls, value: str) -> str:
        if value:
            durations.seconds(value)
        return value

    @field_validator("apps", mode="before")
    @classmethod
    def _split(cls, value: object) -> object:
        return value.split() if isinstance(value, str) else value


def load(flags: Mapping[str, Any], file: str | None = None) -> Config:
    """Put the three layers together.

    Args:
        flags: Settings that were given on the command line, by field name.
        file: The file that was named; None: ``hayata.toml`` in the working directory, if there is one.

    Raises:
        HayataError: ``invalid_options``, with every problem and its place in ``details["problems"]``.
    """
    path = DEFAULT_FILE if file is None else file
    in_file = _read(path, must_exist=file is not None)

    class Layered(Config):
        @classmethod
        def settings_customise_sources(
            cls,
            settings_cls: type[BaseSettings],
            init_settings: PydanticBaseSettingsSource,
            env_settings: PydanticBaseSettingsSource,
            dotenv_settings: PydanticBaseSettingsSource,
            file_secret_settings: PydanticBaseSettingsSource,
        ) -> tuple[PydanticBaseSettingsSource, ...]:
            return init_settings, env_settings, InitSettingsSource(settings_cls, in_file)

    try:
        return Layered(**flags)
    except ValidationError as error:
        raise _invalid(error, flags, path) from None


def _read(path: str, *, must_exist: bool) -> dict[str, Any]:
    try:
        with open(path, "rb") as file:
            values = tomllib.load(file)
    except FileNotFoundError:
        if not must_exist:
            return {}
        raise _bad_file(path, "there is no such file") from None
    except OSError as error:
        raise _bad_file(path, error.strerror or str(error)) from error
    except ValueError as error:  # TOML or UTF-8
        raise _bad_file(path, str(error)) from error
    directory = os.path.dirname(os.path.abspath(path))
    for key in ("data_dir", "socket"):
        if values.get(key) and isinstance(values[key], str):
            values[key] = os.path.join(directory, values[key])
    if isinstance(values.get("apps"), list):
        values["apps"] = [_relative_to(directory, app) for app in values["apps"]]
    return values


def _relative_to(directory: str, app: object) -> object:
    if isinstance(app, str) and _path_of(app):
        return os.path.join(directory, app)
    return app


def _bad_file(path: str, reason: str) -> HayataError:
    return error_for(
        "invalid_options",
        f"the configuration file {path} can't be used: {reason}",
        details={"path": path},
        hint="see --config, and the settings in the documentation",
    )


def _invalid(error: ValidationError, flags: Mapping[str, Any], path: str) -> HayataError:
    problems = []
    for problem in error.errors(include_url=False):
        field = str(problem["loc"][0]) if problem["loc"] else ""
        where = ".".join(map(str, problem["loc"]))
        if field in flags:
            where = f"--{where.replace('_', '-')}" if field != "apps" else "APP"
        elif os.environ.get(PREFIX + field.upper()):
            where = PREFIX + field.upper()
        else:
            where = f"{path}: {where}"
        reason = "there is no such setting" if problem["type"] == "extra_forbidden" else problem["msg"]
        problems.append(f"{where}: {reason}")
    settings = ", ".join(Config.model_fields)
    return error_for(
        "invalid_options",
        "; ".join(problems),
        details={"problems": problems},
        hint=f"the settings are {settings}",
    )


def unknown_variables(environ: Mapping[str, str]) -> list[str]:
    """Names that begin with ``HAYATA_`` and set nothing: misspelt, or another program's, so no error."""
    known = _NOT_SETTINGS | {PREFIX + field.upper() for field in Config.model_fields}
    return sorted(name for name in environ if name.startswith(PREFIX) and name.upper() not in known)


def launch(config: Config, passed: Passed | None = None) -> Launch:
    """Make what the guard is started with: paths are absolute, apps look as they should.

    Args:
        config: The settings.
        passed: The socket that the service manager listens on for us.

    Raises:
        HayataError: ``invalid_options``: no app, an app that can't be one, a socket path that is too long or not that
            of the socket that was passed.
    """
    if not config.apps:
        raise error_for(
            "invalid_options",
            "no APP is given",
            hint="for example: hayata-supervisor my_agents.py, or apps = [...] in hayata.toml",
        )
    return Launch(
        apps=[check_app(app) for app in config.apps],
        data_dir=os.path.abspath(config.data_dir),
        socket=_socket(config.socket, passed),
        listen_fd=None if passed is None else passed.fd,
        sys_path=[os.getcwd()],
        cwd=os.getcwd(),
        log_level=config.log_level,
        log_format=config.log_format,
        drain_timeout_s=config.drain_timeout,
        policy_timeout_s=config.policy_timeout,
        start_timeout_s=config.start_timeout,
        node_retry_s=config.node_retry,
        hang_timeout_s=config.hang_timeout,
        stopped_timeout_s=config.stopped_timeout,
        frame_cap_bytes=config.frame_cap_bytes,
        retention_s=durations.seconds(config.retention) if config.retention else None,
    )


def _socket(setting: str, passed: Passed | None) -> str:
    path = os.path.abspath(setting) if setting else ""
    if passed is None:
        return check_socket_path(path or default_socket())
    if path and os.path.realpath(path) != os.path.realpath(passed.path):
        raise error_for(
            "invalid_options",
            f"the socket is set to {path}, and the service manager has passed one at {passed.path}",
            details={"path": path, "passed": passed.path},
            hint="leave --socket, HAYATA_SOCKET and the file's socket out, or set the same path in the .socket unit",
        )
    return passed.path


def check_app(app: str) -> str:
    """Return the reference with its path made absolute.

    Raises:
        HayataError: ``invalid_options``: it is neither an existing ``path.py[:attr]`` nor ``module:attr``.
    """
    path = _path_of(app)
    if path:
        attribute = app[len(path) :]
        if os.path.isfile(path) and _is_attribute(attribute):
            return os.path.abspath(path) + attribute
        reason = "there is no such file" if _is_attribute(attribute) else f"{attribute!r} names no attribute"
    else:
        module, colon, attribute = app.partition(":")
        if _MODULE.match(module) and _is_attribute(colon + attribute) and colon:
            return app
        reason = "it is neither path.py[:attr] nor module:attr"
    raise error_for(
        "invalid_options",
        f"the app {app!r} can't be loaded: {reason}",
        details={"app": app},
        hint="for example my_agents.py, my_agents.py:agent or my_package.agents:agent",
    )


def _path_of(app: str) -> str:
    """The part of a reference that is a path, or an empty string when it names a module."""
    if os.path.isfile(app):
        return app
    path, colon, attribute = app.rpartition(":")
    path = path if colon and "/" not in attribute else app
    return path if path.endswith(".py") or "/" in path else ""


def _is_attribute(text: str) -> bool:
    return not text or (text.startswith(":") and _MODULE.match(text[1:]) is not None)
