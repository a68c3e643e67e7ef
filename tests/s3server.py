"""S3 servers for tests: moto in a process of its own, and a one-node Ceph RADOS Gateway."""

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import boto3

_CEPH = Path(__file__).with_name("ceph.sh")
_PROGRAMS = ("ceph-mon", "ceph-osd", "ceph-mgr", "radosgw", "radosgw-admin", "monmaptool", "curl")


@dataclass(frozen=True)
class Server:
    """Where an S3 server is, and who may use it."""

    url: str
    key: str = "AKIADUMMY"
    secret: str = "sekrit/dummy+key"

    def environment(self) -> dict[str, str]:
        """The variables that lead to it, and to no settings of this machine's user."""
        return {
            "AWS_ENDPOINT_URL": self.url,
            "AWS_ACCESS_KEY_ID": self.key,
            "AWS_SECRET_ACCESS_KEY": self.secret,
            "AWS_REGION": "us-east-1",
            "AWS_EC2_METADATA_DISABLED": "true",
            "AWS_CONFIG_FILE": os.devnull,
            "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
        }

    def client(self) -> Any:
        """boto3's client, independent of what hslake uses."""
        return boto3.client(
            "s3",
            endpoint_url=self.url,
            aws_access_key_id=self.key,
            aws_secret_access_key=self.secret,
            region_name="us-east-1",
        )


def free_port() -> int:
    """A loopback port nobody listens on now."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


@contextlib.contextmanager
def moto() -> Iterator[Server]:
    """A moto server in a process of its own."""
    port = free_port()
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    quiet: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    process = subprocess.Popen(command, **quiet)
    url = f"http://127.0.0.1:{port}"
    try:
        for _ in range(600):
            assert process.poll() is None, "moto's server ended at once"
            try:
                urllib.request.urlopen(f"{url}/moto-api/", timeout=5).close()
                break
            except OSError:
                time.sleep(0.1)
        else:
            raise AssertionError("moto's server does not answer")
        yield Server(url)
    finally:
        process.kill()
        process.wait()


def ceph_missing() -> list[str]:
    """Programs of Ceph that are not installed."""
    return [p for p in _PROGRAMS if shutil.which(p) is None]


@contextlib.contextmanager
def ceph(folder: Path, gigabytes: int = 2) -> Iterator[Server]:
    """A RADOS Gateway with its files in `folder`, objects in RAM; ready in about 25 s."""
    script = ["bash", str(_CEPH)]
    ports = [str(free_port()) for _ in range(3)]
    try:
        started = subprocess.run(
            [*script, "up", str(folder), str(gigabytes), *ports],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=120,
            check=False,
            text=True,
        )
        if "S3 ready" not in started.stdout:
            raise RuntimeError(f"Ceph does not start: {started.stdout[-500:]}")
        yield Server(f"http://127.0.0.1:{ports[0]}", "tkey", "tsecret")
    finally:
        subprocess.run([*script, "down", str(folder)], check=False)
