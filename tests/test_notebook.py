"""The example notebook runs unmodified from its first cell to its last and shows the results."""

import ast
from pathlib import Path

import pytest
import redline

NOTEBOOK = Path(redline.__file__).parent / "examples" / "quickstart.ipynb"
nbformat = pytest.importorskip("nbformat", reason="nbclient is not installed: pip install 'redline[test]'")


def shown(cell):
    """A cell's outputs by MIME type."""
    found = {}
    for output in cell.outputs:
        found |= output.get("data", {})
        if output.output_type == "stream":
            found["stdout"] = found.get("stdout", "") + output.text
    return found


@pytest.mark.exhaustive
def test_the_notebook_runs_and_shows_the_result(tmp_path):
    nbclient = pytest.importorskip("nbclient", reason="nbclient is not installed: pip install 'redline[test]'")
    book = nbformat.read(NOTEBOOK, as_version=4)
    nbclient.NotebookClient(book, timeout=570, resources={"metadata": {"path": str(tmp_path)}}).execute()
    cells = {cell.source.splitlines()[-1]: shown(cell) for cell in book.cells if cell.cell_type == "code"}
    result = cells["result"]["text/html"]
    assert "tokens/s" in result and "<table" in result and "3 ok" in result
    (trials,) = [each["text/html"] for name, each in cells.items() if name.startswith("result.trials")]
    assert trials.count("<tr") == 4
    (script,) = [each["stdout"] for name, each in cells.items() if name.startswith("print(render")]
    assert "per_device_train_batch_size" in script
    (own,) = [each["text/html"] for name, each in cells.items() if name.startswith("rl.tune(throughput")]
    assert "oom" in own
    assert (tmp_path / "runs" / "notebook" / "best.yaml").is_file()


def test_the_notebook_runs_up_to_its_search_and_its_names_exist():
    cells = [each.source for each in nbformat.read(NOTEBOOK, as_version=4).cells if each.cell_type == "code"]
    search = next(number for number, source in enumerate(cells) if "rl.tune(" in source)
    names = {}
    for source in cells[:search]:
        exec(source, names)
    assert len(names["space"]) > 1
    for node in (node for source in cells[search:] for node in ast.walk(ast.parse(source))):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            exec(ast.unparse(node), names)
        elif isinstance(node, ast.Attribute) and ast.unparse(node.value) == "rl":
            assert hasattr(redline, node.attr), node.attr


def test_the_notebook_is_kept_without_outputs():
    book = nbformat.read(NOTEBOOK, as_version=4)
    assert not any(cell.get("outputs") or cell.get("execution_count") for cell in book.cells)
