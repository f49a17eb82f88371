"""The two apps under `flwr run`, with a SuperLink and SuperNodes on the loopback interface, TLS and authenticated nodes.

Flower starts a process for every message, so this takes a minute or more. It is a separate step, which CI runs too:

    make deployment-test
"""

import datetime
import ipaddress
import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("flwr")

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from tests.federated.network import plain
from tests.federated.test_server import seeded
from unheard.corpus.store import write_store
from unheard.engines.choice import EngineChoice
from unheard.run_folder import RunFolder
from unheard.training.checkpoint import newest_checkpoint
from unheard.training.run import run_toml

ROOT = Path(__file__).parents[2]
BIN = Path(sys.executable).parent


def free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    for one in sockets:
        one.bind(("127.0.0.1", 0))
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports


def pem(key: ec.EllipticCurvePrivateKey, kind=serialization.PrivateFormat.TraditionalOpenSSL) -> bytes:
    return key.private_bytes(serialization.Encoding.PEM, kind, serialization.NoEncryption())


def write_certificates(folder: Path) -> None:
    """Write a root certificate and a certificate for 127.0.0.1."""
    now = datetime.datetime.now(datetime.UTC)

    def certificate(name, key, issuer, signer, *extensions):
        builder = (
            x509.CertificateBuilder()
            .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)]))
            .issuer_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, issuer)]))
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(days=1))
            .not_valid_after(now + datetime.timedelta(days=1))
        )
        for extension, critical in extensions:
            builder = builder.add_extension(extension, critical)
        return builder.sign(signer, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)

    root, server = (ec.generate_private_key(ec.SECP256R1()) for _ in range(2))
    names = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1")), x509.DNSName("localhost")])
    constraints = (x509.BasicConstraints(ca=True, path_length=None), True)
    (folder / "ca.crt").write_bytes(certificate("test root", root, "test root", root, constraints))
    (folder / "server.pem").write_bytes(certificate("localhost", server, "test root", root, (names, False)))
    (folder / "server.key").write_bytes(pem(server, serialization.PrivateFormat.PKCS8))


def write_node_key(path: Path) -> None:
    key = ec.generate_private_key(ec.SECP384R1())
    path.write_bytes(pem(key, serialization.PrivateFormat.OpenSSH))
    public = key.public_key().public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
    path.with_suffix(".pub").write_bytes(public)


@pytest.mark.skipif("UNHEARD_DEPLOYMENT_TEST" not in os.environ, reason="starts dozens of processes: a minute or more")
@pytest.mark.timeout(590)
def test_flwr_run_trains_on_supernodes_over_tls_with_authenticated_nodes(run, store, tmp_path, statements):
    run = seeded(run, rounds=2)
    write_certificates(tmp_path)
    (tmp_path / "run.toml").write_text(run_toml(run, EngineChoice(kind="reference")))
    for i in range(2):
        users = [store.train.tokens(k) for k in range(30 * i, 30 * i + 30)]
        write_store(
            tmp_path / f"node-{i}" / "store", train=users, held_out=[], vocabulary=store.vocabulary, info=store.info
        )
        write_node_key(tmp_path / f"node-{i}.key")
    port, *node_ports = free_ports(3)
    home = tmp_path / "home"
    home.mkdir()
    (home / "config.toml").write_text(
        f'[superlink]\ndefault = "here"\n\n[superlink.here]\naddress = "127.0.0.1:{port}"\n'
        f'root-certificates = "{tmp_path}/ca.crt"\n'
    )
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", "")])
    env = {
        **os.environ,
        "FLWR_HOME": str(home),
        "PYTHONPATH": path,
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "OMP_NUM_THREADS": "1",
        "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}",
    }
    processes: list[subprocess.Popen] = []

    def start(name: str, *words: object) -> None:
        command = [str(BIN / str(words[0])), *map(str, words[1:])]
        with open(tmp_path / f"{name}.log", "wb") as log:  # the process has its own copy
            processes.append(subprocess.Popen(command, stdout=log, stderr=log, env=env, cwd=tmp_path))

    def flwr(*words: object) -> str:
        done = subprocess.run(
            [str(BIN / "flwr"), *map(str, words)], env=env, capture_output=True, text=True, cwd=tmp_path, timeout=100
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    files = {"ca-cert": "ca.crt", "cert": "server.pem", "key": "server.key"}
    tls = [f"--ssl-{name}file={tmp_path}/{file}" for name, file in files.items()]
    try:
        words = ("--enable-supernode-auth", "--disable-runtime-dependency-installation", "--port", port)
        start("superlink", "flower-superlink", *tls, *words)
        wait_for_port(port)
        for i in range(2):
            flwr("supernode", "register", tmp_path / f"node-{i}.pub")
            start(
                f"supernode-{i}", "flower-supernode", "--superlink", f"127.0.0.1:{port}",
                "--root-certificates", tmp_path / "ca.crt",
                "--auth-supernode-private-key", tmp_path / f"node-{i}.key", "--port", node_ports[i],
                "--node-config", f'folder="{tmp_path}/node-{i}" partition-id={i}',
            )  # fmt: skip
        config = f'run-file="{tmp_path}/run.toml" out="{tmp_path}/out" min-nodes=2'
        flwr("run", ROOT / "examples" / "flower", "here", "--run-config", config)
        until = time.monotonic() + 400
        # The server writes the statement after the last round, and then sends the last model to the nodes.
        kept = [tmp_path / f"node-{i}" / "model" / "model.safetensors" for i in range(2)]
        last = tmp_path / "out" / "model.safetensors"
        while not (tmp_path / "out" / "statement.json").exists() or not all(
            path.exists() and path.read_bytes() == last.read_bytes() for path in kept
        ):
            assert time.monotonic() < until, (tmp_path / "superlink.log").read_text()[-3000:]
            time.sleep(0.2)
    finally:
        for process in reversed(processes):
            process.terminate()
        for process in processes:
            try:
                process.wait(timeout=10)
            except subprocess.TimeoutExpired:
                process.kill()
    model = newest_checkpoint(RunFolder.open(tmp_path / "out")).state.params_P.numpy()
    np.testing.assert_array_equal(model, plain(run, tmp_path / "plain"))
    assert json.loads((tmp_path / "node-0" / "record.json").read_text())["contributions"] >= 1


def wait_for_port(port: int, seconds: float = 60) -> None:
    until = time.monotonic() + seconds
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
            return
        except OSError:
            assert time.monotonic() < until, f"nothing listens on port {port}"
            time.sleep(0.2)
