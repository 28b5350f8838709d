"""
Print every error and warning of the package with its place, to be read as a user would.

    python tests/scripts/messages.py            # all
    python tests/scripts/messages.py servers    # of one folder
"""

import ast
import sys
from pathlib import Path


PACKAGE = Path(__file__).parents[2] / "marft_trl"
_LOGS = {"warning", "warn", "error", "critical"}


def text_of(node: ast.AST) -> str:
    """The text of an expression, with placeholders in braces."""
    if isinstance(node, ast.Constant):
        return str(node.value) if isinstance(node.value, str) else ""
    if isinstance(node, ast.JoinedStr):
        return "".join(text_of(part) for part in node.values)
    if isinstance(node, ast.FormattedValue):
        return "{" + ast.unparse(node.value) + "}"
    if isinstance(node, ast.BinOp):
        return text_of(node.left) + text_of(node.right)
    if isinstance(node, ast.IfExp):
        return f"[{text_of(node.body)}|{text_of(node.orelse)}]"
    return "{" + ast.unparse(node) + "}" if isinstance(node, (ast.Name, ast.Call, ast.Attribute)) else ""


def messages(path: Path) -> list[tuple[int, str, str]]:
    """Line, kind and text of the messages of a file, those of tables of checks included."""
    rows = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and node.exc.args:
            rows.append((node.lineno, ast.unparse(node.exc.func), text_of(node.exc.args[0])))
        elif (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr in _LOGS
            and node.args
        ):
            rows.append((node.lineno, node.func.attr, text_of(node.args[0])))
        elif isinstance(node, ast.Dict):  # `{message: condition}`
            texts = [(key.lineno, text_of(key)) for key in node.keys if isinstance(key, (ast.Constant, ast.JoinedStr))]
            rows += [(line, "check", text) for line, text in texts if len(text) > 60]
    return sorted(rows)


def main() -> None:
    folders = [PACKAGE / name for name in sys.argv[1:]] or [PACKAGE]
    files = sorted(path for folder in folders for path in ([folder] if folder.is_file() else folder.rglob("*.py")))
    count = 0
    for path in files:
        for line, kind, text in messages(path):
            count += 1
            print(f"{path.relative_to(PACKAGE)}:{line} {kind}\n    {text}")
    print(f"{count} messages")


if __name__ == "__main__":
    main()
