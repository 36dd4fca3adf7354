"""`redline models`: the predefined models."""

import json

import click


@click.command(
    epilog="\b\nExamples:\n  redline models\n  redline models --json\n",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def models(as_json: bool) -> None:
    """List the predefined models with their sizes.

    Other Hugging Face models work too, by their folder, config.json or hub id.
    """
    from ..models.presets import list_presets

    rows = list_presets()
    if as_json:
        click.echo(json.dumps({row["name"]: row for row in rows}))
        return
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for name in ("model", "family", "params", "layers", "hidden", "heads", "vocab", "seq len", "batch"):
        table.add_column(name, justify="left" if name in ("model", "family") else "right", no_wrap=True)
    for row in rows:
        table.add_row(
            row["name"],
            row["family"],
            _count(row["parameters"]),
            *(
                f"{row[key]:,}" if row[key] else "-"
                for key in ("layers", "hidden", "heads", "vocabulary", "seq_len", "global_batch")
            ),
        )
    console = Console(highlight=False)
    # Lines that are too long wrap: a truncated name cannot be passed to `redline tune`.
    needed = console.measure(table, options=console.options.update(max_width=10**4)).maximum
    console.width = max(console.width, needed)
    console.print(table)


def _count(number: int) -> str:
    return f"{number / 1e9:.2f}B" if number >= 1e9 else f"{number / 1e6:.1f}M"
