"""Hooks of mkdocs: pages that `nav` does not name, the commands' help, links to sources."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
MARK = "<!-- commands -->"


def on_config(config: Any) -> Any:
    """Puts pages that `nav` does not name under "More"."""
    named = set(re.findall(r"[\w./-]+\.md", str(config["nav"])))
    pages = sorted(path.relative_to(config["docs_dir"]).as_posix() for path in Path(config["docs_dir"]).rglob("*.md"))
    more = [page for page in pages if page not in named]
    if more:
        config["nav"].insert(-1, {"More": more})
    return config


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Writes the commands' help where it is asked for, and names sources that lie outside of the site."""
    if MARK in markdown:
        markdown = markdown.replace(MARK, commands())
    return re.sub(r"\[([^\]]+)\]\((?:\.\./)+([^)#]+)(?:#[^)]*)?\)", _source, markdown)


def _source(found: re.Match[str]) -> str:
    text, path = found.groups()
    if not (ROOT / path).exists():
        return found.group()  # mkdocs complains of it
    return text if path in text else f"{text} (`{path}`)"


def commands() -> str:
    """Each command's help, as `-h` prints it."""
    import click
    from redline.cli.main import redline

    def helps(group: click.Group, parent: click.Context, level: str) -> Iterator[str]:
        for name in group.list_commands(parent):
            command = group.get_command(parent, name)
            assert command is not None  # it has just been listed
            context = click.Context(command, info_name=name, parent=parent, max_content_width=100)
            yield f"{level} {context.command_path}\n\n```text\n{command.get_help(context)}\n```\n"
            if isinstance(command, click.Group):
                yield from helps(command, context, f"{level}#")

    return "\n".join(helps(redline, click.Context(redline, info_name="redline", max_content_width=100), "##"))
