"""The files of pictures: whether one can be written, said before anything is computed for it, and writing it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Final

from chameleon_ft.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["require_picture", "save_picture"]

_SUFFIXES: Final = (".svg", ".png", ".pdf")


def require_picture(path: Path) -> None:
    """Raise ConfigError where no picture could be written to `path`: another suffix, no such folder, no matplotlib."""
    if path.suffix.lower() not in _SUFFIXES:
        raise ConfigError(f"{path}: a picture is of the kind {', '.join(_SUFFIXES)}; end the name in one of these")
    if not path.parent.is_dir():
        raise ConfigError(f"{path}: the picture cannot be written: no such folder; give a file in a folder that exists")
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            f"{path}: pictures need matplotlib, which cannot be loaded ({error}); "
            "install it by: pip install 'chameleon-ft[pictures]'"
        ) from None


def save_picture(figure: Figure, path: Path, *, title: str) -> None:
    """Write a picture in place of what is there. Raises ConfigError where that fails."""
    try:
        figure.savefig(path, facecolor="white", metadata={"Title": title})
    except OSError as error:
        raise ConfigError(
            f"{path}: the picture cannot be written: {error.strerror}; give a file in a folder that exists"
        ) from None
