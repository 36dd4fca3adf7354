"""Words of the command that a shell script runs: its variables, arrays, arithmetic and branches, without running it.

Not bashlex 0.18, which refuses arrays, arithmetic, `case` and `[[`, nor tree-sitter, which only parses: what is wanted here are
the values of variables.
"""

import ast
import operator
import re
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from ..base.errors import UsageError

PROGRAMS = (
    *("accelerate", "deepspeed", "torchrun", "srun", "mpirun", "litgpt", "axolotl", "trl", "llamafactory-cli"),
    *("python", "python3"),
)
"""Programs that start a training."""
_SHELLS = {"sh", "bash", "eval"}
_OTHERS = (
    *("echo", "printf", "cd", "mkdir", "rm", "cp", "ls", "cat", "pip", "pip3", "conda", "module", "sleep", "git"),
    "wget",
)
"""Programs of scripts that start no training."""
_MOST_WORDS = 20_000  # of a command; trainers have some hundred
_DEEPEST = 4  # calls in each other, as a script may call itself
_NAME = re.compile(r"(?:export|local|declare|readonly|typeset)?(?:\s+-\w+)*\s*([A-Za-z_]\w*)(\+?)=(.*)", re.DOTALL)
_DECLARES = ("export", "local", "declare", "readonly", "typeset")
_PAIR = re.compile(r"([A-Za-z_]\w*)(\+?)=(.*)", re.DOTALL)
_PARAMETER = re.compile(r"(\w+|[@*#?])(?:\[([@*]|\d+)\])?(?:(:?[-=+?])(.*))?", re.DOTALL)
_ARITHMETIC: Mapping[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.floordiv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
_COMPARED: Mapping[type[ast.cmpop], Callable[[int, int], bool]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
}
_TESTS = {"-eq": "==", "-ne": "!=", "-gt": ">", "-ge": ">=", "-lt": "<", "-le": "<="}


def command_of(script: str, where: str, folder: Path | None = None) -> tuple[list[str], list[str]]:
    """Returns the words of the command in a text, or of the training that a script starts, and lines that were not understood.

    Variables that are not set are kept as written. Files that the script sources are read, from `folder` if their paths are
    relative; None to open none.

    Raises:
        UsageError: it cannot be split into words.
    """
    shell = _Script(folder=folder)
    words = split_words(script, where) if "\n" not in script.strip() else []
    is_one = [script.strip()] == list(_statements(_without_redirections(script))) and not _SHELLS & set(words)
    if words and shell.script_in(words) is None and is_one:
        return words, []
    shell.run(script)
    tokens = max(filter(_starts_training, shell.commands), key=len, default=words)
    if not tokens:  # a file with only flags
        flags = [value for value in shell.values.values() if value and value[0].lstrip().startswith("-")]
        tokens = [word for value in flags for item in value for word in shell.words(item)]
    if not tokens:
        split_words(script, where)
    return tokens, shell.unknown


def split_words(text: str, where: str) -> list[str]:
    """Splits a command without variables.

    Raises:
        UsageError: it cannot be split into words.
    """
    try:
        return shlex.split(text)
    except ValueError as error:
        raise UsageError(f"{where} cannot be split into words: {str(error).lower()}") from None


def _starts_training(tokens: Sequence[str]) -> bool:
    names = [Path(word).name for word in tokens]
    return bool(names) and names[0] not in _OTHERS and any(name in PROGRAMS or name.endswith(".py") for name in names)


_KEYWORD = re.compile(r"(if|elif|then|else|while|until|do|\{|!|time|exec|nohup)(?:\s+(.*))?", re.DOTALL)
_FUNCTION = re.compile(r"(?:function\s+([\w-]+)\s*(?:\(\s*\))?|([\w-]+)\s*\(\s*\))\s*(.*)", re.DOTALL)
_HEREDOC = re.compile(r"<<-?\s*(['\"]?)(\w+)\1([^\n]*)\n.*?^\s*\2$", re.MULTILINE | re.DOTALL)
_REDIRECTION = re.compile(
    r"""("(?:\\.|[^"\\])*"|'[^']*'|\\.|\$\{[^}]*\}|\$\([^)]*\))|"""
    r"""(?:(?<!\S)\d+|&)?[<>]{1,3}[&|]?\s*(?:"[^"]*"|'[^']*'|\$?\([^)]*\)|[^\s"'<>|;&()])*""",
    re.DOTALL,
)
"""Text that is quoted or expanded, as the first group, or a redirection with its target."""
_ENDS = frozenset({"then", "elif", "else", "fi", "do", "done", "esac", ";;", "}"})


def _statements(script: str) -> Iterator[str]:
    """Commands of a script, split at newlines and operators outside quotes and parentheses; `;;`, `&&`, `||` and words such as
    `if` by themselves."""
    text = _HEREDOC.sub(r"\3", re.sub(r"\\\n", " ", script))
    start, position, depth, quote = 0, 0, 0, ""
    while position < len(text):
        char, pair = text[position], text[position : position + 2]
        before, after = text[position - 1 : position], text[position + 1 : position + 2]
        if quote:
            position += char == "\\" and quote == '"'
            quote = "" if char == quote else quote
        elif char == "\\":
            position += 1
        elif char in "'\"":
            quote = char
        elif char == "#" and before in ("", *" \t\n;"):
            end = text.find("\n", position)
            text = text[:position] + (text[end:] if end >= 0 else "")
            continue
        elif char == "(" or (char == "{" and before == "$"):
            depth += 1
        elif char in ")}" and depth:
            depth -= 1
        elif not depth and (
            char in "\n;"
            or pair == "||"
            or (char == "|" and before.isspace())
            or (char == "&" and ">" not in (before, after))
        ):
            yield from _words_apart(text[start:position].strip())
            position += len(pair) if pair in (";;", "&&", "||") else 1
            if pair in (";;", "&&", "||"):
                yield pair
            start = position
            continue
        position += 1
    yield from _words_apart(text[start:].strip())


def _without_redirections(text: str) -> str:
    return _REDIRECTION.sub(lambda match: match[1] or "", text)


def _words_apart(statement: str) -> Iterator[str]:
    """A statement with the words before it, such as `then`, as statements of their own."""
    while statement:
        if match := _KEYWORD.fullmatch(statement):
            yield match[1]
            statement = (match[2] or "").strip()
        elif match := _FUNCTION.fullmatch(statement):
            yield f"function {match[1] or match[2]}"
            statement = match[3]
        else:
            yield statement
            return


@dataclass
class _Script:
    """A script that is read from top to bottom."""

    folder: Path | None = None
    values: dict[str, list[str]] = field(default_factory=dict)
    commands: list[list[str]] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)
    _functions: dict[str, list[str]] = field(default_factory=dict)
    _depth: int = 0
    """Depth of sourced files and called functions."""

    def run(self, script: str) -> None:
        """Reads statements: assignments, branches and commands."""
        self._run(list(_statements(script)))

    def _run(self, statements: Sequence[str]) -> None:
        position = 0
        while position < len(statements):
            position, _ = self._block(statements, position, runs=True)
            position += 1  # an end without a beginning

    def _block(self, statements: Sequence[str], position: int, *, runs: bool) -> tuple[int, bool | None]:
        """Reads statements up to one of `_ENDS`, or skips them; returns its position, and what the last test says."""
        result: bool | None = None
        joint, negated = "", False
        while position < len(statements) and statements[position] not in _ENDS:
            statement = statements[position]
            position += 1
            if statement in ("&&", "||"):
                joint = statement
                continue
            if statement in ("!", "time", "exec", "nohup"):
                negated = negated or statement == "!"
                continue
            decided = joint and result is not None and result is not (joint == "&&")
            position, value = self._statement(statements, position, statement, runs=runs and not decided)
            if not decided:
                result = not value if negated and value is not None else value
            joint, negated = "", False
        return position, result

    def _statement(self, statements: Sequence[str], position: int, text: str, *, runs: bool) -> tuple[int, bool | None]:
        """Reads a statement, with the following ones that belong to it; returns the position after it, and what it says if it
        is a test."""
        keyword, _, rest = text.partition(" ")
        if keyword == "if":
            return self._if(statements, position, runs=runs), None
        if keyword in ("for", "while", "until"):
            return self._loop(statements, position, text, runs=runs), None
        if keyword == "case":
            return self._case(statements, position, rest, runs=runs), None
        if keyword in ("{", "function"):
            start = position + (keyword == "function" and statements[position : position + 1] == ["{"])
            end, _ = self._block(statements, start, runs=runs and keyword == "{")
            if keyword == "function" and runs:
                self._functions[rest] = list(statements[start:end])
            return end + 1, None
        if not runs:
            return position, None
        if keyword in ("[", "[[", "test") or text.startswith("(("):
            return position, self._holds(text)
        text = _without_redirections(text).strip()
        if text.startswith("(") and text.endswith(")"):
            self.run(text[1:-1])
        elif keyword in (".", "source"):
            self._source(rest)
        elif not self._assign(text):
            self._command(text)
        return position, None

    def _if(self, statements: Sequence[str], position: int, *, runs: bool) -> int:
        """Reads the branch whose tests hold; returns the position after `fi`."""
        pending, end = runs, "if"
        while end in ("if", "elif", "else"):
            holds: bool | None = True
            if end != "else":
                start = position
                position, holds = self._block(statements, position, runs=pending)
                if pending and holds is None:
                    self.unknown.append(f"if {' '.join(statements[start:position])}")
                position += 1
            position, _ = self._block(statements, position, runs=pending and bool(holds))
            pending = pending and not holds
            end = statements[position] if position < len(statements) else "fi"
            position += 1
        return position

    def _loop(self, statements: Sequence[str], position: int, text: str, *, runs: bool) -> int:
        """Reads a loop once, with the first of its values; returns the position after `done`."""
        holds: bool | None = True
        if match := re.fullmatch(r"for\s+(\w+)\s+in\s+(.*)", text, re.DOTALL):
            if runs:
                self.values[match[1]] = self.words(match[2])[:1]
        elif text in ("while", "until"):
            start = position
            position, holds = self._block(statements, position, runs=runs)
            if runs and holds is not False:
                self.unknown.append(f"{text} {' '.join(statements[start:position])}")
        elif runs:
            self.unknown.append(text)
        position, _ = self._block(statements, position + 1, runs=runs and holds is not False)
        return position + 1

    def _case(self, statements: Sequence[str], position: int, head: str, *, runs: bool) -> int:
        """Reads the branch with a matching pattern; returns the position after `esac`."""
        subject, _, first = head.partition(" in")
        word = " ".join(self.words(subject))
        remaining = [*_words_apart(first.strip()), *statements[position:]]
        consumed, patterns = 0, ""
        while consumed < len(remaining) and remaining[consumed] != "esac":
            patterns += f"|{remaining[consumed]}"
            consumed += 1
            if ")" not in patterns:
                continue
            listed, _, statement = patterns.partition(")")
            remaining[:consumed] = _words_apart(statement.strip())
            matches = any(
                fnmatchcase(word, pattern.strip(" ('\"")) for pattern in listed.split("|") if pattern.strip(" ('\"")
            )
            consumed, _ = self._block(remaining, 0, runs=runs and matches)
            runs = runs and not matches
            consumed += remaining[consumed : consumed + 1] == [";;"]
            patterns, remaining, consumed = "", remaining[consumed:], 0
        return len(statements) - len(remaining) + consumed + 1

    def _assign(self, text: str) -> bool:
        """Sets variables; False if the text is a command, which may have variables of its own."""
        match = _NAME.fullmatch(text)
        if match is None:
            return False
        name, appends, raw = match.groups()
        if raw.startswith("(") and raw.rstrip().endswith(")") and not raw.startswith("(("):
            value = self.words(raw.strip()[1:-1])
            self.values[name] = [*self.values.get(name, []), *value] if appends else value
            return True
        pairs = [_PAIR.fullmatch(word) for word in self.words(text, split_values=False) if word not in _DECLARES]
        if not all(pairs) and not text.startswith(_DECLARES):
            return False
        for pair in filter(None, pairs):
            earlier = self.values.get(pair[1], []) if pair[2] else []
            self.values[pair[1]] = ["".join([*earlier, *([pair[3]] if pair[3] else [])])]
        return True

    def _command(self, text: str) -> None:
        tokens = self.words(text)
        for position, word in enumerate(tokens[:-1]):
            follows_shell = word == "-c" and position and Path(tokens[position - 1]).name in _SHELLS
            if follows_shell or (word == "eval" and position == 0):
                start = position - 1 if follows_shell else position
                with suppress(ValueError):
                    inner = _without_redirections(" ".join(tokens[position + 1 :]))
                    commands = [*map(shlex.split, _statements(inner))]
                    tokens = [*tokens[:start], *next(filter(_starts_training, commands), shlex.split(inner))]
                break
        self.commands.append(tokens)
        if tokens and (body := self._functions.get(tokens[0])) is not None:
            self._call(body, tokens[1:])
        elif (script := self.script_in(tokens)) is not None:
            for pair in filter(None, map(_PAIR.fullmatch, tokens[:script])):
                self.values[pair[1]] = [pair[3]]
            self._call(list(_statements(self._text(tokens[script]) or "")), tokens[script + 1 :])

    def _call(self, statements: Sequence[str], arguments: Sequence[str]) -> None:
        """Reads the statements of a function or a script with their arguments."""
        if self._depth >= _DEEPEST:
            return
        outer = dict(self.values)
        inner = {str(number): [word] for number, word in enumerate(arguments, 1)}
        inner |= {"@": list(arguments), "*": list(arguments), "#": [str(len(arguments))]}
        self._depth += 1
        self.values |= inner
        self._run(statements)
        self._depth -= 1
        for name in inner:
            self.values.pop(name, None)
            if name in outer:
                self.values[name] = outer[name]

    def script_in(self, tokens: Sequence[str]) -> int | None:
        """Position of a script that a command runs and that can be read; None if there is none. torchtitan's is known."""
        if not tokens or Path(tokens[0]).name in _OTHERS:
            return None
        scripts = (index for index, word in enumerate(tokens) if Path(word).suffix in (".sh", ".bash"))
        position = next(scripts, None)
        if position is None or Path(tokens[position]).name == "run_train.sh" or self._text(tokens[position]) is None:
            return None
        return position

    def _text(self, name: str) -> str | None:
        """Contents of a file that the script names; None if it is not there."""
        candidates = () if self.folder is None else (Path(name), self.folder / name)
        path = next((path for path in candidates if path.is_file()), None)
        return None if path is None else path.read_text(encoding="utf-8", errors="replace")

    def _source(self, rest: str) -> None:
        name = " ".join(self.words(rest)[:1])
        text = self._text(name)
        if text is None or self._depth >= _DEEPEST:
            self.unknown.append(f"source {name}")
            return
        self._depth += 1
        self.run(text)
        self._depth -= 1

    def _holds(self, test: str) -> bool:
        """True if a test holds, where variables that are not set are empty; a test of files or programs does not."""
        if arithmetic := re.fullmatch(r"\(\((.*)\)\)", test.strip(), re.DOTALL):
            return bool(self._number(arithmetic[1].replace("$", "")))
        match = re.fullmatch(r"(?:test\s|\[\[?\s)(.*?)(?:\s\]\]?)?", test.strip(), re.DOTALL)
        if match is None:
            self.unknown.append(f"if {test}")
            return False
        parts = re.split(r"\s(&&|\|\||-a|-o)\s", match[1])
        holds = self._single(parts[0])
        for joint, part in zip(parts[1::2], parts[2::2]):
            holds = holds and self._single(part) if joint in ("&&", "-a") else holds or self._single(part)
        return holds

    def _single(self, test: str) -> bool:
        tokens = [re.sub(r"\$\{?[\w@]+\}?", "", word) for word in self.words(test, keep_empty=True)]
        if tokens[:1] == ["!"]:
            return not self._single(test.strip()[1:])
        if len(tokens) == 2 and tokens[0] in ("-z", "-n"):
            return (tokens[1] == "") is (tokens[0] == "-z")
        if len(tokens) == 1 and tokens[0] in ("-z", "-n"):
            return tokens[0] == "-z"
        if len(tokens) == 3 and tokens[1] in _TESTS:
            return bool(self._number(f"{tokens[0] or 0} {_TESTS[tokens[1]]} {tokens[2] or 0}"))
        if len(tokens) == 3 and tokens[1] in ("=", "==", "!="):
            return fnmatchcase(tokens[0], tokens[2]) is (tokens[1] != "!=")
        return len(tokens) == 1 and tokens[0] != "" if not tokens or not tokens[0].startswith("-") else False

    def _number(self, text: str) -> int | None:
        """Value of an arithmetic expression; None if it has names or operators that are not known."""

        def value(node: ast.expr) -> int:
            if isinstance(node, ast.Constant) and isinstance(node.value, int):
                return node.value
            if isinstance(node, ast.Name) and node.id in self.values:
                return value(ast.parse("".join(self.values[node.id]) or "0", mode="eval").body)
            if isinstance(node, ast.BinOp) and type(node.op) in _ARITHMETIC:
                return _ARITHMETIC[type(node.op)](value(node.left), value(node.right))
            if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
                return -value(node.operand)
            if isinstance(node, ast.IfExp):
                return value(node.body) if value(node.test) else value(node.orelse)
            if isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in _COMPARED:
                return _COMPARED[type(node.ops[0])](value(node.left), value(node.comparators[0]))
            raise ValueError(text)

        try:
            choice = re.fullmatch(r"([^?]*)\?([^?:]*):([^?]*)", text)
            text = "({1}) if ({0}) else ({2})".format(*choice.groups()) if choice else text
            return value(ast.parse(text.strip(), mode="eval").body)
        except (SyntaxError, ValueError, ZeroDivisionError, RecursionError):
            return None

    def words(self, text: str, *, split: bool = True, split_values: bool = True, keep_empty: bool = False) -> list[str]:
        """Words of a text, with variables filled in; in one word without `split`, as many as written without `split_values`."""
        tokens: list[str] = []
        word: str | None = None
        quoted, position = False, 0
        while position < len(text) and len(tokens) < _MOST_WORDS:
            char, following = text[position], text[position + 1 : position + 2]
            if char in " \t\n" and split and not quoted:
                tokens += [] if word is None else [word]
                word, position = None, position + 1
            elif char == "'" and not quoted:
                literal = text[position + 1 :].partition("'")[0]
                word, position = (word or "") + literal, position + len(literal) + 2
            elif char == '"':
                quoted, position = not quoted, position + 1
                word = word or "" if quoted else word
            elif char == "\\" and following and (not quoted or following in '$`"\\'):
                word, position = (word or "") + following, position + 2
            elif char in "$`":
                values, end = self._expanded(text, position)
                is_array = text[position:end].endswith(("[@]}", "$@"))
                pieces = values if quoted and is_array else [" ".join(values)]
                if split and split_values and not quoted and not pieces[0].startswith("$"):
                    pieces = re.split(r"[ \t\n]+", pieces[0])
                for number, piece in enumerate(pieces):
                    if number:
                        tokens += [] if word is None else [word]
                        word = None
                    if piece or quoted or keep_empty or word is not None:
                        word = (word or "") + piece
                word, position = word if pieces else word or None, end
            else:
                word, position = (word or "") + char, position + 1
        return tokens if word is None else [*tokens, word]

    def _expanded(self, text: str, start: int) -> tuple[list[str], int]:
        """Values of the expansion at a position, and the position after it; one that is not known stays as written."""
        if text.startswith("$((", start):
            end = _closing(text, start + 1) + 1
            inside = text[start + 3 : end - 2]
            value = self._number(re.sub(r"\$\{?(\w+)\}?", r"\1", inside))
            return ([text[start:end]] if value is None else [str(value)]), end
        if text[start] == "`" or text.startswith("$(", start):
            end = text.find("`", start + 1) + 1 if text[start] == "`" else _closing(text, start + 1) + 1
            end = end if end > 0 else len(text)
            return [text[start:end]], end
        if text.startswith("${", start):
            end = _closing(text, start + 1) + 1
            inside = text[start + 2 : end - 1]
        elif match := re.compile(r"\$([A-Za-z_]\w*|[\d@*#?])").match(text, start):
            end, inside = match.end(), match[1]
        else:
            return ["$"], start + 1
        parameter = _PARAMETER.fullmatch(inside)
        if parameter is None:
            return [text[start:end]], end
        name, index, default_form, default = parameter.groups()
        values: list[str] | None = self.values.get(name)
        if name in ("@", "*"):
            values = values or []
        if values is not None and index is not None and index.isdigit():
            values = values[int(index) : int(index) + 1]
        if (
            default_form
            and default_form[-1] in "-="
            and (values is None or (":" in default_form and values in ([], [""])))
        ):
            values = ["".join(self.words(default, split=False))]
            if default_form.endswith("="):
                self.values[name] = values
        if default_form and default_form.endswith("+"):
            values = self.words(default) if values else []
        return ([text[start:end]] if values is None else list(values)), end


def _closing(text: str, start: int) -> int:
    """Position of the quote or bracket that closes the one at a position; the end of the text if there is none."""
    opens = text[start]
    closes: Any = {"(": ")", "{": "}"}.get(opens, opens)
    depth, position = 0, start
    while position < len(text):
        char = text[position]
        if char == "\\":
            position += 1
        elif char == closes and (depth == 1 or opens == closes) and position > start:
            return position
        elif char == opens:
            depth += 1
        elif char == closes:
            depth -= 1
        position += 1
    return len(text)
