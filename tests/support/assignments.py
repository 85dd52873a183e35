"""Find in the source of a package which statements change an object of a class that the package does not define.

The class of an object is read from annotations, constructors, results of functions, and the attributes of classes.
"""

import ast
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

# Methods that change what they are called on
MUTATING_METHODS = set("append extend insert remove pop popitem clear update setdefault add discard".split())
SETTERS = {"setattr", "delattr", "object.__setattr__", "object.__delattr__"}
# From a name to its annotations and to the values that it gets; None for one that the source does not write there
Known: TypeAlias = dict[str, list[ast.expr | None]]


@dataclass
class OwnClass:
    """A class of the package."""

    bases: list[str]
    attributes: Known = field(default_factory=dict)  # methods too, by what they return


def note(known: Known, name: str, value: ast.expr | None) -> None:
    known.setdefault(name, []).append(value)


def unpacked(target: ast.expr, value: ast.expr | None) -> list[tuple[ast.expr, ast.expr | None]]:
    """Return the parts of a target of an assignment, with the value of each."""
    if not isinstance(target, ast.Tuple | ast.List):
        return [(target, value)]
    is_written = isinstance(value, ast.Tuple) and len(value.elts) == len(target.elts)
    values = value.elts if is_written else [None] * len(target.elts)
    return [pair for subtarget, value in zip(target.elts, values, strict=True) for pair in unpacked(subtarget, value)]


def assigned_pairs(node: ast.AST) -> list[tuple[ast.expr, ast.expr | None]]:
    """Return what a statement assigns to or deletes, one by one, with its value or annotation."""
    if isinstance(node, ast.AnnAssign):
        return [(node.target, node.annotation)]
    if isinstance(node, ast.Assign):
        return [pair for target in node.targets for pair in unpacked(target, node.value)]
    if isinstance(node, ast.AugAssign | ast.For | ast.comprehension):
        return unpacked(node.target, None)
    if isinstance(node, ast.withitem) and node.optional_vars is not None:
        return unpacked(node.optional_vars, node.context_expr)
    if isinstance(node, ast.NamedExpr):
        return [(node.target, node.value)]
    if isinstance(node, ast.Delete):
        return [(target, None) for target in node.targets]
    return []


def variables_of(function: ast.FunctionDef) -> Known:
    """Return the parameters and variables of a function."""
    known: Known = {}
    arguments = function.args
    for parameter in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs):
        if parameter.arg not in ("self", "cls"):
            note(known, parameter.arg, parameter.annotation)
    for node in ast.walk(function):
        for target, value in assigned_pairs(node):
            if isinstance(target, ast.Name):
                note(known, target.id, value)
    return known


def owner_of_table(table: ast.expr) -> ast.expr | None:
    """Return x for the tables `x.name`, `x.name[...]` and `vars(x)`; None for a variable."""
    if isinstance(table, ast.Subscript):
        return owner_of_table(table.value)
    if isinstance(table, ast.Attribute):
        return table.value
    if isinstance(table, ast.Call) and ast.unparse(table.func) == "vars" and table.args:
        return table.args[0]
    return None


def changed_objects(node: ast.AST) -> Iterator[tuple[ast.expr, str]]:
    """Yield each object of which a statement or call changes an attribute or an entry of one, and what is changed."""
    for target, _ in assigned_pairs(node):
        owner = target.value if isinstance(target, ast.Attribute) else None
        if isinstance(target, ast.Subscript):
            owner = owner_of_table(target.value)
        if owner is not None:
            yield owner, ast.unparse(target)
    if not isinstance(node, ast.Call):
        return
    called = ast.unparse(node.func)
    if called in SETTERS:
        yield node.args[0], f"{called}({ast.unparse(node.args[0])}, ...)"
    elif isinstance(node.func, ast.Attribute) and node.func.attr in MUTATING_METHODS:
        owner = owner_of_table(node.func.value)
        if owner is not None:
            yield owner, called


class PackageSource:
    """The source of a package: what its classes hold, and what its functions return.

    Args:
        sources: the text of each file.
    """

    def __init__(self, sources: dict[str, str]):
        self.trees = {name: ast.parse(source) for name, source in sources.items()}
        self.classes: dict[str, OwnClass] = {}
        self.results: Known = {}  # of functions, by name
        for tree in self.trees.values():
            for node in ast.walk(tree):
                if isinstance(node, ast.ClassDef):
                    self.classes[node.name] = self._read_class(node)
                elif isinstance(node, ast.FunctionDef):
                    note(self.results, node.name, node.returns)

    @classmethod
    def from_folder(cls, folder: Path) -> "PackageSource":
        return cls({path.relative_to(folder).as_posix(): path.read_text() for path in sorted(folder.rglob("*.py"))})

    def _read_class(self, node: ast.ClassDef) -> OwnClass:
        own_class = OwnClass([ast.unparse(base) for base in node.bases])
        for statement in node.body:
            if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
                note(own_class.attributes, statement.target.id, statement.annotation)
        annotated = set(own_class.attributes)
        for function in (statement for statement in node.body if isinstance(statement, ast.FunctionDef)):
            note(own_class.attributes, function.name, function.returns)
            variables = variables_of(function)
            for target, value in (pair for inner in ast.walk(function) for pair in assigned_pairs(inner)):
                is_own = isinstance(target, ast.Attribute) and ast.unparse(target.value) == "self"
                if is_own and target.attr not in annotated:
                    values = variables.get(value.id, [None]) if isinstance(value, ast.Name) else [value]
                    for value_assigned in values:
                        note(own_class.attributes, target.attr, value_assigned)
        return own_class

    def class_of(self, node: ast.expr | None, variables: Known, depth: int = 0) -> str | None:
        """Return the package's class of which an expression is an object, or that an annotation names; else None."""
        if depth > 9:
            return None
        if isinstance(node, ast.Constant) and isinstance(node.value, str):  # a quoted annotation
            return node.value if node.value in self.classes else None
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr):  # `Layout | None`
            return self._class_of_all([node.left, node.right], variables, depth)
        if isinstance(node, ast.Name):
            if node.id in self.classes:
                return node.id
            return self._class_of_all(variables.get(node.id, []), variables, depth)
        if isinstance(node, ast.Attribute):
            owner = self.class_of(node.value, variables, depth + 1)
            return None if owner is None else self._class_of_attribute(owner, node.attr, depth)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in self.results:
            return self._class_of_all(self.results[node.func.id], {}, depth)
        if isinstance(node, ast.Call):
            return self.class_of(node.func, variables, depth + 1)
        return None

    def _class_of_all(self, nodes: list[ast.expr | None], variables: Known, depth: int) -> str | None:
        """Return the class of values of which a name has one at a time; None if one of them is foreign."""
        values = [node for node in nodes if not (isinstance(node, ast.Constant) and node.value is None)]
        classes = [self.class_of(value, variables, depth + 1) for value in values]
        return classes[0] if classes and None not in classes else None

    def _class_of_attribute(self, owner: str, name: str, depth: int) -> str | None:
        one = self.classes[owner]
        if name in one.attributes:
            return self._class_of_all(one.attributes[name], {"self": [ast.Name(owner)]}, depth)
        classes = (self._class_of_attribute(base, name, depth) for base in one.bases if base in self.classes)
        return next((one_class for one_class in classes if one_class is not None), None)

    def foreign_changes(self) -> list[tuple[str, str]]:
        """Return the file and the text of each change of an object whose class is not known to be the package's."""
        return [(file, text) for file, tree in self.trees.items() for text in self.changes_in(tree, {})]

    def changes_in(self, node: ast.AST, variables: Known) -> Iterator[str]:
        """Yield the text of each such change in a part of the source, in which these variables are known."""
        if isinstance(node, ast.Module):
            top = [pair for statement in node.body for pair in assigned_pairs(statement)]
            variables = {target.id: [value] for target, value in top if isinstance(target, ast.Name)}
        elif isinstance(node, ast.ClassDef):
            variables = variables | {"self": [ast.Name(node.name)], "cls": [ast.Name(node.name)]}
        elif isinstance(node, ast.FunctionDef):
            variables = variables | variables_of(node)
        for owner, text in changed_objects(node):
            if self.class_of(owner, variables) is None:
                yield text
        for child in ast.iter_child_nodes(node):
            yield from self.changes_in(child, variables)
