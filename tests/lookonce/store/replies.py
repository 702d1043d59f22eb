"""Wrong replies of a server: errors of every kind, RESP that fits no command, and bytes that are no RESP."""

from __future__ import annotations

from collections.abc import Callable

from hypothesis import strategies as st

from lookonce.store.codec import HEADER_BYTES
from lookonce.store.redis.miss_reason import MissReason
from tests.lookonce.store.damage import cut, flip, insert, remove, zero

ERRORS = {
    b"OOM command not allowed when used memory > 'maxmemory'.": MissReason.OOM,
    b"READONLY You can't write against a read only replica.": MissReason.READONLY,
    b"NOREPLICAS Not enough good replicas to write.": MissReason.READONLY,
    b"NOPERM this user has no permissions to run the command": MissReason.NOPERM,
    b"NOAUTH Authentication required.": MissReason.AUTH,
    b"WRONGPASS invalid username-password pair or user is disabled.": MissReason.AUTH,
    b"LOADING Redis is loading the dataset in memory": MissReason.LOADING,
    b"MISCONF Redis is configured to save RDB snapshots": MissReason.MISCONF,
    b"WRONGTYPE Operation against a key holding the wrong kind of value": MissReason.WRONG_TYPE,
    b"MOVED 3999 127.0.0.1:6381": MissReason.MOVED,
    b"MOVED": MissReason.MOVED,
    b"ASK 3999 127.0.0.1:6381": MissReason.MOVED,
    b"TRYAGAIN Multiple keys request during rehashing of slot": MissReason.MOVED,
    b"CLUSTERDOWN The cluster is down": MissReason.CLUSTER_DOWN,
    b"MASTERDOWN Link with MASTER is down": MissReason.CLUSTER_DOWN,
    b"ERR max number of clients reached": MissReason.MAX_CLIENTS,
    b"CROSSSLOT Keys in request don't hash to the same slot": MissReason.SERVER_ERROR,
    b"BUSY Redis is busy running a script.": MissReason.SERVER_ERROR,
    b"EXECABORT Transaction discarded because of previous errors.": MissReason.SERVER_ERROR,
    b"NOSCRIPT No matching script.": MissReason.SERVER_ERROR,
    b"UNKILLABLE Sorry the script already executed write commands": MissReason.SERVER_ERROR,
    b"NOTBUSY No scripts in execution right now.": MissReason.SERVER_ERROR,
    b"NOPROTO unsupported protocol version": MissReason.SERVER_ERROR,
    b"ERR unknown command 'GETRANGE', with args beginning with: ": MissReason.SERVER_ERROR,
    b"ERR Protocol error: invalid bulk length": MissReason.SERVER_ERROR,
    b"ERR": MissReason.SERVER_ERROR,
    b"": MissReason.SERVER_ERROR,
    b" ": MissReason.SERVER_ERROR,
    b"SOMETHING new": MissReason.SERVER_ERROR,
    b"\xff\xfe\x00 no text at all": MissReason.SERVER_ERROR,
    b"ERR " + b"x" * 10_000: MissReason.SERVER_ERROR,
}
"""The text of error replies, and the reason that a client must see in it."""

# Replies in place of a number. The first of them are numbers, or texts that some parsers accept as one.
_NUMBERS = [
    *(b"0", b"1", b"-1", b"-2", b"-0", b"+1", b" 1 ", b"1_0", b"65537", b"536870913", b"9223372036854775807"),
    *(b"-9223372036854775809", b"9" * 400, b"9" * 5000, b"", b"0x1", b"1.0", b"1e3", b"nan", b"\xc2\xb2", b"?"),
]
NASTY = [
    *(kind + number + b"\r\n" for kind in (b":", b"$", b"*") for number in _NUMBERS),
    *(b"", b"\r\n", b"\n", b"+OK\n", b"+\r\n", b"OK\r\n", b"+OK\r\n+OK\r\n", b":1", b"$5\r\nhello", b"$0\r\n"),
    *(b"$5\r\nhelloworld\r\n", b"$3\r\nabc\n\n", b"_\r\n", b"#t\r\n", b"%1\r\n+a\r\n:1\r\n", b">2\r\n+a\r\n+b\r\n"),
    *(b"x" * 100_000, b":" + b"9" * 20_000 + b"\r\n", b":1\r\n" * 20_000, b"*1\r\n" * 20_000, b"*64\r\n" * 3000),
    *(
        b"$64\r\n" * 3000,
        b"$2000\r\n" + b"maxmemory:" + b"9" * 1990 + b"\r\n",
        b"*2\r\n$6\r\nserver\r\n$6\r\nvalkey\r\n",
    ),
    b"$5010\r\nmaxmemory:" + b"9" * 5000 + b"\r\n",
    b"*4\r\n$6\r\nserver\r\n$6\r\nvalkey\r\n$7\r\nversion\r\n$5000\r\n" + b"9" * 5000 + b"\r\n",
]
"""Replies that a parser may stumble over."""


def _aggregate(kind: bytes, items: list[bytes]) -> bytes:
    return b"%b%d\r\n%b" % (kind, len(items) // (2 if kind in b"%|" else 1), b"".join(items))


def _bulk(data: bytes, excess: int = 0) -> bytes:
    return b"$%d\r\n%b\r\n" % (len(data) + excess, data)


_SCALARS = st.one_of(
    st.binary(max_size=40).map(lambda text: b"+%b\r\n" % text),
    st.binary(max_size=40).map(lambda text: b"-%b\r\n" % text),
    (st.integers(-2, 5000) | st.integers()).map(lambda number: b":%d\r\n" % number),
    st.binary(max_size=200).map(_bulk),
    st.sampled_from([b"$-1\r\n", b"*-1\r\n", b"_\r\n", b"#t\r\n", b",1.5\r\n", b"(%d\r\n" % 10**60]),
    st.sampled_from([b"=15\r\ntxt:Some string\r\n", b"!5\r\nERR x\r\n", b"$?\r\n;4\r\nabcd\r\n;0\r\n"]),
)
_AGGREGATES = st.recursive(
    _SCALARS,
    lambda inner: st.builds(_aggregate, st.sampled_from([b"*", b"~", b">", b"%", b"|"]), st.lists(inner, max_size=6)),
)
REPLIES = st.one_of(
    _SCALARS,
    _AGGREGATES,
    st.builds(_bulk, st.binary(max_size=60), st.integers(-70, 70)),
    st.binary(max_size=300),
    st.lists(_SCALARS, max_size=5).map(b"".join),
)
"""Any reply, well formed or not, for any command."""

_OFFSETS = st.integers(0, 60) | st.integers(0, 2 * HEADER_BYTES)
CHANGES: st.SearchStrategy[Callable[[bytes], bytes]] = st.one_of(
    st.lists(st.tuples(_OFFSETS, st.integers(0, 7)), min_size=1, max_size=4).map(flip),
    st.builds(cut, _OFFSETS),
    st.builds(insert, _OFFSETS, st.binary(min_size=1, max_size=20)),
    st.builds(remove, _OFFSETS, st.integers(1, 20)),
    st.builds(zero, _OFFSETS, st.integers(1, 20)),
    st.builds(lambda extra: lambda true: true + extra, _SCALARS),
    st.builds(lambda extra: lambda true: extra + true, _SCALARS),
    st.just(lambda true: true.replace(b"\r\n", b"\n")),
    st.just(lambda true: true[:-2]),
)
"""What becomes of a true reply on its way."""
