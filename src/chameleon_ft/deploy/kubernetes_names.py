"""Checks of names of objects, images and resources, which Kubernetes would reject only when it creates the pods."""

from __future__ import annotations

import re
from pathlib import PurePosixPath
from typing import Final

from chameleon_ft.errors import ConfigError

_LABEL: Final = r"[a-z0-9](?:[-a-z0-9]*[a-z0-9])?"
_SUBDOMAIN: Final = rf"{_LABEL}(?:\.{_LABEL})*"
_MOST_CHARACTERS: Final = 253
_RESOURCE: Final = re.compile(rf"({_SUBDOMAIN})/[A-Za-z0-9](?:[-A-Za-z0-9_.]{{0,61}}[A-Za-z0-9])?")

_HOST: Final = r"(?:[A-Za-z0-9](?:[-A-Za-z0-9]*[A-Za-z0-9])?(?:\.[A-Za-z0-9](?:[-A-Za-z0-9]*[A-Za-z0-9])?)*)"
_REGISTRY: Final = rf"(?:{_HOST}|\[[0-9A-Fa-f:]+\])(?::[0-9]+)?"
_COMPONENT: Final = r"[a-z0-9]+(?:(?:\.|__?|-+)[a-z0-9]+)*"
_IMAGE: Final = re.compile(
    rf"(?:{_REGISTRY}/)?{_COMPONENT}(?:/{_COMPONENT})*(?::[A-Za-z0-9_][-A-Za-z0-9_.]{{0,127}})?"
    r"(?:@[A-Za-z][-A-Za-z0-9_+.]*:[0-9A-Fa-f]{32,})?"
)
"""The grammar of the distribution project for references."""


def require_object_name(flag: str, name: str) -> None:
    """Raise ConfigError if no object, such as a secret, can have that name."""
    if len(name) > _MOST_CHARACTERS or not re.fullmatch(_SUBDOMAIN, name):
        raise ConfigError(
            f"{flag} {name}: should be the name of an object of Kubernetes, of lower-case letters, digits, hyphens and "
            "dots, which begins and ends with a letter or digit"
        )


def require_image(image: str) -> None:
    """Raise ConfigError if no image can have that name."""
    if not _IMAGE.fullmatch(image):
        raise ConfigError(
            f"--image {image}: should be the name of an image, in lower case and without spaces, such as "
            "registry.example/chameleon:1"
        )


def require_resource_name(name: str) -> None:
    """Raise ConfigError if this is no name of an extended resource, which begins with the domain of a vendor."""
    found = _RESOURCE.fullmatch(name)
    if found is None or len(found[1]) > _MOST_CHARACTERS or f".{found[1]}".endswith(".kubernetes.io"):
        raise ConfigError(f"--resource {name}: should be the name of an extended resource, such as nvidia.com/gpu")


def require_mount(mount: str, *, taken: tuple[str, ...]) -> None:
    """Raise ConfigError if the shared volume cannot be mounted there, because of what is mounted at `taken`, too."""
    path = PurePosixPath(mount)
    if not path.is_absolute() or ":" in mount or ".." in path.parts:
        raise ConfigError(f"--mount {mount}: should be an absolute path without .. and colons")
    if clash := next((each for each in map(PurePosixPath, taken) if each.is_relative_to(path)), None):
        raise ConfigError(f"--mount {mount}: hides {clash} of the pods; take another directory, such as /shared")
    if clash := next((each for each in map(PurePosixPath, taken) if path.is_relative_to(each)), None):
        raise ConfigError(f"--mount {mount}: is within {clash} of the pods; take another directory, such as /shared")
