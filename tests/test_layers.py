"""The layering: placements <- collectives <- spmd; optional packages and private JAX names only where they belong."""

from __future__ import annotations

import ast
import inspect
import pkgutil
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

import collectives
import placements
import spmd

ROOT = Path(__file__).parents[1]
STANDARD = set(sys.stdlib_module_names)
ALLOWED = {
    "placements": STANDARD | {"placements"},
    "collectives": STANDARD | {"placements", "collectives", "numpy", "jax", "ml_dtypes"},
    "spmd": STANDARD | {"placements", "collectives", "spmd", "numpy", "jax"},
}
ONLY = {"mpi4py": ("mpi.py", "mpi_transfers.py"), "cupy": ("nccl.py",)}


def imports(path: Path) -> Iterator[str]:
    """The full names of what a file imports."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


@pytest.mark.parametrize("package", sorted(ALLOWED))
def test_imports_point_down(package: str) -> None:
    """No file imports a package above its own, or one that only another file may import."""
    for path in (ROOT / package).rglob("*.py"):
        for name in imports(path):
            top = name.split(".")[0]
            assert top in ALLOWED[package] or path.name in ONLY.get(top, ()), f"{path} imports {name}"


def test_private_jax_names_are_in_one_file() -> None:
    """jax.extend, jax.interpreters and jax._src occur in collectives/jax_compat.py alone."""
    for package in ALLOWED:
        for path in (ROOT / package).rglob("*.py"):
            private = [name for name in imports(path) if re.match(r"jax\.(extend|interpreters|_)", name)]
            assert not private or path.name == "jax_compat.py", f"{path} imports {private}"


def test_importing_needs_no_optional_package() -> None:
    """placements needs no JAX; none of the three imports mpi4py, cupy, optax or scikit-learn."""
    script = (
        "import sys, placements; assert 'jax' not in sys.modules and 'numpy' not in sys.modules;"
        "import collectives, spmd, spmd.testing, collectives.testing;"
        "assert not {'mpi4py', 'cupy', 'optax', 'sklearn', 'matplotlib', 'pytest'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", script], check=True, cwd=ROOT, timeout=120)


@pytest.mark.parametrize("package", [placements, collectives, spmd])
def test_public_names(package: ModuleType) -> None:
    """Every public name has a docstring; none hides a module; spmd re-exports nothing of the packages below."""
    modules = {module.name for module in pkgutil.iter_modules(package.__path__)}
    for name in package.__all__:
        value = getattr(package, name)
        assert name not in modules or inspect.ismodule(value), f"{package.__name__}.{name} hides a module"
        if inspect.isclass(value) or inspect.isroutine(value):
            assert inspect.getdoc(value), f"{package.__name__}.{name} has no docstring"
            assert value.__module__.split(".")[0] == package.__name__, f"{name} is of {value.__module__}"


def test_what_is_public_says_what_it_does() -> None:
    """Modules, and their public functions, classes and methods, have docstrings."""
    for package in ALLOWED:
        for path in (ROOT / package).rglob("*.py"):
            tree = ast.parse(path.read_text())
            assert ast.get_docstring(tree), f"{path} has no docstring"
            classes = [node for node in tree.body if isinstance(node, ast.ClassDef) and not node.name.startswith("_")]
            for node in [*tree.body, *(member for owner in classes for member in owner.body)]:
                if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and not node.name.startswith("_"):
                    assert ast.get_docstring(node), f"{path}:{node.lineno} {node.name} has no docstring"
