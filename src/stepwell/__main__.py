"""``python -m stepwell``."""

from __future__ import annotations

import sys

from stepwell._cli import main

sys.exit(main())
