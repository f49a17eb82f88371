"""What the server and the nodes of a federated run send each other: a kind, JSON fields, and arrays of numbers.

| request | fields | answer |
| --- | --- | --- |
| `describe` | vocabulary and tokens of the server's store | the number of users, and how the node is named |
| `update` | plan, seed, users; array `params` | array `units` [U, P], `weights` and `balances` [U] |
| `keys` | session | two public keys |
| `share` | session, peers with their keys, threshold | encrypted shares for each peer |
| `masked` | as `update`, and the shares from each peer | array `masked` [P], `extra` |
| `reveal` | session, survivors, dropped | one share for each of them |
| `model` | files of the released model | nothing |

Any request may be answered by `refused` with a reason. Nothing is pickled. A `Packet` shows its kind only when it is
printed: its arrays may hold a user's update.

>>> packet = Packet("update", {"session": "ab"}, {"units": np.zeros(3, np.int64)})
>>> packet
Packet(kind='update')
>>> Packet.from_json(packet.kind, packet.to_json(), packet.arrays).fields
{'session': 'ab'}
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from unheard.errors import NodeError

MAX_FIELDS = 64 * 2**20
"""The largest JSON text of a message, in bytes."""


@dataclass(frozen=True)
class Packet:
    """One request or one answer.

    Args:
        kind: What is asked, or the kind of the request that is answered.
        fields: JSON data.
        arrays: Numbers by name.
    """

    kind: str
    fields: Mapping[str, Any] = field(default_factory=dict, repr=False)
    arrays: Mapping[str, np.ndarray] = field(default_factory=dict, repr=False)

    def to_json(self) -> str:
        """The fields as text."""
        return json.dumps(dict(self.fields))

    @classmethod
    def from_json(cls, kind: str, text: str, arrays: Mapping[str, np.ndarray]) -> "Packet":
        """Make a packet from what another machine sent.

        Args:
            kind: The kind that the message states.
            text: The JSON text of its fields.
            arrays: Its arrays by name.

        Raises:
            NodeError: The text is not a JSON object.
        """
        try:
            fields = json.loads(text) if len(text) <= MAX_FIELDS else None
        except (ValueError, RecursionError):
            fields = None
        if not isinstance(fields, dict) or not isinstance(kind, str):
            raise NodeError(
                "A message of a federated run is not readable: give every node the same version of unheard."
            )
        return cls(kind, fields, arrays)


def refused(request: Packet, reason: str) -> Packet:
    """Make the answer of a node that refuses a request.

    Args:
        request: The request.
        reason: Why the node refuses it, for the log of the server.
    """
    return Packet("refused", {"session": request.fields.get("session"), "reason": reason})


class Network(Protocol):
    """How the server reaches the nodes: Flower's grid (flower.py), or a list of nodes in tests."""

    def nodes(self) -> list[int]:
        """The ids of the nodes that are connected now."""
        ...

    def exchange(self, requests: Mapping[int, Packet], timeout: float) -> dict[int, Packet]:
        """Send one request to each node, and wait for the answers.

        Args:
            requests: The request for each node, by its id.
            timeout: Seconds to wait.
        """
        ...
