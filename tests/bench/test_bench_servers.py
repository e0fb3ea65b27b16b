"""How servers are described, and what is wrong with a description that cannot be used."""

from __future__ import annotations

from pathlib import Path

import pytest
import typer

from paceline.bench.matrix import Plan
from paceline.bench.screens import SCREENS, screen, with_flags
from paceline.bench.servers import Configuration, fill, read_servers
from paceline.cli.app import _application
from paceline.errors import ConfigError


def test_the_ready_made_servers() -> None:
    servers = read_servers()
    ours, llama = servers["paceline"], servers["llama-server"]
    assert ours.exact and not llama.exact and ours.metrics == "/metrics" and "{trace}" in ours.command
    assert llama.command[:6] == ("llama-server", "--ctx-checkpoints", "0", "--cache-ram", "0", "-kvu")
    assert llama.body == {"cache_prompt": False}
    for server in (ours, llama):
        assert [made.speculation for made in server.configurations] == [False, True]


def test_a_file_adds_servers_and_replaces_those_of_the_same_name(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(
        '[paceline]\nurl = "http://10.0.0.1:8000"\nexact = true\n'
        '[other]\ncommand = ["run", 8]\n[other.configurations]\nfast = { flags = ["-x"], speculation = true }\n'
    )
    servers = read_servers(path)
    assert servers["paceline"].command == () and servers["paceline"].url == "http://10.0.0.1:8000"
    assert servers["paceline"].configurations == (Configuration("default", (), speculation=False),)
    assert servers["other"].command == ("run", "8")
    assert servers["other"].configurations == (Configuration("fast", ("-x",), speculation=True),)
    assert "llama-server" in servers


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('[a]\ncomand = ["x"]', r"mine.toml: \[a\]: unknown field 'comand'; there are command"),
        ('[a]\ncommand = "x"', r"\[a\]: command must be a list, got 'x'"),
        ('[a]\ncommand = ["x"]\ntimeout = "long"', "timeout must be a number, got 'long'"),
        ("[a]\nready = '/'", r"\[a\]: a server without a command runs already, and needs a url"),
        ('[a]\ncommand = ["x"]\n[a.configurations]\nb = { flags = [] }', r"configurations.b: speculation must say"),
        ("a = 1", r"\[a\] must be a table, got 1"),
        ("[a", "mine.toml: not readable as TOML"),
    ],
)
def test_what_is_wrong_is_named_with_its_place(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        read_servers(path)
    with pytest.raises(ConfigError, match="none.toml: No such file"):
        read_servers(tmp_path / "none.toml")


def test_placeholders_are_filled_and_json_is_left_alone() -> None:
    assert fill('{port} {"a": {"b": 1}} {model}', {"port": "8", "model": "m.gguf"}) == '8 {"a": {"b": 1}} m.gguf'
    with pytest.raises(ConfigError, match=r"unknown placeholder \{modle\}; there are \{model\}"):
        fill("-m {modle}", {"model": "x"})


@pytest.mark.parametrize("name", list(SCREENS))
def test_every_screen_is_a_plan_whose_flags_the_server_knows(name: str) -> None:
    chosen = screen(name)
    server = with_flags(read_servers()["paceline"], ("--max-ctx", "99"), chosen.configurations)
    plan = Plan("demo", "demo", (server,), chosen.workloads, chosen.concurrency, lanes=chosen.lanes)
    cells = [cell for group in plan.groups() for cell in group]
    assert len(cells) == len(chosen.configurations) * len(chosen.workloads) * len(chosen.concurrency)
    command = typer.main.get_command(_application())
    assert isinstance(command, typer.core.TyperGroup)
    known = {
        option for parameter in command.commands["serve"].params for option in parameter.opts + parameter.secondary_opts
    }
    flags = {flag for made in server.configurations for flag in made.flags if flag.startswith("--")}
    assert flags <= known and not chosen.configurations[0].speculation


def test_configurations_are_names_and_flags() -> None:
    plain = Configuration.parse("plain=--no-speculation")
    forced = Configuration.parse("spec-4.0=--spec-synth-len 4.0 --log-level debug")
    assert (plain.speculation, plain.synthetic, forced.speculation, forced.synthetic) == (False, False, True, True)
    assert forced.flags == ("--spec-synth-len", "4.0", "--log-level", "debug")
    assert Configuration.parse("on=").flags == ()
    for wrong in ("--no-speculation", "=--x", "a/b=--x", "plain"):
        with pytest.raises(ConfigError, match="NAME=FLAGS"):
            Configuration.parse(wrong)
