"""A template's form of calls is recognised by what it writes."""

from __future__ import annotations

import pytest

from decoder_svc.tools.tool_formats import PROBE_KEY, PROBE_NAME, PROBE_VALUE, format_of

ARGUMENTS = f'{{"{PROBE_KEY}": "{PROBE_VALUE}"}}'
WRITTEN = {
    "hermes": f'<tool_call>\n{{"name": "{PROBE_NAME}", "arguments": {ARGUMENTS}}}\n</tool_call>',
    "mistral": f"[TOOL_CALLS]{PROBE_NAME}[ARGS]{ARGUMENTS}</s>",
    "mistral_list": f'[TOOL_CALLS] [{{"name": "{PROBE_NAME}", "arguments": {ARGUMENTS}, "id": "abcdefghi"}}]',
    "python": f"[{PROBE_NAME}({PROBE_KEY}='{PROBE_VALUE}')]",
    "llama": f'{{"name": "{PROBE_NAME}", "parameters": {ARGUMENTS}}}',
    "glm": f"<tool_call>{PROBE_NAME}\n<arg_key>{PROBE_KEY}</arg_key>\n<arg_value>{PROBE_VALUE}</arg_value>\n"
    "</tool_call>",
    "qwen_xml": f"<tool_call>\n<function={PROBE_NAME}>\n<parameter={PROBE_KEY}>\n{PROBE_VALUE}\n</parameter>\n"
    "</function>\n</tool_call>",
    "gemma": f"<start_function_call>call:{PROBE_NAME}{{{PROBE_KEY}:<escape>{PROBE_VALUE}<escape>}}<end_function_call>",
    "gemma4": f'<|tool_call>call:{PROBE_NAME}{{{PROBE_KEY}:<|"|>{PROBE_VALUE}<|"|>}}<tool_call|>',
}


@pytest.mark.parametrize("name", sorted(WRITTEN))
def test_forms_are_recognised(name: str) -> None:
    form = format_of(f"User: {PROBE_NAME}?\nAssistant: {WRITTEN[name]}\nResult: ?")
    assert form is not None
    assert form.name == name


@pytest.mark.parametrize(
    "written", ["", PROBE_NAME, f"<call>{PROBE_NAME} {ARGUMENTS}</call>", f"<tool_call>{PROBE_NAME}</tool_call>"]
)
def test_an_unknown_form_is_none(written: str) -> None:
    assert format_of(written) is None
