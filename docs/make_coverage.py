"""Write docs/coverage.md: for every primitive how it shards, read off the rule of an example.

Usage: python docs/make_coverage.py, with the oldest JAX that is supported.
"""

from __future__ import annotations

import string
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax

from placements import Mesh
from spmd.factors import Rule
from spmd.phases import PHASES
from spmd.rules import OTHERWISE, REPLICATED, RULES, rule_of
from spmd.trace import trace

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "coverage.md"

HEAD = """# Coverage

Written by `docs/make_coverage.py` from the tables of rules. Each line is the rule of one example, in the manner of einsum: a
letter is a factor, one for each dim, and `ab` a dim of two.

- A letter in operands and results may be sharded, and nothing moves.
- `-a` is whole: where it is sharded, shards go to another dim, or are gathered.
- `~a` may be sharded, and needs a window of the operand: neighbours exchange the overlap.
- `sum a`: shards of `a` give parts of a sum, reduced where a whole is needed.

`parts` says of which operands, the first being 0, parts pass unreduced, and of which op.

| primitive | rule | parts |
| --- | --- | --- |
"""


def examples() -> dict[str, tuple[Any, Rule]]:
    """An equation of every primitive that has a rule: the one with most factors that may be sharded."""
    sys.path.insert(0, str(ROOT / "tests"))
    from test_rules import ROWS

    found: dict[str, tuple[Any, Rule]] = {}
    for name in sorted(ROWS):
        function, args = ROWS[name]
        for eqn in _equations(trace(function, [jax.typeof(arg) for arg in args], Mesh(), lambda value: False)):
            rule = rule_of(eqn)
            best = found.get(eqn.primitive.name)
            if rule is not None and (best is None or _rank(rule) > _rank(best[1])):
                found[eqn.primitive.name] = eqn, rule
    return found


def _equations(jaxpr: Any) -> Iterator[Any]:
    for eqn in jaxpr.eqns:
        yield eqn
        for body in eqn.params.get("bodies", ()):
            yield from _equations(body)


def _rank(rule: Rule) -> tuple[int, int, int]:
    return len(rule.windows), len(list(rule.shardable())), len(rule.passes)


def spec(rule: Rule) -> str:
    """A rule in the manner of einsum."""
    letters: dict[int, str] = {}

    def dim(factors: tuple[int, ...], mark: str) -> str:
        word = "".join(letters.setdefault(factor, string.ascii_lowercase[len(letters)]) for factor in factors) or "1"
        whole = all(factor in rule.replicated for factor in factors) and factors
        return ("-" if whole else mark) + word

    def array(index: int, dims: Any, windows: Any) -> str:
        marked = {d for operand, d, _ in windows if operand == index}
        return " ".join(dim(factors, "~" if d in marked else "") for d, factors in enumerate(dims)) or "()"

    operands = ", ".join(array(index, dims, rule.windows) for index, dims in enumerate(rule.operands))
    results = ", ".join(array(-1, dims, ()) for dims in rule.results)
    reduced: dict[str, list[str]] = {}
    for factor, op in rule.reductions:
        reduced.setdefault(op, []).append(letters[factor])
    notes = "".join(f"; {op} {' '.join(names)}" for op, names in reduced.items())
    return f"`{operands} -> {results}`{notes}".replace("` ->", "`->")


def parts(rule: Rule) -> str:
    """Of which operands parts pass."""
    words = []
    for passes in rule.passes:
        ops = "any op" if len(passes.ops) > 5 else ", ".join(passes.ops)
        count = len(rule.operands)
        which = (
            ""
            if count == 1
            else " of all"
            if len(passes.operands) == count
            else f" of {', '.join(map(str, passes.operands))}"
        )
        words.append(ops + which)
    return "; ".join(dict.fromkeys(words))


def render() -> str:
    """The page."""
    found = examples()
    lines = [HEAD]
    for name in sorted({primitive.name for primitive in RULES}):
        if name in found:
            _, rule = found[name]
            phases = "; along a sharded dim in phases (`spmd/phases.py`)" if name in PHASES else ""
            lines.append(f"| `{name}` | {spec(rule)}{phases} | {parts(rule)} |\n")
    lines.append("\n## Computed on whole operands, with a warning\n\n| primitive | why |\n| --- | --- |\n")
    lines += [f"| `{name}` | {why} |\n" for name, why in sorted(REPLICATED.items())]
    lines.append("\n## Needs no rule\n\n| primitive | why |\n| --- | --- |\n")
    lines += [f"| `{name}` | {why} |\n" for name, why in sorted(OTHERWISE.items())]
    return "".join(lines)


if __name__ == "__main__":
    PAGE.write_text(render())
