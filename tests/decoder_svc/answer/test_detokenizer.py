"""The pieces of streamed text are the whole text, end at whole characters, and never contain a stop string."""

from __future__ import annotations

import itertools

import pytest
import transformers
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers

from decoder_svc.answer.detokenizer import IncrementalDecoder, StopFilter
from decoder_svc.prompt.text_tokenizer import TextTokenizer
from decoder_svc.service import LoadedText

ANY_TEXT = st.text(st.one_of(st.characters(codec="utf-8"), st.sampled_from("é€😀☃️漢字 \ufffd\u200d")), max_size=30)
FIXTURES = settings(max_examples=200)


def pieces_of(tokenizer: TextTokenizer, token_ids: list[int]) -> list[str]:
    decoder = IncrementalDecoder(tokenizer)
    return [*(decoder.push(token_id) for token_id in token_ids), decoder.flush()]


@given(ANY_TEXT)
@FIXTURES
def test_any_text_comes_out_whole_and_in_whole_characters(llava_text: LoadedText, text: str) -> None:
    # Control tokens do not come out. Hypothesis also tries strings that stand in the source code.
    backend = llava_text.tokenizer.backend
    assume(not any(token.content in text for token in backend.get_added_tokens_decoder().values()))
    token_ids = backend.encode(text, add_special_tokens=False).ids
    pieces = pieces_of(llava_text.tokenizer, token_ids)
    assert "".join(pieces) == text
    if "\ufffd" not in text:
        assert all("\ufffd" not in piece for piece in pieces)
        assert pieces[-1] == ""


@given(st.data())
@FIXTURES
def test_any_ids_come_out_as_when_decoded_at_once(llava_text: LoadedText, data: st.DataObject) -> None:
    """The ids are mostly broken UTF-8, because each byte has a token of its own in this vocabulary."""
    one_byte = st.integers(4, 259)
    token_ids = data.draw(st.lists(st.one_of(one_byte, st.integers(0, llava_text.vocab_size - 1)), max_size=60))
    expected = llava_text.tokenizer.backend.decode(token_ids, skip_special_tokens=True)
    assert "".join(pieces_of(llava_text.tokenizer, token_ids)) == expected


def test_every_sequence_of_a_few_hard_bytes_comes_out_as_when_decoded_at_once(llava_text: LoadedText) -> None:
    # First bytes of characters of 4, 3 and 2 bytes, a following byte, a letter.
    hard = [byte_id(llava_text, byte) for byte in (0xF0, 0xE2, 0xC3, 0x9F, 0x61)]
    for token_ids in itertools.product(hard, repeat=5):
        expected = llava_text.tokenizer.backend.decode(list(token_ids))
        assert "".join(pieces_of(llava_text.tokenizer, list(token_ids))) == expected


def byte_id(text: LoadedText, byte: int) -> int:
    """Returns the token of a byte. The byte-level alphabet (GPT-2's table) has a letter for each byte."""
    visible = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [value for value in range(256) if value not in visible]
    letter = chr(byte) if byte in visible else chr(256 + others.index(byte))
    token_id = text.tokenizer.backend.token_to_id(letter)
    assert token_id is not None
    return int(token_id)


def test_endless_broken_bytes_come_out_while_they_run(llava_text: LoadedText) -> None:
    pieces = pieces_of(llava_text.tokenizer, [byte_id(llava_text, 0x9F)] * 200)
    assert "".join(pieces) == "\ufffd" * 200
    assert len("".join(pieces[:-1])) > 180


@pytest.mark.parametrize("num_broken", range(8, 20))
def test_a_character_after_broken_bytes_is_never_cut(llava_text: LoadedText, num_broken: int) -> None:
    """This holds wherever the bound on pending tokens falls."""
    for character in "é€😀":
        tail = [byte_id(llava_text, byte) for byte in character.encode()]
        token_ids = [byte_id(llava_text, 0x9F)] * num_broken + tail
        assert "".join(pieces_of(llava_text.tokenizer, token_ids)) == "\ufffd" * num_broken + character


def test_special_tokens_leave_no_trace(llava_text: LoadedText) -> None:
    backend = llava_text.tokenizer.backend
    token_ids = backend.encode("é</s>€<pad>😀", add_special_tokens=False).ids
    assert "".join(pieces_of(llava_text.tokenizer, token_ids)) == "é€😀"


def byte_fallback() -> TextTokenizer:
    """A vocabulary like that of Llama 2: words with a leading mark, and a token for each byte."""
    vocabulary = {"<unk>": 0, **{f"<0x{byte:02X}>": byte + 1 for byte in range(256)}}
    for token in ("▁", "a", "b", "▁a", "▁ab", "é", "ab"):
        vocabulary[token] = len(vocabulary)
    merges = [("▁", "a"), ("a", "b"), ("▁a", "b")]
    backend = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return TextTokenizer(transformers.PreTrainedTokenizerFast(tokenizer_object=backend))


@given(st.text(st.sampled_from("ab é€😀漢"), max_size=20))
@settings(max_examples=200)
def test_any_text_comes_out_whole_with_byte_fallback(text: str) -> None:
    tokenizer = byte_fallback()
    token_ids = tokenizer.backend.encode(text).ids
    pieces = pieces_of(tokenizer, token_ids)
    assert "".join(pieces) == tokenizer.backend.decode(token_ids) == text
    assert all("\ufffd" not in piece for piece in pieces)


def test_characters_of_a_long_run_of_byte_tokens_come_one_by_one() -> None:
    tokenizer = byte_fallback()
    token_ids = tokenizer.backend.encode("漢字漢字").ids
    pieces = [piece for piece in pieces_of(tokenizer, token_ids) if piece]
    assert "".join(pieces) == "漢字漢字"
    assert len(pieces) == 4


def test_a_run_of_byte_tokens_that_breaks_off_keeps_its_whole_characters() -> None:
    tokenizer = byte_fallback()
    token_ids = tokenizer.backend.encode("é漢").ids[:-1]
    assert "".join(pieces_of(tokenizer, token_ids)).startswith("é\ufffd")


STOPS = st.lists(st.text("ab.", min_size=1, max_size=4), min_size=1, max_size=3)


def filtered(stop_strings: list[str], chunks: list[str]) -> tuple[str, bool]:
    stop_filter = StopFilter(stop_strings)
    passed = []
    for chunk in chunks:
        result = stop_filter.push(chunk)
        passed.append(result.text)
        if result.is_stopped:
            return "".join(passed), True
    return "".join([*passed, stop_filter.flush()]), False


def expected_stop(stop_strings: list[str], text: str) -> tuple[str, bool]:
    """A plain reference: reads letter by letter until the text ends in a stop string."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stop_strings if text[:end].endswith(stop)]
        if found:
            return text[: end - max(map(len, found))], True
    return text, False


@given(STOPS, st.lists(st.text("ab.c", max_size=5), max_size=8))
@settings(max_examples=300)
def test_text_passes_up_to_the_first_stop_string_however_it_is_cut(stops: list[str], chunks: list[str]) -> None:
    assert filtered(stops, chunks) == expected_stop(stops, "".join(chunks))


@given(STOPS, st.lists(st.text("ab.c", max_size=5), max_size=8))
@settings(max_examples=300)
def test_nothing_is_held_back_that_cannot_begin_a_stop_string(stops: list[str], chunks: list[str]) -> None:
    stop_filter = StopFilter(stops)
    passed = ""
    for chunk in chunks:
        result = stop_filter.push(chunk)
        if result.is_stopped:
            return
        passed += result.text
    held = stop_filter.flush()
    assert passed + held == "".join(chunks)
    assert held == "" or any(stop.startswith(held) and stop != held for stop in stops)


@pytest.mark.parametrize("text", ["", "plain", "a\nb"])
def test_without_stop_strings_everything_passes_at_once(text: str) -> None:
    result = StopFilter([]).push(text)
    assert (result.text, result.is_stopped) == (text, False)
