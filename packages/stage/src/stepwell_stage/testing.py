"""For authors of stage programs, and for tests of code that runs one.

:func:`check_stage_program` tries every promise of :class:`stepwell_stage.StageProgram` on a program of yours;
:class:`FakeProgram` is the smallest one that keeps them, and notes what it was asked for.
"""

from __future__ import annotations

from ._fake_program import FakeProgram
from ._program_checks import PROGRAM_CHECKS, ProgramCheck, ProgramCheckError, ProgramSubject, check_stage_program

__all__ = [
    "PROGRAM_CHECKS",
    "FakeProgram",
    "ProgramCheck",
    "ProgramCheckError",
    "ProgramSubject",
    "check_stage_program",
]
