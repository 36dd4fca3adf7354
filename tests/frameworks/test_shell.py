"""A shell script is read into the command that it runs: variables, arrays, arithmetic, branches."""

import pytest
from redline.base.errors import UsageError
from redline.frameworks import read
from redline.frameworks.shell import command_of

LAUNCH = 'torchrun --nproc_per_node 8 pretrain_gpt.py "${ARGS[@]}"\n'


def words(script, folder=None):
    return command_of(script, "x.sh", folder)


@pytest.mark.parametrize(
    ("script", "value"),
    [
        ("A=4\nB=$A\n", "4"),
        ("A=${1:-7}\nB=${A}\n", "7"),
        ("N=2; G=8\nB=$((N * $G / 4))\n", "4"),
        ('[ -z "$T" ] && B=3\n[ -n "$T" ] && B=5\n', "3"),
        ('B=1\nif [[ $S == 7b ]]; then B=2; elif [ "$S" = "" ] && [ 1 -lt 2 ]; then B=3; else B=4; fi\n', "3"),
        ("S=13b\ncase $S in\n 7b) B=1 ;;\n 13b|14b) B=2 ;;\n *) B=9 ;;\nesac\n", "2"),
        ("T=4\nB=$(( ($T > 1) ? 6 : 7 ))\n", "6"),
        ("B=1\nif (( 3 > 2 )); then\n  B=6\nfi\n", "6"),
        ("if [ $UNSET -eq 0 ]; then B=5; fi\n", "5"),
        ("for B in 2 4 8; do\n", "2"),
        (": ${B:=9}\n", "9"),
        ("S='a b'\nB=\"x_${S}_$'y'\"\n", "x_a b_$'y'"),
        ("B=$(nproc)\n", "$(nproc)"),
        ('set_b() {\n  local more=$2\n  B="$1$more"\n}\nset_b 4 2\n', "42"),
        ("function set_b\n{\n  B=$1\n}\nset_b $# && set_b 7\n", "7"),
        ("B=1\nnever() { B=2; }\n", "1"),
        ("export A=4 B=5 C\n", "5"),
        ('A=4 B="5 6"\n', "5 6"),
        ("B=1\nB+=2\n", "12"),
        ("A='1 2'\nB=$A\n", "1 2"),
        ("B=${C:-1 2}\n", "1 2"),
        ("B=1\ncat > f <<EOF\nB=2\nEOF\n", "1"),
        ('B=1\nwhile [[ "$1" != "" ]]; do\n case $1 in\n  -b | --b )\n   B=$2 ;;\n * ) exit 1 ;;\n esac\ndone\n', "1"),
        ("B=1\nif [ 1 = 2 ]; then\n if [ 1 = 1 ]; then B=2; else B=3; fi\nelif [ 1 = 1 ]; then\n (B=4)\nfi\n", "4"),
    ],
)
def test_a_variables_value_is_that_of_the_script(script, value):
    (command, unknown) = words(f'{script}ARGS=(--pipeline-model-parallel-size "$B")\n{LAUNCH}')
    assert command[-1] == value and command[:2] == ["torchrun", "--nproc_per_node"] and not unknown


@pytest.mark.parametrize(
    "around",
    [
        *(
            "{} > log.txt 2>&1 &",
            "{} 2>&1 | tee log",
            "{}; echo done",
            "{} && echo done",
            "{} # comment",
            "nohup {} &> log",
        ),
        *("({}) 2>&1 | tee log", "time {} >log_$(date +%s).txt", "bash -c 'cd x && {} > log && echo done'"),
    ],
)
def test_what_a_shell_does_with_a_command_is_no_value_of_its_last_flag(around):
    command = "torchrun --nproc_per_node 8 run_clm.py --config_name gpt2 --bf16"
    assert words(around.format(command))[0][-7:] == ["torchrun", "--nproc_per_node", "8", *command.split()[3:]]
    assert read(around.format(command)).config["precision"] == "bf16"


def test_quoted_signs_of_redirections_are_values():
    script = "trl sft --eos_token '<|im_end|>' --pad_token \"<pad>\" > log 2>&1 --bf16\n"
    for text in (script, f"A=1\n{script}"):
        assert words(text)[0][2:] == ["--eos_token", "<|im_end|>", "--pad_token", "<pad>", "--bf16"]


def test_arrays_grow_and_comments_in_them_are_none():
    script = 'A=(--a 1 # one\n  --b "2 3")\nA+=(--c)\nA=("${A[@]}" --d $((1+1)))\nARGS=("${A[@]}" ${A[0]})\n'
    assert words(script + LAUNCH)[0][4:] == ["--a", "1", "--b", "2 3", "--c", "--d", "2", "--a"]


@pytest.mark.parametrize(
    "launch",
    [
        'run_cmd="python -u pretrain_gpt.py ${ARGS[*]}"\nsrun -l sh -c "${run_cmd}"\n',
        'CMD="torchrun pretrain_gpt.py ${ARGS[*]}"\necho "$CMD and much more that is not run"\neval $CMD 2>&1 | tee log\n',
        "run() {\n  exec torchrun pretrain_gpt.py ${ARGS[@]}\n}\nrun\n",
        "NCCL_DEBUG=INFO torchrun pretrain_gpt.py ${ARGS[@]} > log.txt &\n",
    ],
)
def test_the_command_that_starts_the_training_is_found(launch):
    command, _ = words(f"ARGS=(--micro-batch-size 2)\n{launch}")
    assert command[-3:] == ["pretrain_gpt.py", "--micro-batch-size", "2"]


def test_a_branch_that_is_not_taken_is_not_the_command():
    script = 'if [ "$DRY" = true ]; then\n  torchrun pretrain_gpt.py --tensor-model-parallel-size 8 --bf16\nfi\n'
    script += "torchrun pretrain_gpt.py --bf16\n"
    assert words(script)[0] == ["torchrun", "pretrain_gpt.py", "--bf16"]


def test_a_word_before_a_command_leaves_the_test_before_it():
    script = "[ 1 = 2 ] && time torchrun pretrain_gpt.py --tensor-model-parallel-size 8\nexec torchrun pretrain_gpt.py --bf16\n"
    assert words(script)[0] == ["torchrun", "pretrain_gpt.py", "--bf16"]


def test_what_is_not_understood_is_named(tmp_path):
    (tmp_path / "env.sh").write_text("TP=4\n")
    script = "source env.sh\nsource missing.sh\nwhile read x; do\n  y=1\ndone\n" + LAUNCH.replace(
        '"${ARGS[@]}"', "--tp $TP"
    )
    command, unknown = words(script, tmp_path)
    assert command[-1] == "4" and unknown == ["source missing.sh", "while read x"]
    (tmp_path / "train.sh").write_text(
        "source missing.sh\ntorchrun --nproc_per_node 8 pretrain_gpt.py --tensor-model-parallel-size 4 --micro-batch-size 1\n"
    )
    assert any("source missing.sh" in note for note in read(tmp_path / "train.sh").notes)


def test_a_script_that_expands_itself_ends():
    assert words("A=$A$A\nA=${A}${A}\ntorchrun pretrain_gpt.py $A\n")[0][0] == "torchrun"


@pytest.mark.parametrize("command", ["bash {} {}", "TP=9 {} {}", "srun -N 1 bash {} {}"])
def test_a_script_gets_the_arguments_of_its_command(tmp_path, command):
    script = tmp_path / "train.sh"
    script.write_text(
        'TP=$1\nDO=${2}\nif [ $DO = true ]; then\n  OPTIONS="--use-distributed-optimizer --bf16"\nfi\n'
        "torchrun --nproc_per_node 8 pretrain_gpt.py --tensor-model-parallel-size $TP --micro-batch-size $# ${OPTIONS}\n"
    )
    trainer = read(command.format(script, "4 true"))
    assert (trainer.config["tp"], trainer.config["micro_batch"], trainer.config["zero"]) == (4, 2, 1)
    with pytest.raises(UsageError, match="no framework"):
        read(command.format(script, "4 true"), files=False)


def test_a_command_in_a_file_of_any_name_is_read(tmp_path):
    file = tmp_path / "command.txt"
    file.write_text(
        "torchrun --nproc_per_node 4 run_clm.py --config_name gpt2 --bf16 --per_device_train_batch_size 3\n"
    )
    assert read(file).config["micro_batch"] == read(str(file)).config["micro_batch"] == 3


def test_a_sourced_file_is_opened_only_where_files_may_be(tmp_path):
    (tmp_path / "env.sh").write_text('X="--per_device_train_batch_size 7"\n')
    command = f"source {tmp_path}/env.sh\npython run_clm.py --model_name_or_path gpt2 --output_dir x $X"
    assert read(command).config["micro_batch"] == 7
    unopened = read(command, files=False)
    assert unopened.config["micro_batch"] != 7 and any("source" in note for note in unopened.notes)


@pytest.mark.parametrize(
    ("assigned", "words"),
    [
        ("$(( W / (4 * 2) ))", "4"),
        ("$((W/(TP*2)))", "4"),
        ("$(( (W + 0) / 8 ))", "4"),
    ],
)
def test_arithmetic_may_have_parentheses(assigned, words):
    script = f"W=32\nTP=4\nDP={assigned}\ntorchrun --nnodes $DP pretrain_gpt.py --seq-length $(( (DP + 4) * 2 ))\n"
    found, unknown = command_of(script, "run.sh")
    assert found[1:3] == ["--nnodes", words] and found[-1] == "16" and unknown == []
