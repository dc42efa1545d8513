import os
import re
from pathlib import Path

import pytest

from hayata.errors import HayataError
from hayata_supervisor import config


@pytest.fixture(autouse=True)
def _clean_place(tmp_path, monkeypatch):
    for name in list(os.environ):
        if name.startswith("HAYATA_") or name == "XDG_RUNTIME_DIR":
            monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)


def _file(text, name="hayata.toml"):
    with open(name, "w") as file:
        file.write(text)
    return name


def _problems(*arguments):
    with pytest.raises(HayataError) as caught:
        config.load(*arguments)
    assert caught.value.code == "invalid_options"
    assert caught.value.hint
    return caught.value.details["problems"]


def test_without_anything_the_defaults_hold():
    loaded = config.load({})
    assert (loaded.data_dir, loaded.log_format, loaded.drain_timeout) == (".hayata", "console", 25.0)


def test_flags_win_over_environment_and_that_over_the_file(monkeypatch):
    _file('drain_timeout = 1\npolicy_timeout = 1\nstart_timeout = 1\nlog_level = "debug"')
    monkeypatch.setenv("HAYATA_POLICY_TIMEOUT", "2")
    monkeypatch.setenv("HAYATA_START_TIMEOUT", "2")
    monkeypatch.setenv("HAYATA_LOG_LEVEL", "")  # as if it were not set
    loaded = config.load({"start_timeout": "3"})
    assert (loaded.drain_timeout, loaded.policy_timeout, loaded.start_timeout) == (1.0, 2.0, 3.0)
    assert loaded.log_level == "debug"


def test_named_file_replaces_the_one_in_the_directory():
    _file("drain_timeout = 1")
    _file("policy_timeout = 2", "other.toml")
    loaded = config.load({}, "other.toml")
    assert (loaded.drain_timeout, loaded.policy_timeout) == (25.0, 2.0)


def test_all_problems_are_reported_at_once_each_with_its_place(monkeypatch):
    _file('drain_tiemout = 1\nnode_retry = 0\napps = ["a.py", 3]')
    monkeypatch.setenv("HAYATA_POLICY_TIMEOUT", "soon")
    problems = "\n".join(_problems({"log_level": "loud"}))
    for place in (
        "hayata.toml: drain_tiemout: there is no such setting",
        "hayata.toml: node_retry: ",
        "hayata.toml: apps.1: ",
        "HAYATA_POLICY_TIMEOUT: ",
        "--log-level: ",
    ):
        assert place in problems


@pytest.mark.parametrize(
    "text",
    [
        "drain_timeout = -1",
        "drain_timeout = nan",
        "policy_timeout = inf",
        "start_timeout = 0",
        "frame_cap_bytes = 10",
        'retention = "soon"',
        "retention = 30",
    ],
)
def test_values_that_make_no_sense_are_refused(text):
    _file(text)
    assert len(_problems({})) == 1


@pytest.mark.parametrize("text", ["drain_timeout = ", "= 1", '"\\ud800"', "a = 1\na = 2"])
def test_file_that_is_no_toml_is_refused_with_its_name(text):
    with pytest.raises(HayataError, match=r"hayata\.toml can't be used"):
        config.load({}, _file(text))


def test_file_that_was_named_must_exist():
    with pytest.raises(HayataError, match=r"nowhere\.toml can't be used: there is no such file"):
        config.load({}, "nowhere.toml")


def test_paths_of_a_file_are_relative_to_it(tmp_path):
    place = tmp_path / "etc"
    place.mkdir()
    text = 'data_dir = "store"\nsocket = "h.sock"\napps = ["a.py", "b.py:x", "m.n:x", "/abs/c.py"]'
    loaded = config.load({}, _file(text, str(place / "h.toml")))
    assert loaded.data_dir == str(place / "store")
    assert loaded.socket == str(place / "h.sock")
    assert loaded.apps == [str(place / "a.py"), str(place / "b.py:x"), "m.n:x", "/abs/c.py"]


def test_apps_of_the_environment_are_separated_by_blanks(monkeypatch):
    monkeypatch.setenv("HAYATA_APPS", "a.py  m:x")
    assert config.load({}).apps == ["a.py", "m:x"]


def test_launch_has_absolute_paths_and_every_setting(tmp_path):
    _file("", "a.py")
    launch = config.launch(
        config.load(
            {
                "apps": ["a.py:agents", "pkg.mod:attr"],
                "data_dir": "d",
                "socket": "s",
                "log_format": "json",
                "log_level": "error",
                "drain_timeout": 1,
                "policy_timeout": 2,
                "start_timeout": 3,
                "node_retry": 4,
                "hang_timeout": 5,
                "stopped_timeout": 6,
                "frame_cap_bytes": 100_000,
            }
        )
    )
    assert launch.apps == [f"{tmp_path}/a.py:agents", "pkg.mod:attr"]
    assert (launch.data_dir, launch.socket) == (f"{tmp_path}/d", f"{tmp_path}/s")
    assert (launch.cwd, launch.sys_path) == (str(tmp_path), [str(tmp_path)])
    assert (launch.log_format, launch.log_level) == ("json", "error")
    durations = (launch.drain_timeout_s, launch.policy_timeout_s, launch.start_timeout_s, launch.node_retry_s)
    assert durations == (1.0, 2.0, 3.0, 4.0)
    assert (launch.hang_timeout_s, launch.stopped_timeout_s) == (5.0, 6.0)
    assert launch.frame_cap_bytes == 100_000
    assert launch.control_fd is launch.parent_pid is launch.value_fd is None


def test_socket_is_the_default_unless_set(monkeypatch):
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/run/user/9")
    assert config.launch(config.load({"apps": ["m:x"]})).socket == "/run/user/9/hayata/hayata.sock"
    monkeypatch.setenv("HAYATA_SOCKET", "/x/y.sock")
    assert config.launch(config.load({"apps": ["m:x"]})).socket == "/x/y.sock"
    assert config.launch(config.load({"apps": ["m:x"], "socket": "/z"})).socket == "/z"


def test_too_long_socket_path_is_refused():
    with pytest.raises(HayataError, match="the system allows"):
        config.launch(config.load({"apps": ["m:x"], "socket": "/" + "s" * 200}))


def test_no_app_is_refused():
    with pytest.raises(HayataError, match="no APP"):
        config.launch(config.load({}))


@pytest.mark.parametrize(
    ("app", "reason"),
    [
        ("nosuch.py", "there is no such file"),
        ("no/such.py:agent", "there is no such file"),
        ("nosuch", "neither"),
        ("no such:agent", "neither"),
        (":agent", "neither"),
        ("", "neither"),
        ("a.py:", "names no attribute"),
        ("a.py:1", "names no attribute"),
        ("dir/", "there is no such file"),
    ],
)
def test_app_that_can_not_be_one_is_refused(app, reason):
    _file("", "a.py")
    os.mkdir("dir")
    with pytest.raises(HayataError, match=reason) as caught:
        config.check_app(app)
    assert caught.value.code == "invalid_options"
    assert caught.value.details["app"] == app


def test_app_may_be_any_file_that_exists(tmp_path):
    for name in ("a:b.py", "script"):
        _file("", name)
        assert config.check_app(name) == str(tmp_path / name)
    assert config.check_app("a:b.py:agent") == str(tmp_path / "a:b.py") + ":agent"


def test_variables_that_set_nothing_are_named():
    environ = {
        "HAYATA_DRAIN_TIMOUT": "1",
        "HAYATA_DATA_DIR": "x",
        "HAYATA_INSTANCE": "1-2",
        "PATH": "",
        "HAYATA": "",
    }
    assert config.unknown_variables(environ) == ["HAYATA_DRAIN_TIMOUT"]


def test_retention_is_a_duration_and_nothing_without_it():
    _file("")
    assert config.launch(config.load({"apps": ["a.b:c"]})).retention_s is None
    _file('retention = "30d"')
    assert config.launch(config.load({"apps": ["a.b:c"]})).retention_s == 30 * 86400


def test_every_setting_is_in_the_documentation_with_its_default():
    text = (Path(__file__).parents[2] / "docs/operations.md").read_text("utf-8")
    table = text.partition("## Settings")[2].partition("\n## ")[0]
    rows = dict(re.findall(r"^\| `(\w+)` \| (.*?) \|", table, re.M))
    assert list(rows) == list(config.Config.model_fields)
    for name, field in config.Config.model_fields.items():
        if isinstance(field.default, float):
            assert rows[name] == f"{field.default:g}", name
