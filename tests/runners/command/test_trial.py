"""Trials of commands with real processes: measured while they run, ended in time, and no process is left."""

import os
import re
import socket
import sys
import textwrap
import time
from pathlib import Path

import cloudpickle
import psutil
import pytest
from processes import left_of
from redline.base.device import Device, detect
from redline.base.errors import UsageError
from redline.results import Status
from redline.runners import LocalRunner, TimingPlan, TrialRequest, TrialTerms
from redline.runners.command import run as run_module
from redline.runners.command.command import Command
from redline.runners.command.trial import outcome
from redline.runners.command.work import Commands
from redline.runners.host.client import HostAgent

TORCHRUN = Path(sys.executable).with_name("torchrun")


@pytest.fixture
def script(tmp_path, monkeypatch):
    """Writes a script to a folder where the command starts. Returns the command that starts it."""
    checkout = tmp_path / "checkout"
    checkout.mkdir()
    monkeypatch.chdir(checkout)

    def write(text, arguments="{micro_batch}"):
        Path("train.py").write_text("import os, signal, subprocess, sys, time\n" + textwrap.dedent(text))
        return f"{sys.executable} train.py {arguments}"

    return write


@pytest.fixture
def run(space, tmp_path):
    """Runs a trial of a command on a runner of its own."""
    runners = []

    def run(command, *, number=0, timeout_s=60, best=None, limit_mib=None, config=None, **more):
        work = Commands(Command(command=command, **more), space, devices=1)
        terms = TrialTerms(
            device=detect(), timeout_s=timeout_s, memory_limit_mib=limit_mib, plan=TimingPlan(seconds=1.0)
        )
        # The agent's own memory does not count against a limit, but this one is kept as small as a command's agent.
        agent = HostAgent(work.imports) if limit_mib else None
        runners.append(LocalRunner(work, terms, agent=agent))
        log = tmp_path / "run" / "logs" / f"{number}.log"
        request = TrialRequest(
            config=config or space.config(micro_batch=2), number=number, log=log, best_throughput=best
        )
        measured = runners[-1].run(request)
        return measured, log.read_text()

    yield run
    for each in runners:
        agent = psutil.Process(each._agent.pid)
        assert left_of(agent.children(recursive=True), timeout=10) == []
        each.close()


STEPS = """
for step in range(1000):
    time.sleep(0.02 / int(sys.argv[1]))
    print(f"Epoch 0:  1%|#   | {step}/1000 [00:00<00:10, 50.0it/s]", file=sys.stderr)
"""


def test_a_progress_bar_is_enough_and_it_is_ended_once_its_speed_is_known(run, script):
    begin = time.monotonic()
    measured, log = run(script(STEPS))
    assert measured.status is Status.OK, measured.reason
    # Steps of 10 ms and of two samples.
    assert measured.unit == "samples/s" and 100 < measured.throughput <= 202
    assert measured.step_ms == pytest.approx(2e3 / measured.throughput) and measured.step_ms_spread > 0
    assert measured.peak_memory_mib > 1
    assert time.monotonic() - begin < 30 and "999/1000" not in log and "1/1000" in log


def test_reports_of_the_script_are_exact(run, script):
    measured, _ = run(
        script(
            """
            from redline import report
            for step in range(200):
                time.sleep(0.01)
                report(step=step, tokens=100, loss=1.5)
            """
        )
    )
    assert measured.status is Status.OK and measured.unit == "tokens/s" and measured.loss == 1.5
    assert 3000 < measured.throughput <= 10_000


def test_each_trial_has_its_own_folder_files_and_environment(run, script, tmp_path):
    Path(tmp_path / "checkout" / "job.yaml").write_text("batch: '{micro_batch}'\n")
    command = script(
        """
        print(open(sys.argv[1] + "/job.yaml").read(), os.environ["THREADS"], os.environ["MORE"], sys.argv[2], os.getcwd())
        print("stdin:", repr(sys.stdin.read()))
        print("value 1")
        """,
        "{trial_dir} '{trial} of {devices}'",
    )
    measured, log = run(
        f"THREADS={{micro_batch}} {command}", number=3, env=["MORE=a {micro_batch}"], render=["job.yaml"],
        metric=["value (?P<value>.)"],
    )  # fmt: skip
    assert measured.status is Status.OK
    assert f"batch: 2\n 2 a 2 3 of 1 {tmp_path}/checkout" in log and "stdin: ''" in log
    assert (tmp_path / "run" / "trials" / "3" / "job.yaml").read_text() == "batch: 2\n"
    assert sorted(each.name for each in Path().iterdir()) == ["job.yaml", "train.py"]


OUT_OF_MEMORY = {
    "cuda": (
        "[rank1]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 1 has 79.10 GiB",
        2048.0,
    ),
    "python": ("MemoryError", None),
}


@pytest.mark.parametrize("kind", list(OUT_OF_MEMORY))
def test_one_rank_out_of_memory_ends_the_others_that_wait_for_it_at_once(run, script, kind):
    message, needed = OUT_OF_MEMORY[kind]
    measured, log = run(
        script(
            f"""
            other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            print("CUDA out of memory is what one may read about")
            print({message!r}, file=sys.stderr)
            print("said at", time.monotonic(), flush=True)
            time.sleep(600)
            """
        )
    )
    ended = time.monotonic()
    assert measured.status is Status.OOM and message.removeprefix("[rank1]: ")[:50] in measured.reason
    if needed is None:  # memory of the process that reads the output is not the command's
        assert measured.peak_memory_mib is None
    else:
        assert measured.peak_memory_mib >= needed
    said_at = float(log.rpartition("said at ")[2].split()[0])
    assert ended - said_at < 5


def test_a_process_that_the_memory_limit_stops_is_out_of_memory(run, script):
    measured, _ = run(script("held = bytearray(512 << 20)\nprint(len(held))"), limit_mib=128)
    assert measured.status is Status.OOM and measured.reason == "MemoryError" and measured.memory_limit_mib == 128


def test_memory_that_the_system_s_limit_does_not_count_is_limited_too(run, script):
    text = """
    import mmap
    shared = mmap.mmap(-1, 400 << 20)
    for page in range(0, len(shared), 4096):
        shared[page] = 1
    """
    measured, _ = run(script(textwrap.dedent(text) + textwrap.dedent(STEPS)), limit_mib=300)
    assert measured.status is Status.OOM and 300 < measured.peak_memory_mib < 500, measured
    assert re.fullmatch(
        r"\d{3} MiB of memory are resident in one process, but the limit is 300 MiB", measured.reason
    ), measured.reason


@pytest.mark.parametrize(("limit_mib", "status"), [(1000.0, Status.OOM), (8000.0, Status.OK)])
def test_on_gpus_memory_and_its_limit_are_the_gpus(space, tmp_path, script, monkeypatch, limit_mib, status):
    """Host memory of the command's processes does not count. Without a GPU a stub replaces the driver's answer."""

    class Held:
        def held_mib(self, pids):
            return 5000.0 if pids else 0.0

    monkeypatch.setattr(run_module, "GpuMemory", Held)
    work = Commands(Command(command=script("held = bytearray(300 << 20)\n" + textwrap.dedent(STEPS))), space, devices=1)
    gpu = Device(type="cuda", name="NVIDIA H100", count=1, memory_mib=80_000)
    terms = TrialTerms(device=gpu, memory_limit_mib=limit_mib, plan=TimingPlan(seconds=0.5))
    job = work.job(TrialRequest(config=space.config(micro_batch=2), number=0, log=tmp_path / "r/logs/0.log"), terms)
    assert job.memory_limit_mib is None, "the host's memory is not limited by the GPU's"
    trial = cloudpickle.loads(job.program)
    Path(trial.terms.folder).mkdir(parents=True)
    peaks = []
    run = run_module.Run(trial.terms, {**trial.terms.values, "master_port": 1}, peaks.append)
    measured = outcome(run, run.timed())
    assert measured.status is status, measured
    assert measured.peak_memory_mib == 5000.0 == peaks[-1]
    if status is Status.OOM:
        assert measured.reason == "5,000 MiB of a GPU are in use, but the limit is 1,000 MiB"


def test_a_port_that_is_taken_is_not_the_end(run, script):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        text = f"""
        import socket, pathlib
        pathlib.Path(sys.argv[2], "output").mkdir()
        tried = pathlib.Path("tried")
        first = not tried.exists()
        tried.touch()
        port = {taken.getsockname()[1]} if first else int(sys.argv[1])
        socket.socket().bind(("127.0.0.1", port))
        print("value 1")
        """
        measured, log = run(script(text, "{master_port} {trial_dir} {micro_batch}"), metric=["value (?P<value>.)"])
    assert measured.status is Status.OK and "is taken; restarting on another" in log


@pytest.mark.parametrize(
    ("text", "arguments", "status"),
    [
        ("print('port 80: Address already in use, taking 81'); print('value 1')", "{micro_batch} {master_port}", "ok"),
        ("raise OSError('[Errno 98] Address already in use')", "{micro_batch}", "crash"),
    ],
)
def test_a_run_that_another_port_would_not_help_is_not_started_again(run, script, text, arguments, status):
    measured, log = run(script(text, arguments), metric=["value (?P<value>.)"])
    assert measured.status.value == status and "started again" not in log


@pytest.mark.parametrize(
    ("asked", "takes"),
    [
        ({"command": "true {micro_batch}"}, False),
        ({"command": "true {micro_batch} --port={master_port}"}, True),
        ({"command": "sh -c 'true {micro_batch} {master_port}'"}, True),
        ({"command": "true {micro_batch}", "env": ["MASTER_PORT={master_port}"]}, True),
    ],
)
def test_wherever_the_port_is_mentioned_it_is_given(space, asked, takes):
    assert ("master_port" in Commands(Command(**asked), space, devices=1).names) is takes


def test_a_traceback_before_exit_code_0_is_the_reason_of_a_crash(run, script):
    """Of a program that catches its own exception, in a process that the observer does not see."""
    text = """
    import traceback
    try:
        [][3]
    except IndexError:
        traceback.print_exc()
    """
    command = script(text).replace("train.py", "-I train.py")
    measured, _ = run(command)
    assert measured.status is Status.CRASH
    assert measured.reason == "it exited with code 0 after IndexError: list index out of range"


@pytest.mark.parametrize(
    ("text", "status", "reason"),
    [
        (
            "raise ValueError('no such option')",
            Status.CRASH,
            "the command exited with code 1: ValueError: no such option",
        ),
        (
            "print('train.py: error: argument --x: invalid', file=sys.stderr); sys.exit(2)",
            Status.CRASH,
            "code 2: train.py: error: argument --x",
        ),
        ("os.kill(os.getpid(), signal.SIGKILL)", Status.CRASH, "the command was killed by signal 9 (SIGKILL)"),
        (
            "print('no config', flush=True); print(); sys.exit(3)",
            Status.CRASH,
            "code 3; the last line it printed: no config",
        ),
        ("import missing_module", Status.CRASH, "ModuleNotFoundError: No module named 'missing_module'"),
        (
            "print('Throughput: 12 tok/s')",
            Status.CRASH,
            "without reporting a throughput, a step's time or its number; metric='Throughput: (?P<tokens_per_second>",
        ),
        ('print(\'{"step_ms": 5, "loss": "x"}\')', Status.OK, ""),
        ('for i in range(50): print(\'{"step_ms": 5, "loss": NaN}\')', Status.WRONG, "the reported loss is nan"),
    ],
)
def test_a_command_s_exit_status_is_reported(run, script, text, status, reason):
    measured, _ = run(script(text))
    assert measured.status is status and reason in measured.reason


def test_a_command_that_cannot_be_started_is_a_crash(run, script, tmp_path):
    broken = tmp_path / "broken"
    broken.write_text("no program")
    broken.chmod(0o755)
    measured, _ = run(f"{broken} {{micro_batch}}")
    assert measured.status is Status.CRASH and "cannot be started: Exec format error" in measured.reason


BAD_MANNERS = {
    "ignores SIGTERM": "signal.signal(signal.SIGTERM, signal.SIG_IGN)",
    "daemonises": "if os.fork(): os._exit(0)\nos.setsid()\nif os.fork(): os._exit(0)",
    "changes its process group": "os.setpgid(0, 0) if os.getpid() != os.getsid(0) else None\nsubprocess.Popen(['sleep', '600'], "
    "start_new_session=True)",
    "holds its pipe by a child": "subprocess.Popen(['sleep', '600'])",
}


@pytest.mark.parametrize("manners", list(BAD_MANNERS))
def test_bad_manners_leave_nothing_behind(run, script, manners):
    text = BAD_MANNERS[manners] + textwrap.dedent(STEPS)
    begin = time.monotonic()
    measured, _ = run(script(text))
    assert measured.status is Status.OK, measured.reason
    assert time.monotonic() - begin < 30


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "(during the command, without a usable metric: it has printed nothing)"),
        (
            "while True: print('[iter 00010] loss=2.30 | 654.4 samples/sec', flush=True); time.sleep(0.1)",
            "samples/sec' reads '654.4' in '[iter 00010] loss=2.30 | 654.4 samples/sec'",
        ),
        (
            "print('{\"samples_per_second\": 5}', flush=True)",
            "(during the command, after 1 value of 'samples_per_second')",
        ),
    ],
)
def test_a_timeout_names_what_was_read(run, script, text, says):
    measured, _ = run(script(f"{text}\ntime.sleep(600)"), timeout_s=6)
    assert measured.status is Status.TIMEOUT and "no result within 6 s" in measured.reason
    assert says in measured.reason


def test_nothing_is_observed_if_that_is_switched_off(run, script):
    text = "print(os.environ.get('PYTHONPATH'), os.environ.get('REDLINE_OBSERVE'))\nprint('speed 1')"
    _, log = run(script(text), metric=["speed (?P<speed>.)"], no_observe=True)
    assert f"{os.environ.get('PYTHONPATH')} None" in log


def test_gigabytes_of_output_are_read_and_not_kept(run, script):
    measured, log = run(
        script(
            """
            for step in range(300):
                sys.stdout.write("x" * (1 << 20))
                print(f'\\n{{"step": {step}}}')
            """
        )
    )
    assert measured.status is Status.OK, measured.reason
    assert len(log) < 10 << 20


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"command": "no-such-program {micro_batch}"}, "there is no program 'no-such-program'"),
        ({"command": "python3 -u trian.py {micro_batch}"}, "there is no file 'trian.py' in the current folder"),
        ({"command": "bash trian.sh {micro_batch}"}, "there is no file 'trian.sh'"),
        ({"command": f"{TORCHRUN} --nproc-per-node 2 trian.py {{micro_batch}}"}, "there is no file 'trian.py'"),
        ({"command": "true"}, "the knob 'micro_batch' is not used"),
        ({"command": "true {micro_batch} {x}"}, "unknown placeholder"),
        ({"command": "true {micro_batch}", "env": ["A"]}, "env must be NAME=VALUE"),
        ({"command": "true {micro_batch}", "samples": "{x}"}, "samples: unknown placeholder"),
    ],
)
def test_a_command_that_cannot_work_is_refused_before_the_first_trial(space, more, says):
    with pytest.raises(UsageError, match=says):
        Commands(Command(**more), space, devices=1).check_program()


def test_a_knob_that_a_configuration_lacks_has_its_default(space):
    space.choice("offload", ["none", "cpu"], when=space["micro_batch"] > 1)
    work = Commands(Command(command="true {micro_batch} {offload}"), space, devices=4)
    assert work.rendered(space.config(micro_batch=1), 0, Path()) == "true 1 none"
    assert work.rendered(space.config(micro_batch=2, offload="cpu"), 0, Path()) == "true 2 cpu"


def test_a_speed_in_an_unknown_form_ends_the_trial_with_the_metric_that_reads_it(run, script):
    begin = time.monotonic()
    measured, _ = run(
        script(
            """
            for step in range(10_000):
                print(f"step {step} at 12.5 samples/s", flush=True)
                time.sleep(0.1)
            """
        ),
        timeout_s=120,
    )
    assert measured.status is Status.CRASH and time.monotonic() - begin < 60
    assert measured.reason.startswith(
        "no training of it can be observed, and its speed is printed in an unknown form: metric='"
    )
    assert "(?P<samples_per_second>" in measured.reason and "reads '12.5' in 'step " in measured.reason


def test_samples_of_a_step_follow_from_knobs_or_an_option(space):
    def work(**more):
        made = Commands(Command(command="true {micro_batch}", **more), space, devices=4)
        return made._samples_per_step(made.values(space.config(micro_batch=2), 0, Path()))

    assert work() == 8.0 and work(samples="{micro_batch * 3}") == 6.0 and work(samples="5") == 5.0
    with pytest.raises(UsageError, match="samples must be a number"):
        work(samples="many")


def test_an_unknown_metric_counts_with_its_last_value(run, script):
    text = """
    for speed in (5, 7, 3):
        print("speed", speed)
    print("latency 0.25")
    """
    measured, _ = run(script(text), metric=[r"speed (?P<speed>\d+)"])
    assert (measured.throughput, measured.unit) == (3.0, "speed")
    measured, _ = run(script(text), metric=[r"latency (?P<latency>\S+)", r"speed (?P<speed>\d+)"], direction="min")
    assert (measured.throughput, measured.unit) == (4.0, "1/latency")
    assert measured.reason == measured.told == "speed = 3"
    measured, _ = run(
        script(text), metric=[r"speed (?P<speed>\d+)", r"latency (?P<latency>\S+)"], require=["latency < 0.2"]
    )
    assert measured.status is Status.WRONG
    assert measured.reason == "latency = 0.25, but `latency < 0.2` is required; speed = 3"
