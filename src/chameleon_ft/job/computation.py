"""How the layers of a job are computed: in which precision, and whether they are compiled."""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Literal


@dataclass(frozen=True, slots=True)
class Precision:
    """The element type that layers compute in.

    Attributes:
        name: fp32: that of the model's own parameters; bf16: parameters and activations in bfloat16, with gradients
            summed in float32, and updates applied to float32 masters of the parameters.
        fp32_modules: modules, parameters and buffers that bf16 leaves in float32, as patterns of the names of classes
            of modules, or of names within a layer, such as "*RMSNorm", "feed_forward.router" and "*inv_freq".
    """

    name: Literal["fp32", "bf16"] = "fp32"
    fp32_modules: tuple[str, ...] = ()

    @property
    def is_lower(self) -> bool:
        """Whether layers compute in fewer bits than those in which their parameters are updated."""
        return self.name != "fp32"

    def keeps(self, *names: str) -> bool:
        """Return whether a module, parameter or buffer with one of these names is left in float32."""
        return any(fnmatchcase(name, pattern) for pattern in self.fp32_modules for name in names)


@dataclass(frozen=True, slots=True)
class Compile:
    """Compilation of layers by `torch.compile`.

    Attributes:
        shapes: off: layers are not compiled; static: for the shapes that they get; dynamic: for variable shapes.
        backend: one of torch's, which compiles.
    """

    shapes: Literal["off", "static", "dynamic"] = "off"
    backend: str = "inductor"

    @property
    def is_on(self) -> bool:
        """Whether layers are compiled."""
        return self.shapes != "off"
