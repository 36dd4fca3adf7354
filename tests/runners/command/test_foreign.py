"""Options that another tool's file adds to a command: they replace the command's own values, but not its templates."""

import pytest
from redline.base.errors import UsageError
from redline.frameworks.stated_space import ForeignSpace
from redline.runners.command.command import Command
from redline.runners.command.trained import completed
from redline.space import Space


def command_of(command, options=(), render=(), **more):
    foreign = ForeignSpace(
        space=Space(),
        notes=(),
        called="a file",
        stated=frozenset(),
        options=tuple(options),
        render=tuple(render),
        **more,
    )
    return completed(command if isinstance(command, Command) else Command(command=command), foreign)


@pytest.mark.parametrize(
    ("command", "options", "expected"),
    [
        ("train x", [("--batch", "{b}")], "train x --batch {b}"),
        ("train --batch 8 x", [("--batch", "{b}")], "train --batch {b} x"),
        ("train --batch=8 x", [("--batch", "{b}")], "train --batch={b} x"),
        ("train --batch_size 8", [("--batch", "{b}")], "train --batch_size 8 --batch {b}"),
        ("train --batch {micro * 2}", [("--batch", "{b}")], "train --batch {micro * 2}"),
        ("train -o A.dp=1 -o A.mp=2", [("-o A.mp=", "{tp}")], "train -o A.dp=1 -o A.mp={tp}"),
        ("train", [("-o A.dp=", "{dp}"), ("-o A.mp=", "{tp}")], "train -o A.dp={dp} -o A.mp={tp}"),
        (["train", "--batch", "8"], [("--batch", "{b}")], ["train", "--batch", "{b}"]),
        (["train", "--batch", "{x}"], [("--batch", "{b}")], ["train", "--batch", "{x}"]),
        (["train", "a b"], [("--batch", "{b + 1}")], ["train", "a b", "--batch", "{b + 1}"]),
        (["train", "-o", "A.dp=1"], [("-o A.dp=", "{dp}")], ["train", "-o", "A.dp={dp}"]),
        (["train"], [("-o A.dp=", "{dp}")], ["train", "-o", "A.dp={dp}"]),
    ],
)
def test_options_are_told_in_the_place_of_values_that_are_there(command, options, expected):
    assert command_of(command, options).command == expected


@pytest.mark.parametrize("words", ["t --ds conf/ds.json x", "t --ds=conf/ds.json x", "t --ds {trial_dir}/ds.json x"])
def test_a_file_is_read_where_it_is_written(words):
    render = ("conf/ds.json", "conf/ds.json:a={b}", "conf/ds.json:c={d}")
    made = command_of(words, render=render)
    assert made.command == words.replace("conf/ds.json", "{trial_dir}/ds.json") and made.render == render
    listed = command_of(["t", "./conf/ds.json"], render=render)
    assert listed.command == ["t", "{trial_dir}/ds.json"]
    own = command_of(Command(command=words, render=("conf/ds.json:a={mine}",)), render=render)
    assert own.render == ("conf/ds.json:a={mine}", "conf/ds.json", "conf/ds.json:c={d}")


def test_a_file_that_the_command_does_not_read_is_refused():
    with pytest.raises(UsageError, match=r"the command does not read ds.json.*as \{trial_dir\}/ds.json"):
        command_of("train --deepspeed other.json", render=("ds.json",))


def test_a_metric_of_its_own_stays():
    assert command_of("train", metric="loss", direction="min").metric == ("loss",)
    mine = command_of(Command(command="train", metric=("speed",)), metric="loss", direction="min")
    assert mine.metric == ("speed",) and mine.direction is None
