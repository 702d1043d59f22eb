"""Values planted in a real server in place of an image's own, and checks of the reads that follow."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from lookonce.content_key import ContentKey
from lookonce.embedding_meta import EmbeddingMeta, RowDtype
from lookonce.store.embedding_store import EmbeddingStore
from lookonce.store.redis.miss_reason import MissReason
from tests.lookonce.store.entries import data_key, make_rows

# Six blocks of 4 rows of 24 bytes, the last one of 3 rows. Small enough to be written ten thousand times.
META = EmbeddingMeta(23, 6, 1, RowDtype.BFLOAT16, 20, 10)
BLOCK_BYTES = 4 * META.row_bytes
NUM_BLOCKS = 6
ROWS = make_rows(META, seed=1)
# Rows as a second encode of the same image may produce them.
OLDER_ROWS = make_rows(META, seed=2)

# Reasons of a corrupt value, which the store deletes.
CORRUPT = {
    MissReason.TOO_SHORT,
    MissReason.BAD_MAGIC,
    MissReason.OTHER_VERSION,
    MissReason.HEADER_SEAL,
    MissReason.WRONG_KEY,
    MissReason.BAD_SHAPE,
    MissReason.OTHER_SHAPE,
    MissReason.LENGTH,
    MissReason.BLOCK_SEAL,
}
# By its bytes an empty value is the same as no value.
ABSENT = {MissReason.ABSENT}


@dataclass(frozen=True, slots=True)
class Question:
    """The range of rows that a test reads."""

    start: int
    stop: int
    # Number of rows that the reader expects. A reader that knows it may use another command for all rows.
    knows_size: bool

    @property
    def wants_all(self) -> bool:
        """Whether the range covers every row of the image."""
        return self.stop - self.start == META.num_rows

    def rows_of(self, rows: bytes) -> bytes:
        """Returns the range's part of all rows."""
        return rows[self.start * META.row_bytes : self.stop * META.row_bytes]


def question_about(value: bytes) -> Question:
    """Returns a range of rows or all of them, always the same for the same value."""
    chance = random.Random(value)
    start, stop = (0, META.num_rows) if chance.random() < 0.5 else sorted(chance.sample(range(META.num_rows + 1), 2))
    return Question(start, stop, knows_size=chance.random() < 0.5)


@dataclass(frozen=True, slots=True)
class Image:
    """The real values of one image, and other real values that could be mistaken for them."""

    store: EmbeddingStore
    admin: Any
    key: ContentKey
    # Values under the image's own keys.
    entry: bytes
    record: bytes
    # Entry from another write of the same image.
    older: bytes
    # Entries of another image, and of the same image with other seals.
    foreign: tuple[bytes, ...]
    foreign_records: tuple[bytes, ...]

    def read(self, question: Question) -> bytes | MissReason:
        """The rows, or why there are none."""
        out = bytearray((question.stop - question.start) * META.row_bytes)
        num_rows = META.num_rows if question.knows_size else None
        miss = self.store.read_rows(self.key, question.start, question.stop, memoryview(out), num_rows=num_rows)
        return miss or bytes(out)


@dataclass(slots=True)
class Tally:
    """Results of the reads of one test. The store must have counted the same."""

    image: Image
    counts: Counter[tuple[str, str]] = field(default_factory=Counter)

    def read(self, value: bytes, question: Question) -> bytes | None:
        """Plants a value and reads rows. Notes a miss; after a corrupt value checks that it was deleted."""
        name = data_key(self.image.key)
        self.image.admin.set(name, value)
        found = self.image.read(question)
        self._note("read_rows", name, found if isinstance(found, MissReason) else None, is_empty=not value)
        return None if isinstance(found, MissReason) else found

    def describe(
        self, operation: str, name: str, value: bytes, ask: Callable[[ContentKey], EmbeddingMeta | None]
    ) -> EmbeddingMeta | None:
        """Plants a value and reads the shape. The reason of a miss is only in the counters."""
        self.image.admin.set(name, value)
        before = self.image.store.stats.snapshot()
        meta = ask(self.image.key)
        new = Counter(self.image.store.stats.snapshot())
        new.subtract(before)
        (outcome,) = {outcome for (one, outcome), count in new.items() if one == operation and count}
        assert (outcome == "ok") == (meta is not None)
        self._note(operation, name, None if outcome == "ok" else MissReason(outcome), is_empty=not value)
        return meta

    @property
    def reasons(self) -> set[MissReason]:
        """Returns the reasons of all misses."""
        return {MissReason(outcome) for _, outcome in self.counts if outcome not in ("ok", "discarded")}

    def check(self) -> None:
        """Checks that each result was counted under its reason."""
        written = {"write", "delete"}
        counted = self.image.store.stats.snapshot()
        assert {label: count for label, count in counted.items() if label[0] not in written} == {
            label: count for label, count in self.counts.items() if label[0] != "delete"
        }
        assert counted.get(("delete", "discarded"), 0) == self.counts["delete", "discarded"]

    def _note(self, operation: str, name: str, reason: MissReason | None, *, is_empty: bool) -> None:
        self.counts[operation, "ok" if reason is None else reason.value] += 1
        if reason is None or (is_empty and reason in ABSENT):
            return
        assert reason in CORRUPT
        assert not self.image.admin.exists(name)
        self.counts["delete", "discarded"] += 1
