"""The chat template: Hugging Face's conventions, the sandbox, errors."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
from tiny_models import TEMPLATE, random_tensors, target_shapes, tiny_target

from paceline.config import DEMO_TARGET
from paceline.errors import InvalidRequest, LoadError
from paceline.weights.load import open_target
from paceline.weights.safetensors import HfDirectory
from paceline.weights.template import ChatTemplate

MESSAGES = [{"role": "user", "content": "1 < 2 & 'é'"}]


def test_demo_template_renders_chat_and_tools() -> None:
    template = open_target(DEMO_TARGET).chat_template()
    assert template is not None
    assert template.render(MESSAGES) == "<|im_start|>user\n1 < 2 & 'é'<|im_end|>\n<|im_start|>assistant\n"
    assert template.render(MESSAGES, add_generation_prompt=False) == "<|im_start|>user\n1 < 2 & 'é'<|im_end|>\n"
    tool = {"type": "function", "function": {"name": "f", "description": "a < b, é"}}
    assert json.dumps(tool, ensure_ascii=False) in template.render(MESSAGES, tools=[tool])


def test_blocks_are_trimmed_and_json_is_plain() -> None:
    template = ChatTemplate(
        "  {% if true %}\n{{ messages | tojson }}|{{ {'b': 1, 'a': 2} | tojson(indent=1) }}\n  {% endif %}\n"
    )
    assert template.render(MESSAGES) == '[{"role": "user", "content": "1 < 2 & \'é\'"}]|{\n "b": 1,\n "a": 2\n}\n'


def test_variables_reach_the_template() -> None:
    template = ChatTemplate("{{ bos_token }}{{ enable_thinking }}{{ eos_token }}", bos_token="<b>", eos_token="<e>")
    assert template.render(MESSAGES, enable_thinking=False) == "<b>False<e>"


def test_extra_variables_cannot_replace_the_messages() -> None:
    template = ChatTemplate("{{ messages | length }}")
    assert template.render(MESSAGES, messages=[]) == "1"


def test_loop_controls_and_time() -> None:
    template = ChatTemplate("{% for m in messages %}{% break %}{% endfor %}{{ strftime_now('%Y') | length }}")
    assert template.render(MESSAGES) == "4"


def test_the_templates_own_refusal_is_told() -> None:
    template = ChatTemplate("{{ raise_exception('roles must alternate') }}")
    with pytest.raises(InvalidRequest, match="rejects the messages: roles must alternate") as caught:
        template.render(MESSAGES)
    assert caught.value.param == "messages"


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages[0].content + 1 }}",
        "{{ messages[7].content }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    ],
)
def test_failures_while_rendering_are_invalid_requests(source: str) -> None:
    with pytest.raises(InvalidRequest, match="the chat template rejects the messages"):
        ChatTemplate(source).render(MESSAGES)


def test_an_unreadable_template_is_a_load_error(tmp_path: Path) -> None:
    path = tiny_target(
        tmp_path / "t.gguf", tensors=random_tensors(target_shapes()), **{"tokenizer.chat_template": "a\n{% if %}"}
    )
    with pytest.raises(LoadError, match=r"t\.gguf: the chat template cannot be read, line 2"):
        open_target(path).chat_template()


def test_no_template(tmp_path: Path) -> None:
    path = tiny_target(tmp_path / "t.gguf", **{"tokenizer.chat_template": None})
    assert open_target(path).chat_template() is None


def hf_source(path: Path) -> str | None:
    directory = HfDirectory.__new__(HfDirectory)
    directory.path = path
    template = directory.chat_template()
    return template.source if template else None


def test_hugging_face_places(tmp_path: Path) -> None:
    assert hf_source(tmp_path) is None
    settings = tmp_path / "tokenizer_config.json"
    settings.write_text(json.dumps({"chat_template": "one"}))
    assert hf_source(tmp_path) == "one"
    named = [{"name": "rag", "template": "two"}, {"name": "default", "template": "three"}]
    settings.write_text(json.dumps({"chat_template": named}))
    assert hf_source(tmp_path) == "three"
    (tmp_path / "chat_template.jinja").write_text(TEMPLATE)
    assert hf_source(tmp_path) == TEMPLATE


@pytest.mark.parametrize(
    "source",
    [
        "{% set r = range(99999) %}{% for i in r %}{% for j in r %}{% endfor %}{% endfor %}",
        "{% set r = range(99999) %}{% for i in r recursive %}{% for j in r %}x{% endfor %}{% endfor %}",
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(40) }}",
    ],
    ids=["loops", "recursive", "macros"],
)
def test_a_template_that_does_not_end_is_stopped(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.weights.template.MAX_SECONDS", 0.1)
    began = time.thread_time()
    with pytest.raises(InvalidRequest, match=r"rejects the messages: it takes longer than 0\.1 s"):
        ChatTemplate(source).render(MESSAGES)
    assert time.thread_time() - began < 2


def test_a_text_without_end_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.weights.template.MAX_CHARACTERS", 1000)
    repeated = "{% for i in range(N) %}0123456789{% endfor %}"
    assert len(ChatTemplate(repeated.replace("N", "100")).render(MESSAGES)) == 1000
    with pytest.raises(InvalidRequest, match="more than 1000 characters"):
        ChatTemplate(repeated.replace("N", "101")).render(MESSAGES)


@pytest.mark.parametrize(
    "expression",
    [
        "'x' * 10 ** 9",
        "10 ** 9 * [1]",
        "9 ** (9 ** 9)",
        "'%999999999d' % 1",
        "'x'.ljust(999999999)",
        "'{:999999999}'.format(1)",
        "'x' | center(999999999)",
        "'x\\ny' | indent(width=999999999)",
    ],
)
def test_one_operation_cannot_take_all_memory(expression: str) -> None:
    with pytest.raises(InvalidRequest, match="a number of more than"):
        ChatTemplate("{{ " + expression + " }}").render(MESSAGES)


def test_the_limits_leave_ordinary_templates_alone() -> None:
    template = ChatTemplate(
        "{% for m in messages %}{{ loop.index }}/{{ loop.length }}{{ ' ' * 2 }}{{ '%05d' % 7 }}{{ '{:>3}'.format(1) }}"
        "{{ 'ab' | indent(2) }}{% else %}none{% endfor %}{{ 2 ** 3 }}"
    )
    assert template.render(MESSAGES) == "1/1  00007  1ab8"
    assert template.render([]) == "none8"


def test_many_messages_are_far_from_the_limit() -> None:
    template = open_target(DEMO_TARGET).chat_template()
    assert template is not None
    began = time.thread_time()
    assert len(template.render(MESSAGES * 20_000)) > 200_000
    assert time.thread_time() - began < 2
