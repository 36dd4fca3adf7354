"""The package's files and their imports."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
OUTSIDE = ("tests", "bench", "docs", "examples", "build")
"""Folders of the repository outside the package."""


def sources(root):
    """Maps every module of the package to its file: `{"redline.space.knob": Path}`."""
    out = {}
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        if parts[0] in OUTSIDE or any(part.startswith(".") for part in parts):
            continue
        out[".".join(("redline", *(parts[:-1] if parts[-1] == "__init__" else parts)))] = path
    return out


def imports(name, path, known):
    """Yields the package's modules that a file imports, also within functions and for types."""
    package = name.split(".") if path.name == "__init__.py" else name.split(".")[:-1]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (each.name for each in node.names if each.name in known)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            target = ".".join([*base, *([node.module] if node.module else [])])
            for each in node.names:
                found = f"{target}.{each.name}" if f"{target}.{each.name}" in known else target
                if found in known:
                    yield found
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
            yield from by_string(node, package, known)


def lost(name, path, known):
    """Yields relative imports of modules that do not exist; inside a function no other test would notice them."""
    package = name.split(".") if path.name == "__init__.py" else name.split(".")[:-1]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.level:
            base = package[: max(0, len(package) - node.level + 1)]
            target = ".".join([*base, *([node.module] if node.module else [])])
            if not base or target not in known:
                yield f"{path.name}:{node.lineno} imports {'.' * node.level}{node.module or ''}"


def by_string(call, package, known):
    """Yields modules of the package that `import_module("...")` or `import_module(f".{name}", __package__)` may import."""
    given = call.args[0]
    parts = given.values if isinstance(given, ast.JoinedStr) else [given]
    first = parts[0].value if isinstance(parts[0], ast.Constant) else ""
    level = len(first) - len(first.lstrip("."))
    if not level and first.split(".")[0] != "redline":
        return
    base = ".".join([*package[: len(package) - level + 1], ""]) if level else ""
    rest = [re.escape(part.value) if isinstance(part, ast.Constant) else r"[a-z][^.]*" for part in parts[1:]]
    pattern = re.escape(base + first[level:]) + "".join(rest)
    yield from (name for name in known if re.fullmatch(pattern, name))


def named(path):
    """Yields packages that a file imports by absolute name."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (each.name.split(".")[0] for each in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            yield node.module.split(".")[0]


def importers(package):
    """Files of the package that import another one by its absolute name."""
    return {path.relative_to(ROOT).as_posix() for path in sources(ROOT).values() if package in named(path)}


def graph(root):
    """Maps each module to the modules that it imports, without itself."""
    known = sources(root)
    return {name: {each for each in imports(name, path, known) if each != name} for name, path in known.items()}
