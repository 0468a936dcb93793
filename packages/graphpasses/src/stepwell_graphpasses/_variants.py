"""Which graph of one trace: how far gradients are reduced, and what earlier microbatches left to add.

====================  ===========================================================  =====================================
variant               gradients out                                                gradients in
====================  ===========================================================  =====================================
``FULL``              reduced, as stored                                           none
``NONE``              whole, in the reduce dtype, not reduced                      none
``SCATTER``           this rank's part, reduced on the shard axis                  none
``FULL_AFTER_NONE``   reduced, as stored                                           what ``NONE`` graphs gave, summed
``FULL_AFTER_SCATTER``  reduced, as stored                                         what ``SCATTER`` graphs gave, summed
====================  ===========================================================  =====================================

A graph for evaluation has no gradients and so only the first variant.
"""

from __future__ import annotations

from typing import Literal

import attrs


@attrs.frozen
class Variant:
    """See the module's table.

    Attributes:
        reduce: how far gradients are reduced.
        carries: what is added to them first: nothing, whole gradients, or parts.
    """

    reduce: Literal["none", "scatter", "full"]
    carries: Literal["nothing", "whole", "parts"] = "nothing"


FULL = Variant("full")
NONE = Variant("none")
SCATTER = Variant("scatter")
FULL_AFTER_NONE = Variant("full", "whole")
FULL_AFTER_SCATTER = Variant("full", "parts")
