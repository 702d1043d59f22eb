"""Builds the engine's prompt from a caller's prompt and resolved images: expanded token ids and image spans.

Knows nothing of the gRPC messages.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

from decoder_svc.prompt.chat_template import ChatTemplate
from decoder_svc.prompt.family import DecoderFamily
from decoder_svc.prompt.image_layout import ImageLayout, expanded
from decoder_svc.prompt.prompt_spec import (
    ChatPrompt,
    ImageSource,
    PromptSpec,
    TextPrompt,
    TokenPrompt,
    VideoSource,
    texts_of,
)
from decoder_svc.prompt.text_tokenizer import TextPiece, TextTokenizer
from decoder_svc.prompt.video_frames import SplitVideo
from decoder_svc.scheduling.prompt import ImageItem, Prompt, Span
from lookonce.content_key import ContentKey, ProcessorOptions
from lookonce.errors import (
    ContextTooLongError,
    ImageCountError,
    InvalidParameterError,
    ModelFolderError,
    PlaceholderMismatchError,
    PromptEmptyError,
    UnsupportedError,
)
from lookonce.image_file import ImageFile, files_of
from lookonce.model.pretrained_tokenizer import NO_BOS


@dataclass(frozen=True, slots=True)
class ResolvedImage:
    """An image (or entry of video frames) with known identity and size. Its rows need not exist yet."""

    key: ContentKey
    # Size of the upright image in pixels.
    width: int
    height: int
    options: ProcessorOptions
    # The original file if the request contained it; None for a reference by digest.
    data: ImageFile | None = field(repr=False)
    # Number of rows according to the cache; None if the cache was not asked.
    num_rows: int | None = None
    # `ImageHeader.num_pixels` of the file if the request contained it, of a pair that of the frame that costs more.
    num_file_pixels: int = 0

    @property
    def num_inline_pixels(self) -> int:
        """The number of pixels that decoding the files in the request costs; 0 for a reference by digest."""
        return 0 if self.data is None else self.num_file_pixels * len(files_of(self.data))


@dataclass(frozen=True, slots=True)
class PromptLimits:
    """Upper limits on the size of a prompt."""

    # Tokens of prompt plus completion.
    max_context_tokens: int
    max_images_per_prompt: int
    # Size of the model's token embedding table: valid ids are 0..vocab_size - 1, and the image token.
    vocab_size: int
    max_video_frames_per_prompt: int = 0


class PromptBuilder:
    """Checks and builds prompts for one model; safe to use from several threads at once."""

    def __init__(
        self,
        tokenizer: TextTokenizer,
        template: ChatTemplate | None,
        family: DecoderFamily,
        limits: PromptLimits,
    ) -> None:
        """`template` None: chat prompts are refused.

        Raises ModelFolderError if the family's prompts have a BOS token in their middle and the tokenizer has none.
        """
        if family.finish_text is not None and not tokenizer.bos_token:
            raise ModelFolderError(NO_BOS)
        self._tokenizer = tokenizer
        self._template = template
        self._family = family
        self._limits = limits

    def check(self, spec: PromptSpec) -> None:
        """Runs the checks that need no image to be hashed or looked up.

        Raises PromptEmptyError, ImageCountError, ContextTooLongError (more text than the context holds even in the
        longest tokens), InvalidParameterError (ids outside the vocabulary, wrong processor options) and
        UnsupportedError (chat without a template, videos without support).
        """
        if len(spec.images) > self._limits.max_images_per_prompt:
            raise ImageCountError(
                f"the prompt has {len(spec.images)} images, the limit is {self._limits.max_images_per_prompt}"
            )
        if isinstance(spec, ChatPrompt) and spec.videos:
            self._check_videos(spec.videos)
        for index, source in enumerate(spec.images):
            try:
                self._family.check_options(source.options)
            except InvalidParameterError as error:
                raise InvalidParameterError(f"images[{index}].{error.field}", error.description) from None
        if isinstance(spec, ChatPrompt):
            self._check_chat(spec)
        elif isinstance(spec, TextPrompt):
            if not spec.text:
                raise PromptEmptyError("text.text is empty; send some text")
            self._check_text([spec.text])
        else:
            self._check_tokens(spec)

    def image_sources(self, spec: PromptSpec, videos: Sequence[SplitVideo] = ()) -> tuple[ImageSource, ...]:
        """Returns the prompt's images and the entries of its videos in reading order.

        Sets the processor options that depend on the whole prompt, such as `beside_others`.
        """
        images = spec.images
        if len(images) > 1 and self._family.depends_on_image_count:
            images = tuple(replace(one, options=replace(one.options, beside_others=True)) for one in images)
        if not isinstance(spec, ChatPrompt) or not videos:
            return images
        upcoming_images, upcoming_videos = iter(images), iter(videos)
        return tuple(
            source
            for one in spec.visuals
            for source in (next(upcoming_videos).sources if isinstance(one, VideoSource) else (next(upcoming_images),))
        )

    def build(self, spec: PromptSpec, images: Sequence[ResolvedImage], videos: Sequence[SplitVideo] = ()) -> Prompt:
        """Builds the prompt. Takes milliseconds, so do not call it on an event loop.

        `images` are the resolved `image_sources`. The kinds of prompts differ as follows:

        * Chat is rendered by the model's template; control tokens spelled in the messages are plain text.
        * Text was rendered by the caller, so control tokens count; each image placeholder stands for one image.
        * Tokens have one placeholder id per image, or the tokens of every image already in place.

        Raises ImageCountError, PlaceholderMismatchError, ImageTooLargeError, and InvalidParameterError for a
        conversation that the template refuses.
        """
        layouts = self._layouts(images, videos)
        for image, layout in zip(images, layouts, strict=True):
            num_rows = layout.num_rows + layout.num_unused_rows
            if image.num_rows is not None and image.num_rows != num_rows:
                raise PlaceholderMismatchError(
                    f"an image has {image.num_rows} cached rows, but this model's layout takes {num_rows}"
                )
        token_ids, spans = self._placed(spec, layouts, videos)
        items = [
            ImageItem(
                image.key,
                span,
                layout.num_rows,
                image.options,
                image.data,
                layout.row_tokens,
                _time_of(layout),
                layout.num_unused_rows,
            )
            for image, span, layout in zip(images, spans, layouts, strict=True)
        ]
        if (num_markers := self._family.num_last_markers(token_ids, spans)) is not None:
            items[-1] = replace(items[-1], time=num_markers)
        positions = self._family.positions(token_ids, spans, layouts)
        return Prompt(tuple(token_ids), tuple(items), positions, self._family.mask)

    def continuation_ids(self, spec: PromptSpec, continuation: str | tuple[int, ...]) -> tuple[int, ...]:
        """Returns the token ids of a continuation: of a text, those that it adds to the prompt's text.

        Raises InvalidParameterError, without a field, for one without tokens and for ids outside the vocabulary.
        """
        token_ids = self._added_ids(spec, continuation) if isinstance(continuation, str) else continuation
        if not token_ids:
            raise InvalidParameterError("", "must have at least one token")
        if max(token_ids) >= self._limits.vocab_size:
            raise InvalidParameterError(
                "", f"must be below the vocabulary's {self._limits.vocab_size}, got {max(token_ids)}"
            )
        return token_ids

    def _added_ids(self, spec: PromptSpec, text: str) -> tuple[int, ...]:
        """Returns the tokens that a text adds to those of the prompt, without the tokens of its images."""
        tokenizer = self._tokenizer
        if isinstance(spec, TokenPrompt):
            # Nothing says how the prompt's text would go on.
            return tuple(tokenizer.encode_trusted(text, is_complete=True))
        if isinstance(spec, TextPrompt):
            before, whole = map(tokenizer.encode_trusted, (spec.text, spec.text + text))
            alone = tokenizer.encode_trusted(text, is_complete=True)
        else:
            pieces, piece = self._rendered(spec), TextPiece(text, is_trusted=False)
            before, whole = map(tokenizer.encode_pieces, (pieces, [*pieces, piece]))
            alone = tokenizer.encode_pieces([piece], is_complete=True)
        if whole[: len(before)] == before:
            return tuple(whole[len(before) :])
        # A token would hold the end of the prompt and the beginning of the text. The text gets tokens of its own.
        texts = [tokenizer.decode(ids, skip_special_tokens=False) for ids in ([*before, *alone], whole)]
        if texts[0] != texts[1]:
            raise InvalidParameterError("", "shares a token with the end of the prompt, and cannot be written apart")
        return tuple(alone)

    def _layouts(self, images: Sequence[ResolvedImage], videos: Sequence[SplitVideo]) -> list[ImageLayout]:
        """Returns one layout per image: by its size, or for an entry of frames the layout from its video."""
        of_frames = (layout for video in videos for layout in video.layouts)
        return [
            next(of_frames)
            if image.options.frame_size is not None
            else self._family.image_layout(image.width, image.height, image.options)
            for image in images
        ]

    def _check_videos(self, videos: Sequence[VideoSource]) -> None:
        if self._template is None or not self._template.takes_videos or not self._limits.max_video_frames_per_prompt:
            reason = self._family.no_video_reason or "the chat template or this server's limits allow none"
            raise UnsupportedError(f"this model takes no videos here: {reason}; send single images")
        num_frames = sum(len(video.frames) for video in videos)
        if num_frames > self._limits.max_video_frames_per_prompt:
            raise ImageCountError(
                f"the prompt has {num_frames} video frames, the limit is {self._limits.max_video_frames_per_prompt}"
            )

    def _check_chat(self, spec: ChatPrompt) -> None:
        if self._template is None:
            raise UnsupportedError(
                "this model has no chat template; send a text or token prompt, in which "
                f"{self._family.placeholder} stands for each image (TextPrompt in Python, `lookonce generate --raw`)"
            )
        if not spec.messages:
            raise PromptEmptyError("chat.messages is empty; send at least one message")
        for index, message in enumerate(spec.messages):
            if not message.parts and not message.calls:
                raise InvalidParameterError(f"chat.messages[{index}].parts", "must not be empty")
        self._check_text(texts_of(spec))

    def _check_text(self, texts: Iterable[str]) -> None:
        num_chars = sum(map(len, texts))
        limit = self._limits.max_context_tokens * self._tokenizer.longest_token_chars
        if num_chars > limit:
            raise ContextTooLongError(
                f"a text of {num_chars} characters cannot fit into {self._limits.max_context_tokens} tokens"
            )

    def _check_tokens(self, spec: TokenPrompt) -> None:
        if not spec.token_ids:
            raise PromptEmptyError("tokens.token_ids is empty; send at least one id")
        if len(spec.token_ids) > self._limits.max_context_tokens:
            raise ContextTooLongError(
                f"the prompt has {len(spec.token_ids)} tokens, the context {self._limits.max_context_tokens}"
            )
        outside = {token_id for token_id in spec.token_ids if token_id >= self._limits.vocab_size}
        outside.discard(self._family.image_token_id)
        if outside:
            raise InvalidParameterError(
                "tokens.token_ids", f"must be below the vocabulary's {self._limits.vocab_size}, got {min(outside)}"
            )

    def _placed(
        self, spec: PromptSpec, layouts: Sequence[ImageLayout], videos: Sequence[SplitVideo]
    ) -> tuple[list[int], list[Span]]:
        """Returns the ids with every image's tokens in place, and the images' spans."""
        if isinstance(spec, TokenPrompt):
            return self._placed_in_tokens(spec.token_ids, layouts)
        if isinstance(spec, TextPrompt):
            pieces = [TextPiece(self._finished(spec.text), is_trusted=True)]
            of_images = self._image_texts(layouts)
            text = _filled(pieces, self._family.placeholder, of_images, self._family.closing)[0].text
            token_ids = self._tokenizer.encode_trusted(text, is_complete=self._family.finish_text is not None)
        else:
            pieces = self._filled_chat(self._rendered(spec), layouts, videos)
            token_ids = self._tokenizer.encode_pieces(pieces)
            if not token_ids:
                raise PromptEmptyError("the conversation has no token; send some text")
        row_ids = {self._family.image_token_id, *(layout.row_token_id for layout in layouts)}
        self._check_embedded(spec, set(token_ids) - row_ids)
        runs = [run for layout in layouts for run in layout.runs]
        num_found = sum(map(token_ids.count, row_ids))
        if num_found != len(runs):
            raise PlaceholderMismatchError(
                f"the prompt has {num_found} image tokens, but its images take {len(runs)}; "
                f"write {self._family.placeholder} once for each image, and nothing else for it"
            )
        token_ids = list(expanded(token_ids, row_ids, runs))
        return token_ids, _found_spans(token_ids, layouts)

    def _rendered(self, chat: ChatPrompt) -> list[TextPiece]:
        assert self._template is not None, "check() comes first"
        return self._template.render(chat.messages, chat.shown_tools, chat.template_arguments)

    def _check_embedded(self, spec: PromptSpec, token_ids: set[int]) -> None:
        """Raises InvalidParameterError for ids of the tokenizer that the model has no embedding for."""
        if max(token_ids, default=0) >= self._limits.vocab_size:
            raise InvalidParameterError(
                "text.text" if isinstance(spec, TextPrompt) else "chat.messages",
                f"has a token with id {max(token_ids)}, and this model's vocabulary has {self._limits.vocab_size}",
            )

    def _finished(self, text: str) -> str:
        finish, bos_token = self._family.finish_text, self._tokenizer.bos_token
        return text if finish is None or bos_token is None else finish(text, bos_token)

    def _filled_chat(
        self, pieces: Sequence[TextPiece], layouts: Sequence[ImageLayout], videos: Sequence[SplitVideo]
    ) -> list[TextPiece]:
        """Replaces the placeholders of all images and videos in the rendered pieces by their texts."""
        in_videos = {id(layout) for video in videos for layout in video.layouts}
        of_images = self._image_texts([layout for layout in layouts if id(layout) not in in_videos])
        filled = _filled(pieces, self._family.placeholder, of_images, self._family.closing)
        if not videos:
            return filled
        assert self._family.video_placeholder is not None, "check() comes first"
        of_videos = ["".join(layout.text for layout in video.layouts) for video in videos]
        return _filled(filled, self._family.video_placeholder, of_videos)

    def _image_texts(self, layouts: Sequence[ImageLayout]) -> list[str]:
        """Returns the text of each image of a prompt, whose layouts are given in order."""
        return [self._family.opening(number) + layout.text for number, layout in enumerate(layouts)]

    def _placed_in_tokens(
        self, token_ids: Sequence[int], layouts: Sequence[ImageLayout]
    ) -> tuple[list[int], list[Span]]:
        """Places images in token ids that have one placeholder id per image, or all tokens of every image already."""
        image_id, placeholder_id = self._family.image_token_id, self._family.placeholder_id
        num_image_tokens = token_ids.count(image_id)
        num_placeholders = 0 if placeholder_id is None else token_ids.count(placeholder_id)
        is_placed = num_image_tokens > 0 if image_id != placeholder_id else num_placeholders > len(layouts) > 0
        if layouts and not is_placed and image_id == placeholder_id and _is_whole(token_ids, layouts):
            # Images of one row each: the number of their tokens equals the number of placeholders.
            is_placed = True
        if not is_placed:
            if num_placeholders != len(layouts):
                raise _wrong_count(len(layouts), num_placeholders)
            return _placed_ids(token_ids, placeholder_id, layouts, self._family)
        num_expected = sum(sum(layout.runs) for layout in layouts)
        if num_image_tokens != num_expected:
            raise PlaceholderMismatchError(
                f"{num_image_tokens} placeholder tokens for images that take {num_expected}; "
                "send one per image, or as many as Tokenize returns"
            )
        return list(token_ids), _found_spans(token_ids, layouts)


def _time_of(layout: ImageLayout) -> int | None:
    """Returns the time of a frame pair that continues a video; None for images and for a video's first pair."""
    return None if layout.place is None or layout.place.index == 0 else layout.place.time


def _wrong_count(num_images: int, num_placeholders: int) -> ImageCountError:
    return ImageCountError(f"{num_images} images for {num_placeholders} placeholders; each placeholder takes one image")


def _filled(
    pieces: Sequence[TextPiece],
    placeholder: str,
    texts: Sequence[str],
    closing: Callable[[str | None], str] = lambda _behind: "",
) -> list[TextPiece]:
    """Replaces the k-th placeholder in trusted pieces by the k-th text. Raises ImageCountError on a wrong number.

    `closing` maps what follows a placeholder to more text: a text that it begins with, or None for another placeholder.
    """
    num_placeholders = sum(piece.text.count(placeholder) for piece in pieces if piece.is_trusted)
    if num_placeholders != len(texts):
        raise _wrong_count(len(texts), num_placeholders)
    upcoming = reversed(texts)
    filled: list[TextPiece] = []
    behind: str | None = ""
    for piece in reversed(pieces):
        first, *rest = piece.text.split(placeholder) if piece.is_trusted else [piece.text]
        for index, part in reversed(list(enumerate(rest))):
            rest[index] = next(upcoming) + closing(part or behind) + part
            behind = None
        behind = first or behind
        filled.append(replace(piece, text="".join([first, *rest])))
    return filled[::-1]


def _placed_ids(
    token_ids: Sequence[int], placeholder_id: int | None, layouts: Sequence[ImageLayout], family: DecoderFamily
) -> tuple[list[int], list[Span]]:
    """Replaces the k-th placeholder id by the k-th layout's tokens, and returns the ids with the images' spans.

    The family's opening precedes every image, and its closing follows each one that is not followed by another.
    """
    placed: list[int] = []
    spans: list[Span] = []
    for token_id, next_id in itertools.zip_longest(token_ids, token_ids[1:]):
        if token_id != placeholder_id:
            placed.append(token_id)
            continue
        layout = layouts[len(spans)]
        placed.extend(family.opening_ids(len(spans)))
        spans.append(Span(len(placed) + layout.span_start, layout.span_length))
        placed.extend(layout.token_ids)
        if next_id != placeholder_id:
            placed.extend(family.closing_ids)
    return placed, spans


def _is_whole(token_ids: Sequence[int], layouts: Sequence[ImageLayout]) -> bool:
    """Whether `token_ids` has all tokens of every image, including those before and behind its rows."""
    end = 0
    for layout in layouts:
        first = layout.span_token_ids[0]
        if first not in token_ids[end:]:
            return False
        start = token_ids.index(first, end) - layout.span_start
        if start < end or tuple(token_ids[start : start + len(layout.token_ids)]) != layout.token_ids:
            return False
        end = start + len(layout.token_ids)
    return True


def _found_spans(token_ids: Sequence[int], layouts: Sequence[ImageLayout]) -> list[Span]:
    """Finds the layouts' spans in order. Raises PlaceholderMismatchError if one is incomplete."""
    spans: list[Span] = []
    end = 0
    for index, layout in enumerate(layouts):
        try:
            offset = token_ids.index(layout.span_token_ids[0], end)
        except ValueError:
            raise PlaceholderMismatchError(
                "the chat template changes the order of images and videos; send them in the template's order"
            ) from None
        span = Span(offset, layout.span_length)
        if tuple(token_ids[span.offset : span.stop]) != layout.span_token_ids:
            raise PlaceholderMismatchError(
                f"image {index} must have {span.length} consecutive tokens for its size, and they are not complete"
            )
        spans.append(span)
        end = span.stop
    return spans
