"""Makes ``support.py`` importable as ``graphpasses_support``, here and (by value) in the ranks of the worker pool."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import cloudpickle

if "graphpasses_support" not in sys.modules:
    spec = importlib.util.spec_from_file_location("graphpasses_support", Path(__file__).with_name("support.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["graphpasses_support"] = module
    spec.loader.exec_module(module)
    cloudpickle.register_pickle_by_value(module)
