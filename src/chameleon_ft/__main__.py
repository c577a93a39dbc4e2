"""`python -m chameleon_ft` is the command `chameleon`."""

from __future__ import annotations

import sys

from chameleon_ft.cli import main

sys.exit(main())
