"""Copies of the demo model that were taught, as far as their chat templates say, to call functions."""

from __future__ import annotations

import json
import pathlib
import shutil
from collections.abc import Mapping

from tests.conftest import DEMO_MODEL

_HEAD = """
{%- macro text_of(content) -%}
  {%- if content is string -%}{{ content }}{%- else -%}
    {%- for part in content -%}
      {%- if part.type == 'image' -%}<image>{%- else -%}{{ part.text }}{%- endif -%}
    {%- endfor -%}
  {%- endif -%}
{%- endmacro -%}
{{- bos_token -}}
"""
_FUNCTIONS = """
{%- if tools -%}
  {{- '<|user|>Functions:' -}}
  {%- for tool in tools -%}{{- '\\n' + (tool | tojson) -}}{%- endfor -%}
{%- endif -%}
"""
_TAIL = """
{%- if add_generation_prompt -%}
  {{- '<|assistant|>' -}}
  {%- if enable_thinking is defined and enable_thinking -%}{{- '<think>\\n' -}}{%- endif -%}
{%- endif -%}
"""


def _template(call: str, between: str = "", before: str = "", behind: str = "") -> str:
    """Returns a template that writes `call` for each call, `between` two of them, and two texts around all."""
    messages = f"""
{{%- for message in messages -%}}
  {{%- if message.role == 'tool' -%}}
    {{{{- '<|user|>Result: ' + text_of(message.content) -}}}}
  {{%- else -%}}
    {{{{- '<|' + message.role + '|>' + text_of(message.content) -}}}}
    {{%- if message.tool_calls -%}}
      {{{{- {json.dumps(before)} -}}}}
      {{%- for tool_call in message.tool_calls -%}}
        {{%- set call = tool_call.function -%}}
        {{%- if not loop.first -%}}{{{{- {json.dumps(between)} -}}}}{{%- endif -%}}
        {call}
      {{%- endfor -%}}
      {{{{- {json.dumps(behind)} -}}}}
    {{%- endif -%}}
    {{%- if message.role == 'assistant' -%}}{{{{- eos_token -}}}}{{%- endif -%}}
  {{%- endif -%}}
{{%- endfor -%}}
"""
    return _HEAD + _FUNCTIONS + messages + "{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}"


TEMPLATES: Mapping[str, str] = {
    "hermes": _template(
        """{{- '<tool_call>\\n{"name": "' + call.name + '", "arguments": ' + (call.arguments | tojson) -}}
        {{- '}\\n</tool_call>' -}}""",
        between="\n",
    ),
    "llama": _template(
        """{{- '{"name": "' + call.name + '", "parameters": ' + (call.arguments | tojson) + '}' -}}""", between="; "
    ),
    "mistral_list": _template(
        """{{- (call | tojson)[:-1] + ', "id": "' + tool_call.id + '"}' -}}
        {%- if tool_call.id | length != 9 -%}{{- raise_exception('ids have 9 characters') -}}{%- endif -%}""",
        between=", ",
        before="[TOOL_CALLS] [",
        behind="]",
    ),
    "mistral": _template("""{{- '[TOOL_CALLS]' + call.name + '[ARGS]' + (call.arguments | tojson) -}}"""),
    "python": _template(
        """{{- call.name + '(' -}}
        {%- for key, value in call.arguments.items() -%}
          {{- key + '=' + (value | tojson) -}}{%- if not loop.last -%}{{- ', ' -}}{%- endif -%}
        {%- endfor -%}{{- ')' -}}""",
        between=", ",
        before="[",
        behind="]",
    ),
    "glm": _template(
        """{{- '\\n<tool_call>' + call.name + '\\n' -}}
        {%- for key, value in call.arguments.items() -%}
          {{- '<arg_key>' + key + '</arg_key>\\n<arg_value>' -}}
          {{- value if value is string else (value | tojson) -}}{{- '</arg_value>\\n' -}}
        {%- endfor -%}{{- '</tool_call>' -}}"""
    ),
    "qwen_xml": _template(
        """{{- '\\n<tool_call>\\n<function=' + call.name + '>\\n' -}}
        {%- for key, value in call.arguments.items() -%}
          {{- '<parameter=' + key + '>\\n' -}}
          {{- value if value is string else (value | tojson) -}}{{- '\\n</parameter>\\n' -}}
        {%- endfor -%}{{- '</function>\\n</tool_call>' -}}"""
    ),
    "gemma": _template(
        """{{- '<start_function_call>call:' + call.name + '{' -}}
        {%- for key, value in call.arguments | dictsort -%}
          {{- key + ':' -}}{{- '<escape>' + value + '<escape>' if value is string else (value | tojson) -}}
          {%- if not loop.last -%}{{- ',' -}}{%- endif -%}
        {%- endfor -%}{{- '}<end_function_call>' -}}"""
    ),
}
"""By the name of the form in which they write calls."""


def with_reasoning(template: str) -> str:
    """Returns a template that knows reasoning and begins it if it is told to."""
    return template + (
        "{#- Reasoning stands between <think> and </think>. -#}"
        "{%- if add_generation_prompt and enable_thinking -%}{{- '<think>\\n' -}}{%- endif -%}"
    )


def tool_folder(target: pathlib.Path, template: str, names: Mapping[str, str] | None = None) -> pathlib.Path:
    """Returns a copy of the demo model with another template. `names` are new names of its tokens."""
    shutil.copytree(DEMO_MODEL, target)
    (target / "chat_template.jinja").write_text(template)
    if names:
        path = target / "tokenizer.json"
        text = path.read_text()
        for old, new in names.items():
            text = text.replace(json.dumps(old, ensure_ascii=False), json.dumps(new, ensure_ascii=False))
        path.write_text(text)
        config = target / "tokenizer_config.json"
        config.write_text(config.read_text().replace("<|picture|>", names.get("<|picture|>", "<|picture|>")))
    return target
