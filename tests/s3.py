"""A real S3 server on this machine, for tests: moto's, behind a proxy that can stop passing on."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from typing import Any
from urllib.request import Request, urlopen

import boto3

from chameleon_ft.host.fork_server import end_with
from tests.proxy import Proxy

BUCKET = "bucket"


@dataclass(frozen=True, slots=True)
class S3:
    """The server.

    Attributes:
        address: host:port of the server itself.
        proxy: through which the runs of a test reach it.
    """

    address: str
    proxy: Proxy

    @property
    def environ(self) -> dict[str, str]:
        """The environment of a process that uses it."""
        return {
            "AWS_ENDPOINT_URL": f"http://{self.proxy.address}",
            "AWS_ACCESS_KEY_ID": "key",
            "AWS_SECRET_ACCESS_KEY": "secret",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_EC2_METADATA_DISABLED": "true",
        }

    def keys(self, prefix: str) -> list[str]:
        """Return the keys of all objects below a prefix."""
        found = self.client.list_objects_v2(Bucket=BUCKET, Prefix=f"{prefix}/").get("Contents", [])
        return sorted(each["Key"].removeprefix(f"{prefix}/") for each in found)

    def complete(self, prefix: str) -> list[int]:
        """Return the steps of the complete checkpoints of a run."""
        marks = [key for key in self.keys(f"{prefix}/checkpoints") if key.endswith("/complete.json")]
        return [int(key.partition("/")[0].removeprefix("step-")) for key in marks]

    def change(self, key: str) -> None:
        """Change some bytes in the middle of an object."""
        content = bytearray(self.client.get_object(Bucket=BUCKET, Key=key)["Body"].read())
        middle = len(content) // 2
        content[middle : middle + 8] = bytes(byte ^ 0xFF for byte in content[middle : middle + 8])
        self.client.put_object(Bucket=BUCKET, Key=key, Body=bytes(content))

    def refuse_all(self) -> None:
        """Refuse every request from now on, since no user has any rights."""
        address, header = f"http://{self.address}/moto-api/reset-auth", {"Content-Type": "text/plain"}
        urlopen(Request(address, data=b"0", headers=header)).close()

    @property
    def client(self) -> Any:
        """A client of boto3, which has no types."""
        return _client(self.address)


@cache  # making one takes longer than most requests
def _client(address: str) -> Any:
    return boto3.client(
        "s3",
        endpoint_url=f"http://{address}",
        aws_access_key_id="key",
        aws_secret_access_key="secret",
        region_name="us-east-1",
    )


@contextmanager
def s3_server() -> Iterator[S3]:
    """Run the server, in a process of its own, with one empty bucket."""
    command = [sys.executable, "-m", "moto.server", "--host", "127.0.0.1", "--port", "0"]
    bound = partial(end_with, os.getpid())
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, preexec_fn=bound
    ) as server:
        try:
            assert server.stdout is not None
            lines = iter(server.stdout.readline, "")
            found = next(each for line in lines if (each := re.search(r"Running on http://([\d.:]+)", line)))
            # Its log of requests must not fill the pipe.
            threading.Thread(target=deque, args=(lines, 0), daemon=True).start()
            with Proxy(found[1]) as proxy:
                s3 = S3(found[1], proxy)
                s3.client.create_bucket(Bucket=BUCKET)
                yield s3
        finally:
            server.kill()
