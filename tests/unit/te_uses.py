"""Uses of Transformer Engine in a source file, read from its syntax tree alone."""

import ast
import operator
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from packaging.version import Version

_ROOT = "transformer_engine"
_COMPARISONS = {ast.Lt: operator.lt, ast.Eq: operator.eq, ast.GtE: operator.ge}
_CATCH_ALL = {"BaseException", "Exception", "ImportError", "ModuleNotFoundError"}


@dataclass(frozen=True, order=True)
class Use:
    """One name that a source file takes from Transformer Engine, or one keyword of a call."""

    name: str  # transformer_engine.pytorch.Linear
    keyword: str  # of a call of the name; empty: the name itself
    has_fallback: bool  # it is inside a try that goes on without Transformer Engine
    place: str  # file:line


def uses_in(source: str, file: str, version: str) -> list[Use]:
    """Collect the uses of a source file where this version of Transformer Engine is installed.

    Branches for other versions are left out (``is_te_min_version``), and so is what follows a
    failed import. Names are followed through imports, assignments of one name, base classes
    (``super().__init__``) and dictionaries that are passed with ``**``. Keywords in other
    dictionaries, and attributes of instances, are not seen.
    """
    collector = _Collector(file, Version(version))
    collector.visit(ast.parse(source))
    return sorted(set(collector.uses))


class _Collector(ast.NodeVisitor):
    """Collects uses; ``_names`` has the names that stand for a part of Transformer Engine."""

    def __init__(self, file: str, version: Version) -> None:
        self.uses: list[Use] = []
        self._file, self._version = file, version
        self._names: dict[str, frozenset[str]] = {}
        self._keys: dict[str, set[str]] = {}  # string keys of dictionaries, by variable
        self._returned: dict[str, set[str]] = {}  # keys of all dictionaries of a function
        self._bases: frozenset[str] = frozenset()
        self._has_fallback = False

    def _use(self, node: ast.AST, name: str, keyword: str = "") -> None:
        place = f"{self._file}:{getattr(node, 'lineno', 0)}"
        self.uses.append(Use(name, keyword, self._has_fallback, place))

    @contextmanager
    def _scope(self, *hidden: str) -> Iterator[None]:
        names, keys, bases, fallback = self._names, self._keys, self._bases, self._has_fallback
        self._names = {name: of for name, of in names.items() if name not in hidden}
        self._keys = {}
        yield
        self._names, self._keys, self._bases = names, keys, bases
        self._has_fallback = fallback

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            if alias.name.partition(".")[0] == _ROOT:
                self._use(node, alias.name)
                name = alias.name if alias.asname else _ROOT
                self._names[alias.asname or _ROOT] = frozenset([name])

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        if node.level == 0 and (node.module or "").partition(".")[0] == _ROOT:
            for alias in node.names:
                self._use(node, f"{node.module}.{alias.name}")
                self._names[alias.asname or alias.name] = frozenset([f"{node.module}.{alias.name}"])

    def visit_Try(self, node: ast.Try) -> None:
        before = self._has_fallback
        caught = [ast.unparse(h.type) if h.type else "Exception" for h in node.handlers]
        goes_on = any(name.strip("() ") in _CATCH_ALL for c in caught for name in c.split(","))
        self._has_fallback = before or goes_on
        for statement in node.body:
            self.visit(statement)
        self._has_fallback = before
        others = [] if goes_on else node.handlers
        for statement in [*others, *node.orelse, *node.finalbody]:
            self.visit(statement)

    def visit_If(self, node: ast.If) -> None:
        verdict = _holds(node.test, self._version)
        self.visit(node.test)
        for statement in [] if verdict is False else node.body:
            self.visit(statement)
        for statement in [] if verdict is True else node.orelse:
            self.visit(statement)

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        for part in [*node.decorator_list, *node.bases]:
            self.visit(part)
        with self._scope():
            self._bases = frozenset().union(*(self._meanings(base) for base in node.bases[:1]))
            for statement in node.body:
                self.visit(statement)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        arguments = node.args
        every = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
        for part in [*node.decorator_list, *(a.annotation for a in every), node.returns]:
            if part is not None:
                self.visit(part)
        with self._scope(*(argument.arg for argument in every)):
            for statement in node.body:
                self.visit(statement)
            self._returned[node.name] = set().union(*self._keys.values())

    def visit_Assign(self, node: ast.Assign) -> None:
        for target in node.targets:
            if isinstance(target, ast.Name):
                meanings = self._meanings(node.value)
                if meanings:
                    self._names[target.id] = self._names.get(target.id, frozenset()) | meanings
                self._keys.setdefault(target.id, set()).update(self._keys_of(node.value))
            elif isinstance(target, ast.Subscript) and isinstance(target.value, ast.Name):
                key = target.slice
                if isinstance(key, ast.Constant) and isinstance(key.value, str):
                    self._keys.setdefault(target.value.id, set()).add(key.value)
        self.generic_visit(node)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        meanings = self._meanings(node) if isinstance(node.ctx, ast.Load) else frozenset()
        for name in meanings:
            self._use(node, name)
        if not meanings:
            self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        function = node.func
        called = self._meanings(function)
        if isinstance(function, ast.Attribute) and ast.unparse(function.value) == "super()":
            # A class's parameters are those of its __init__, which a dataclass does not write.
            last = "" if function.attr == "__init__" else f".{function.attr}"
            called = frozenset(f"{base}{last}" for base in self._bases)
            for name in called:
                self._use(node, name)
        keywords = {keyword.arg for keyword in node.keywords if keyword.arg is not None}
        for keyword in node.keywords:
            if keyword.arg is None:
                keywords |= self._keys_of(keyword.value)
        for name in called:
            for keyword in keywords:
                self._use(node, name, keyword)
        if isinstance(function, ast.Attribute) and function.attr == "update" and node.args:
            self._keys.setdefault(ast.unparse(function.value), set()).update(
                self._keys_of(node.args[0])
            )
        self.generic_visit(node)

    def _meanings(self, node: ast.expr) -> frozenset[str]:
        """Parts of Transformer Engine that an expression may be."""
        if isinstance(node, ast.Name):
            return self._names.get(node.id, frozenset())
        if isinstance(node, ast.Attribute):
            return frozenset(f"{name}.{node.attr}" for name in self._meanings(node.value))
        return frozenset()

    def _keys_of(self, node: ast.expr) -> set[str]:
        """Known string keys of a dictionary."""
        if isinstance(node, ast.Name):
            return self._keys.get(node.id, set())
        if isinstance(node, ast.Dict):
            constants = [key.value for key in node.keys if isinstance(key, ast.Constant)]
            return {key for key in constants if isinstance(key, str)}
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            return self._returned.get(node.func.id, set())
        return set()


def _holds(test: ast.expr, version: Version) -> bool | None:
    """Whether a condition on Transformer Engine's version holds; None: it asks something else."""
    if isinstance(test, ast.Name) and test.id == "HAVE_TE":
        return True
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        inner = _holds(test.operand, version)
        return None if inner is None else not inner
    if isinstance(test, ast.BoolOp):
        return _joined((_holds(part, version) for part in test.values), isinstance(test.op, ast.Or))
    if isinstance(test, ast.Call) and ast.unparse(test.func) == "is_te_min_version":
        least = Version(ast.literal_eval(test.args[0]))
        strict = any(ast.unparse(keyword.value) == "False" for keyword in test.keywords)
        return version > least if strict else version >= least
    if isinstance(test, ast.Compare) and ast.unparse(test.left) == "get_te_version()":
        (right,) = test.comparators
        if isinstance(right, ast.Call):  # PkgVersion("1.8.0")
            other = Version(ast.literal_eval(right.args[0]))
            return _COMPARISONS[type(test.ops[0])](version, other)
    return None


def _joined(parts: Iterable[bool | None], is_or: bool) -> bool | None:
    """``and`` or ``or`` of conditions that may be unknown."""
    values = [*parts]
    if is_or in values:
        return is_or
    return None if None in values else not is_or
