"""`redline models`: the models that have a name."""

import json

import click


@click.command(
    epilog="\b\nExamples:\n  redline models\n  redline models --json\n",
    short_help="List the models that have a name.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def models(as_json: bool) -> None:
    """List the models that have a name, with their sizes.

    Any Hugging Face model works by its folder, its config.json or its hub id too.
    """
    from ...models.presets import list_presets

    rows = list_presets()
    if as_json:
        click.echo(json.dumps({row["name"]: row for row in rows}))
        return
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for name in ("model", "family", "parameters", "layers", "hidden", "heads", "vocabulary", "seq-len", "global batch"):
        table.add_column(name, justify="left" if name in ("model", "family") else "right")
    for row in rows:
        table.add_row(
            row["name"],
            row["family"],
            _count(row["parameters"]),
            *(f"{row[key]:,}" for key in ("layers", "hidden", "heads", "vocabulary", "seq_len", "global_batch")),
        )
    Console(highlight=False).print(table)


def _count(number: int) -> str:
    return f"{number / 1e9:.2f}B" if number >= 1e9 else f"{number / 1e6:.1f}M"
