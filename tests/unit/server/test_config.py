"""Settings come from file, environment and command line; what is misspelt is refused by its path, and secrets stay secret."""

from __future__ import annotations

from pathlib import Path

import pytest

from tidings.core.errors import SettingsError
from tidings.core.settings import checked
from tidings.server.settings import REDACTED, NodeSettings, ServerSettings, changed_paths, load_settings, printable

SECRET = "do-not-print-this-secret-anywhere-please"


def load(**environment: str) -> NodeSettings:
    return load_settings(environment=environment)


def load_toml(toml: str, path: Path) -> NodeSettings:
    path.write_text(toml)
    return load_settings(path, environment={})


def test_without_anything_the_defaults_hold() -> None:
    """No file and an empty environment give the defaults."""
    assert load() == NodeSettings()


def test_the_environment_overrides_the_file_and_options_override_both(tmp_path: Path) -> None:
    """Each source overrides those before it; what none of them names keeps its default."""
    file = tmp_path / "node.toml"
    file.write_text('[server]\nhost = "::1"\nport = 1\nkeep_alive_s = 7\n')
    settings = load_settings(
        file,
        environment={"TIDINGS_SERVER__PORT": "2", "TIDINGS_SERVER__KEEP_ALIVE_S": "8"},
        overrides={"server.keep_alive_s": 9, "server.unix_path": None},
        defaults={"server.port": 3, "log.layout": "space"},
    )

    server = settings.server
    assert (server.host, server.port, server.keep_alive_s, server.unix_path) == ("::1", 2, 9, None)
    assert settings.log.layout == "space"


def test_values_of_the_environment_take_the_type_of_their_setting() -> None:
    """Numbers, booleans, lists and tables are read as what the setting is; text stays text."""
    settings = load(
        TIDINGS_SERVER__ACCESS_LOG="false",
        TIDINGS_SERVER__PING_INTERVAL_S="2.5",
        TIDINGS_SERVER__ORIGINS='["https://a.example", "https://b.example"]',
        TIDINGS_BUS__TOPICS='{"jobs": {"expired": "dead_letter"}}',
        TIDINGS_ACCESS__TOKENS__KEY_SET='{"keys": []}',
        TIDINGS_LOG__RETENTION__jobs__AGE_DAYS_MAX="3",
    )

    assert settings.server.access_log is False
    assert settings.server.ping_interval_s == 2.5
    assert settings.server.origins == ("https://a.example", "https://b.example")
    assert settings.bus.topics["jobs"].expired == "dead_letter"
    assert settings.access.tokens.key_set == '{"keys": []}'
    assert settings.log.retention["jobs"].age_days_max == 3


@pytest.mark.parametrize(
    ("toml", "path", "meant"),
    [
        ("[server]\nprot = 1", "server.prot", "'port'"),
        ("[sever]\nport = 1", "sever", "'server'"),
        ('[bus.topics.jobs]\nexpire = "drop"', "bus.topics.jobs.expire", "'expired'"),
        ('[access.tokens]\nsecrets = "x"', "access.tokens.secrets", "'secret'"),
        ("[log.retention.demo]\nage_day_max = 1", "log.retention.demo.age_day_max", "'age_days_max'"),
    ],
)
def test_a_misspelt_key_is_refused_by_its_path(tmp_path: Path, toml: str, path: str, meant: str) -> None:
    """The error names the whole path and the key that was probably meant, at every depth."""
    with pytest.raises(SettingsError) as refused:
        load_toml(toml, tmp_path / "node.toml")

    assert refused.value.path == path
    assert f"did you mean {meant}?" in str(refused.value)


@pytest.mark.parametrize(
    ("environment", "path"),
    [
        ({"TIDINGS_SERVER__PROT": "1"}, "server.prot"),
        ({"TIDINGS_SERVER_PORT": "1"}, "TIDINGS_SERVER_PORT"),
        ({"TIDINGS_JWT_SECERT": SECRET}, "TIDINGS_JWT_SECERT"),
        ({"TIDINGS_SERVER": "1"}, "TIDINGS_SERVER"),
        ({"TIDINGS_SERVER__PORT__X": "1"}, "server.port"),
    ],
)
def test_a_misspelt_variable_is_refused(environment: dict[str, str], path: str) -> None:
    """Also in the environment nothing that was meant as a setting is passed over in silence."""
    with pytest.raises(SettingsError) as refused:
        load(**environment)

    assert refused.value.path == path
    assert SECRET not in str(refused.value)


def test_variables_of_the_command_line_are_none_of_its_business() -> None:
    """What options of the tool read from the environment is no misspelt setting."""
    assert load(TIDINGS_WORKSPACE="x", TIDINGS_TOKEN="y", TIDINGS_KEY_FILE="z", PATH="/bin") == NodeSettings()


@pytest.mark.parametrize(
    ("toml", "path"),
    [
        ("[server]\nport = 70000", "server.port"),
        ('[server]\nport = "many"', "server.port"),
        ("[server]\nconnections_max = 0", "server.connections_max"),
        ('[server]\ntls_cert_file = "c.pem"', "server.tls_key_file"),
        ('[access.tokens]\nsecret = "short"', "access.tokens.secret"),
        ('[log]\ndurability = "maybe"', "log.durability"),
        ("server = 3", "server"),
    ],
)
def test_a_value_out_of_range_is_refused_by_its_path(tmp_path: Path, toml: str, path: str) -> None:
    """Before anything starts, every value is within its range, and values fit together."""
    with pytest.raises(SettingsError) as refused:
        load_toml(toml, tmp_path / "node.toml")

    assert refused.value.path == path


@pytest.mark.parametrize("content", [b"[server\n", b"\xff\xfe", b"#" * ((1 << 20) + 1), None])
def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, content: bytes | None) -> None:
    """No TOML, no UTF-8, too long or missing: the error names the file."""
    file = tmp_path / "node.toml"
    if content is not None:
        file.write_bytes(content)

    with pytest.raises(SettingsError, match=r"node\.toml"):
        load_settings(file, environment={})


def test_the_secret_comes_from_its_own_variable_or_file(tmp_path: Path) -> None:
    """``TIDINGS_JWT_SECRET`` holds the secret, ``TIDINGS_JWT_SECRET_FILE`` names a file that does."""
    file = tmp_path / "secret"
    file.write_text(SECRET + "\n")

    assert load(TIDINGS_JWT_SECRET=SECRET).access.tokens.secret == SECRET
    assert load(TIDINGS_JWT_SECRET_FILE=str(file)).access.tokens.secret == SECRET
    with pytest.raises(SettingsError, match="TIDINGS_JWT_SECRET_FILE"):
        load(TIDINGS_JWT_SECRET_FILE=str(tmp_path / "nowhere"))


def test_the_key_set_comes_from_its_file(tmp_path: Path) -> None:
    """``server.key_set_file`` is read when settings are loaded, so loading them again finds new keys."""
    file = tmp_path / "keys.json"
    file.write_text('{"keys": []}')

    assert load(TIDINGS_SERVER__KEY_SET_FILE=str(file)).access.tokens.key_set == '{"keys": []}'


def test_no_print_out_holds_a_secret() -> None:
    """Settings are shown whole, but for the value of every secret."""
    settings = load(TIDINGS_JWT_SECRET=SECRET)

    shown = printable(settings)

    assert SECRET not in repr(shown)
    assert shown["access"]["tokens"]["secret"] == REDACTED
    assert shown["server"]["port"] == settings.server.port
    assert SECRET not in repr(settings)


def test_changed_paths_names_each_difference() -> None:
    """Only what differs is named, by its dotted path."""
    old = NodeSettings()
    new = load(TIDINGS_SERVER__PORT="1", TIDINGS_JWT_SECRET=SECRET)

    assert changed_paths(old, new) == ["server.port", "access.tokens.secret"]
    assert changed_paths(old, old) == []


def test_settings_made_in_code_are_checked_too() -> None:
    """A program that builds settings itself gets the same refusals."""
    with pytest.raises(SettingsError, match=r"server\.port"):
        checked(NodeSettings(server=ServerSettings(port=-1)))
