"""Which values are the same on every rank bit for bit, wherever they are computed whole: those that follow from integers alone.

Floats need not be: a reduction may add in another order on another rank's processor. A branch or a loop that decides on
collectives by such a value needs a broadcast of its decision; by an exact one it needs none.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from collectives.jax_compat import Atom, JaxprEqn, Literal
from spmd.trace import GlobalJaxpr

Flow = tuple[tuple[Atom, ...], tuple[Atom, ...]]
"""Values, and those that they lead to."""


class Exactness:
    """What is known of the values of a jaxpr and of all bodies in it. `atom in exactness` says whether a value is exact.

    Every integer and bool is taken to be exact until something that is not leads to it: an operand, what a body makes of it,
    or the decision that the loop or branch around it depends on. A body that several equations share is as exact as the least
    exact of its uses.
    """

    def __init__(self, jaxpr: GlobalJaxpr) -> None:
        self.inexact: set[int] = set()
        while self._sweep(jaxpr):
            pass

    def __contains__(self, atom: Atom) -> bool:
        return isinstance(atom, Literal) or (_is_discrete(atom) and id(atom) not in self.inexact)

    def _sweep(self, jaxpr: GlobalJaxpr) -> bool:
        """Carry inexactness along every equation once. Returns whether something was found."""
        before = len(self.inexact)
        for eqn in jaxpr.eqns:
            for body in eqn.params.get("bodies", ()):
                self._sweep(body)
            for sources, targets in _flows(eqn):
                if not all(atom in self for atom in sources):
                    self.inexact.update(id(var) for var in targets if _is_discrete(var))
        return len(self.inexact) > before


def _flows(eqn: JaxprEqn) -> Iterator[Flow]:
    """What leads to what in an equation: any of the first to all of the second."""
    bodies = eqn.params.get("bodies", ())
    if not bodies:
        yield tuple(eqn.invars), tuple(eqn.outvars)
    elif eqn.primitive.name == "scan":
        (body,), (first, carries) = bodies, eqn.params["counts"]
        yield from _pairs(eqn.invars, body.inputs)
        yield from _pairs(body.outputs[:carries], body.inputs[first : first + carries])
        yield from _pairs(body.outputs, eqn.outvars)
    elif eqn.primitive.name == "while":
        (condition, body), of_condition, of_body = bodies, eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
        constants, init = eqn.invars[:of_condition], eqn.invars[of_condition + of_body :]
        yield from _pairs((*constants, *init), condition.inputs)
        yield from _pairs(eqn.invars[of_condition:], body.inputs)
        yield from _pairs(body.outputs, body.inputs[of_body:])
        yield from _pairs(body.outputs, condition.inputs[of_condition:])
        yield from _pairs(body.outputs, eqn.outvars)
        yield tuple(condition.outputs), (*body.inputs[of_body:], *condition.inputs[of_condition:], *eqn.outvars)
    elif eqn.primitive.name == "shard_map":
        yield from _pairs(eqn.invars, bodies[0].inputs)
        yield from _pairs(bodies[0].outputs, eqn.outvars)
    else:
        for body in bodies:
            yield from _pairs(eqn.invars[1:], body.inputs)
            yield from _pairs(body.outputs, eqn.outvars)
        yield (eqn.invars[0],), tuple(eqn.outvars)


def _pairs(sources: Sequence[Atom], targets: Sequence[Atom]) -> Iterator[Flow]:
    """Each of the first to its counterpart."""
    for source, target in zip(sources, targets, strict=True):
        yield (source,), (target,)


def _is_discrete(atom: Atom) -> bool:
    """Whether a value is of bools or integers."""
    return isinstance(atom.aval.dtype, np.dtype) and atom.aval.dtype.kind in "biu"
