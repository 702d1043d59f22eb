"""Random traffic against a scheduler, with an oracle that knows what every KV slot must hold. No model, no tensors.

A model with a sliding window has two kinds of layers, so each token has two slots, and the oracle checks both. A model
with recurrent layers has a state for each running request, and snapshots of states.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

from decoder_svc.scheduling.kv_cache.kv_group import SlidingGroupSize
from decoder_svc.scheduling.kv_cache.state_group import StateGroupSize
from decoder_svc.scheduling.prompt import ImageItem
from decoder_svc.scheduling.request import CacheScope, Request, RequestId, RequestState
from decoder_svc.scheduling.request_output import FinishReason
from decoder_svc.scheduling.scheduler_output import RowFetch, SampledToken, SchedulerOutput
from decoder_svc.scheduling.speculation import NO_SPECULATION, SpeculationLimits
from decoder_svc.scheduling.window import Window
from lookonce.families.base import Mask
from lookonce.forgotten import EVERYTHING, Forgotten
from tests.decoder_svc.scheduling.oracle import Oracle, next_token
from tests.decoder_svc.scheduling.simulation import BLOCK_SIZE, image, request, scheduler, step

CACHE_ROWS = 12
# KV blocks and the tokens of a step; where a whole prompt is one chunk, most prompts shall fit into one.
SIZES = {Mask.CAUSAL: (10, 9), Mask.IMAGE: (10, 9), Mask.PROMPT: (6, 16)}
# Blocks of layers with a window, in all and for one request: of four tokens each, for a window of six and such a step.
SLIDING_SIZES = {Mask.CAUSAL: (6, 5), Mask.IMAGE: (6, 5), Mask.PROMPT: (6, 6)}
# Requests that run at the same time.
MAX_NUM_SEQS = 4
# Mask and whether answers are deterministic, which is not offered where an image cannot be cut.
MODES = [(Mask.CAUSAL, False), (Mask.CAUSAL, True), (Mask.IMAGE, False), (Mask.PROMPT, False)]


def masked(one: Request, mask: Mask) -> Request:
    """The same request to a model with that mask."""
    one.prompt = replace(one.prompt, mask=mask)
    return one


def steps_until_served(uncut: Request, newcomer: Callable[[int], Request], num_steps: int) -> int:
    """Steps until the first token of a request that cannot be cut, while another newcomer arrives before every step.

    Raises AssertionError when it has none after `num_steps`.
    """
    target = scheduler(token_budget=16, num_blocks=200, max_num_seqs=6)
    target.add(newcomer(0))
    target.add(uncut)
    for index in range(1, num_steps + 1):
        step(target)
        if uncut.num_output_tokens:
            return index
        target.add(newcomer(index + 1))
    raise AssertionError(f"{uncut} is overtaken for ever")


class Traffic:
    """Random actions: requests arrive, mostly variants of earlier ones; rows come late or never; steps run or fail."""

    def __init__(
        self,
        seed: int,
        *,
        deterministic: bool = False,
        window: Window | None = None,
        mask: Mask = Mask.CAUSAL,
        speculation: SpeculationLimits = NO_SPECULATION,
        overlaps: bool = False,
        states: StateGroupSize | None = None,
    ) -> None:
        """`window`: what tokens see in some layers, at most 6 tokens; None: no layer has one.

        With `speculation`, or with steps that overlap, answers are longer, and some end at a stop id.
        """
        # The source of every random choice; tests may replace it between actions.
        self.rng = random.Random(seed)
        # A source of its own: where rows come from changes no other choice.
        self._encodes = random.Random(seed)
        self._mask = mask
        self._num_blocks, token_budget = SIZES[mask]
        self.target = scheduler(
            token_budget=token_budget,
            num_blocks=self._num_blocks,
            cache_rows=CACHE_ROWS,
            max_num_seqs=MAX_NUM_SEQS,
            rows_asked=CACHE_ROWS,
            deterministic=deterministic,
            min_tokens_before_missing_row=4 if seed % 4 == 3 else 1,
            overlap_encode=seed % 5 != 4,
            sliding=None if window is None else SlidingGroupSize(window, *SLIDING_SIZES[mask]),
            states=states,
            speculation=speculation,
        )
        self._overlaps = overlaps
        # The step whose tokens the scheduler does not know yet, and these tokens.
        self._in_flight: tuple[SchedulerOutput, list[SampledToken]] | None = None
        # Steps that were decided while another one was in flight, tokens that were sampled and not used, and corrected.
        self.num_ahead = self.num_wasted = self.num_corrected = 0
        # Requests whose chunk of the latest step is void.
        self._void: set[RequestId] = set()
        self._has_long_answers = overlaps or speculation.max_draft_tokens > 0
        self.oracle = Oracle(self.target, window)
        self.requests: list[Request] = []
        self._texts: dict[RequestId, str] = {}
        self.travelling: list[RowFetch] = []
        # Steps that left the layers with a window no free block.
        self.num_short_of_sliding_blocks = 0
        # Everything that was decided, for comparing runs.
        self.trace: list[SchedulerOutput] = []

    def run(self, num_actions: int) -> None:
        """Random actions, then nothing but steps until all is done; the invariants are checked after each."""
        actions = (
            self.submit,
            self.step,
            self.step,
            self.step,
            self.end_journey,
            self.abort,
            self.fail_step,
            self.forget,
        )
        weights = (3, 3, 3, 3, 3, 1, 1, 0.1)
        for _ in range(num_actions):
            self.rng.choices(actions, weights)[0]()
            self.target.check_integrity()
        self.drain()

    def drain(self) -> None:
        """Runs steps until every request has ended: none is lost or stuck, and nothing stays allocated."""
        for _ in range(600):
            if not self.target.has_requests():
                break
            self.step()
            while self.travelling:
                self._arrive(self.travelling.pop(0))
            self.target.check_integrity()
        self._settle()
        unfinished = [one for one in self.requests if one.state is not RequestState.FINISHED]
        assert not unfinished, "requests were left alone"
        assert self.target.kv_cache.pool.num_free_blocks == self._num_blocks
        sliding_pool = self.target.kv_cache.sliding_pool
        assert sliding_pool is None or sliding_pool.num_free_blocks == SLIDING_SIZES[self._mask][0]
        snapshots = self.target.kv_cache.snapshot_pool
        if snapshots is not None:
            # The next step lets go of the snapshots of this one.
            self.target.kv_cache.begin_step()
            assert snapshots.usage == 0, "a snapshot is held for nobody"
        for one in self.requests:
            self._check_answer(one)
            self._check_usage(one)
        self._check_encodes()

    def _check_answer(self, one: Request) -> None:
        """Every token is the model's, and the last one is where an answer ends."""
        for index in range(one.num_prompt_tokens, one.num_tokens):
            assert one.token_ids[index] == next_token(one.token_ids[:index]), f"{one} was answered wrongly"
        ends = [token in one.params.stop_token_ids for token in one.output_token_ids]
        assert not any(ends[:-1]), f"{one} goes on behind its end"
        if one.finish_reason is FinishReason.STOP:
            assert ends[-1]
        elif one.finish_reason is FinishReason.LENGTH:
            assert one.num_output_tokens == one.params.max_tokens
            assert not ends[-1]

    def _check_usage(self, one: Request) -> None:
        usage = one.usage
        if one.num_output_tokens == one.params.max_tokens:
            accounted = usage.encoded_image_tokens + usage.cached_image_tokens + usage.skipped_image_tokens
            assert accounted == usage.image_tokens, f"rows of {one} were counted twice or not at all"
            assert usage.cached_prompt_tokens < usage.prompt_tokens + usage.completion_tokens

    def _check_encodes(self) -> None:
        """Every row that an encoder computed is counted by one request, or still open for the next one."""
        num_counted = sum(one.usage.encoded_image_tokens for one in self.requests)
        num_open = self.target._row_demand._uncounted.num_rows
        assert num_counted + num_open == self.oracle.num_encoded_rows, "encodes were counted twice or lost"

    def submit(self) -> None:
        """Submits a request, mostly a variant of an earlier one."""
        if self.requests and self.rng.random() < 0.75:
            new = self._repeated(self.rng.choice(self.requests))
        else:
            new = self._fresh()
        if self._fits(new):
            self.requests.append(new)
            self.target.add(new)

    def _fits(self, new: Request) -> bool:
        """Whether admission control lets the request through to the scheduler."""
        if any(span.length > self.target.limits.max_num_batched_tokens for span in new.prompt.mutual_spans):
            return False
        if self._mask is Mask.PROMPT and new.prompt.num_image_tokens > CACHE_ROWS:
            return False
        return -(-(new.num_tokens + new.params.max_tokens) // 4) <= self._num_blocks

    def _fresh(self) -> Request:
        images: list[ImageItem] = []
        offset = 0
        for _ in range(self.rng.choice((0, 1, 1, 2))):
            offset += self.rng.choice((0, 0, 1, 3, 4))
            images.append(self._image(self.rng.choice("uvw"), offset, self.rng.choice((2, 4, 5, 8))))
            offset = images[-1].span.stop
        return self._request(offset + self.rng.randint(1, 6), tuple(images), self.rng.choice("st"), CacheScope())

    def _repeated(self, earlier: Request) -> Request:
        """An earlier request with at most one thing changed, which must be enough not to be taken for it."""
        images = earlier.prompt.images
        num_tokens = earlier.num_prompt_tokens
        text, scope = self._texts[earlier.request_id], earlier.cache_scope
        change = self.rng.randrange(8)
        if change == 0 and images:
            images = (self._image("z", images[0].span.offset, images[0].span.length), *images[1:])
        elif change == 1 and images and (len(images) == 1 or images[0].span.stop < images[1].span.offset):
            images = (self._image(self._name(images[0]), images[0].span.offset + 1, images[0].span.length), *images[1:])
            num_tokens += 1
        elif change == 2:
            scope = self.rng.choice((CacheScope(salt=b"a"), CacheScope(salt=b"b"), CacheScope(adapter="a")))
        elif change == 3:
            num_tokens += self.rng.randint(1, 4)
        elif change == 4 and images and images[0].span.length >= 4:
            # The same tokens, split into two showings of the image.
            first, half = images[0].span.offset, images[0].span.length // 2
            name = self._name(images[0])
            rest = images[0].span.length - half
            images = (self._image(name, first, half), self._image(name, first + half, rest), *images[1:])
        elif change == 5:
            text = "u"
        elif change >= 6 and self._has_long_answers:
            return self._continued(self.rng.choice(self.requests[-4:]))
        return self._request(num_tokens, images, text, scope)

    def _continued(self, earlier: Request) -> Request:
        """The next turn: an earlier prompt, its answer as far as it is there, and perhaps something new."""
        num_new_tokens = self.rng.choice((0, 0, 1, 3))
        new = self._request(
            len(earlier.token_ids) + num_new_tokens,
            earlier.prompt.images,
            self._texts[earlier.request_id],
            earlier.cache_scope,
        )
        new.token_ids[: len(earlier.token_ids)] = earlier.token_ids
        new.prompt = replace(new.prompt, token_ids=tuple(new.token_ids))
        return new

    def _request(self, num_tokens: int, images: tuple[ImageItem, ...], text: str, scope: CacheScope) -> Request:
        new = request(
            f"r{len(self.requests)}",
            num_tokens,
            images,
            text=text,
            max_tokens=self.rng.randint(1, 20 if self._has_long_answers else 5),
            stop_token_ids=frozenset({self.rng.choice((0, 0, 8))}) if self._has_long_answers else frozenset(),
            priority=self.rng.choice((0, 0, 0, 1)),
            tenant=self.rng.choice("aab"),
            arrival_s=len(self.requests),
            cache_scope=scope,
            mask=self._mask,
        )
        self._texts[new.request_id] = text
        return masked(new, self._mask)

    def _image(self, name: str, offset: int, length: int) -> ImageItem:
        """Makes an image. With bidirectional attention, images of different length get different keys."""
        return image(name if self._mask is Mask.CAUSAL else f"{name}{length}", offset, length)

    def _name(self, item: ImageItem) -> str:
        return next(name for name in "uvwz" if self._image(name, 0, item.span.length).key == item.key)

    def step(self) -> None:
        """One whole step; its fetches begin."""
        output = self.target.schedule()
        self.trace.append(output)
        pool = self.target.kv_cache.sliding_pool
        self.num_short_of_sliding_blocks += pool is not None and pool.num_free_blocks == 0
        self.num_ahead += self._in_flight is not None
        sampled = self._corrected(output, self.oracle.run(output))
        self._settle()
        if self._overlaps and self.target.may_run_ahead(output):
            self.target.advance(output)
            self._in_flight = (output, sampled)
        else:
            self.target.update(output, sampled)
        self.travelling += output.fetches
        for one in self.target.live_requests():
            num_blocks = len(self.target.kv_cache.block_table(one.request_id))
            # The block of a void chunk is used by the request's next one, which may come some steps later.
            num_used = one.num_computed_tokens + (one.request_id in self._void)
            assert num_blocks <= -(-num_used // BLOCK_SIZE), f"{one} keeps blocks that it has no use for"

    def _corrected(self, output: SchedulerOutput, sampled: list[SampledToken]) -> list[SampledToken]:
        """Lets some tokens of the step in flight be other ones than the step behind it has read."""
        self._void -= {chunk.request_id for chunk in output.chunks}
        if self._in_flight is None:
            return sampled
        before, tokens = self._in_flight
        readers = {chunk.request_id: chunk for chunk in output.chunks if not chunk.draft_ids}
        corrected = {one.request_id for one in tokens if one.request_id in readers and self.rng.random() < 0.1}
        for request_id in corrected:
            self.oracle.take_back(readers[request_id])
        self.num_corrected += len(corrected)
        self._void |= corrected
        self._in_flight = (before, [replace(one, is_corrected=one.request_id in corrected) for one in tokens])
        return [one for one in sampled if one.request_id not in corrected]

    def _settle(self) -> None:
        """Tells the scheduler the tokens of the step in flight."""
        if self._in_flight is not None:
            (output, sampled), self._in_flight = self._in_flight, None
            self.num_wasted += len(sampled) - len(self.target.update(output, sampled))

    def fail_step(self) -> None:
        """Runs a step that fails, so that its results never arrive: the next one, or else the one in flight."""
        if self._in_flight is not None and self.rng.random() < 0.5:
            self._fail_in_flight()
            return
        output = self.target.schedule()
        self.trace.append(output)
        # The runner started the step and failed in the middle, so its slots may hold anything.
        self.oracle.run(output)
        for chunk in output.chunks:
            self.oracle.spoil(chunk)
        self._settle()
        self.target.fail_step(output)
        self.travelling += output.fetches

    def _fail_in_flight(self) -> None:
        """The step in flight turns out to have failed when another one has been launched behind it, or none."""
        assert self._in_flight is not None
        (failed, _), self._in_flight = self._in_flight, None
        for chunk in failed.chunks:
            self.oracle.spoil(chunk)
        if self.rng.random() < 0.3:
            self.target.fail_step(failed)
            return
        output = self.target.schedule()
        self.trace.append(output)
        self.oracle.run_in_vain(output)
        self.target.fail_step(failed, output)
        self.travelling += output.fetches

    def end_journey(self) -> None:
        """Ends one fetch in flight: its rows arrive or fail."""
        if not self.travelling:
            return
        fetch = self.travelling.pop(self.rng.randrange(len(self.travelling)))
        if self.rng.random() < 0.15:
            self.target.rows_failed(fetch.key, fetch.rows, had_data=True)
        else:
            self._arrive(fetch)

    def _arrive(self, fetch: RowFetch) -> None:
        """Brings the rows of a fetch, which an encoder computes or the shared cache has."""
        self.oracle.arrive(fetch.key, fetch.rows, self._encodes.choice((0, fetch.num_image_rows)))

    def forget(self) -> None:
        """Removes one image, or all, as an operator would."""
        name = self.rng.choice("uvwz*")
        keys = [self._image(name, 0, length).key for length in range(1, 9)]
        forgotten = EVERYTHING if name == "*" else Forgotten.of(keys)
        self.target.forget(forgotten)

    def abort(self) -> None:
        """Aborts a random request, as if its client had disconnected."""
        if self.requests:
            self.target.abort(self.rng.choice(self.requests).request_id)
