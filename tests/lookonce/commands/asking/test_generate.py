"""`lookonce generate` sends each of its flags, and prints an answer for people or for programs."""

from __future__ import annotations

import asyncio
import json
import pathlib

import pytest

from lookonce.generation import GenerateOptions, Message, ToolCall
from lookonce.images import ImageRef
from lookonce.testing import FakeServer
from tests.lookonce.command import clean_environment, run_here
from tests.lookonce.commands.conftest import Command
from tests.lookonce.sdk.sdk_servers import running_system

# Values of each flag, and of the option that the server gets.
FLAGS = {
    "temperature": (["0.5"], 0.5),
    "top_p": (["0.9"], 0.9),
    "top_k": (["5"], 5),
    "min_p": (["0.1"], 0.1),
    "repetition_penalty": (["1.1"], 1.1),
    "presence_penalty": (["-1"], -1.0),
    "frequency_penalty": (["0.25"], 0.25),
    "logit_bias": (["7=-1.5", "9=2"], {7: -1.5, 9: 2.0}),
    "seed": (["3"], 3),
    "max_tokens": (["11"], 11),
    "min_tokens": (["2"], 2),
    "stop": (["END", "a b"], ["END", "a b"]),
    "stop_token_ids": (["4", "5"], [4, 5]),
    "logprobs": (["2"], 2),
    "prompt_logprobs": (["3"], 3),
    "n": (["2"], 2),
    "best_of": (["3"], 3),
}
# Flags without a value, those of no sampling option, and those that the server does not offer.
OTHERS = {
    "ignore_eos", "bypass_prefix_cache", "request_id", "priority", "cache_salt", "adapter", "timeout_s",
    "json_schema", "regex", "grammar", "json_object", "choice",
    "tools", "tool_choice", "parallel_tool_calls", "template_arguments",
}  # fmt: skip


def test_every_option_has_a_flag_that_reaches_the_server(command: Command, server: FakeServer) -> None:
    assert set(FLAGS) | OTHERS == set(GenerateOptions.__annotations__), "a new option needs a flag"
    arguments = [
        argument
        for name, (values, _) in FLAGS.items()
        for value in values
        for argument in (
            {"stop_token_ids": "--stop-token-id", "n": "--answers"}.get(name, f"--{name.replace('_', '-')}"),
            value,
        )
    ]
    finished = command("generate", "what?", "--json", "--request-id", "mine", "--ignore-eos", *arguments)
    assert finished.returncode == 0, finished.stderr
    (request,) = server.requests
    assert request.request_id == "mine"
    assert request.options == {name: value for name, (_, value) in FLAGS.items()} | {"ignore_eos": 1}


async def test_options_beside_sampling_reach_the_server(tmp_path: pathlib.Path) -> None:
    (tmp_path / "schema.json").write_text('{"type": "object"}')
    flags = ["--priority", "-5", "--cache-salt", "pepper", "--adapter", "a", "--bypass-prefix-cache"]
    flags += ["--json-schema", f"@{tmp_path}/schema.json"]
    async with running_system() as system:
        environment = clean_environment(tmp_path) | {"LOOKONCE_TARGET": system.decoder_target}
        finished = await asyncio.to_thread(run_here, environment, "generate", "what?", *flags)
        assert finished.returncode == 0, finished.stderr
        sent = system.decoder.last
        assert (sent.priority, sent.cache_salt, sent.adapter, sent.bypass_prefix_cache) == (-5, "pepper", "a", True)
        assert sent.sampling.json_schema == '{"type": "object"}'


async def test_a_chat_has_the_system_prompt_then_images_videos_and_the_text(pictures: pathlib.Path) -> None:
    first, later = pictures / "2.png", pictures / "10.png"
    flags = ["--system", "Be short.", "--video", str(pictures), "--fps", "4", "--frame-size", "8", "6"]
    async with running_system() as system:
        environment = clean_environment(pictures) | {"LOOKONCE_TARGET": system.decoder_target}
        asked = ["generate", "what?", "--json", "-i", str(first), "--max-pixels", "99"]
        finished = await asyncio.to_thread(run_here, environment, *asked, *flags)
        assert finished.returncode == 0, finished.stderr
        instructions, question = system.decoder.last.chat.messages
    assert [part.text for part in instructions.parts] == ["Be short."]
    image, video, text = question.parts
    assert image.image.max_pixels == video.video.max_pixels == 99
    assert text.text == "what?"
    # Numbers in names count by their value; hidden files and other files are no frames.
    digests = [frame.key.digest or frame.expected_digest for frame in video.video.frames]
    assert digests == [ImageRef.from_file(path).digest for path in (first, later)]
    assert (video.video.fps, video.video.size.width, video.video.size.height) == (4.0, 8, 6)
    answer = json.loads(finished.stdout)
    assert (answer["num_images"], answer["num_video_frames"]) == (1, 2)


def test_json_is_one_object_with_the_counts_of_the_answer(command: Command, pictures: pathlib.Path) -> None:
    finished = command("generate", "-", "--json", "-i", str(pictures / "2.png"), stdin="what is it?\n")
    assert finished.returncode == 0, finished.stderr
    (line,) = finished.stdout.splitlines()
    answer = json.loads(line)
    assert answer["text"] == "a red square"
    assert answer["finish_reason"] == "stop"
    assert answer["request_id"]
    assert answer["total_time_s"] > 0
    usage = answer["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (3 + 16, 3)
    assert (usage["image_tokens"], usage["encoded_image_tokens"]) == (16, 16)
    assert "logprobs" not in answer


def test_a_cached_image_is_named_by_its_digest(command: Command, server: FakeServer, pictures: pathlib.Path) -> None:
    digest = ImageRef.from_file(pictures / "2.png").hex
    unknown = command("generate", "what?", "--image", digest)
    assert (unknown.returncode, unknown.stdout) == (1, "")
    assert unknown.stderr.startswith("error: ")
    assert command("encode", str(pictures / "2.png")).returncode == 0
    known = command("generate", "what?", "--image", digest)
    assert (known.returncode, known.stdout) == (0, "a red square\n")
    assert len(server.images.uploads) == 1


def test_several_answers_have_numbers_and_json_has_them_all(command: Command, server: FakeServer) -> None:
    finished = command("generate", "what?", "-n", "3")
    assert finished.returncode == 0, finished.stderr
    assert finished.stdout == "[1] a red square\n[2] a red square\n[3] a red square\n"
    assert "1 prompt tokens" in finished.stderr
    finished = command("generate", "what?", "-n", "2", "--json")
    answer = json.loads(finished.stdout)
    assert (answer["text"], [other["text"] for other in answer["others"]]) == ("a red square", ["a red square"])
    one = command("generate", "what?", "-n", "1")
    assert one.stdout == "a red square\n"
    assert [request.options.get("n") for request in server.requests] == [3, 2, None]


FUNCTION = {"name": "find", "description": "Finds it.", "parameters": {"type": "object"}}


def test_functions_and_their_calls(command: Command, tmp_path: pathlib.Path) -> None:
    (tmp_path / "tools.json").write_text(json.dumps([{"type": "function", "function": FUNCTION}]))
    calls = (ToolCall("abc", "find", '{"x": 1}'), ToolCall("def", "find", "{}"))
    with FakeServer(Message("assistant", "So.", calls, "It asks for two.")) as server:
        flags = ["--target", server.target, "--tools", f"@{tmp_path}/tools.json", "--tool-choice", "find"]
        flags += ["--no-parallel-tool-calls", "--template-arguments", '{"enable_thinking": true}']
        finished = command("generate", "what?", *flags)
        assert finished.stdout == 'So.\nfind({"x": 1})\nfind({})\n'
        assert "It asks for two." in finished.stderr
        found = json.loads(command("generate", "what?", "--json", *flags).stdout)
        assert found["tool_calls"] == [{"id": call.id, "name": "find", "arguments": call.arguments} for call in calls]
        assert (found["reasoning"], found["finish_reason"]) == ("It asks for two.", "tool_calls")
        (tool,) = server.requests[0].tools
        assert {
            "name": tool.name,
            "description": tool.description,
            "parameters": json.loads(str(tool.parameters)),
        } == FUNCTION
        assert (server.requests[0].tool_choice, server.requests[0].template_arguments) == (
            "find",
            '{"enable_thinking": true}',
        )


@pytest.mark.parametrize("tools", ["{", "5", "[5]", '[{"description": "x"}]', '[{"name": "x", "color": 1}]'])
def test_functions_that_are_none_are_refused(command: Command, server: FakeServer, tools: str) -> None:
    finished = command("generate", "what?", "--tools", tools)
    assert finished.returncode == 2
    assert "--tools" in finished.stderr
    assert not server.requests


def test_a_chat_takes_no_functions(command: Command, server: FakeServer) -> None:
    finished = command("chat", "--tools", '[{"name": "x"}]')
    assert finished.returncode == 2
    assert "nobody calls functions" in finished.stderr
    assert not server.requests
