"""The connection to Flower: a ServerApp, a ClientApp, and Flower's simulation on this machine.

    with simulated_nodes(store, supernodes=50) as network:            # `unheard train --on flower`
        engine = FederatedEngine(network, run.model, choice, store)
        for report in train(run, out, on=engine): ...

`flwr run` deploys `server_app` and `client_app` with a SuperLink and SuperNodes (docs/flower.md). Their settings are:

    run config of the ServerApp    run-file, out        paths on the server
                                   min-nodes, wait      nodes to wait for, and for how many seconds
    node config of a SuperNode     folder               the node's folder (node.py)
                                   trust                what the server may see (`NodeData.trust`)
                                   max-rounds           the largest number of rounds that the node contributes to
                                   any-model            whether the server may name a model that imports code
                                   partition-id         the order of the node (`NodeData.order`)

Messages go through Flower's message API as a `ConfigRecord` (kind and JSON text) and an `ArrayRecord`. The content of
messages is defined in messages.py, node.py and server.py.
"""

import contextlib
import io
import json
import logging
import math
import os
import queue
import secrets
import signal
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

# The variables that turn telemetry off are set by unheard/__init__.py, which runs before this import.
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

from unheard.corpus.store import TokenStore
from unheard.errors import InvalidValue, NodeError, RunFolderMissing
from unheard.federated.messages import Network, Packet
from unheard.federated.node import MODEL_FILES, Node, NodeData, NodeFolder
from unheard.federated.server import FederatedEngine
from unheard.run_folder import RunFolder

START_TIMEOUT = 300.0
"""The number of seconds that a simulation may take to start its nodes."""
PULL_SECONDS = 0.1
"""The smallest number of seconds between two queries for replies."""
_TRAINS = ("update", "masked")
"""The kinds of requests that Flower displays as training."""


def to_records(packet: Packet, ticket: str = "") -> RecordDict:
    """Return a packet as Flower's records.

    Args:
        packet: The request or the answer.
        ticket: A random text, new for each request. The answer has the ticket of its request.
    """
    head = ConfigRecord({"kind": packet.kind, "fields": packet.to_json(), "ticket": ticket})
    records = RecordDict({"unheard": head})
    if packet.arrays:
        records["arrays"] = ArrayRecord({name: Array(array) for name, array in packet.arrays.items()})
    return records


def from_records(records: RecordDict) -> Packet:
    """Return the packet that Flower's records contain.

    Raises:
        NodeError: The records are not a message of a federated run.
    """
    head = records.config_records.get("unheard")
    if head is None:
        raise NodeError("A message has no records of unheard: give every node the same version of unheard.")
    numbers = {name: _numbers(array) for name, array in records.array_records.get("arrays", {}).items()}
    return Packet.from_json(str(head.get("kind")), str(head.get("fields")), numbers)


def ticket_of(records: RecordDict) -> str:
    """Return the ticket of a request or an answer; "" for a message without one."""
    head = records.config_records.get("unheard")
    return "" if head is None else str(head.get("ticket", ""))


def _numbers(array: Array) -> np.ndarray:
    """Return the numbers of an array that another machine sent, after a check of its header.

    The header may be wrong: if a few bytes claim to be 2^50 numbers, NumPy would allocate memory for all of them.

    Raises:
        NodeError: The array is not readable, or its length differs from the length in its header.
    """
    try:
        stream = io.BytesIO(array.data)
        version = np.lib.format.read_magic(stream)
        read_header = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, _, dtype = read_header(stream)
        # math.prod uses Python's integers; NumPy's could overflow.
        if array.stype == "numpy.ndarray" and math.prod(shape) * dtype.itemsize == len(array.data) - stream.tell():
            return array.numpy()
    except Exception:  # NumPy raises errors of many types for a bad header.
        pass
    raise NodeError("The arrays of a message cannot be read: give every node the same version of unheard.")


class GridNetwork:
    """The `Network` of the nodes that are connected to Flower's grid.

    Args:
        grid: The grid that Flower passes to a ServerApp.
    """

    def __init__(self, grid: Grid) -> None:
        self._grid = grid

    def nodes(self) -> list[int]:
        """Return the ids of the nodes that are connected now, in ascending order."""
        return sorted(self._grid.get_node_ids())

    def exchange(self, requests: Mapping[int, Packet], timeout: float) -> dict[int, Packet]:
        """Send a request to each node, and return the answers that arrive in time (see `Network.exchange`)."""
        tickets = {secrets.token_hex(16): node for node in requests}
        messages = [
            Message(
                content=to_records(requests[node], ticket),
                dst_node_id=node,
                message_type="train" if requests[node].kind in _TRAINS else "query",
                ttl=timeout,
            )
            for ticket, node in tickets.items()
        ]
        waiting = [number for number in self._grid.push_messages(messages) if number]
        answers: dict[int, Packet] = {}
        until = time.monotonic() + timeout
        while waiting:
            began = time.monotonic()
            for reply in self._pulled(waiting):
                # DP: an answer is that of the node to which its ticket was sent. A node can write any sender into its
                # reply, so a hostile node could answer for all nodes, and the noise of their shares would be missing.
                node = tickets.pop(ticket_of(reply.content), None)
                if node is not None:
                    with contextlib.suppress(NodeError):
                        answers[node] = from_records(reply.content)
            now = time.monotonic()
            if now >= until:
                break
            if waiting:
                time.sleep(max(PULL_SECONDS, 2 * (now - began)))
        return answers

    def _pulled(self, waiting: list[str]) -> Iterator[Message]:
        """Yield the replies that have arrived, and remove their ids from `waiting`.

        The replies are pulled one by one: Flower raises an error for an unreadable reply, and would lose other replies
        that are pulled in the same call.

        Args:
            waiting: The ids of the messages without a reply; changed in place.

        Raises:
            NodeError: Flower raises an error for every message; the SuperLink has probably ended.
        """
        errors: list[Exception] = []
        asked = list(waiting)
        for number in asked:
            try:
                replies = list(self._grid.pull_messages([number]))
            except Exception as error:
                errors.append(error)
                waiting.remove(number)
                continue
            if replies:
                waiting.remove(number)
            # A reply without content means that the node is gone, or that Flower's code failed there.
            yield from (reply for reply in replies if reply.has_content())
        if len(asked) > 1 and len(errors) == len(asked):
            raise NodeError(f"Flower's SuperLink cannot be reached: {errors[0]}") from errors[0]


def node_app(data_of: Any) -> ClientApp:
    """Return the Flower ClientApp that runs on each node.

    Args:
        data_of: A function that returns the `NodeData` of a node for Flower's context.
    """
    app = ClientApp()

    def answer(message: Message, context: Context) -> Message:
        """Answer one request. The node's memory is read from Flower's context and written back."""
        kept = context.state.config_records.get("unheard")
        memory: dict[str, Any] = json.loads(str(kept["memory"])) if kept else {}
        reply = Node(data_of(context), memory).answer(from_records(message.content))
        context.state["unheard"] = ConfigRecord({"memory": json.dumps(memory)})
        return Message(content=to_records(reply, ticket_of(message.content)), reply_to=message)

    app.train()(answer)
    app.query()(answer)
    return app


def _data_on_device(context: Context) -> NodeData:
    """Return the data of a SuperNode, from its `--node-config`. Raise `NodeError` if it names no folder."""
    config = context.node_config
    if "folder" not in config:
        raise NodeError("Start the SuperNode with --node-config 'folder=\"/path/of/the/node\"'.")
    folder = NodeFolder(path=Path(str(config["folder"])))
    limit = config.get("max-rounds")
    return NodeData(
        store=folder.store,
        order=int(config.get("partition-id", 0)),
        folder=folder,
        max_contributions=None if limit is None else int(limit),
        trust=str(config.get("trust", "central")),
        any_model=config.get("any-model", False) is True,  # a quoted "false" is not False
    )


client_app = node_app(_data_on_device)
"""The app that `flwr run` deploys on every SuperNode."""

server_app = ServerApp()
"""The app that `flwr run` deploys on the SuperLink."""


@server_app.main()
def _main(grid: Grid, context: Context) -> None:
    """Start the run of `run-file`, or resume it if the folder `out` has a run; send released models to the nodes."""
    from unheard.training.initialise import pinned
    from unheard.training.loop import resume, train
    from unheard.training.run import read_run_file, read_saved_run

    config = context.run_config
    for key in ("run-file", "out"):
        if not config.get(key):
            raise InvalidValue(f"Start the run with --run-config '{key}=\"...\"': a path on the server.")
    out = Path(str(config["out"]))
    network = GridNetwork(grid)
    wait_for_nodes(network, int(config.get("min-nodes", 1)), float(config.get("wait", START_TIMEOUT)))
    again = RunFolder(out).run_file.exists()
    run, choice = read_saved_run(RunFolder(out).run_file) if again else read_run_file(str(config["run-file"]))
    run = run if again else pinned(run)
    engine = FederatedEngine(network, run.model, choice, TokenStore.open(run.corpus))
    reports = resume(out, on=engine) if again else train(run, out, engine=choice, on=engine)
    with contextlib.closing(reports):
        for report in reports:
            logging.getLogger("flwr").info("round %d of %d, epsilon %.3g", report.round, report.rounds, report.epsilon)
            # A checkpoint releases a model, which the keyboards of the nodes may use. The last model is sent below.
            if report.round % run.training.checkpoint_every == 0 and report.round < report.rounds:
                send_model(network, out, choice.node_timeout)
    send_model(network, out, choice.node_timeout)


def wait_for_nodes(network: Network, count: int, seconds: float) -> None:
    """Wait until enough nodes are connected.

    Args:
        network: The nodes.
        count: The number of nodes that must be connected.
        seconds: How long to wait.

    Raises:
        NodeError: Fewer than `count` nodes are connected after `seconds`.
    """
    until = time.monotonic() + seconds
    while len(network.nodes()) < count:
        if time.monotonic() > until:
            raise NodeError(
                f"{len(network.nodes())} nodes are connected after {seconds:g} s; {count} are needed. Start more."
            )
        time.sleep(0.1)


def send_model(network: Network, out: Path, timeout: float) -> int:
    """Send the newest released model to every node.

    Everything that is sent is public: the run file, the ledger, the record of the nodes, the noisy model,
    the vocabulary and the tokenizer.

    Args:
        network: The nodes.
        out: The run folder.
        timeout: Seconds to wait for the answers.

    Returns:
        The number of nodes that saved the model.

    Raises:
        RunFolderMissing: The run has not released a model yet.
    """
    folder = RunFolder.open(out)
    if not folder.model.exists():
        raise RunFolderMissing(f"{out} has released no model yet.")
    files = {name: np.frombuffer((folder.path / name).read_bytes(), np.uint8) for name in MODEL_FILES}
    requests = {node: Packet("model", {}, files) for node in network.nodes()}
    return sum(answer.kind == "model" for answer in network.exchange(requests, timeout).values())


class _Partition:
    """A function that returns the data of a simulated node: a contiguous part of the users of one store.

    Args:
        store: The folder of the store.
        threads: The number of torch threads of a node.
    """

    def __init__(self, store: Path, threads: int) -> None:
        self.store, self.threads = store, threads

    def __call__(self, context: Context) -> NodeData:
        # Rounding depends on the number of threads, so a node uses as many as `unheard train` would.
        if torch.get_num_threads() != self.threads:
            torch.set_num_threads(self.threads)
        part, parts = int(context.node_config["partition-id"]), int(context.node_config["num-partitions"])
        return NodeData(store=self.store, part=part, parts=parts, any_model=True)


@contextlib.contextmanager
def simulated_nodes(
    store: str | Path, supernodes: int, *, processes: int | None = None, app: ClientApp | None = None
) -> Iterator[GridNetwork]:
    """Run Flower's simulation on this machine, with the users of a store divided among its nodes. Yield the network.

    Args:
        store: The folder of the store.
        supernodes: N, the number of nodes. Node i has the users from i n / N to below (i + 1) n / N of n users.
        processes: The number of processes that compute for the nodes; None for one per core.
        app: Another ClientApp, for tests and benchmarks.

    Raises:
        NodeError: The simulation does not start.
    """
    from flwr.simulation import run_simulation

    logging.getLogger("flwr").setLevel(logging.ERROR)
    grids: queue.Queue[Grid | None] = queue.Queue()
    is_over = threading.Event()
    server = ServerApp()

    @server.main()
    def main(grid: Grid, context: Context) -> None:
        """Pass the grid to the thread that trains, and wait until it is done; Flower ends when this function ends."""
        grids.put(grid)
        is_over.wait()

    client = app or node_app(_Partition(Path(store).resolve(), torch.get_num_threads()))
    backend: Any = {"client_resources": {"num_cpus": 1, "num_gpus": 0.0}}
    failures: list[BaseException] = []

    def simulate() -> None:
        """Run the simulation. If it fails, record the error and wake the thread that waits for the grid."""
        try:
            run_simulation(server, client, num_supernodes=supernodes, backend_config=backend)
        except BaseException as error:
            failures.append(error)
            grids.put(None)

    with _ray_on_loopback(processes or os.cpu_count() or 1):
        thread = threading.Thread(target=simulate, name="flower simulation", daemon=True)
        thread.start()
        try:
            grid = grids.get(timeout=START_TIMEOUT)
            if grid is None:
                raise NodeError(f"Flower's simulation did not start: {failures[0]}") from failures[0]
            network = GridNetwork(grid)
            wait_for_nodes(network, supernodes, START_TIMEOUT)
            yield network
        finally:
            is_over.set()
            thread.join(timeout=60)


@contextlib.contextmanager
def _environment(**variables: str) -> Iterator[None]:
    """Set environment variables in the `with` block. Processes that start in the block inherit them."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


@contextlib.contextmanager
def _ray_services() -> Iterator[None]:
    """Change three settings inside Ray in the `with` block, which Ray does not offer as options.

    - Ray does not start the process of its dashboard. Ray would start it even without a dashboard, and it would ask the
      metadata services of three cloud providers where it runs, even with telemetry turned off.
    - Ray waits up to `START_TIMEOUT` seconds for its own process. Its limit of 30 s is too short on a busy machine.
    - Ray listens on the loopback interface only.
    """
    from ray._private import ray_constants, services

    before = services.start_api_server, services.get_node, ray_constants.ENABLE_RAY_CLUSTER

    def get_node(*args: Any, **named: Any) -> Any:
        """Wait up to `START_TIMEOUT` seconds for the node that Ray has started."""
        until = time.monotonic() + START_TIMEOUT
        while True:
            try:
                return before[1](*args, **named)
            except RuntimeError:  # The node has not started yet.
                if time.monotonic() > until:
                    raise
                time.sleep(0.1)

    services.start_api_server = lambda *_, **__: (None, None)  # Ray returns this if the dashboard does not start.
    services.get_node = get_node
    # DP: Ray listens on the loopback interface only, because it transports updates without noise. By default it
    # replaces 127.0.0.1 by an address of the network and listens on all interfaces.
    ray_constants.ENABLE_RAY_CLUSTER = False
    try:
        yield
    finally:
        services.start_api_server, services.get_node, ray_constants.ENABLE_RAY_CLUSTER = before


@contextlib.contextmanager
def _ray_on_loopback(processes: int) -> Iterator[None]:
    """Start Ray, which runs the simulated nodes, in a temporary folder that only this user can read.

    Raises:
        NodeError: Ray already runs in this process, does not start, or listens on another address than 127.0.0.1.
    """
    import ray

    if ray.is_initialized():
        raise NodeError("Ray runs in this process already, and a simulation starts its own: call ray.shutdown() first.")
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    # The paths of Unix sockets must be short, so the folder is in /tmp and not in TMPDIR.
    folder = tempfile.TemporaryDirectory(
        prefix="unheard-ray-", dir="/tmp" if Path("/tmp").is_dir() else None, ignore_cleanup_errors=True
    )
    try:
        try:
            path = os.pathsep.join(filter(None, sys.path))
            variables = {"PYTHONPATH": path, "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
            with warnings.catch_warnings(), _environment(**variables), _ray_services():
                warnings.simplefilter("ignore")  # Ray warns about its own settings.
                ray.init(
                    address="local",
                    num_cpus=processes,
                    include_dashboard=False,
                    log_to_driver=False,
                    logging_level=logging.ERROR,
                    # DP: only this user can read what Ray writes. Ray makes its own folder readable for all users of
                    # the machine, so that folder is inside a private one.
                    _temp_dir=os.path.join(folder.name, "ray"),
                )
        except Exception as error:
            raise NodeError(f"Ray, which runs Flower's simulation, did not start: {error}") from error
        if threading.current_thread() is threading.main_thread():
            for number, handler in handlers.items():  # Ray's handler for SIGTERM would end the process without saving.
                signal.signal(number, handler)
        addresses = {str(node["NodeManagerAddress"]) for node in ray.nodes()}
        if addresses != {"127.0.0.1"}:
            raise NodeError(
                f"Ray listens on {', '.join(sorted(addresses))} instead of 127.0.0.1, and updates without noise could be "
                "read there. Nothing was trained. Install the version of Ray that constraints.txt names."
            )
        yield
    finally:
        ray.shutdown()
        folder.cleanup()
