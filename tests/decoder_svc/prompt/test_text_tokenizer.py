"""Only trusted text may spell control tokens; everything else is tokenized exactly as by Hugging Face."""

from __future__ import annotations

import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import transformers
from hypothesis import assume, given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from decoder_svc.prompt import text_tokenizer
from decoder_svc.prompt.text_tokenizer import TextPiece, TextTokenizer
from decoder_svc.service import LoadedText
from lookonce.errors import InvalidParameterError
from lookonce.model.libraries.rust_panics import RustPanicError
from tests.rust_panic import GOOD_TEXT, PANICKING_TEXT, with_short_table

CORPUS = ["what is in the picture", "a red square left of a blue circle", "image im age < > | _ start end"]


def byte_level() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<s>", "</s>", "<image>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return tokenizer


def wrapped(tokenizer: Tokenizer) -> TextTokenizer:
    return TextTokenizer(
        transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")
    )


def plain(text: str) -> list[TextPiece]:
    return [TextPiece(text, is_trusted=False)]


def trusted(text: str) -> list[TextPiece]:
    return [TextPiece(text, is_trusted=True)]


@given(st.text(max_size=40))
def test_without_control_tokens_the_ids_are_those_of_hugging_face(any_text: LoadedText, text: str) -> None:
    # Hypothesis also tries strings that stand in the source code.
    assume(not any(token.content in text for token in any_text.tokenizer.backend.get_added_tokens_decoder().values()))
    expected = any_text.tokenizer.backend.encode(text).ids
    assert any_text.tokenizer.encode_trusted(text) == expected
    assert any_text.tokenizer.encode_pieces(plain(text)) == expected


@given(st.lists(st.sampled_from(["<s>", "</s>", "<image>", "<pad>", " ", "<", "image", ">", "x"]), max_size=8))
def test_trusted_text_is_tokenized_as_hugging_face_does(llava_text: LoadedText, words: list[str]) -> None:
    text = "a" + "".join(words)
    assert llava_text.tokenizer.encode_pieces(trusted(text)) == llava_text.tokenizer.backend.encode(text).ids


@given(st.lists(st.sampled_from(["<s>", "</s>", "<image>", "<im", "age>", "<", ">", " x"]), max_size=8), st.data())
def test_plain_text_never_yields_a_control_token_however_it_is_cut(
    llava_text: LoadedText, words: list[str], data: st.DataObject
) -> None:
    text = "".join(words)
    cut = data.draw(st.integers(0, len(text)))
    pieces = [TextPiece("q:", is_trusted=True), *plain(text[:cut]), *plain(text[cut:])]
    ids = llava_text.tokenizer.encode_pieces(pieces)
    assert llava_text.tokenizer.special_token_ids.isdisjoint(ids[1:])
    assert llava_text.tokenizer.decode(ids, skip_special_tokens=True) == f"q:{text}"


def test_a_control_token_cannot_be_put_together_across_the_border_of_trusted_text() -> None:
    tokenizer = wrapped(byte_level())
    ids = tokenizer.encode_pieces([*trusted("see <im"), *plain("age>"), *trusted("<image>")])
    assert ids.count(2) == 1
    assert ids[-1] == 2


def test_look_alikes_that_the_normalizer_folds_stay_plain_text() -> None:
    backend = byte_level()
    backend.normalizer = normalizers.NFKC()
    backend.add_tokens([AddedToken("<tool>", normalized=True)])
    tool_id = backend.token_to_id("<tool>")
    tokenizer = wrapped(backend)
    wide = "＜tool＞"
    assert tool_id in backend.encode(wide).ids
    assert tool_id not in tokenizer.encode_pieces(plain(wide))
    assert tool_id in tokenizer.encode_pieces(trusted("<tool>"))


def test_a_control_token_keeps_its_id_where_the_normalizer_puts_something_before_it() -> None:
    backend = byte_level()
    backend.normalizer = normalizers.Prepend("▁")
    backend.add_tokens([AddedToken("<tool>", normalized=True)])
    found = wrapped(backend).encode_pieces(trusted("<tool>"))
    assert backend.token_to_id("<tool>") in found
    assert max(found) < backend.get_vocab_size()


def test_flags_of_control_tokens_are_kept() -> None:
    backend = byte_level()
    backend.add_special_tokens([AddedToken("<|sep|>", lstrip=True, rstrip=True, normalized=False)])
    text = "a  <|sep|> \n b"
    assert wrapped(backend).encode_pieces(trusted(text)) == backend.encode(text).ids


def test_added_tokens_of_whitespace_are_text_for_everybody() -> None:
    backend = byte_level()
    backend.add_tokens([AddedToken("\n\n", normalized=False), AddedToken("    ", normalized=False)])
    text = "a\n\nb    c"
    expected = backend.encode(text).ids
    assert backend.token_to_id("\n\n") in expected
    assert wrapped(backend).encode_pieces(plain(text)) == expected


def test_ids_are_right_where_added_tokens_stand_before_the_models_own() -> None:
    """Some vocabularies number their added tokens first, so that new numbers would collide with ordinary ones."""
    state = json.loads(byte_level().to_str())
    shifted = {token: number + 1000 for token, number in state["model"]["vocab"].items() if number > 2}
    state["model"]["vocab"] = shifted
    backend = Tokenizer.from_str(json.dumps({**state, "added_tokens": []}))
    backend.post_processor = None
    backend.add_special_tokens([AddedToken("<image>", normalized=False)])
    text = "a <image> picture <image> is"
    assert wrapped(backend).encode_pieces(trusted(text)) == backend.encode(text).ids


def unigram() -> Tokenizer:
    letters = [(letter, -5.0) for letter in "abcdefghijklmnopqrstuvwxyz<>▁"]
    backend = Tokenizer(models.Unigram([("<unk>", 0.0), ("<image>", -1.0), *letters], unk_id=0, byte_fallback=False))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    backend.add_special_tokens(["<unk>", "<image>"])
    return backend


def test_a_vocabulary_that_holds_the_control_token_as_a_piece_spells_it_out() -> None:
    backend = unigram()
    tokenizer = wrapped(backend)
    ids = tokenizer.encode_pieces(plain("is <image> it"))
    image_id = backend.token_to_id("<image>")
    assert image_id not in ids
    assert [backend.id_to_token(token_id) for token_id in ids if token_id].count("<") == 1
    assert image_id in tokenizer.encode_pieces(trusted("is <image> it"))


def test_unknown_characters_are_the_unknown_token_in_anybodys_text() -> None:
    assert 0 in wrapped(unigram()).encode_pieces(plain("a é b"))


def test_text_that_cannot_be_spelled_without_a_control_token_is_refused() -> None:
    backend = Tokenizer(models.Unigram([("<unk>", 0.0), ("§", -1.0), ("a", -2.0)], unk_id=0))
    backend.add_special_tokens(["§"])
    with pytest.raises(InvalidParameterError, match="cannot be plain text"):
        wrapped(backend).encode_pieces(plain("a§"))


def test_the_beginning_of_sequence_comes_once() -> None:
    tokenizer = wrapped(byte_level())
    assert tokenizer.encode_trusted("<s>what") == tokenizer.encode_trusted("what")
    assert tokenizer.encode_pieces(trusted("<s>what")) == tokenizer.encode_trusted("what")
    assert tokenizer.encode_trusted("what").count(0) == 1


def test_a_users_beginning_of_sequence_does_not_replace_the_real_one() -> None:
    ids = wrapped(byte_level()).encode_pieces(plain("<s>what"))
    assert ids.count(0) == 1
    assert ids[0] == 0


def test_truncation_and_padding_of_the_folder_are_ignored() -> None:
    backend = byte_level()
    expected = backend.encode("what is in the picture").ids
    backend.enable_truncation(2)
    backend.enable_padding(length=50)
    tokenizer = wrapped(backend)
    assert tokenizer.encode_trusted("what is in the picture") == expected
    assert tokenizer.encode_pieces(plain("what is in the picture")) == expected


def test_unknown_ids_are_named() -> None:
    tokenizer = wrapped(byte_level())
    assert tokenizer.unknown_ids([0, 1, 5, 999_999]) == {999_999}


def test_a_text_on_which_the_tokenizer_panics_is_refused_and_others_are_not() -> None:
    backend = Tokenizer.from_str(json.dumps(with_short_table(json.loads(byte_level().to_str()))))
    tokenizer = wrapped(backend)
    for encode in (lambda text: tokenizer.encode_pieces(plain(text)), tokenizer.encode_trusted):
        with pytest.raises(InvalidParameterError, match="cannot encode") as caught:
            encode(PANICKING_TEXT)
        assert caught.value.__suppress_context__
        assert encode(GOOD_TEXT) == backend.encode(GOOD_TEXT).ids


def test_a_character_for_which_the_tokenizer_has_no_token_is_refused() -> None:
    backend = Tokenizer(models.Unigram([("<s>", 0.0), *((char, -1.0) for char in "0123456789abc")], None, False))
    backend.add_special_tokens(["<s>", "</s>"])
    tokenizer = wrapped(backend)
    assert tokenizer.encode_pieces(plain("cab")) == backend.encode("cab").ids
    with pytest.raises(InvalidParameterError, match="cannot encode"):
        tokenizer.encode_pieces(plain("taxi"))


def test_a_panic_while_ids_become_text_is_an_ordinary_error() -> None:
    backend = byte_level()
    backend.decoder = decoders.Strip("a", 1, 1)
    with pytest.raises(RustPanicError):
        wrapped(backend).decode(backend.encode("a", add_special_tokens=False).ids, skip_special_tokens=True)


@pytest.mark.parametrize("is_chat", [True, False])
def test_other_threads_run_while_a_long_text_is_tokenized(is_chat: bool) -> None:
    """One thread of the decoder is the event loop: a megabyte kept it waiting for a second."""
    tokenizer = wrapped(byte_level())
    text = "what is in the picture " * 50_000
    begun, ended = threading.Event(), threading.Event()
    # Only Rust is at work between the two events: Python code would let other threads run in any case.
    backend = tokenizer._aliased._tokenizer if is_chat else tokenizer.backend

    def work() -> None:
        begun.set()
        text_tokenizer._encoding(backend, text, True, "text.text")
        ended.set()

    with ThreadPoolExecutor(1) as threads:
        threads.submit(work)
        assert begun.wait(60)
        num_pauses = 0
        while not ended.is_set():
            time.sleep(0.001)
            num_pauses += 1
    assert num_pauses > 5
