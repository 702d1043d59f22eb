"""The peer's process: what it is told and answers, and what happens when it does not.

vLLM itself is not installed where these tests run. A stand-in of that name, as wide as what the worker asks of it, is
put on the worker's path; pipes, processes and their ends are the real ones.
"""

from __future__ import annotations

import argparse
import io

import PIL.Image
import pytest
from tokenizers import Tokenizer

from benchmarks import peer
from benchmarks.models import demo_model, kv_token_bytes
from benchmarks.peer import Peer, PeerError, PeerInstall, PeerPrompts, PeerRequest


def picture(width: int) -> bytes:
    file = io.BytesIO()
    PIL.Image.new("RGB", (width, 8)).save(file, "PNG")
    return file.getvalue()


def test_requests_and_answers_pass_between_other_printed_lines(install: PeerInstall) -> None:
    with Peer(install, demo_model(), kv_cache_bytes=1 << 20) as one:
        assert one.version == "0.0"
        assert one.start_s > 0
        assert one.memory_bytes() > 1 << 20
        run = one.run([PeerRequest((1, 2, 3), (picture(11), picture(13)), 4), PeerRequest((5,), (), 2)])
        assert [answer.token_ids for answer in run.answers] == [(0, 11, 13, 7), (0, 7)]
        assert [answer.num_prompt_tokens for answer in run.answers] == [3, 1]
        assert (run.answers[0].first_token_s, run.answers[0].decode_s) == (0.5, 2.0)
        one.reset()
        again = one.run([PeerRequest((5,), (), 1)] * 2, one_by_one=True)
        assert [answer.token_ids for answer in again.answers] == [(3,), (3,)]


def test_two_engines_work_at_the_same_time(install: PeerInstall) -> None:
    with (
        Peer(install, demo_model(), kv_cache_bytes=1 << 20) as one,
        Peer(install, demo_model(), kv_cache_bytes=1) as two,
    ):
        one.begin([PeerRequest((1,), (), 1)])
        two.begin([PeerRequest((1, 2), (), 1)])
        assert (two.finish().answers[0].num_prompt_tokens, one.finish().answers[0].num_prompt_tokens) == (2, 1)


def test_one_that_does_not_start_says_why(install: PeerInstall) -> None:
    with pytest.raises(PeerError, match="no such dtype"), Peer(install, demo_model(), kv_cache_bytes=1, dtype="wrong"):
        pass


def test_one_that_dies_says_why(install: PeerInstall) -> None:
    with Peer(install, demo_model(), kv_cache_bytes=1) as one, pytest.raises(PeerError, match="the engine died"):
        one.run([PeerRequest((666,), (), 1)])


def test_prompts_have_one_placeholder_per_image() -> None:
    placeholder = Tokenizer.from_file(str(demo_model() / "tokenizer.json")).token_to_id("<image>")
    prompts = PeerPrompts(demo_model())
    found = [prompts.request("What is it?", [picture(8)] * number, 1) for number in range(3)]
    assert [request.token_ids.count(placeholder) for request in found] == [0, 1, 2]
    assert [len(request.images) for request in found] == [0, 1, 2]


def test_without_a_name_there_is_no_peer_and_a_wrong_name_is_an_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("LOOKONCE_PEER_PYTHON", raising=False)
    parser = argparse.ArgumentParser()
    peer.add_arguments(parser)
    assert peer.named_peer(parser.parse_args([])) is None
    assert "peer: not run" in capsys.readouterr().out
    with pytest.raises(PeerError, match="is not a file"):
        peer.named_peer(parser.parse_args(["--peer-python", "/nowhere/python"]))


def test_bytes_of_a_token_are_keys_and_values_of_all_layers() -> None:
    import transformers

    text = transformers.AutoConfig.from_pretrained(demo_model()).get_text_config()
    width = text.num_key_value_heads * text.head_dim
    assert kv_token_bytes(demo_model()) in (
        2 * 2 * text.num_hidden_layers * width,
        2 * 4 * text.num_hidden_layers * width,
    )
