"""Every kind of tokenizer gives the ids of transformers, whatever flags its added tokens have."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import pytest
import transformers
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from decoder_svc.prompt.text_tokenizer import TextPiece, TextTokenizer
from lookonce.errors import InvalidParameterError, ModelFolderError

LETTERS = "abcdefgimnotx<>|_AB."
SPECIAL = ("<s>", "</s>", "<unk>")
# Texts of added tokens: white space, which anybody may write, and control tokens, which only the template writes.
SPACES = ("  ", "\n\n", "▁▁", "   ", "\t")
CONTROLS = ("<tool>", "<image>", "AB", "<im_end>")


def byte_level() -> Tokenizer:
    """Byte-level BPE, as in GPT-2 and Qwen."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("a", "b"), ("Ġ", "a"), ("Ġ", "Ġ"), ("o", "n")]
    tokens = [*SPECIAL, *alphabet, *("".join(merge) for merge in merges)]
    backend = Tokenizer(models.BPE({token: index for index, token in enumerate(tokens)}, merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return backend


def sentencepiece(*, byte_fallback: bool = True) -> Tokenizer:
    """BPE over white space written as "▁" by the normaliser, as in Llama's first tokenizers and Gemma."""
    merges = [("▁", "a"), ("▁", "▁"), ("a", "b")]
    fallback = [f"<0x{byte:02X}>" for byte in range(256)] if byte_fallback else []
    tokens = [*SPECIAL, *fallback, "▁", "\n", *LETTERS, *("".join(merge) for merge in merges)]
    vocab = {token: index for index, token in enumerate(tokens)}
    backend = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=byte_fallback))
    backend.normalizer = normalizers.Replace(" ", "▁")
    return backend


def legacy_llama() -> Tokenizer:
    """BPE whose normaliser also puts "▁" before each stretch of text."""
    backend = sentencepiece()
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    return backend


def metaspace() -> Tokenizer:
    """BPE over white space written as "▁" by the pre-tokenizer."""
    backend = sentencepiece(byte_fallback=False)
    backend.normalizer = normalizers.NFKC()
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    return backend


def unigram() -> Tokenizer:
    """Unigram model, as in T5 and XLM-R; the vocabulary also has a control token's text as a piece."""
    letters = [(letter, -5.0) for letter in dict.fromkeys(LETTERS + "▁")]
    pieces = [*((special, 0.0) for special in SPECIAL), ("<image>", -1.0), ("▁a", -2.0), ("▁▁", -3.0), *letters]
    backend = Tokenizer(models.Unigram(pieces, unk_id=2, byte_fallback=False))
    backend.normalizer = normalizers.Replace(" ", "▁")
    return backend


def wordpiece() -> Tokenizer:
    """WordPiece over lower-case text, as in BERT."""
    letters = [*LETTERS.lower(), *(f"##{letter}" for letter in LETTERS.lower()), "ab", "##on"]
    tokens = dict.fromkeys([*SPECIAL, *letters])
    backend = Tokenizer(models.WordPiece({token: index for index, token in enumerate(tokens)}, unk_token="<unk>"))
    backend.normalizer = normalizers.BertNormalizer(lowercase=True)
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    return backend


def sparse_words() -> Tokenizer:
    """Whole words, with gaps between their ids: a new id next to the old ones would be another word's."""
    words = {"<s>": 0, "</s>": 1, "<unk>": 2} | {letter: 40 + 7 * index for index, letter in enumerate(LETTERS)}
    backend = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    backend.normalizer = normalizers.Replace(" ", "▁")
    backend.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    return backend


KINDS = (byte_level, sentencepiece, legacy_llama, metaspace, unigram, wordpiece, sparse_words)
ANY_FLAGS = [
    dict(zip(("normalized", "lstrip", "rstrip", "single_word", "special"), flags, strict=True))
    for flags in itertools.product((False, True), repeat=5)
]


def complete(backend: Tokenizer, added: Sequence[AddedToken]) -> transformers.PreTrainedTokenizerFast:
    """Adds the special tokens, those of the caller, and a post-processor that begins each prompt with BOS."""
    backend.add_special_tokens(list(SPECIAL))
    backend.add_tokens(list(added))
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )


def is_well_defined(pretrained: transformers.PreTrainedTokenizerFast, added: Sequence[AddedToken], text: str) -> bool:
    """Whether transformers has one answer for a text.

    It has none if two added tokens are the same to the normaliser, and none if the library panics: it does for some
    runs of white space between tokens that strip their surroundings.
    """
    normalizer = pretrained.backend_tokenizer.normalizer
    found = [normalizer.normalize_str(one.content) if normalizer else one.content for one in added if one.normalized]
    if len(set(found)) < len(found):
        return False
    try:
        pretrained(text)
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        return False
    return True


def vocabulary_size(pretrained: transformers.PreTrainedTokenizerFast) -> int:
    return 1 + int(max(pretrained.get_vocab().values()))


def holds_control_token(
    pretrained: transformers.PreTrainedTokenizerFast, added: Sequence[AddedToken], text: str
) -> bool:
    """Whether transformers sees a control token in the text, or would if the token's flags were others.

    A token can be seen in the text as it is written or as the normaliser rewrites it. Where the token's flags forbid
    it there, transformers passes over its characters, while ours tokenizes them as if there were no such token.
    """
    controls = [token for token in added if token.special or not token.content.replace("▁", " ").isspace()]
    names = [*SPECIAL, *(token.content for token in controls)]
    found = set(pretrained(text, add_special_tokens=False).input_ids) - {pretrained.unk_token_id}
    normalizer = pretrained.backend_tokenizer.normalizer or normalizers.Sequence([])
    return (
        any(name in text for name in names)
        or any(normalizer.normalize_str(name) in normalizer.normalize_str(text) for name in names)
        or not found.isdisjoint(pretrained.convert_tokens_to_ids(names))
    )


def turned_on(*names: str) -> dict[str, bool]:
    """Returns the flags of an added token; those named are on."""
    return {flag: flag in names for flag in ("normalized", "lstrip", "rstrip", "single_word", "special")}


# A tab that the normaliser makes a space, beside a control token of two spaces.
TAB_AND_SPACES = {
    "\t": turned_on("normalized"),
    "  ": turned_on("normalized", "lstrip", "rstrip", "single_word", "special"),
}


@pytest.mark.parametrize("kind", KINDS)
@given(
    added=st.dictionaries(st.sampled_from(SPACES + CONTROLS), st.sampled_from(ANY_FLAGS), min_size=1, max_size=5),
    words=st.lists(st.sampled_from([*SPACES, *"ab<>on. ▁\n", "<im", "age>", "é", "ａ", "<TOOL", "on "]), max_size=12),
)
@settings(suppress_health_check=[HealthCheck.too_slow], max_examples=60)
def test_ordinary_text_has_the_ids_of_transformers(
    kind: Callable[[], Tokenizer], added: dict[str, dict[str, bool]], words: list[str]
) -> None:
    tokens = [AddedToken(content, **flags) for content, flags in added.items()]
    pretrained = complete(kind(), tokens)
    text = "".join(words)
    assume(is_well_defined(pretrained, tokens, text))
    assume(not holds_control_token(pretrained, tokens, text))
    tokenizer = TextTokenizer(pretrained)
    expected = pretrained(text).input_ids
    assert tokenizer.encode_pieces([TextPiece(text, is_trusted=False)]) == expected
    assert tokenizer.encode_pieces([TextPiece(text, is_trusted=True)]) == expected
    assert tokenizer.encode_trusted(text) == expected
    assert max(expected, default=0) < vocabulary_size(pretrained)


@pytest.mark.parametrize("kind", KINDS)
@given(
    added=st.dictionaries(st.sampled_from(SPACES + CONTROLS), st.sampled_from(ANY_FLAGS), min_size=1, max_size=5),
    words=st.lists(st.sampled_from([*SPACES, *CONTROLS, *SPECIAL, *"ab<> ", "<im", "age>"]), max_size=12),
    data=st.data(),
)
@settings(suppress_health_check=[HealthCheck.too_slow], max_examples=60)
def test_every_id_is_one_of_the_vocabulary(
    kind: Callable[[], Tokenizer], added: dict[str, dict[str, bool]], words: list[str], data: st.DataObject
) -> None:
    tokens = [AddedToken(content, **flags) for content, flags in added.items()]
    pretrained = complete(kind(), tokens)
    tokenizer = TextTokenizer(pretrained)
    pieces = [TextPiece(word, is_trusted=data.draw(st.booleans())) for word in words]
    assume(is_well_defined(pretrained, tokens, "".join(words)))
    try:
        found = tokenizer.encode_pieces(pieces)
    except InvalidParameterError:
        # A user's text that only a control token could stand for.
        return
    assert set(found) <= set(pretrained.get_vocab().values())
    assert tokenizer.unknown_ids(found) == frozenset()


@pytest.mark.parametrize("kind", KINDS)
def test_a_templates_control_tokens_count_where_transformers_sees_them(kind: Callable[[], Tokenizer]) -> None:
    for flags in ANY_FLAGS:
        if kind is legacy_llama and flags["normalized"] and flags["single_word"]:
            # The sign for a space is part of the token there, so that to transformers it never stands alone.
            continue
        pretrained = complete(kind(), [AddedToken("<tool>", **flags)])
        tokenizer = TextTokenizer(pretrained)
        for text in ("<tool>", "a<tool>b", "a <tool> b", "on. <tool>\n<tool> a", "<tool><tool>"):
            found = tokenizer.encode_pieces([TextPiece(text, is_trusted=True)])
            assert found == pretrained(text).input_ids, (flags, text)


def test_a_control_token_that_the_normalizer_would_make_is_as_if_it_did_not_exist() -> None:
    pretrained = complete(wordpiece(), [AddedToken(content, **on) for content, on in TAB_AND_SPACES.items()])
    found = TextTokenizer(pretrained).encode_pieces([TextPiece("\n\na", is_trusted=False)])
    without = complete(wordpiece(), [AddedToken("\t", **TAB_AND_SPACES["\t"])])
    assert found == without("\n\na").input_ids
    assert pretrained.convert_tokens_to_ids("  ") not in found


def test_white_space_that_the_normalizer_rewrites_keeps_its_id() -> None:
    pretrained = complete(unigram(), [AddedToken("  ", normalized=True)])
    found = TextTokenizer(pretrained).encode_pieces([TextPiece("a  b", is_trusted=False)])
    assert found == pretrained("a  b").input_ids
    assert pretrained.convert_tokens_to_ids("  ") in found


def test_a_users_words_never_switch_off_a_control_token_of_the_template() -> None:
    pretrained = complete(byte_level(), [AddedToken("<tool>", single_word=True)])
    pieces = [TextPiece("a", is_trusted=False), TextPiece("<tool>", is_trusted=True), TextPiece("b", is_trusted=False)]
    assert pretrained.convert_tokens_to_ids("<tool>") in TextTokenizer(pretrained).encode_pieces(pieces)


def test_a_normalizer_that_rewrites_the_aliases_is_refused() -> None:
    backend = byte_level()
    backend.normalizer = normalizers.Replace(Regex("[0-9]"), "0")
    pretrained = complete(backend, [AddedToken("<tool>", normalized=True), AddedToken("<image>", normalized=True)])
    with pytest.raises(ModelFolderError, match="normalizer changes digits"):
        TextTokenizer(pretrained)
