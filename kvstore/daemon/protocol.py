"""What client and daemon say to each other, one message a packet of a SOCK_SEQPACKET socket: docs/formats/protocol.md.

msgspec structs as arrays, tagged by number, in MessagePack. Every field has a bound, every message a longest length;
what does not decode is refused with the connection. Values only; any thread.
"""

from __future__ import annotations

import struct
from enum import IntEnum
from functools import cache
from typing import Annotated, TypeAlias

import msgspec
from msgspec import Meta, Struct

VERSION = 1
MAGIC = "kvstore daemon"
PAGE_HASHES = 1024
"""Most hashes in one message."""
PAGE_ITEMS = 512
"""Most copies in one message that is not a lookup."""
LONGEST_BYTES = 96 << 10
"""Longest message in either direction."""
HASH_BYTES = 32
MOST_FORMS = 4096
"""Forms that one connection may name."""
MOST_FORM_BYTES = 1 << 20
"""Codec parameters in these, together."""
MOST_FDS = 64
"""Descriptors that go with one answer."""
MOST_LOOKED_FORMS = 64
MISSED, NOT_ASKED, HERE = 0, 1, 2
"""Outcomes of a block in Looked: HERE + i names the message's form i."""
MOST_BLOCKS = 1 << 24
"""Of one prompt: what statistics are told is bounded too."""

_Index: TypeAlias = Annotated[int, Meta(ge=0, lt=1 << 32)]
_Number: TypeAlias = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
_Bytes: TypeAlias = Annotated[int, Meta(ge=0, lt=1 << 48)]
_Small: TypeAlias = Annotated[int, Meta(ge=0, lt=1 << 16)]
_Hash: TypeAlias = Annotated[bytes, Meta(min_length=32, max_length=32)]
_Hashes: TypeAlias = Annotated[bytes, Meta(max_length=PAGE_HASHES * HASH_BYTES)]
_ItemHashes: TypeAlias = Annotated[bytes, Meta(max_length=PAGE_ITEMS * HASH_BYTES)]
_Name: TypeAlias = Annotated[str, Meta(max_length=64, pattern=r"^[\x20-\x7e]*$")]
_Numbers: TypeAlias = Annotated[list[_Number], Meta(max_length=PAGE_ITEMS)]


class Cause(IntEnum):
    """Why a request was refused (Refused.cause), or the connection ended."""

    GARBAGE = 1  # did not decode, or a field was out of its bounds
    OVERSIZED = 2
    VERSION = 3
    UID = 4  # not on the list
    CLIENTS = 5  # too many connections, of this uid or in all
    EARLY = 6  # a request before Hello, or a second Hello
    FORM = 7  # a form that was not named, named twice, or one too many
    LEASES = 8  # too many leases of this client
    STALE = 9  # a lease that has ended, was never given, or is another client's
    SEGMENT = 10  # a segment that this client may not have
    PINS = 11  # unpin of what was not pinned
    STOPPING = 12  # the daemon drains
    LOWER = 13  # a lower tier could not do what was asked
    PACE = 14  # asked for much more than its part of the rate; seq 0: connected too often, or was cut off


class Place(IntEnum):
    """What has become of one copy in a Reserved or Acquired answer."""

    GRANTED = 0  # its place follows
    THERE = 1  # reserve: stored already, and touched
    FULL = 2  # reserve: nothing may go, a quota is reached, or a segment is being recalled
    TOO_LARGE = 3
    MISS = 4  # acquire: not there
    PENDING = 5  # acquire: on its way from a lower tier, ask again


# requests -------------------------------------------------------------------------------------------------------------


class Request(Struct, array_like=True, frozen=True, gc=False, forbid_unknown_fields=True):
    """All requests begin with their tag and `seq`, a number that the answer repeats."""

    seq: _Number


class Hello(Request, tag=1, frozen=True):
    """First message of a connection."""

    magic: _Name
    version: _Small
    client: _Name


class Form(Request, tag=2, frozen=True):
    """Names what a run of copies has in common, as number `form` of this connection: a CopyKey but for its hash, and
    what its frames say. `tenant`: whose quota it counts against, "" for the uid's own."""

    form: _Index
    root: _Hash
    group: _Small
    codec: Annotated[str, Meta(min_length=1, max_length=16, pattern=r"^[\x20-\x7e]*$")]
    exact: bool
    heads: tuple[_Small, _Small]
    layers: tuple[_Small, _Small]
    parameters: Annotated[bytes, Meta(max_length=16384)]
    block_tokens: Annotated[int, Meta(ge=1, lt=1 << 32)]
    key_dim: Annotated[int, Meta(ge=1, lt=1 << 32)]
    value_dim: Annotated[int, Meta(ge=0, lt=1 << 32)]
    dtype: Annotated[str, Meta(min_length=1, max_length=16, pattern=r"^[\x20-\x7e]*$")]
    tenant: _Name = ""


class Run(Request, tag=3, frozen=True):
    """How many of these hashes, from the first on, are stored?"""

    form: _Index
    hashes: _Hashes


class Contains(Request, tag=4, frozen=True):
    """Which of these hashes are stored, one byte each (0: no, 1: yes, 2: a lower tier is still looking)."""

    form: _Index
    hashes: _Hashes


class Acquire(Request, tag=5, frozen=True):
    """Read leases: where the frames of these copies lie. One lease for all that are granted."""

    form: _Index
    hashes: _ItemHashes
    payload_bytes: Annotated[list[_Bytes], Meta(max_length=PAGE_ITEMS)]


class Release(Request, tag=6, frozen=True):
    """Read leases end. No answer."""

    leases: _Numbers


class Reserve(Request, tag=7, frozen=True):
    """Write leases: places for new copies. `parents` holds the hash of each block before; the root: none."""

    form: _Index
    hashes: _ItemHashes
    parents: _ItemHashes
    frame_bytes: Annotated[list[_Bytes], Meta(max_length=PAGE_ITEMS)]


class Publish(Request, tag=8, frozen=True):
    """The frames of these write leases are whole. One byte each in the answer: 1 if the copy can be found now."""

    leases: _Numbers


class Abandon(Request, tag=9, frozen=True):
    """These write leases end with nothing written that counts; their holder writes there no more. No answer."""

    leases: _Numbers


class Touch(Request, tag=10, frozen=True):
    """A use elsewhere. No answer."""

    form: _Index
    hashes: _Hashes


class Delete(Request, tag=11, frozen=True):
    """Drop copies, in lower tiers too."""

    form: _Index
    hashes: _Hashes


class Clear(Request, tag=12, frozen=True):
    """Drop every copy of the roots that this connection has named, pins included, in lower tiers too."""


class Pin(Request, tag=13, frozen=True):
    """Keep copies in the arena until Unpin or the connection's end, one count each."""

    form: _Index
    hashes: _Hashes


class Unpin(Request, tag=14, frozen=True):
    """Give pins of this connection back; all or none."""

    form: _Index
    hashes: _Hashes


class Suspect(Request, tag=15, frozen=True):
    """These copies did not check out after copying: look at them. No answer."""

    form: _Index
    hashes: _ItemHashes


class Map(Request, tag=16, frozen=True):
    """Descriptors of segments, in order, with the answer. writable: of segments leased to this client only."""

    segments: Annotated[list[_Number], Meta(max_length=MOST_FDS)]
    writable: bool


class Return(Request, tag=17, frozen=True):
    """These segments, leased for writing, are mapped writable no longer. No answer."""

    segments: _Numbers


class Ping(Request, tag=18, frozen=True):
    """Sent when idle; the answer says what the client has to let go."""


class Goodbye(Request, tag=19, frozen=True):
    """The client lets everything go and holds no mapping. The daemon closes the connection."""


class Disown(Request, tag=20, frozen=True):
    """An earlier connection of this process was cut off, and nothing of it is mapped any more."""

    token: Annotated[bytes, Meta(min_length=16, max_length=16)]


class Epoch(Request, tag=21, frozen=True):
    """Tells the daemon of an epoch, so that its own is at least that; rising: raises it above all before, a reset."""

    least: Annotated[int, Meta(ge=0, le=1 << 62)]
    rising: bool


class Looked(Request, tag=22, frozen=True):
    """What became of the lookup of a prompt, once a request and whatever was asked before; a long prompt in several
    messages, in order. For statistics alone. No answer.

    form: in which a block is asked for first. prompt: hash of the first block. first: place in the prompt of the first
    of `hashes`. outcomes, a byte a hash - 0: nobody has it; 1: not asked of the daemon, since the client's own memory
    or another tier of it has the block, or nothing reads it; 2 + i: here, in the form forms[i]. tokens: of the whole
    prompt. covered_blocks: so many blocks before, which nothing reads, stand or fall with those that are here (a
    window's). is_counted: the lookup counts with this one of its messages.
    """

    form: _Index
    prompt: _Hash
    first: Annotated[int, Meta(ge=0, lt=MOST_BLOCKS)]
    hashes: _Hashes
    outcomes: Annotated[bytes, Meta(max_length=PAGE_HASHES)]
    forms: Annotated[tuple[_Index, ...], Meta(max_length=MOST_LOOKED_FORMS)]
    tokens: Annotated[int, Meta(ge=0, lt=1 << 40)]
    covered_blocks: Annotated[int, Meta(ge=0, lt=MOST_BLOCKS)] = 0
    is_counted: bool = True


class Reused(Request, tag=23, frozen=True):
    """So many blocks of a prompt need not be computed for what was read here, once a request. No answer."""

    form: _Index
    blocks: Annotated[int, Meta(ge=0, lt=MOST_BLOCKS)]


class Speed(Request, tag=30, frozen=True):
    """How fast this client computes tokens that it does not find: for what the daemon says of time saved. No answer."""

    prefill_tokens_per_second: Annotated[float, Meta(ge=0.01, le=1e9)]


AnyRequest: TypeAlias = (
    Hello
    | Form
    | Run
    | Contains
    | Acquire
    | Release
    | Reserve
    | Publish
    | Abandon
    | Touch
    | Delete
    | Clear
    | Pin
    | Unpin
    | Suspect
    | Map
    | Return
    | Ping
    | Goodbye
    | Disown
    | Epoch
    | Looked
    | Reused
    | Speed
)

# answers --------------------------------------------------------------------------------------------------------------


class Answer(Struct, array_like=True, frozen=True, gc=False):
    """All answers begin with their tag and the request's `seq`."""

    seq: _Number


class Welcome(Answer, tag=64, frozen=True):
    """boot: 16 bytes, new with every start of the daemon; leases, segments and forms of another boot mean nothing.
    checksums: whether frames of this domain carry and are checked by one.
    token: names this connection, for a later Disown. Beside it comes the descriptor of the domain's epoch page."""

    version: _Small
    boot: Annotated[bytes, Meta(min_length=16, max_length=16)]
    capacity_bytes: _Bytes
    lease_seconds: float
    write_lease_seconds: float
    token: Annotated[bytes, Meta(min_length=16, max_length=16)]
    checksums: bool = True


class Count(Answer, tag=65, frozen=True):
    """Run: hashes that are stored, and how many of the rest a lower tier is still looking up. Delete: copies. Epoch:
    the one that holds. Form, Clear, Unpin: 0."""

    count: _Number
    pending: _Number = 0


class Flags(Answer, tag=66, frozen=True):
    """Contains, Publish, Pin: one byte a copy."""

    flags: bytes


class Places(Answer, tag=67, frozen=True):
    """Acquire, Reserve: PLACE records, one a copy; `lease`: of all granted ones (acquire), 0 where each has its own."""

    lease: _Number
    places: bytes


class Segments(Answer, tag=68, frozen=True):
    """Map: lengths, in the order asked; the descriptors come beside, MOST_FDS at most."""

    sizes: list[_Bytes]


class Pong(Answer, tag=69, frozen=True):
    """used_bytes and capacity_bytes of the arena; recalled: segments to return; live: segments that still exist."""

    used_bytes: _Bytes
    capacity_bytes: _Bytes
    recalled: list[_Number]
    live: list[_Number]


class Refused(Answer, tag=70, frozen=True):
    """The request did nothing. The connection stays, unless the cause says that it cannot be trusted."""

    cause: Annotated[int, Meta(ge=0, lt=1 << 16)]
    message: str = ""


AnyAnswer: TypeAlias = Welcome | Count | Flags | Places | Segments | Pong | Refused

PLACE = struct.Struct("<BxxxxxxxQQQ")
"""place, segment, offset, and frame bytes (acquire) or lease (reserve)."""

encode = msgspec.msgpack.Encoder().encode
decode_request = msgspec.msgpack.Decoder(AnyRequest).decode
decode_answer = msgspec.msgpack.Decoder(AnyAnswer).decode
ENCODER = msgspec.msgpack.Encoder()
"""For encode_into: one encoder may be used by every thread."""


@cache
def _splitter(count: int) -> struct.Struct:
    return struct.Struct(f"{HASH_BYTES}s" * count)


def split_hashes(hashes: bytes) -> tuple[bytes, ...]:
    """The hashes of a message. ValueError for a length that is no multiple of 32."""
    count, rest = divmod(len(hashes), HASH_BYTES)
    if rest:
        raise ValueError(f"hashes: got {len(hashes)} bytes; expected a multiple of {HASH_BYTES}")
    return _splitter(count).unpack(hashes)
