"""What a decorated function's signature says: which parameters are static or donated, and the placements stated for each.

Placements come from annotations or from `in_placements` / `out_placements`, never from both for one parameter. Everything
here happens once, at decoration.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin

import jax

from placements import P, Partial, Replicate, Shard
from spmd.errors import AnnotationError, ArgumentError
from spmd.prefix import describe, is_leaf

RETURN = "return"


@dataclass(frozen=True, eq=False)
class Signature:
    """A function's parameters with the prefix of placements stated for each (by name), and for the result."""

    name: str
    signature: inspect.Signature
    statics: frozenset[str]
    donated: frozenset[str]
    stated: Mapping[str, Any]
    result: Any

    def bind(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> inspect.BoundArguments:
        """The arguments by parameter. Raises `TypeError` as a call would."""
        try:
            return self.signature.bind(*args, **kwargs)
        except TypeError as error:
            raise TypeError(f"{self.name}: {error}") from None

    def prefix(self, parameter: str) -> Any:
        """The placements stated for a parameter, or None."""
        return self.stated.get(parameter)

    def has(self, parameter: str) -> bool:
        """Whether a keyword of this name is the function's own."""
        kinds = {p.kind for p in self.signature.parameters.values()}
        return parameter in self.signature.parameters or inspect.Parameter.VAR_KEYWORD in kinds


def read_signature(
    function: Callable[..., Any],
    in_placements: Any,
    out_placements: Any,
    statics: tuple[Any, Any],
    donated: tuple[Any, Any],
    frame_locals: Mapping[str, Any],
) -> Signature:
    """Read a function once. `statics` and `donated` are (argnums, argnames).

    Raises `AnnotationError` for an annotation that cannot be evaluated, or a parameter whose placement is stated twice;
    `ArgumentError` for names, numbers or placements that fit no parameter.
    """
    name = getattr(function, "__name__", type(function).__name__)
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        signature = inspect.signature(lambda *args, **kwargs: None)
    static_names = _names(name, signature, "static", *statics)
    annotations = _annotated(name, function, signature, frame_locals)
    given = _given(name, signature, in_placements, static_names)
    for parameter, prefix in given.items():
        if prefix is not None and parameter in annotations:
            raise AnnotationError(
                f"{name}: the placement of parameter {parameter!r} is stated twice, as {annotations[parameter]!r} in its "
                f"annotation and as {prefix!r} in in_placements. Keep one."
            )
    result = annotations.pop(RETURN, None)
    if result is not None and out_placements is not None:
        raise AnnotationError(
            f"{name}: the placement of the result is stated twice, as {result!r} in the return annotation and as "
            f"{out_placements!r} in out_placements. Keep one."
        )
    for parameter in static_names & annotations.keys():
        raise AnnotationError(f"{name}: parameter {parameter!r} is static and has a placement. Only arrays are placed.")
    stated = annotations | {parameter: prefix for parameter, prefix in given.items() if prefix is not None}
    donated_names = _names(name, signature, "donate", *donated)
    return Signature(name, signature, static_names, donated_names, stated, result or out_placements)


def _as_tuple(value: Any) -> tuple[Any, ...]:
    return (value,) if isinstance(value, (int, str)) else tuple(value or ())


def _names(name: str, signature: inspect.Signature, what: str, numbers: Any, words: Any) -> frozenset[str]:
    """Parameter numbers and names, as names."""
    parameters = list(signature.parameters)
    found = set()
    for number in _as_tuple(numbers if numbers is not None else ()):
        if not -len(parameters) <= number < len(parameters):
            raise ArgumentError(
                f"{name}: {what}_argnums={number} is out of range; it has {len(parameters)} parameters."
            )
        found.add(parameters[number])
    for word in _as_tuple(words):
        if word not in parameters:
            raise ArgumentError(f"{name}: {what}_argnames={word!r} is no parameter; they are {', '.join(parameters)}.")
        found.add(word)
    return frozenset(found)


def _given(name: str, signature: inspect.Signature, in_placements: Any, statics: Iterable[str]) -> dict[str, Any]:
    """`in_placements` by parameter name."""
    dynamic = [p for p in signature.parameters.values() if p.name not in statics]
    if in_placements is None:
        return {}
    if is_leaf(in_placements):
        return {p.name: in_placements for p in dynamic}
    if isinstance(in_placements, Mapping):
        unknown = [key for key in in_placements if key not in {p.name for p in dynamic}]
        if unknown:
            names = ", ".join(p.name for p in dynamic)
            raise ArgumentError(
                f"{name}: in_placements names {unknown}; the parameters that are not static are {names}. Placements for one "
                "argument that is a dict go into a tuple: ({...},)."
            )
        return dict(in_placements)
    if not isinstance(in_placements, (tuple, list)):
        raise ArgumentError(
            f"{name}: in_placements is a P for all arguments, a tuple with one entry per argument, or a dict by name; "
            f"{describe(in_placements)}."
        )
    positional = [p for p in dynamic if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    star = next((p for p in dynamic if p.kind is p.VAR_POSITIONAL), None)
    required = sum(p.default is p.empty for p in positional)
    count = len(in_placements)
    if count < required or (count > len(positional) and star is None):
        names = ", ".join(p.name for p in positional)
        by_name = [p.name for p in dynamic if p.kind is p.KEYWORD_ONLY]
        hint = f" Keyword-only ones ({', '.join(by_name)}) are placed by a dict of all." if by_name else ""
        hint += " Placements for one argument that is a list go into a tuple: ([...],)." if len(positional) == 1 else ""
        raise ArgumentError(
            f"{name}: in_placements has {count} entries, but the positional arguments that are not static are "
            f"{len(positional)}: {names}.{hint}"
        )
    found = {p.name: prefix for p, prefix in zip(positional, in_placements, strict=False)}
    rest = tuple(in_placements[len(positional) :])
    return found if star is None or not rest else {**found, star.name: rest}


def _annotated(
    name: str, function: Callable[..., Any], signature: inspect.Signature, frame_locals: Mapping[str, Any]
) -> dict[str, Any]:
    """The placements in a function's annotations, by parameter name, that of the result under `return`."""
    pairs = [(p.name, p.annotation) for p in signature.parameters.values()]
    pairs.append((RETURN, signature.return_annotation))
    found = {}
    for parameter, annotation in pairs:
        if annotation is inspect.Signature.empty:
            continue
        if isinstance(annotation, str):
            annotation = _evaluate(name, parameter, annotation, function, frame_locals)
        prefix = _placements_in(annotation)
        if prefix is not None:
            found[parameter] = prefix
    return found


def _evaluate(
    name: str, parameter: str, text: str, function: Callable[..., Any], frame_locals: Mapping[str, Any]
) -> Any:
    """A string annotation, in the function's globals, its closure and the decorating frame's locals."""
    inner = inspect.unwrap(function)
    while isinstance(inner, functools.partial):
        inner = inspect.unwrap(inner.func)
    if not hasattr(inner, "__globals__"):  # an instance: what is called is its class's
        inner = inspect.unwrap(type(inner).__call__)
    code, cells = getattr(inner, "__code__", None), getattr(inner, "__closure__", None) or ()
    closure = {}
    for variable, cell in zip(code.co_freevars if code else (), cells, strict=True):
        try:
            closure[variable] = cell.cell_contents
        except ValueError:  # an empty cell: the name is bound later
            continue
    try:
        return eval(text, getattr(inner, "__globals__", {}), {**frame_locals, **closure})
    except Exception as error:
        what = "the result" if parameter == RETURN else f"parameter {parameter!r}"
        raise AnnotationError(
            f"{name}: the annotation of {what}, {text!r}, cannot be evaluated: {type(error).__name__}: {error}. "
            "Define the names before the function, or state the placement in in_placements."
        ) from error


def _placements_in(annotation: Any) -> Any:
    """The P, or pytree of P, in an annotation; None where it holds none."""
    if get_origin(annotation) is Annotated:
        found = [extra for extra in get_args(annotation)[1:] if _is_placement_tree(extra)]
        for extra in get_args(annotation)[1:]:
            if isinstance(extra, (Shard, Replicate, Partial, jax.sharding.PartitionSpec, jax.sharding.Sharding)):
                raise AnnotationError(
                    f"{annotation!r}: {extra!r} is no placement of an array. Placements are by mesh axis, as in "
                    "P(dp=Shard(0)) with `from placements import P`; P.from_spec translates a PartitionSpec."
                )
        if len(found) > 1:
            raise AnnotationError(f"{annotation!r} states several placements: {found!r}. Keep one.")
        return found[0] if found else _placements_in(get_args(annotation)[0])
    if _is_placement_tree(annotation):
        return annotation
    origin, arguments = get_origin(annotation), get_args(annotation)
    parts = [None if part is Ellipsis else _placements_in(part) for part in arguments]
    if not any(part is not None for part in parts):
        return None
    if origin is tuple and Ellipsis not in arguments:
        return tuple(parts)
    if origin in (tuple, list, dict, Sequence, Mapping, Union, UnionType):
        stated = [part for part in parts if part is not None]  # of X | None, dict[str, X], tuple[X, ...]: that of X
        if len(stated) == 1:
            return stated[0]
    raise AnnotationError(
        f"{annotation!r}: a placement inside this type says nothing about an argument. State it for the whole argument: "
        "Annotated[..., P(...)], or with a pytree of placements."
    )


def _is_placement_tree(value: Any) -> bool:
    if isinstance(value, P):
        return True
    leaves = jax.tree.leaves(value) if isinstance(value, (dict, list, tuple)) else []
    return bool(leaves) and all(isinstance(leaf, P) for leaf in leaves)
