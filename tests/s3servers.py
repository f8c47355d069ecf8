"""Real S3 servers on loopback for tests and benches: `rclone serve s3` and SeaweedFS.

Both are context managers that yield a running server and end it for certain. They wait for
conditions (an answer, a process's end), never for a time.
"""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import boto3
from botocore import UNSIGNED
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError

BUCKET = "ckpt"
START_TIMEOUT_S = 90  # weed needs about ten seconds on an idle machine
STOP_TIMEOUT_S = 30
POLL_S = 0.05


@dataclass(frozen=True)
class S3Server:
    """A running server; `folder` is the bucket's directory where the server has one."""

    endpoint: str
    bucket: str
    process: subprocess.Popen[bytes]
    folder: Path | None = None
    access_key: str | None = None
    secret_key: str | None = field(default=None, repr=False)

    @property
    def environment(self) -> dict[str, str]:
        """What a client's process needs in its environment."""
        if self.access_key is None or self.secret_key is None:
            return {}
        return {"AWS_ACCESS_KEY_ID": self.access_key, "AWS_SECRET_ACCESS_KEY": self.secret_key}

    def client(self) -> Any:
        """Return a plain boto3 client, to look at the server past the code under test."""
        options: dict[str, Any] = {
            "s3": {"addressing_style": "path"},
            "retries": {"total_max_attempts": 1},
        }
        if self.access_key is None:
            options["signature_version"] = UNSIGNED
        return boto3.session.Session().client(
            "s3",
            endpoint_url=self.endpoint,
            region_name="us-east-1",
            aws_access_key_id=self.access_key,
            aws_secret_access_key=self.secret_key,
            config=Config(**options),
        )

    def keys(self, prefix: str = "") -> list[str]:
        """Return all keys below `prefix`."""
        pages = self.client().get_paginator("list_objects_v2")
        found = []
        for page in pages.paginate(Bucket=self.bucket, Prefix=prefix):
            found += [item["Key"] for item in page.get("Contents", ())]
        return found

    def uploads(self, below: str = "") -> list[str]:
        """Return the keys of the multipart uploads that are under way, all or below a prefix."""
        try:
            response = self.client().list_multipart_uploads(Bucket=self.bucket)
        except ClientError as error:
            if error.response["Error"]["Code"] == "NoSuchUpload":
                return []  # how rclone says that there never was one
            raise
        keys = [item["Key"] for item in response.get("Uploads", ())]
        return [key for key in keys if not below or key.startswith(f"{below}/")]


def free_port() -> int:
    """Return a port that is free now."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port


def tool(name: str) -> str:
    """Return the path of a program of this environment."""
    beside = Path(sys.executable).parent / name
    found = str(beside) if beside.exists() else shutil.which(name)
    if found is None:
        raise FileNotFoundError(f"{name} is not installed: pip install -e '.[test]'")
    return found


@contextmanager
def rclone_s3(
    folder: Path,
    *,
    port: int | None = None,
    keys: tuple[str, str] | None = None,
    address: str = "127.0.0.1",
) -> Iterator[S3Server]:
    """Run `rclone serve s3` on `folder`, whose subfolder `ckpt` is the bucket.

    Anonymous without `keys` (id, secret). A `port` of one's own lets a server come back, and the
    `outside_address` of hosts (namespaces.py) lets them reach it.
    """
    bucket = folder / BUCKET
    bucket.mkdir(parents=True, exist_ok=True)
    port = port or free_port()
    command = [tool("rclone"), "serve", "s3", "--addr", f"{address}:{port}"]
    if keys is not None:
        command += ["--auth-key", ",".join(keys)]
    access, secret = keys or (None, None)
    with _running([*command, str(folder)], folder.parent / f"rclone-{port}.log") as process:
        server = S3Server(f"http://{address}:{port}", BUCKET, process, bucket, access, secret)
        _wait_until_serving(server)
        yield server


@contextmanager
def weed_s3(folder: Path) -> Iterator[S3Server]:
    """Run SeaweedFS with S3 and keys on `folder`, and make the bucket `ckpt`."""
    data = folder / "data"
    data.mkdir(parents=True, exist_ok=True)
    access, secret = "lmstorfs-test", "lmstorfs-test-secret"
    identities = folder / "s3.json"
    identity = {
        "name": "test",
        "credentials": [{"accessKey": access, "secretKey": secret}],
        "actions": ["Admin", "Read", "List", "Tagging", "Write"],
    }
    identities.write_text(json.dumps({"identities": [identity]}))
    ports = {name: _weed_port() for name in ("master", "volume", "filer", "s3")}
    command = [
        *(tool("weed"), "server", f"-dir={data}", "-ip=127.0.0.1", "-ip.bind=127.0.0.1"),
        *("-s3", f"-s3.config={identities}", f"-s3.port={ports['s3']}"),
        *(f"-master.port={ports['master']}", f"-volume.port={ports['volume']}"),
        *(f"-filer.port={ports['filer']}", "-volume.max=50", "-master.volumeSizeLimitMB=1024"),
        *("-s3.port.iceberg=0", "-s3.port.lance=0"),  # fixed ports: two servers would collide
    ]
    # killed at the end: it takes half a minute to leave by itself, and nobody needs its data
    with _running(command, folder / "weed.log", stop=signal.SIGKILL) as process:
        server = S3Server(
            f"http://127.0.0.1:{ports['s3']}",
            BUCKET,
            process,
            access_key=access,
            secret_key=secret,
        )
        _wait_until_serving(server, create=True)
        yield server


def _weed_port() -> int:
    """Return a free port whose gRPC port (10000 above) is free as well."""
    while True:
        port = free_port()
        if port >= 55000:
            port -= 30000
        with socket.socket() as first, socket.socket() as second:
            try:
                first.bind(("127.0.0.1", port))
                second.bind(("127.0.0.1", port + 10000))
            except OSError:
                continue
            return port


@contextmanager
def _running(
    command: list[str], log: Path, *, stop: signal.Signals = signal.SIGTERM
) -> Iterator[subprocess.Popen[bytes]]:
    """Run `command` in a process group of its own until the block ends."""
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        yield process
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGCONT)  # a test may have stopped it
            os.killpg(process.pid, stop)
            try:
                process.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def _wait_until_serving(server: S3Server, *, create: bool = False) -> None:
    """Return once the bucket answers; fails where the server ends or never comes up."""
    client = server.client()
    deadline = time.monotonic() + START_TIMEOUT_S
    while True:
        try:
            if create:
                client.create_bucket(Bucket=server.bucket)
                client.put_object(Bucket=server.bucket, Key="started", Body=b"1")
                client.delete_object(Bucket=server.bucket, Key="started")
            client.head_bucket(Bucket=server.bucket)
            return
        except (ClientError, BotoCoreError) as error:
            if isinstance(error, ClientError) and "BucketAlready" in str(error):
                create = False
            if server.process.poll() is not None:
                raise RuntimeError(
                    f"the S3 server ended with {server.process.returncode}"
                ) from error
            if time.monotonic() > deadline:
                raise TimeoutError(f"no S3 server within {START_TIMEOUT_S} s") from error
            time.sleep(POLL_S)
