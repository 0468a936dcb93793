"""Runs one page's script as a program; `test_docs.py` calls it in processes that have torch loaded already."""

from __future__ import annotations

import os
import runpy
import sys
import warnings
from pathlib import Path


def run(page: str, output: str) -> None:
    """The page in its own folder, with all that it prints, also of its own processes, in a file."""
    with Path(output).open("w") as file:
        sys.stdout.flush()
        for descriptor in (1, 2):
            os.dup2(file.fileno(), descriptor)
    os.chdir(Path(page).parent)
    sys.argv = [page]
    sys.path[0] = str(Path(page).parent)
    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", "Failed to initialize NumPy", UserWarning)
    runpy.run_path(page, run_name="__main__")


if __name__ == "__main__":
    run(*PAGE_AND_OUTPUT)  # type: ignore[name-defined]  # noqa: F821  # runpy puts it into this namespace
