"""How the benchmarks that are modules end: ``python -m paceline.bench.…``."""

from __future__ import annotations

import sys
from collections.abc import Callable

from paceline.errors import PacelineError


def run(main: Callable[[], object]) -> None:
    """Run it. What a user can cause is one line on stderr and status 1, as for the commands of ``paceline``."""
    try:
        main()
    except (PacelineError, OSError) as error:
        sys.exit(f"error: {error}")
