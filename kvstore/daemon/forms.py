"""What a run of copies has in common: a CopyKey but for its hash, and what its frames say. Immutable; any thread."""

from __future__ import annotations

import hashlib
import threading
from dataclasses import dataclass, field

from kvstore.copy_key import CopyKey
from kvstore.frame.layout import FrameSpec, header_layout
from kvstore.frame.specs import plain_specs

_NO_HASH = bytes(32)
_MOST_KNOWN_BYTES = 32 << 20
_FORM_BYTES = 512  # about, without its parameters
_DOMAIN_TAG = b"kvstore trust domain 1\x00"


def lower_root(root: bytes, domain: str) -> bytes:
    """What a root of a trust domain is called in lower tiers, which domains share."""
    return hashlib.sha256(_DOMAIN_TAG + domain.encode() + b"\x00" + root).digest() if domain else root


@dataclass(frozen=True, slots=True)
class Form:
    """template: the key of a block of zeros; tenant: whose quota; domain: "" or the trust domain that lower tiers
    must keep apart from others'."""

    template: CopyKey
    block_tokens: int
    key_dim: int
    value_dim: int
    dtype: str
    tenant: str = ""
    domain: str = ""
    family: tuple[object, ...] = field(init=False)
    header_bytes: int = field(init=False)
    lower_template: CopyKey = field(init=False)

    def __post_init__(self) -> None:
        put = object.__setattr__
        put(self, "family", self.template.family)
        put(self, "header_bytes", header_layout(len(self.template.parameters), 1)[2])
        put(self, "lower_template", self.template)
        if self.domain:
            root = lower_root(self.template.root, self.domain)
            put(self, "lower_template", self.template._replace(root=root))

    def key(self, hash: bytes) -> CopyKey:
        return self.template.with_hash(hash)

    def spec(self, key: CopyKey, payload_bytes: int) -> FrameSpec:
        """What a frame of this key must say."""
        return FrameSpec(key, self.block_tokens, self.key_dim, self.value_dim, self.dtype, payload_bytes)


class KnownForms:
    """A SpecSource for lower tiers: what clients have said that frames of a family say; else the plain form."""

    def __init__(self) -> None:
        self._by_family: dict[tuple[object, ...], Form] = {}
        self._bytes = 0
        self._lock = threading.Lock()

    def learn(self, form: Form) -> None:
        """The first form of a family stays, until so many others have been named that it is forgotten."""
        family = form.lower_template.family
        with self._lock:
            if family in self._by_family:
                return
            self._by_family[family] = form
            self._bytes += _FORM_BYTES + len(form.template.parameters)
            while self._bytes > _MOST_KNOWN_BYTES:
                oldest = self._by_family.pop(next(iter(self._by_family)))
                self._bytes -= _FORM_BYTES + len(oldest.template.parameters)

    def __call__(self, key: CopyKey, payload_bytes: int) -> FrameSpec:
        form = self._by_family.get(key.family)
        return plain_specs(key, payload_bytes) if form is None else form.spec(key, payload_bytes)


def form_of(spec: FrameSpec, tenant: str = "", domain: str = "") -> Form:
    """The form of a frame's copy."""
    return Form(
        spec.key.with_hash(_NO_HASH), spec.block_tokens, spec.key_dim, spec.value_dim, spec.dtype, tenant, domain
    )
