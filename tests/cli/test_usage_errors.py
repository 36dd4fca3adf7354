"""Usage errors are found before slow imports, and before a model is built."""

import json
import subprocess
import sys

PROGRAM = """
import json, sys
from redline.cli import main
for arguments in json.loads(sys.argv[1]):
    try:
        main(arguments)
    except SystemExit as ended:
        slow = sorted({"torch", "transformers", "ray", "scipy", "pandas"} & set(sys.modules))
        print(json.dumps([ended.code, slow]))
"""
MODEL = "gpt2-tiny"
OF_A_MODEL = [
    ["--lora", "16"],
    ["--space", "typo.yaml"],
    ["--space", "malformed.yaml"],
    ["--allow", "lossi"],
    ["--fix", "micro_batch=large"],
    ["--set", "precision=bf16,fp33"],
    ["--devices", "0"],
]
OF_A_SEARCH = [
    ["--out", "taken"],
    ["--out", "empty", "--resume"],
    ["--resume"],
    ["--hardware", "h1000"],
    ["--log-to", "wandbb"],
    ["--sampler", "tpee"],
    ["--runner", "rays"],
    ["--memory-limit", "big"],
    ["--warm-start", "empty"],
]
MODELS = ["gpt2-tinny", "./folder", "no_such.json", "type.json", "class.json"]
CASES = {
    "tune": [
        *([MODEL, *options] for options in (*OF_A_MODEL, *OF_A_SEARCH)),
        *([name] for name in (*MODELS, "typo.yaml", "malformed.yaml")),
        *(["--command-file", name] for name in ("typo.yaml", "malformed.yaml")),
    ],
    "space": [*([MODEL, *options] for options in OF_A_MODEL), *([name] for name in MODELS)],
    "estimate": [[MODEL, *options] for options in (*OF_A_MODEL, ["--hardware", "typo.yaml"])],
    "scale": [[MODEL, *options] for options in (["--lora", "16"], ["--space", "typo.yaml"], ["--hardware", "h1000"])],
    "train": [
        [MODEL, "--lora", "16"],
        ["typo.yaml"],
        ["malformed.yaml"],
        [MODEL, "--data", "no_such.txt"],
        ["class.json"],
    ],
    "export": [["typo.yaml", "--to", "env"]],
}
CONFIGURATION = '{"model_type": "bert", "architectures": ["BertForSequenceClasification"]}'


def test_a_usage_error_needs_no_slow_import(tmp_path):
    (tmp_path / "typo.yaml").write_text("knobs:\n- {name: micro_batch, valus: [1, 2]}\n")
    (tmp_path / "malformed.yaml").write_text("knobs: [\n- {name: micro_batch, values: [1, 2}\n")
    (tmp_path / "type.json").write_text('{"model_type": "bertt"}')
    (tmp_path / "class.json").write_text(CONFIGURATION)
    (tmp_path / "folder").mkdir()
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "trials.csv").write_text("trial,status,throughput\n")
    lines = [[command, *arguments] for command, cases in CASES.items() for arguments in cases]
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, json.dumps(lines)], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    outcomes = [json.loads(line) for line in done.stdout.splitlines()]
    assert dict(zip(map(" ".join, lines), outcomes, strict=True)) == {" ".join(line): [2, []] for line in lines}, (
        done.stderr
    )
    assert "class of this name; did you mean 'BertForSequenceClassification'?\n" in done.stderr
