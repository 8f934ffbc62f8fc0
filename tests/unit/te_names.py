"""Names and parameters that a Python package defines, read from its syntax trees alone."""

import ast
import importlib
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

_Function = ast.FunctionDef | ast.AsyncFunctionDef
Tables = dict[str, list[str]]  # sorted names by module or class, parameters by ``callable()``


class Found(NamedTuple):
    """A definition and its module; for what another package defines, its full name and None."""

    module: str
    node: ast.AST | None


class Sources:
    """Syntax trees of the package in a folder."""

    def __init__(self, package: Path) -> None:
        self._trees: dict[str, ast.Module] = {}
        self._packages: set[str] = set()
        for file in package.rglob("*.py"):
            parts = [package.name, *file.relative_to(package).with_suffix("").parts]
            if parts[-1] == "__init__":
                self._packages.add(".".join(parts := parts[:-1]))
            self._trees[".".join(parts)] = ast.parse(file.read_text(encoding="utf-8"))
        self.bindings = cache(self._bindings)

    def find(self, name: str) -> Found | None:
        """Definition of a dotted name, through re-exports; None if there is none."""
        if name in self._trees:
            return Found(name, self._trees[name])
        parent, _, last = name.rpartition(".")
        owner = self.find(parent) if parent else None
        if owner is None:
            return None
        if isinstance(owner.node, ast.Module):
            bound = self.bindings(owner.module).get(last)
            if isinstance(bound, str):
                is_own = bound.partition(".")[0] == name.partition(".")[0]
                return self.find(bound) if is_own else Found(bound, None)
            return None if bound is None else Found(owner.module, bound)
        if isinstance(owner.node, ast.ClassDef):
            for module, part in self._classes(owner):
                if isinstance(part, ast.ClassDef):
                    for statement in part.body:
                        if last in _bound_by(statement):
                            return Found(module, statement)
        return None

    def names(self, found: Found) -> list[str]:
        """Names in a module or class; a class's bases in other packages as ``<name>``.

        A module's imports from other packages are left out.
        """
        if isinstance(found.node, ast.Module):
            root = found.module.partition(".")[0]  # also begins its compiled modules' names
            modules = (name.rpartition(".") for name in self._trees)
            inner = [last for parent, _, last in modules if parent == found.module]
            bound = self.bindings(found.module).items()
            own = [n for n, to in bound if not isinstance(to, str) or to.startswith(root)]
            return sorted({*own, *inner})
        names: set[str] = set()
        for module, node in self._classes(found):
            if not isinstance(node, ast.ClassDef):
                names.add(f"<{module}>")
                continue
            names |= {name for statement in node.body for name in _bound_by(statement)}
            names |= {
                part.attr
                for part in ast.walk(node)
                if isinstance(part, ast.Attribute)
                and isinstance(part.ctx, ast.Store)
                and ast.unparse(part.value) == "self"
            }
        return sorted(names)

    def parameters(self, found: Found) -> list[str] | None:
        """Names of a function's or class's parameters, ``**`` if it takes any; None: unknown."""
        node = found.node
        if isinstance(node, _Function):
            of = node.args
            named = [a.arg for a in (*of.posonlyargs, *of.args, *of.kwonlyargs)]
            return sorted({*named, *(["**"] if of.kwarg else [])} - {"self", "cls"})
        if not isinstance(node, ast.ClassDef):
            return None
        classes = [part for _, part in self._classes(found) if isinstance(part, ast.ClassDef)]
        if any("dataclass" in ast.unparse(decorator) for decorator in node.decorator_list):
            fields = [
                one for part in classes for one in part.body if isinstance(one, ast.AnnAssign)
            ]
            return sorted({one.target.id for one in fields if isinstance(one.target, ast.Name)})
        for part in classes:
            for statement in part.body:
                if isinstance(statement, _Function) and statement.name == "__init__":
                    return self.parameters(Found(found.module, statement))
        return None

    def _classes(self, found: Found) -> Iterator[Found]:
        """Yield a class and its bases, each class before its own bases."""
        yield found
        if not isinstance(found.node, ast.ClassDef):
            return
        for base in found.node.bases:
            head, _, rest = ast.unparse(base).partition(".")
            bound = self.bindings(found.module).get(head)
            name = bound if isinstance(bound, str) else f"{found.module}.{head}"
            name = f"{name}.{rest}" if rest else name
            yield from self._classes(self.find(name) or Found(name, None))

    def _bindings(self, module: str) -> dict[str, ast.AST | str]:
        """Names that a module binds: to a definition, or to the full name of what it imports."""
        bound: dict[str, ast.AST | str] = {}
        for statement in _top_level(self._trees[module].body):
            if isinstance(statement, ast.Import):
                for alias in statement.names:
                    root = alias.name.partition(".")[0]
                    bound[alias.asname or root] = alias.name if alias.asname else root
            elif isinstance(statement, ast.ImportFrom):
                origin = self._origin(module, statement)
                for alias in statement.names:
                    if alias.name != "*":
                        bound[alias.asname or alias.name] = f"{origin}.{alias.name}"
                    elif origin in self._trees:
                        bound |= {name: f"{origin}.{name}" for name in self.bindings(origin)}
            else:
                bound |= dict.fromkeys(_bound_by(statement), statement)
        return bound

    def _origin(self, module: str, statement: ast.ImportFrom) -> str:
        """Full name of the module that a statement imports from."""
        if not statement.level:
            return statement.module or ""
        parts = module.split(".")
        up = statement.level - (module in self._packages)
        parts = parts[: len(parts) - up]
        return ".".join([*parts, *([statement.module] if statement.module else [])])


def tables(sources: Sources, names: Iterable[str], called: Iterable[str]) -> Tables:
    """Describe the modules and classes that names are read from, and the parameters of calls.

    Private names are left out unless one of ``names`` asks for them.
    """
    described: Tables = {}
    split = [name.split(".") for name in names]
    wanted = {part for parts in split for part in parts}
    for parts in split:
        for owner in (".".join(parts[:end]) for end in range(1, len(parts))):
            found = sources.find(owner)
            if found is not None and isinstance(found.node, ast.Module | ast.ClassDef):
                every = sources.names(found)
                described[owner] = [n for n in every if not n.startswith("_") or n in wanted]
    for name in called:
        found = sources.find(name)
        parameters = None if found is None else sources.parameters(found)
        if parameters is not None:
            described[f"{name}()"] = parameters
    return dict(sorted(described.items()))


def is_defined(described: Tables, name: str) -> bool:
    """Whether every part of a dotted name is in the table of the part before it."""
    parts = name.split(".")
    for end in range(1, len(parts)):
        known = described.get(".".join(parts[:end]), [])
        last = parts[end]
        bases = [entry[1:-1] for entry in known if entry.startswith("<")]
        if last not in known and not any(hasattr(_imported(base), last) for base in bases):
            return False
    return parts[0] in described


def takes(described: Tables, name: str, keyword: str) -> bool:
    """Whether a callable has this parameter, or takes any."""
    parameters = described.get(f"{name}()", [])
    return keyword in parameters or "**" in parameters


@cache
def _imported(name: str) -> object:
    """Import an object by its full name; None if there is none."""
    module, _, last = name.rpartition(".")
    try:
        return getattr(importlib.import_module(module or "builtins"), last, None)
    except ModuleNotFoundError:
        return getattr(_imported(module), last, None)


def _top_level(statements: Iterable[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield a module's statements, with those inside of conditions and tries."""
    for statement in statements:
        yield statement
        if isinstance(statement, ast.If | ast.Try | ast.With):
            handlers = getattr(statement, "handlers", [])
            inner = [statement.body, getattr(statement, "orelse", []), *(h.body for h in handlers)]
            yield from _top_level(one for body in inner for one in body)


def _bound_by(statement: ast.stmt) -> list[str]:
    """Names that a statement other than an import defines."""
    if isinstance(statement, _Function | ast.ClassDef):
        return [statement.name]
    targets = statement.targets if isinstance(statement, ast.Assign) else []
    if isinstance(statement, ast.AnnAssign):
        targets = [statement.target]
    parts = [part for target in targets for part in ast.walk(target)]
    return [p.id for p in parts if isinstance(p, ast.Name) and isinstance(p.ctx, ast.Store)]
