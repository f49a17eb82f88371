"""Secure aggregation: the server learns the sum of the vectors of the parties that finished, and nothing else.

A party is a node that takes part in one session. The protocol is that of Bonawitz et al., "Practical Secure Aggregation
for Privacy-Preserving Machine Learning" (2017). With more than `NEIGHBOURS` + 1 parties it uses the sparse graph of
Bell et al., "Secure Single-Server Aggregation with (Poly)Logarithmic Overhead" (2020). Key agreement and encryption are
Flower's (`flwr.common.secure_aggregation`). The Shamir shares have Flower's format and field; `create_shares` and
`combine` compute them faster than Flower does. Masks are the output of AES-256 in counter mode (`cryptography`), so
each masked coordinate is uniform modulo 2^32 or 2^64.

    stage     each party sends                                             the server sends to each party
    keys      two public keys, new in each session                         the keys of its neighbours, the threshold t
    share     its two secrets in Shamir shares, encrypted for each peer    the shares from its neighbours
    masked    vector + self mask + sum over peers of +- pairwise mask      who finished, who did not
    reveal    for each peer that finished a share of its self mask, for each other peer a share of its pairwise key

Input: integers whose sum is in [-2^(bits-2), 2^(bits-2)] (`modulus_bits`), so that no sum wraps. Output: the exact sum.
Only a hostile party (or, with probability below 2^-60, the nodes' noise) can cause a sum beyond that range; `folded`
maps such a sum back into the range. A round succeeds if at least t of the neighbours of each party (the party included)
finish. t is a majority, so a round succeeds unless about half of the neighbours of some party drop out. `Party` is the
node's side, `Session` the server's side.

The protocol protects against a server that follows it, but tries to learn more from the messages (honest but curious).
docs/threat-model.md says what a malicious server could do.
"""

import base64
import hashlib
import math
import os
import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np
from Crypto.Util.Padding import pad, unpad
from cryptography.fernet import InvalidToken
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from flwr.common.secure_aggregation.crypto.symmetric_encryption import decrypt, encrypt, generate_shared_key

from unheard.errors import NodeError
from unheard.mechanism.aggregation import GRID_BITS

NEIGHBOURS = 64
"""The largest number of peers with which a party exchanges shares. With fewer peers, each party shares with all."""
SECRET_BYTES = 31
"""The length of a secret. Padding makes it two blocks of 16 bytes, the block size of Flower's Shamir shares."""
WRAP_PROBABILITY = 2.0**-60
"""The largest probability that the nodes' noise brings some coordinate of one sum out of its range.

In 2^20 rounds the probability is at most 2^-40.
"""
FEWEST = 3
"""The smallest number of parties. With two, each party could compute the vector of the other from the sum."""

_CURVE = ec.SECP256R1()
_ORDER = 0xFFFFFFFF00000000FFFFFFFFFFFFFFFFBCE6FAADA7179E84F3B9CAC2FC632551


def modulus_bits(
    num_users: int, is_noised: bool, noise_std: float = 0.0, num_parameters: int = 1, num_nodes: int = 0
) -> int:
    """Return the number of bits of the modulus, 32 or 64, so that every sum is in [-2^(bits-2), 2^(bits-2)].

    Args:
        num_users: The number of registered users, which is the size of the largest possible cohort.
        is_noised: Whether the run adds noise. If so, each user adds at most 2^21 units to a coordinate.
        noise_std: The standard deviation, in units, of the noise of all nodes together; 0 if the server adds the noise.
        num_parameters: P, the number of parameters.
        num_nodes: The number of registered nodes, which is the largest number of shares of noise.
    """
    if not is_noised:
        return 64
    # A Gaussian exceeds t standard deviations with probability < 2 exp(-t^2 / 2). Rounding adds at most 0.5 per share.
    tail = math.sqrt(2 * math.log(2 * num_parameters / WRAP_PROBABILITY)) * noise_std
    # DP: a sum that wraps would be a different sum. The bound is for the largest cohort: all registered users.
    return 32 if num_users * 2 ** (GRID_BITS + 1) + tail + num_nodes / 2 <= 2**30 else 64


def folded(residues: np.ndarray, bits: int) -> np.ndarray:
    """Map residues modulo 2^bits to integers, int64.

    A residue in [-2^(bits-2), 2^(bits-2)] is mapped to itself. The sums of honest parties are in that range, but a
    hostile party can cause any residue. Beyond the range the integers decrease again towards zero, so that two sums
    that differ by n modulo 2^bits are mapped to integers that differ by at most n.

    >>> folded(np.array([5, 2**32 - 5, 2**30 + 1, 2**31 - 1, 2**31], np.uint32), 32).tolist()
    [5, -5, 1073741823, 1, 0]

    Args:
        residues: Unsigned integers.
        bits: 32 or 64.
    """
    units = residues.view(f"<i{bits // 8}").astype(np.int64)
    end, last = np.int64(2 ** (bits - 2)), np.int64(2 ** (bits - 1) - 1)
    # DP: without the fold, one user could move a sum by 2^bits if others have brought it to the end of the range.
    units = np.where(units > end, last - units + 1, units)
    return np.where(units < -end, -last - 1 - units, units)


def threshold(holders: int) -> int:
    """Return t, the number of holders of a party's shares that must finish.

    t is a majority of the holders. So two disjoint groups of holders can never reveal one secret of the party each.
    """
    # DP: with a majority the server cannot collect both secrets of a party by asking disjoint groups of nodes.
    return holders // 2 + 1


def mask(secret: bytes, session: str, bits: int, count: int, extras: int) -> tuple[np.ndarray, np.ndarray]:
    """Derive the mask of a session from a secret.

    Args:
        secret: The seed of a self mask, or the secret that two parties share.
        session: The name of the session.
        bits: The size of the modulus, 32 or 64.
        count: The number of coordinates.
        extras: The number of additional values of 64 bits.

    Returns:
        The mask of the coordinates, and the mask of the additional values; both unsigned.
    """
    # DP: the session is in the key, so that no two vectors ever have the same mask.
    key = hashlib.sha256(b"unheard mask" + session.encode() + b"\0" + secret).digest()
    stream = Cipher(algorithms.AES256(key), modes.CTR(bytes(16))).encryptor()
    data = bytearray(8 * extras + bits // 8 * count)
    stream.update_into(_zeros(len(data)), data)
    return np.frombuffer(data, f"<u{bits // 8}", offset=8 * extras), np.frombuffer(data, "<u8", count=extras)


@lru_cache(maxsize=4)
def _zeros(size: int) -> bytes:
    """Return zero bytes, cached because they are as long as the parameters."""
    return bytes(size)


def _private_key(seed: bytes) -> ec.EllipticCurvePrivateKey:
    """Derive a private key from a seed, so that a party can share the short seed instead of the key."""
    wide = HKDF(algorithm=hashes.SHA256(), length=48, salt=None, info=b"unheard key").derive(seed)
    return ec.derive_private_key(int.from_bytes(wide, "big") % (_ORDER - 1) + 1, _CURVE)


def _public_bytes(key: ec.EllipticCurvePrivateKey) -> bytes:
    """Return the encoded public key of a private key."""
    return key.public_key().public_bytes(Encoding.X962, PublicFormat.UncompressedPoint)


def _public_key(data: bytes) -> ec.EllipticCurvePublicKey:
    """Decode a public key. Raise `NodeError` if it is not a point of the curve."""
    try:
        return ec.EllipticCurvePublicKey.from_encoded_point(_CURVE, data)
    except ValueError:
        raise NodeError("A public key of secure aggregation is not a point of the curve.") from None


def _commitment(secret: bytes, session: str) -> str:
    """Return a hash of the seed of a self mask. With it the server checks a seed that it combined from shares."""
    return hashlib.sha256(b"unheard commitment" + session.encode() + b"\0" + secret).hexdigest()


def _to_base64(data: bytes) -> str:
    """Return bytes as base64 text."""
    return base64.b64encode(data).decode()


def _from_base64(text: Any) -> bytes:
    """Return the bytes of base64 text. Raise `NodeError` if it is not valid."""
    try:
        return base64.b64decode(text, validate=True)
    except (TypeError, ValueError):
        raise NodeError("A message of secure aggregation is not base64 text.") from None


_POLYNOMIAL = 1 << 128 | 0x87
"""x^128 + x^7 + x^2 + x + 1. Flower's Shamir shares are in GF(2^128) modulo this polynomial."""
_LANE = 32
"""The bytes of a lane: a block of 16 bytes, and 16 bytes for the upper half of a product.

One Python integer holds many lanes, so that one operation computes all blocks.
"""


def _lanes(data: bytes) -> int:
    """Return blocks of 16 bytes as one integer with a lane for each block."""
    return int.from_bytes(b"".join(bytes(16) + data[at : at + 16] for at in range(0, len(data), 16)), "big")


def _product(lanes: int, factor: int, blocks: int) -> int:
    """Multiply each lane by one element of the field.

    Args:
        lanes: The blocks.
        factor: The element of the field.
        blocks: The number of lanes.
    """
    total = 0
    while factor:
        low = factor & -factor
        total ^= lanes * low  # `low` is a power of two, so this shifts the lanes.
        factor ^= low
    block = _block_mask(blocks)
    for _ in range(2):  # The first reduction can leave a few bits above 128; the second removes them.
        high = total >> 128 & block
        total = total & block ^ high ^ high << 1 ^ high << 2 ^ high << 7
    return total


@lru_cache(maxsize=16)
def _block_mask(blocks: int) -> int:
    """Return a bit mask of the lower 16 bytes of each lane."""
    return int.from_bytes((bytes(16) + b"\xff" * 16) * blocks, "big")


def _inverse(element: int) -> int:
    """Return 1 / element in the field, by Euclid's algorithm for polynomials over GF(2)."""
    a, b, inverse, other = element, _POLYNOMIAL, 1, 0
    while a != 1:
        shift = a.bit_length() - b.bit_length()
        if shift < 0:
            a, b, inverse, other, shift = b, a, other, inverse, -shift
        a ^= b << shift
        inverse ^= other << shift
    return inverse


@lru_cache(maxsize=1024)
def _factors(indices: tuple[int, ...]) -> tuple[int, ...]:
    """Return the factors of Lagrange interpolation at 0, for shares with these indices."""
    factors = []
    for own in indices:
        numerator, denominator = 1, 1
        for other in indices:
            if other != own:
                numerator, denominator = _product(numerator, other, 1), _product(denominator, own ^ other, 1)
        factors.append(_product(numerator, _inverse(denominator), 1))
    return tuple(factors)


def create_shares(secret: bytes, t: int, holders: int) -> list[bytes]:
    """Split a secret into Shamir shares. Any t shares determine the secret; fewer reveal nothing about it.

    The shares have the format of Flower's `create_shares`. Flower evaluates a polynomial for each block of 16 bytes,
    which took most of the time of a session; this function evaluates all blocks at once.

    Args:
        secret: The secret.
        t: The number of shares that determine the secret.
        holders: The number of shares to create.
    """
    padded = pad(secret, 16)
    blocks = len(padded) // 16
    # DP: random coefficients from the operating system, so that fewer than t shares are consistent with every
    # secret.
    coefficients = [*(_lanes(os.urandom(len(padded))) for _ in range(t - 1)), _lanes(padded)]
    shares = []
    for index in range(1, holders + 1):
        value = 0
        for coefficient in coefficients:
            value = _product(value, index, blocks) ^ coefficient
        shares.append(index.to_bytes(4, "little") + _from_lanes(value, blocks))
    return shares


def _from_lanes(lanes: int, blocks: int) -> bytes:
    """Return the blocks of 16 bytes of an integer that `_lanes` made."""
    data = lanes.to_bytes(_LANE * blocks, "big")
    return b"".join(data[at + 16 : at + 32] for at in range(0, len(data), _LANE))


def combine(shares: Sequence[bytes]) -> bytes:
    """Return the secret that t shares determine, as Flower's `combine_shares` does.

    Flower computes the factors of the interpolation for each block of each secret, which takes most of its time. Here
    they are cached, because many secrets have the same holders.

    Raises:
        ValueError: The shares do not fit together.
    """
    indices = tuple(int.from_bytes(share[:4], "little") for share in shares)
    if len(set(indices)) < len(indices) or 0 in indices or any(len(share) % 16 != 4 for share in shares):
        raise ValueError("shares of different secrets")
    blocks, total = len(shares[0]) // 16, 0
    for factor, share in zip(_factors(indices), shares, strict=True):
        total ^= _product(_lanes(share[4:]), factor, blocks)
    return unpad(_from_lanes(total, blocks), 16)


class Party:
    """The node's side of one session.

    The secrets of a session are in `memory`, a dictionary of JSON data that the node keeps between messages. Each stage
    is possible once and in order: a repeated or skipped stage raises `NodeError`.

    Args:
        memory: The node's data about its session; changed in place.
    """

    def __init__(self, memory: dict[str, Any]) -> None:
        self.memory = memory

    def keys(self, session: str) -> dict[str, str]:
        """Begin a session: create its secrets, and return its two public keys. An open session is deleted.

        Raises:
            NodeError: The name of the session is too short.
        """
        if not isinstance(session, str) or len(session) < 16:
            raise NodeError("A session of secure aggregation needs a name of at least 16 characters.")
        self.memory.clear()
        # DP: new secrets for each session, from the operating system.
        seeds = {name: os.urandom(SECRET_BYTES) for name in ("encryption", "pairwise", "self")}
        public = {name: _to_base64(_public_bytes(_private_key(seeds[name]))) for name in ("encryption", "pairwise")}
        self.memory.update(
            session=session, stage="keys", seeds={name: _to_base64(seed) for name, seed in seeds.items()}, public=public
        )
        return public

    def share(self, session: str, own: int, peers: Mapping[str, Mapping[str, str]], t: int) -> dict[str, Any]:
        """Split both secrets of this party into shares, one for each of its peers and one for itself.

        Args:
            session: The name of the session.
            own: This party's number.
            peers: The public keys of its neighbours and its own, by party number.
            t: The threshold.

        Returns:
            The encrypted shares for each peer, and the commitment to the self mask.

        Raises:
            NodeError: The stage, the keys or the threshold are not valid.
        """
        self._enter(session, "keys", "share")
        if dict(peers.get(str(own), {})) != self.memory["public"]:
            raise NodeError("The server shows other keys than this node sent.")
        # DP: a server that names few peers or a low threshold could collect both secrets of this node.
        if len(peers) < FEWEST or t < threshold(len(peers)) or t > len(peers):
            raise NodeError(f"Secure aggregation needs at least {FEWEST} parties and a majority as its threshold.")
        # DP: a key that stands for two peers would give two shares to one party.
        if len({keys["encryption"] for keys in peers.values()}) < len(peers):
            raise NodeError("Two parties of secure aggregation have the same key.")
        numbers = sorted(int(number) for number in peers)
        shares = [create_shares(self._seed(name), t, len(numbers)) for name in ("pairwise", "self")]
        encrypted: dict[str, str] = {}
        keys = self._shared("encryption", {n: peers[str(n)]["encryption"] for n in numbers if n != own})
        for number, *pair in zip(numbers, *shares, strict=True):
            if number == own:
                self.memory["own_shares"] = [_to_base64(part) for part in pair]
                continue
            # The plaintext names the session, the sender and the receiver, so that the server cannot deliver a share as
            # that of another party or session.
            head = f"{session} {own} {number} ".encode()
            encrypted[str(number)] = encrypt(keys[number], head + b" ".join(map(base64.b64encode, pair))).decode()
        self.memory.update(
            own=own,
            threshold=t,
            peers={str(n): str(peers[str(n)]["pairwise"]) for n in numbers},
            sealing={str(n): key.decode() for n, key in keys.items()},
        )
        return {"shares": encrypted, "commitment": _commitment(self._seed("self"), session)}

    def masked(
        self, session: str, received: Mapping[str, str], units: np.ndarray, extra: np.ndarray, bits: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return this party's vector and its further numbers, with all masks added, as unsigned integers.

        Args:
            session: The name of the session.
            received: The encrypted shares from each neighbour that has sent shares, by party number.
            units: This party's integers, int64 [P].
            extra: Further numbers to sum, int64.
            bits: The number of bits of the modulus.

        Raises:
            NodeError: The stage is not the next one, or the server names unknown or too few parties.
        """
        # DP: one vector per session: two vectors under the same masks would reveal their difference.
        self._enter(session, "share", "masked")
        own, peers = self.memory["own"], self.memory["peers"]
        if bits not in (32, 64) or not set(received) <= set(peers) - {str(own)}:
            raise NodeError("The server names parties that are not in this session.")
        # DP: with fewer peers, a few parties together could remove the masks of this node.
        if len(received) + 1 < self.memory["threshold"]:
            raise NodeError("Too few parties have shared their secrets: this node does not send its vector.")
        units_P = units.astype(f"<i{bits // 8}").view(f"<u{bits // 8}")
        extra_E = extra.astype("<i8").view("<u8")
        self_mask, self_extra = mask(self._seed("self"), session, bits, len(units), len(extra))
        # DP: the self mask hides the vector also when the pairwise masks become known: if the vector arrives late, the
        # other parties have already revealed the key of these masks.
        units_P, extra_E = units_P + self_mask, extra_E + self_extra
        for number, shared in self._shared("pairwise", {int(n): peers[n] for n in received}).items():
            pair_mask, pair_extra = mask(shared, session, bits, len(units), len(extra))
            add = np.add if own < number else np.subtract
            add(units_P, pair_mask, out=units_P)
            add(extra_E, pair_extra, out=extra_E)
        self.memory["received"] = dict(received)
        return units_P, extra_E

    def reveal(self, session: str, survivors: Iterable[int], dropped: Iterable[int]) -> dict[str, dict[str, str]]:
        """Reveal one share of each neighbour: of its self mask if it finished, of its pairwise key if it did not.

        The secrets of the session are deleted afterwards, also if this method raises.

        Args:
            session: The name of the session.
            survivors: The neighbours whose vectors arrived, according to the server.
            dropped: The neighbours that sent shares and no vector.

        Returns:
            The shares, by the kind of secret ("self" or "pairwise") and the party number.

        Raises:
            NodeError: The stage is not the next one, or the server asks for too much.
        """
        self._enter(session, "masked", "done")
        try:
            return self._revealed(session, {str(n) for n in survivors}, {str(n) for n in dropped})
        finally:
            # DP: the secrets of a session are deleted with its last message.
            self.memory.clear()
            self.memory.update(session=session, stage="done")

    def _revealed(self, session: str, finished: set[str], lost: set[str]) -> dict[str, dict[str, str]]:
        """Return the shares that the server needs to remove the masks from the sum.

        Args:
            session: The name of the session.
            finished: The parties whose self masks are revealed.
            lost: The parties whose pairwise keys are revealed.

        Raises:
            NodeError: The server asks for both secrets of a party, for unknown parties, or too few have finished.
        """
        own, received = self.memory["own"], self.memory["received"]
        # DP: never both secrets of one party: together they remove both masks from its vector.
        if finished & lost:
            raise NodeError("The server asks for both secrets of one party.")
        if not finished | lost <= {*received, str(own)} or str(own) in lost:
            raise NodeError("The server asks for the secrets of parties that are not in this session.")
        # DP: a sum of few vectors is not revealed.
        if len(finished) < self.memory["threshold"]:
            raise NodeError("Too few parties finished: this node reveals nothing.")
        shares: dict[str, dict[str, str]] = {"self": {}, "pairwise": {}}
        for number in finished | lost:
            try:
                pairwise, own_mask = (
                    [_from_base64(part) for part in self.memory["own_shares"]]
                    if number == str(own)
                    else self._opened(session, number, received[number])
                )
            except NodeError:
                continue  # A peer that sent an invalid share must not prevent that the other shares are revealed.
            kind, part = ("self", own_mask) if number in finished else ("pairwise", pairwise)
            shares[kind][number] = _to_base64(part)
        return shares

    def _opened(self, session: str, sender: str, ciphertext: str) -> list[bytes]:
        """Decrypt the shares of a peer: of its pairwise key, and of its self mask.

        Raises:
            NodeError: The shares belong to another session or party, or are incomplete.
        """
        key = self.memory["sealing"][sender].encode()
        head = f"{session} {sender} {self.memory['own']} ".encode()
        try:
            plain = decrypt(key, ciphertext.encode())
        except (InvalidToken, AttributeError, ValueError):
            raise NodeError(
                "A share of secure aggregation does not decrypt: it belongs to another session or party."
            ) from None
        # DP: a share of another session or party is not used.
        if not plain.startswith(head):
            raise NodeError("A share of secure aggregation belongs to another session or party, and was rejected.")
        parts = [base64.b64decode(part) for part in plain[len(head) :].split(b" ")]
        if len(parts) != 2:
            raise NodeError("A share of secure aggregation is incomplete.")
        return parts

    def _enter(self, session: str, before: str, after: str) -> None:
        """Go from stage `before` to stage `after`. Raise `NodeError` if this node is in another session or stage."""
        if self.memory.get("session") != session or self.memory.get("stage") != before:
            raise NodeError("This message does not belong to the next stage of this node's session.")
        self.memory["stage"] = after

    def _seed(self, name: str) -> bytes:
        """Return a secret of this session: "encryption", "pairwise" or "self"."""
        return _from_base64(self.memory["seeds"][name])

    def _shared(self, name: str, public: Mapping[int, str]) -> dict[int, bytes]:
        """Return the keys that this party and each of its peers can compute (key agreement).

        Args:
            name: "encryption" or "pairwise".
            public: The public keys of the peers, by party number.
        """
        own = _private_key(self._seed(name))
        return {number: generate_shared_key(own, _public_key(_from_base64(text))) for number, text in public.items()}


@dataclass
class Session:
    """The server's side of one session. It collects the answers of the parties and computes the sum.

    Args:
        bits: The number of bits of the modulus.
        count: P, the number of coordinates of a vector.
        extras: The number of further numbers of a vector.
        name: The name of the session; new and random for each round.
        keys: The public keys of each party that answered.
        shares: The encrypted shares that each party sent, by the number of the receiver.
        commitments: The commitment of each party to its self mask.
        vectors: The masked vector and further numbers of each party that finished.
        revealed: The revealed shares, by kind of secret, the party that it belongs to, and the party that held it.
        ring: The parties in random order; it defines the neighbours.
        answered: The parties that answered "reveal".
        suspects: The parties whose shares did not fit together in `total`.
    """

    bits: int
    count: int
    extras: int
    name: str = field(default_factory=lambda: secrets.token_hex(16))
    keys: dict[int, dict[str, str]] = field(default_factory=dict, repr=False)
    shares: dict[int, dict[str, str]] = field(default_factory=dict, repr=False)
    commitments: dict[int, str] = field(default_factory=dict, repr=False)
    vectors: dict[int, tuple[np.ndarray, np.ndarray]] = field(default_factory=dict, repr=False)
    revealed: dict[str, dict[int, dict[int, bytes]]] = field(default_factory=dict, repr=False)
    ring: list[int] = field(default_factory=list)
    answered: set[int] = field(default_factory=set)
    suspects: set[int] = field(default_factory=set)

    def add_keys(self, party: int, fields: Mapping[str, Any]) -> None:
        """Add the public keys of a party.

        Args:
            party: The number of the party.
            fields: The fields of its answer.

        Raises:
            NodeError: A key is malformed.
        """
        keys = {name: str(fields.get(name)) for name in ("encryption", "pairwise")}
        for text in keys.values():
            _public_key(_from_base64(text))
        self.keys[party] = keys

    def neighbours(self, party: int) -> list[int]:
        """Return the parties that exchange shares with a party, and the party itself, sorted.

        They are neighbours on a random ring, which is drawn at the first call, after all keys were added.
        """
        if not self.ring:
            self.ring = sorted(self.keys)
            secrets.SystemRandom().shuffle(self.ring)
        n, k = len(self.ring), min(NEIGHBOURS, len(self.ring) - 1)
        if k == n - 1:
            return sorted(self.ring)
        at = self.ring.index(party)
        return sorted(self.ring[(at + step) % n] for step in range(-(k // 2), k // 2 + 1))

    def share_request(self, party: int) -> dict[str, Any]:
        """Return the fields of the request `share` for a party."""
        peers = self.neighbours(party)
        return {"own": party, "peers": {str(n): self.keys[n] for n in peers}, "threshold": threshold(len(peers))}

    def add_shares(self, party: int, fields: Mapping[str, Any]) -> None:
        """Add the encrypted shares of a party.

        Args:
            party: The number of the party.
            fields: The fields of its answer.

        Raises:
            NodeError: The shares are not for exactly the neighbours of the party.
        """
        shares, wanted = fields.get("shares"), {str(n) for n in self.neighbours(party) if n != party}
        if not isinstance(shares, Mapping) or set(shares) != wanted:
            raise NodeError("A node sent shares for other parties than its neighbours.")
        self.shares[party] = {n: str(share) for n, share in shares.items()}
        self.commitments[party] = str(fields.get("commitment"))

    def masked_request(self, party: int) -> dict[str, Any]:
        """Return the fields of the request `masked` for a party that belong to secure aggregation."""
        senders = [n for n in self.neighbours(party) if n != party and n in self.shares]
        return {"received": {str(n): self.shares[n][str(party)] for n in senders}, "bits": self.bits}

    def add_vector(self, party: int, units: np.ndarray | None, extra: np.ndarray | None) -> None:
        """Add the masked vector of a party.

        Args:
            party: The number of the party.
            units: Its masked integers; None if the answer has none.
            extra: Its masked additional values; None if the answer has none.

        Raises:
            NodeError: A vector is missing, or has another type or length.
        """
        if (
            not isinstance(units, np.ndarray)
            or not isinstance(extra, np.ndarray)
            or units.dtype != np.dtype(f"<u{self.bits // 8}")
            or extra.dtype != np.dtype("<u8")
            or units.shape != (self.count,)
            or extra.shape != (self.extras,)
        ):
            raise NodeError(f"A node sent a vector of another length or type than {self.count} numbers.")
        self.vectors[party] = (units, extra)

    def reveal_request(self, party: int) -> dict[str, Any]:
        """Return the fields of the request `reveal` for a party."""
        sharers = [n for n in self.neighbours(party) if n in self.shares]
        return {
            "survivors": [n for n in sharers if n in self.vectors],
            "dropped": [n for n in sharers if n not in self.vectors],
        }

    def add_revealed(self, party: int, fields: Mapping[str, Any]) -> None:
        """Add the shares that a party reveals.

        Args:
            party: The number of the party.
            fields: The fields of its answer.

        Raises:
            NodeError: A share belongs to a party that was not requested.
        """
        request = self.reveal_request(party)
        for kind, wanted in (("self", request["survivors"]), ("pairwise", request["dropped"])):
            shares = fields.get(kind)
            if not isinstance(shares, Mapping) or not set(shares) <= {str(n) for n in wanted}:
                raise NodeError("A node revealed shares of other parties than it was asked for.")
        self.answered.add(party)
        for kind in ("self", "pairwise"):
            for number, share in fields[kind].items():
                self.revealed.setdefault(kind, {}).setdefault(int(number), {})[party] = _from_base64(share)

    def total(self) -> tuple[np.ndarray, np.ndarray]:
        """Return two sums, int64: of the vectors that arrived, and of the further numbers that came with them.

        Raises:
            NodeError: Too few parties revealed their shares, or shares do not fit together.
        """
        units_P = np.zeros(self.count, f"<u{self.bits // 8}")
        extra_E = np.zeros(self.extras, "<u8")
        for units, extra in self.vectors.values():
            units_P += units
            extra_E += extra
        shape = (self.name, self.bits, self.count, self.extras)
        # A lost party without a neighbour that finished has no mask in the sum.
        lost = [n for n in self.shares.keys() - self.vectors.keys() if self.vectors.keys() & set(self.neighbours(n))]
        secret_of = self._combined({**dict.fromkeys(self.vectors, "self"), **dict.fromkeys(lost, "pairwise")})
        for party in self.vectors:
            self_mask, self_extra = mask(secret_of[party], *shape)
            units_P -= self_mask
            extra_E -= self_extra
        for party in lost:
            key = _private_key(secret_of[party])
            for other in self.vectors.keys() & set(self.neighbours(party)):
                shared = generate_shared_key(key, _public_key(_from_base64(self.keys[other]["pairwise"])))
                pair_mask, pair_extra = mask(shared, *shape)
                # `other` added the mask if its number is the smaller one, and subtracted it otherwise.
                take_off = np.subtract if other < party else np.add
                take_off(units_P, pair_mask, out=units_P)
                take_off(extra_E, pair_extra, out=extra_E)
        return folded(units_P, self.bits), folded(extra_E, 64)

    def _combined(self, kinds: Mapping[int, str]) -> dict[int, bytes]:
        """Combine the shares that were revealed into one secret for each party, and return the secrets by party.

        One holder per secret may have revealed a wrong share: the secret is then computed again without each holder in
        turn, until it matches what the party has published.

        Args:
            kinds: For each party which secret to combine, "self" or "pairwise".

        Raises:
            NodeError: Too few parties have revealed shares, or the shares of a party do not fit together. In the
                second case such parties become suspects, unless they are more than a quarter of all: then it is more likely
                that a few holders revealed wrong shares.
        """
        secret_of: dict[int, bytes] = {}
        first: tuple[int | None, ...] = (None,)
        for party, kind in kinds.items():
            holders = self.neighbours(party)
            t = threshold(len(holders))
            if len(self.answered & set(holders)) < t:
                raise NodeError("Too few parties finished the round: the sum cannot be known.")
            shares = self.revealed.get(kind, {}).get(party, {})
            for without in (*first, *shares):
                some = [share for holder, share in shares.items() if holder != without][:t]
                if len(some) == t and (secret := self._verified(kind, party, some)) is not None:
                    # Try the next secrets without this holder first. A share that is correct may be needed there.
                    secret_of[party], first = secret, (without, None)
                    break
        failed = kinds.keys() - secret_of.keys()
        if failed:
            self.suspects = failed if len(failed) <= len(kinds) / 4 else set()
            raise NodeError("Shares of secure aggregation do not fit together: the sum cannot be known.")
        return secret_of

    def _verified(self, kind: str, party: int, shares: Sequence[bytes]) -> bytes | None:
        """Return the secret that the shares determine; None if it does not match the party's commitment or key."""
        try:
            secret = combine(shares)
        except (ValueError, IndexError):
            return None
        if kind == "self":
            return secret if _commitment(secret, self.name) == self.commitments[party] else None
        return secret if _to_base64(_public_bytes(_private_key(secret))) == self.keys[party]["pairwise"] else None
