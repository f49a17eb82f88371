"""The messages between the server and the nodes of a federated run. Each has a kind, JSON fields, and number arrays.

| request | fields | answer |
| --- | --- | --- |
| `describe` | vocabulary and tokenizer of the server's store | the number of users, and the order of the node |
| `update` | plan, seed, users; array `params` | array `units` [U, P], `weights` and `balances` [U] |
| `keys` | session | two public keys |
| `share` | session, peers with their keys, threshold | encrypted shares for each peer |
| `masked` | as `update`, and the shares from each peer | array `masked` [P], `extra` |
| `reveal` | session, survivors, dropped | one share of a secret of each of these parties |
| `model` | files of the released model | nothing |

A node may answer any request by `refused` with a reason. Nothing is pickled, so a message cannot run code. A `Packet`
shows only its kind when it is printed, because its arrays may hold a user's update.

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
"""The largest length of the JSON text of a message, in characters."""


@dataclass(frozen=True)
class Packet:
    """One request or one answer.

    Args:
        kind: The kind of the request. An answer has the kind of its request, or "refused".
        fields: JSON values, by name.
        arrays: Arrays of numbers, by name.
    """

    kind: str
    fields: Mapping[str, Any] = field(default_factory=dict, repr=False)
    arrays: Mapping[str, np.ndarray] = field(default_factory=dict, repr=False)

    def to_json(self) -> str:
        """Return the fields as JSON text."""
        return json.dumps(dict(self.fields))

    @classmethod
    def from_json(cls, kind: str, text: str, arrays: Mapping[str, np.ndarray]) -> "Packet":
        """Return the packet that another machine sent.

        Args:
            kind: The kind that the message states.
            text: The JSON text of its fields.
            arrays: Its arrays by name.

        Raises:
            NodeError: The text is not a JSON object, or is longer than `MAX_FIELDS`.
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
    """Return the answer of a node that refuses a request.

    Args:
        request: The request.
        reason: Why the node refuses it. The server may show the reason to its operator.
    """
    return Packet("refused", {"session": request.fields.get("session"), "reason": reason})


class Network(Protocol):
    """The connection of the server to the nodes: Flower's grid (flower.py), or a list of nodes in tests."""

    def nodes(self) -> list[int]:
        """Return the ids of the nodes that are connected now."""
        ...

    def exchange(self, requests: Mapping[int, Packet], timeout: float) -> dict[int, Packet]:
        """Send one request to each node, and return the answers that arrive in time, by the id of the node.

        Args:
            requests: The request for each node, by the id of the node.
            timeout: Seconds to wait.
        """
        ...
