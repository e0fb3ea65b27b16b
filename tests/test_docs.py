"""What the documents say is complete: every option, field, metric and file is in them, and the examples run."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest
import typer

import paceline
from paceline import Delta, Result, SamplingParams, Structure
from paceline.cli.app import _application, main
from paceline.config import DEMO_DIR, EngineOptions
from paceline.engine.llm import Usage
from paceline.server.anthropic_input import COUNT_FIELDS, MESSAGES_FIELDS, OUTPUT_FIELDS, THINKING_FIELDS
from paceline.server.metrics import Metrics
from paceline.server.options import ServerOptions
from paceline.server.protocol import CHAT_FIELDS, COMPLETION_FIELDS, DETOKENIZE_FIELDS, TOKENIZE_FIELDS
from paceline.server.responses_input import REASONING_FIELDS, RESPONSES_FIELDS, TEXT_FIELDS
from paceline.types import EngineHandle, EngineInfo, EngineStats, LaneStats, RequestStats, TokenLogprob

ROOT = Path(__file__).parent.parent
SOURCE = Path(paceline.__file__).parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
PYTHON = (ROOT / "docs" / "python.md").read_text(encoding="utf-8")
SERVER = (ROOT / "docs" / "server.md").read_text(encoding="utf-8")
STRUCTURE = (ROOT / "docs" / "structure.md").read_text(encoding="utf-8")


def quoted(text: str) -> set[str]:
    """Everything in single backquotes, and its words."""
    spans = re.findall(r"`([^`\n]+)`", text)
    return {word for span in spans for word in (span, *re.split(r"[ ,{}]+", span))}


def section(text: str, title: str) -> str:
    """What is under a heading of the second level."""
    (found,) = re.findall(rf"^## {title}\n(.*?)(?=^## |\Z)", text, re.DOTALL | re.MULTILINE)
    return str(found)


def test_the_readme_has_every_command_and_option() -> None:
    group = typer.main.get_command(_application())
    assert isinstance(group, typer.core.TyperGroup)
    for name, command in group.commands.items():
        assert f"paceline {name}" in README
        assert command.help
        for parameter in command.params:
            assert getattr(parameter, "help", None), f"{name}: {parameter.name} has no help"
            missing = {option for option in (*parameter.opts, *parameter.secondary_opts) if option.startswith("-")}
            assert missing - quoted(README) <= {"--help"}, name


def test_the_readme_has_every_field_of_the_engine_options() -> None:
    fields = {field.name for field in dataclasses.fields(EngineOptions)}
    assert fields <= quoted(README)


def test_the_python_reference_has_every_export() -> None:
    assert set(paceline.__all__) <= quoted(PYTHON)
    methods = {name for name in vars(paceline.LLM) if not name.startswith("_")} | {"tokenizer", "template", "info"}
    assert methods <= {word.partition("(")[0] for word in quoted(PYTHON)}


@pytest.mark.parametrize("kind", [Usage, RequestStats, TokenLogprob, EngineInfo, EngineStats, Delta, Result, Structure])
def test_the_python_reference_has_every_field_in_the_section_of_its_type(kind: type) -> None:
    name = {Usage: "Result", TokenLogprob: "Result"}.get(kind, kind.__name__)
    members = {field.name for field in dataclasses.fields(kind)}
    members |= {name for name, value in vars(kind).items() if isinstance(value, property)}
    assert members <= quoted(section(PYTHON, name))


def test_the_python_reference_has_the_fields_and_defaults_of_sampling_params() -> None:
    defaults = SamplingParams()
    rows = re.findall(r"^\| `(\w+)` \| `?([^|`]+)`? \|", section(PYTHON, "SamplingParams"), re.MULTILINE)
    assert {name: value.strip() for name, value in rows} == {
        field.name: repr(getattr(defaults, field.name)) for field in dataclasses.fields(SamplingParams)
    }


@pytest.mark.parametrize(
    "fields",
    [
        *(CHAT_FIELDS, COMPLETION_FIELDS, TOKENIZE_FIELDS, DETOKENIZE_FIELDS),
        *(RESPONSES_FIELDS, REASONING_FIELDS, TEXT_FIELDS),
        *(MESSAGES_FIELDS, COUNT_FIELDS, THINKING_FIELDS, OUTPUT_FIELDS),
    ],
)
def test_every_request_field_is_documented(fields: dict[str, object]) -> None:
    assert set(fields) <= quoted(SERVER)


@pytest.mark.parametrize("kind", [LaneStats, ServerOptions])
def test_what_operators_see_and_set_is_documented(kind: type) -> None:
    """Options of the server by their names on the command line, in the README."""
    names = {field.name for field in dataclasses.fields(kind)}
    renamed = {"api_keys": "--api-key", "cors_origins": "--cors-origin", "max_body_bytes": "--max-body-mib"}
    options = {renamed.get(name, "--" + name.replace("_", "-")) for name in names}
    assert names <= quoted(SERVER) or options <= quoted(README)


def test_every_metric_is_documented() -> None:
    class Idle:
        def stats(self) -> EngineStats:
            return EngineStats()

    def handle() -> EngineHandle:
        return Idle()  # type: ignore[return-value]

    kinds = re.findall(r"# TYPE (\w+) (\w+)", Metrics(handle).scrape().decode())
    names = {name for name, kind in kinds if not name.endswith("_created")}
    assert len(names) > 15
    assert names <= quoted(SERVER)


def test_the_structure_lists_every_source_file_and_no_other() -> None:
    listed = set(re.findall(r"^\| `([\w/.]+)` \|", STRUCTURE, re.MULTILINE))
    files = {
        str(path.relative_to(SOURCE)) for path in SOURCE.rglob("*") if path.suffix in (".py", ".jsonl", ".json", ".toml")
    }
    assert listed == {name for name in files if not Path(name).name.startswith("__")}


@pytest.mark.parametrize(
    "document", [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").glob("*.md"))], ids=lambda path: path.name
)
def test_links_lead_to_files(document: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", document.read_text(encoding="utf-8")):
        assert target.startswith("https://") or (document.parent / target).exists(), target


def test_the_python_example_of_the_readme_runs(capsys: pytest.CaptureFixture[str]) -> None:
    (example,) = [code for code in re.findall(r"```python\n(.*?)```", README, re.DOTALL) if "import LLM" in code]
    exec(example, {})
    shown = capsys.readouterr().out
    assert "stop (" in shown or "length (" in shown


@pytest.mark.parametrize(("index", "expected"), [(0, "length "), (1, "drafts accepted"), (2, "{'pencils': ")])
def test_the_examples_of_the_python_reference_run(index: int, expected: str, capsys: pytest.CaptureFixture[str]) -> None:
    examples = re.findall(r"```python\n(.*?)```", PYTHON, re.DOTALL)
    assert len(examples) == 3
    exec(examples[index], {})
    assert expected in capsys.readouterr().out


def test_inspect_prints_what_its_document_shows(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """But for the directory of the files."""
    (shown,) = re.findall(r"\$ paceline inspect demo\n(.*?)```", SERVER, re.DOTALL)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert main(["inspect", "demo"]) == 0
    assert capsys.readouterr().out.replace(f"{DEMO_DIR}/", "…/") == shown
