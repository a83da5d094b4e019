"""Settings: flag over environment over file over default; errors name setting and origin."""

from pathlib import Path
from typing import Any, Final

import pytest

from muniment.config import ENVIRONMENT_PREFIX, Config, field_names, is_loopback, load
from muniment.errors import ConfigError

ENDPOINT: Final[dict[str, Any]] = {
    "embedder": "endpoint",
    "embedder_url": "http://127.0.0.1:1/v1",
    "embedder_model": "m",
    "embedder_tokenizer": "/tokenizer.json",
    "embedder_dimensions": 8,
}


def written(path: Path, text: str) -> str:
    file = path / "muniment.toml"
    file.write_text(text, encoding="utf-8")
    return str(file)


def refused(
    *, flags: dict[str, Any] | None = None, file: str | None = None, environ: dict[str, str] | None = None
) -> ConfigError:
    with pytest.raises(ConfigError) as error:
        load(flags, file=file, environ=environ or {})
    return error.value


def test_nothing_given_is_the_default() -> None:
    assert load(environ={}) == Config()
    assert (Config().host, Config().port) == ("127.0.0.1", 23001)


@pytest.mark.parametrize("layers", range(8))
def test_flag_over_environment_over_file_over_default(tmp_path: Path, layers: int) -> None:
    flag, variable, file = layers & 4, layers & 2, layers & 1
    config = load(
        {"port": 1} if flag else {},
        file=written(tmp_path, "port = 3\npage_rows_max = 7" if file else "page_rows_max = 7"),
        environ={"MUNIMENT_PORT": "2"} if variable else {},
    )
    assert config.port == (1 if flag else 2 if variable else 3 if file else 23001)
    assert config.page_rows_max == 7


def test_every_setting_can_come_from_each_layer(tmp_path: Path) -> None:
    values = {name: getattr(Config(), name) for name in field_names()}
    values |= ENDPOINT | {"embedder_dir": "/d", "embedder_key_env": "KEY", "executor_tally": "/t"}
    assert None not in values.values()
    quoted = (f"{name} = {value!r}" for name, value in values.items())
    by_file = load(file=written(tmp_path, "\n".join(quoted)), environ={})
    by_environment = load(environ={ENVIRONMENT_PREFIX + name.upper(): str(values[name]) for name in values})
    assert load(values, environ={}) == by_file == by_environment == Config(**values)


def test_the_file_may_be_named_by_the_environment(tmp_path: Path) -> None:
    named = {"MUNIMENT_CONFIG": written(tmp_path, "port = 5")}
    assert load(environ=named).port == 5
    other = tmp_path / "other.toml"
    other.write_text("port = 6", encoding="utf-8")
    assert load(file=str(other), environ=named).port == 6
    assert load(environ={"MUNIMENT_CONFIG": ""}).port == 23001


def test_an_empty_variable_is_none_and_others_are_not_looked_at() -> None:
    assert load(environ={"MUNIMENT_PORT": "", "MUNIMENT_UNHEARD": "1", "PORT": "2"}) == Config()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("port", 65536),
        ("port", -1),
        ("port", True),
        ("part_tokens_max", 511),
        ("part_tokens_max", 0),
        ("probe_seconds", 0.0),
        ("embedder", "magic"),
        ("log_level", "loud"),
        ("data_dir", 5),
        ("storage_reserve_bytes", -1),
    ],
)
def test_a_wrong_value_names_setting_value_and_origin(tmp_path: Path, name: str, value: Any) -> None:
    by_flag = refused(flags={name: value})
    literal = str(value).lower() if isinstance(value, bool) else repr(value)
    path = written(tmp_path, f"{name} = {literal}")
    by_file = refused(file=path)
    for error, origin in ((by_flag, "command line"), (by_file, path)):
        assert error.setting == name
        assert str(error).startswith(f"{name}: ")
        assert f"(from {origin}, which says {value!r})" in str(error)


@pytest.mark.parametrize(("name", "text"), [("port", "x"), ("probe_seconds", "-1"), ("embedder", "magic")])
def test_a_wrong_variable_names_the_environment(name: str, text: str) -> None:
    error = refused(environ={ENVIRONMENT_PREFIX + name.upper(): text})
    assert error.setting == name
    assert f"(from environment, which says {text!r})" in str(error)


def test_a_number_in_a_string_is_a_number_in_the_environment_alone(tmp_path: Path) -> None:
    assert load(environ={"MUNIMENT_PORT": "7"}).port == 7
    assert refused(file=written(tmp_path, 'port = "7"')).setting == "port"
    assert refused(flags={"port": "7"}).setting == "port"


def test_a_wrong_value_is_refused_where_a_right_one_stands_over_it(tmp_path: Path) -> None:
    assert refused(flags={"port": 1}, file=written(tmp_path, "port = 70000")).setting == "port"


def test_an_unknown_name_is_refused_with_its_origin(tmp_path: Path) -> None:
    path = written(tmp_path, "prot = 1")
    assert str(refused(file=path)) == f"prot: unknown setting in {path}"
    assert str(refused(flags={"prot": 1})) == "prot: unknown setting from command line"


def test_a_file_that_is_missing_or_no_toml_is_refused(tmp_path: Path) -> None:
    missing = refused(file=str(tmp_path / "missing.toml"))
    assert (missing.setting, "missing.toml: No such file" in str(missing)) == ("config", True)
    broken = refused(environ={"MUNIMENT_CONFIG": written(tmp_path, "port =")})
    assert (broken.setting, "is not TOML" in str(broken)) == ("config", True)
    latin = tmp_path / "latin.toml"
    latin.write_bytes(b'data_dir = "\xe9"')
    assert refused(file=str(latin)).setting == "config"


@pytest.mark.parametrize("host", ["127.0.0.1", "127.9.9.9", "::1", "localhost"])
def test_loopback_is_accepted(host: str) -> None:
    assert is_loopback(host)
    assert load({"host": host}, environ={}).host == host


@pytest.mark.parametrize(
    "host", ["0.0.0.0", "::", "192.168.0.1", "10.0.0.1", "fe80::1", "example.org", "", "localhost.example"]
)
def test_other_addresses_are_refused(host: str) -> None:
    assert not is_loopback(host)
    error = refused(flags={"host": host})
    assert error.setting == "host"
    assert "not a loopback address" in str(error)


def test_what_an_embedder_needs_must_be_there() -> None:
    assert refused(flags={"embedder": "onnx"}).setting == "embedder_dir"
    assert load({"embedder": "onnx", "embedder_dir": "/d"}, environ={}).embedder_dir == "/d"
    assert load(ENDPOINT, environ={}).embedder_dimensions == 8
    for name in ("embedder_url", "embedder_model", "embedder_tokenizer", "embedder_dimensions"):
        without = {key: value for key, value in ENDPOINT.items() if key != name}
        assert refused(flags=without).setting == name


def test_content_must_fit_into_a_body() -> None:
    assert refused(flags={"content_bytes_max": 11, "body_bytes_max": 10}).setting == "content_bytes_max"
    assert load({"content_bytes_max": 10, "body_bytes_max": 10}, environ={}).content_bytes_max == 10


def test_the_data_path_is_absolute_without_a_tilde(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    assert Config(data_dir="~/data").data_path == tmp_path / "data"
    assert Config(data_dir="data").data_path == tmp_path / "data"


def test_the_environment_of_the_process_is_read_where_none_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MUNIMENT_PORT", "9")
    assert load().port == 9


def test_a_stall_budget_that_would_end_healthy_children_is_refused() -> None:
    with pytest.raises(ConfigError, match="twice executor_heartbeat_seconds"):
        load({"executor_stall_seconds": 1.0, "executor_heartbeat_seconds": 0.5}, environ={})
    with pytest.raises(ConfigError, match="more than embedder_timeout_seconds"):
        load({**ENDPOINT, "embedder_timeout_seconds": 60.0}, environ={})
    assert load({**ENDPOINT, "embedder_timeout_seconds": 59.0}, environ={}).embedder == "endpoint"


def test_a_home_of_nobody_is_refused() -> None:
    with pytest.raises(ConfigError, match="data_dir: ~no-such-user/x names no home directory"):
        load({"data_dir": "~no-such-user/x"}, environ={})
    with pytest.raises(ConfigError, match="config: ~no-such-user/x names no home directory"):
        load(file="~no-such-user/x", environ={})
