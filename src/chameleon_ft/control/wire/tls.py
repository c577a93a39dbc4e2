"""Mutual TLS of the control connections: both ends present a certificate that one authority has signed.

A directory holds the authority's certificate in `ca.pem`, and the own certificate and private key in `cert.pem` and
`key.pem`. Names in certificates are not compared with addresses: any process with a certificate of this authority
belongs to the run.
"""

from __future__ import annotations

import shutil
import ssl
import subprocess
from pathlib import Path

from chameleon_ft.errors import ConfigError

_FILES = ("ca.pem", "cert.pem", "key.pem")


def tls_context(directory: Path | None, *, server: bool = False) -> ssl.SSLContext | None:
    """Return the context of one end of the control connections; None without a directory.

    Raises:
        ConfigError: a file is missing or cannot be used.
    """
    if directory is None:
        return None
    authority, certificate, key = (directory / name for name in _FILES)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if server else ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
    try:
        context.load_cert_chain(certificate, key)
        context.load_verify_locations(authority)
    except OSError as error:  # which errors of the format are too
        raise ConfigError(
            f"TLS directory {directory}: {error.strerror or error}; it must hold {', '.join(_FILES)}, "
            "readable by this user, with the key of that certificate"
        ) from None
    return context


def generate_certificates(directory: Path) -> None:
    """Make the directory for one run: a new certificate that is its own authority, and that all its processes share.

    Raises:
        ConfigError: there is no openssl command, or it fails.
    """
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(mode=0o700)
    authority, certificate, key = (directory / name for name in _FILES)
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes"]
    usage = ["-addext", "keyUsage=critical,digitalSignature,keyCertSign"]
    names = ["-days", "3650", "-subj", "/CN=chameleon", "-keyout", str(key), "-out", str(certificate)]
    try:
        subprocess.run([*command, *usage, *names], check=True, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    except FileNotFoundError:
        raise ConfigError(
            'control.tls = "generate": there is no openssl command on this host; install it, or give a directory with '
            "certificates"
        ) from None
    except subprocess.CalledProcessError as error:
        raise ConfigError(f'control.tls = "generate": openssl failed: {error.stderr.strip()}') from None
    key.chmod(0o600)
    shutil.copy(certificate, authority)
