"""Stages from any model, as its author wrote it: by ownership of units, without tracing.

A model's parameters live in *units*: submodules that are never cut. Each unit belongs to one stage. All else is *glue*: the
code of the modules above the units, modules without parameters, the loss. Every stage runs the model's own forward. Its own
units compute; a unit of another stage computes nothing and gives, for each tensor, the one that was *received*, or an
*absent* one: everything of a tensor but the data. Glue runs everywhere, on real and on absent tensors alike::

                     embed      block 0      block 1       norm       loss
    the model     ──▶ [■] ─────▶ [■] ─────▶  [■]  ─────▶   [■] ─────▶ glue
    stage 0           [■] ─────▶ [■] ─ stop: nothing left to compute or send
                                  ╰───── one wire ─────╮
    stage 1           [ ] ╌╌╌╌╌▶ [ ] ─▶ received ──▶ [■] ─▶ [■] ─────▶ glue
                      ╌ absent

**Looking.** `split` runs the forward once on absent tensors (`_record`), with every unit absent, and writes down (`_values`)
what is computed from what. Operations between units are counted, and so are calls of units: number n is the same on every
stage, for all run the same code. Where Python looks at data (an ``if``, an ``item()``), the example is run for real instead.

**Deciding.** Units are found (`_units`), put on stages in the order in which they run, and the pure part (`_demand`) follows
what each stage's units need back to what that stage has. Of what it has not, it takes from an earlier stage whatever moves
the fewest bytes (`_least`): a sum that glue made there, rather than its two parts. These are the wires. Parameters never cross:
glue that reads one on several stages makes it a tied one.

**Running.** A stage's module (`_own`) is a copy of the model's structure with its own parameters in place and the others
absent; functions that the model keeps reach that copy (`_reached`). Its inputs enter as was decided for those of their look
(`_entry`), hooks of the model see them (`_hooked`), and its forward runs under a function mode (`_glue`)
which counts as before; at the number of a received value it gives
that one, at the number of a sent one it keeps it, and at the last number that matters it stops. If anything comes in another
order than it did in the example, the step is refused.

**Several ways.** A forward that does not always go the same way is looked at once for each (`_ways`). Until two ways part, by the
name of a call or operation, they are one: a value crosses in both if it crosses in one, and no stage needs to know which it is.
From there on each has values of its own, on the same wires; a wire without one carries an empty tensor. A stage follows the names
and so finds out; it stops where no way that is left has more for it to do, and says which these are to those that it sends to.

A stage that took a value and found no use for it in its way says that as well, by the gradient of a small value of its own
(`_used`), so that what made it gets no gradient, and not zeros.

**What Python asks.** Stages go one way only if Python gets the same answers on each. Shapes are as of the real tensor. Whether
one needs a gradient is followed (`_needs`), and what cannot be told, such as its memory, is refused by the line that asks
(`_questions`). What a unit gives that is no tensor, or a shape that its inputs do not decide, its own stage compares with what
others take it to be, who run a copy of the unit on absent tensors once for each look of its inputs (`_templates`). Plain values
that units change are poisoned while an example is looked at (`_poison`), so that whoever else looks at them is found. What a unit
puts into an object that it is given, such as a cache, is put there again where it is not run (`_filling`).

**What else crosses the cut.** Of tensors in one memory that glue changes in place only the first crosses; the others are made of
it again. A value with random numbers in it, or a hook on its gradient, is made on one stage alone. What a checkpoint encloses is
on one stage, for it runs again in backward (`_frames`). Counters of glue run on every stage, to the forward's end (`_state`);
what a forward sets and takes back, such as a flag, is put back where a stage stops in between; what of it torch keeps for the
whole process (`_settings`), as it keeps the random numbers that a checkpoint draws again, ranks that are threads would share, and
they are refused.

**Across ranks.** In a pipeline's first step all must have planned the same (`_fingerprint`); in each step all that are given a
batch must be given the same (`_alike`). Objects that units of several stages fill, such as a cache, no stage gives (`_withheld`).

What this cannot do is said before anything is sent: values that would go back to an earlier stage, ways that no example showed,
what leaves a unit by another way than its return, state of glue that depends on what units make.
"""

from __future__ import annotations

from ._split import ModelSplit, split

__all__ = ["ModelSplit", "split"]
