"""Classes that a structure from another stage names."""

from __future__ import annotations

import sys
from collections.abc import Iterable

import attrs

from stepwell_meta import ForwardMeta


def with_classes(look: ForwardMeta, given: Iterable[type]) -> ForwardMeta:
    """A look whose structure can be rebuilt: it knows the classes it names, where this process has them.

    Names are looked up in modules that are imported already; nothing is imported on a peer's word.

    Args:
        look: from another stage, where classes are names only.
        given: classes that the user named, for those that are not at the top of a module.
    """
    names = look.structure.class_names
    if not names:
        return look
    found = {f"{cls.__module__}:{cls.__qualname__}": cls for cls in given}
    for name in names - found.keys():
        module, _, path = name.partition(":")
        value: object = sys.modules.get(module)
        for part in path.split("."):
            value = getattr(value, part, None)
        if isinstance(value, type):
            found[name] = value
    return attrs.evolve(look, structure=attrs.evolve(look.structure, classes={**look.structure.classes, **found}))
