"""Makes ``broken_transports.py`` importable as ``p2p_broken``."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

if "p2p_broken" not in sys.modules:
    spec = importlib.util.spec_from_file_location("p2p_broken", Path(__file__).with_name("broken_transports.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["p2p_broken"] = module
    spec.loader.exec_module(module)
