"""`redline.tune`: from a model and some devices to the fastest configuration."""

import contextlib
import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..errors import RunnerError, UsageError
from ..models import Workload
from ..models.families.standard import BLOCK_KNOBS
from ..results import RunFolder
from ..runners import TimingPlan
from ..runners.function import Calls
from ..runners.host import PLAIN_IMPORTS, HostAgent
from ..scratch import Scratch
from ..space import Config, Space
from .budget import Budget, Stopwatch, parse_duration, parse_memory
from .earlier import read_runs, take
from .feasibility import tight_winner
from .first_trial import first_trial
from .listener import SearchListener
from .loggers import check_trackers, logging_to
from .predicting import check_refinable, described, estimate_to_begin_with, peak_rate, refiner, usable
from .record import asked_of, command_of, plan_of
from .result import Result, make_result
from .running import (
    DEFAULT_MEASURE_TIME,
    DEFAULT_TIMEOUT,
    IN_PROCESS,
    check_honoured,
    imports_early,
    make_runner,
    memory_of_rank,
    runner_of,
)
from .samplers import make_sampler
from .samplers.bayes import BayesSampler
from .search import Search
from .task import resolve_task
from .warm_start import WarmStart

DEFAULT_SAMPLER = "bayes"
DEFAULT_TRIALS = 16
DEFAULT_PATIENCE = 5
DEFAULT_HEADROOM = 0.05


def tune(
    target: str | Workload | Callable[[Config], Any],
    space: Space | str | Path | None = None,
    *,
    devices: int | None = None,
    seq_len: int | None = None,
    global_batch: int | None = None,
    data: str | Path | None = None,
    lora: str | None = None,
    trials: int | None = None,
    time: str | float | None = None,
    device_hours: float | None = None,
    patience: int | None = None,
    runner: str | None = None,
    isolate: bool = True,
    hardware: Any = None,
    sampler: str = DEFAULT_SAMPLER,
    prior: Any = None,
    warm_start: str | Path | Sequence[str | Path] = (),
    headroom: float = DEFAULT_HEADROOM,
    layerwise: bool = False,
    seed: int = 0,
    out: str | Path | None = None,
    resume: bool = False,
    storage: str | None = None,
    allow: str | Sequence[str] = (),
    override: Mapping[str, Sequence[Any]] | None = None,
    fix: Mapping[str, Any] | None = None,
    memory_limit: str | float | None = None,
    trial_timeout: str | float | None = DEFAULT_TIMEOUT,
    measure_time: str | float = DEFAULT_MEASURE_TIME,
    concurrency: int | None = None,
    ray_address: str | None = None,
    listener: SearchListener | None = None,
    log_to: str | Sequence[str] | None = None,
) -> Result:
    """Finds the configuration with the highest throughput.

    Args:
        target: a model (preset, folder, config.json, hub id, or `file.py:name`), a `Workload`, or any
            callable `fn(config) -> throughput | Measurement`, which needs a `space`.
        space: what may vary, also as a YAML file; by default the workload's own for the devices at hand.
        devices: devices of one trial; by default all that are present.
        seq_len, global_batch, data: override the workload's sequence length (tokens), samples per
            optimizer step, and text file.
        lora: train adapters of a Hugging Face model only, such as `r=16` or
            `r=16,alpha=32,target=q_proj+v_proj`; the other weights are frozen.
        trials: trials in all (16 where neither trials nor time is given).
        time: wall time from this call to the winner, measuring the leaders again included, s or as in `30m`.
            Nothing is started once it is up, so that it is exceeded by one trial at most.
        device_hours: device time of all trials, h.
        patience: stop once so many further trials together are unlikely (5 %) to bring another 1 %; 0 never does.
            By default 5, and 0 for the sampler `grid`, of which all is wanted.
        runner: `ray` or `local`; `simulate` answers with predictions for `hardware`, which need not be here.
            By default `ray`, for a callable `local`.
        isolate: call a callable in a fresh process for each trial, with a deadline and a memory limit: whatever
            ends that is an outcome, not the end of the search. What it prints goes to the trial's log, and what
            it changes is gone afterwards. False calls it in this process, as it must be where it works on state
            or devices that this process holds.
        hardware: a name, a YAML file or a `redline.Hardware`: what is simulated; with other runners what the
            machine at hand is taken for by the estimate. By default it is looked up, or measured for a second.
        sampler: see `redline.tuner.sampler_names()`.
        prior: an estimate to begin with: `prior(config) -> Estimate | throughput`, such as a `redline.Estimator`.
            Where it is wrong the search finds out. Samplers other than `bayes` do without. By default a
            workload's is made, where its model can be traced.
        warm_start: folders of earlier runs, of this or another workload: what paid there is expected to pay here.
        headroom: share of a device's memory that is to stay free.
        layerwise: at the end, refine the winner block by block as predictions suggest, and try that beside it: one
            trial more, which wins where it is measured faster.
        seed: of weights, data and proposals.
        out: folder for the run's files; None keeps none.
        resume: go on with the run in `out`.
        storage: URL of an Optuna storage for the ledger, in place of `study.log`.
        allow: `lossy` adds values that trade accuracy for speed to the default space, such as bf16 without
            fp32 master weights; the best without them stands beside the winner.
        override: values of knobs, in place of the space's.
        fix: knobs that do not vary.
        memory_limit: of each device, MiB or as in `8GiB`; by default what the device has.
        trial_timeout: deadline of one trial, s or as in `5m`; None for none. Compilation does not count: it has
            as long again, and five minutes at least.
        measure_time: time for measuring a candidate's steps once they are steady, s or as in `3s`; fewer are
            taken where they agree within 2 %, and never fewer than three.
        concurrency: trials at once.
        ray_address: a Ray cluster to join.
        listener: hears of progress.
        log_to: trackers that each trial is written to: `mlflow`, `tensorboard`, `wandb`; needs `out`.

    Returns:
        The result; `result.best` is None where nothing succeeded, and `result.why` says why, as does a warning
        where there is no listener. After Ctrl-C it holds what was found so far, with `result.interrupted` set.

    Raises:
        UsageError: something asked for is invalid; nothing was written.
        RunnerError: the machinery that runs trials failed. What was found before is in `out`.
    """
    heard, listener = listener is not None, listener or SearchListener()
    space_file, space = (space, Space.from_yaml(space)) if isinstance(space, (str, Path)) else (None, space)
    if trials is None and time is None and device_hours is None:
        trials = DEFAULT_TRIALS
    if patience is None:
        patience = 0 if sampler == "grid" else DEFAULT_PATIENCE
    runner = runner_of(target, runner, isolate)
    budget = Budget(trials=trials, seconds=parse_duration(time), device_hours=device_hours, patience=patience)
    watch = Stopwatch(budget.seconds)
    limit_mib = parse_memory(memory_limit)
    timeout_s = parse_duration(trial_timeout, "trial timeout")
    plan = TimingPlan(seconds=parse_duration(measure_time, "measure time"))
    with contextlib.ExitStack() as held:
        agent: HostAgent | None = None
        if runner == "local" and imports_early(target):
            agent = held.enter_context(contextlib.closing(HostAgent(PLAIN_IMPORTS)))
        task = resolve_task(
            target,
            space,
            devices=devices,
            seq_len=seq_len,
            global_batch=global_batch,
            data=data,
            lora=lora,
            allow=allow,
            override=override,
            fix=fix,
            cluster=runner == "ray" and bool(ray_address or os.environ.get("RAY_ADDRESS")),
            simulated=described(hardware) if runner == "simulate" else None,
        )
        if runner == "local" and task.workload is not None and agent is None:
            agent = held.enter_context(contextlib.closing(HostAgent(PLAIN_IMPORTS)))
        check_honoured(
            task,
            runner,
            trial_timeout=trial_timeout,
            memory_limit=memory_limit,
            measure_time=measure_time,
            concurrency=concurrency,
            ray_address=ray_address,
        )
        asked_timeout = None if trial_timeout == DEFAULT_TIMEOUT else timeout_s
        budget.check_against(asked_timeout, concurrency or 1, task.devices)
        earlier = read_runs([warm_start] if isinstance(warm_start, (str, Path)) else warm_start, own=out)
        if task.workload is None and hardware is not None:
            raise UsageError("hardware belongs to a workload, of which time and memory are estimated, not to a callable")
        if task.simulated and time is not None:
            raise UsageError("simulated trials take no time: limit a simulated search by trials or device_hours")
        if layerwise:
            check_refinable(task.workload, task.space)
        asked = asked_of(task, limit_mib, sampler=sampler, seed=seed, runner=runner, timeout_s=timeout_s)
        # Whatever can be refused is, before anything takes time.
        make_sampler(sampler, task.space, seed=seed)
        check_trackers(log_to, out)
        if out is not None:
            RunFolder.check(out, asked, storage=storage, resume=resume)
        elif resume:
            raise UsageError("resume needs out, the folder of the run to go on with")
        taken = [take(run, task.space, asked, task.workload.unit if task.workload else "") for run in earlier]
        calls = Calls(task.function) if task.function is not None and runner != IN_PROCESS else None
        limit_mib = memory_of_rank(task, limit_mib, concurrency)
        notes: list[str] = []

        def warn(message: str) -> None:
            notes.append(message)
            listener.said(message)

        given, estimator = prior, None
        if task.workload is not None:
            estimator = estimate_to_begin_with(
                task.workload,
                task.space,
                warn,
                devices=task.devices,
                hardware=hardware,
                memory_limit_mib=limit_mib,
                free_batch=task.free_batch,
                settle=agent.wait_ready if agent is not None else lambda: None,
            )
            if prior is None and estimator is not None:
                listener.waiting("predicting")
                prior = usable(estimator, task.space, warn)
        first = first_trial(task.space, prior if task.workload is not None else None, headroom)
        asked |= {"first_trial": first.note} if first.note else {}
        if taken:
            prior = WarmStart(task.space, taken, prior, warn)
            for each in taken:
                warn(each.said)
        # Whoever proposes, the stopping rule asks this one what is left to gain.
        judge = BayesSampler(task.space, seed=seed, prior=prior, warn=warn, headroom=headroom)
        proposer = judge if sampler == BayesSampler.name else make_sampler(sampler, task.space, seed=seed)
        if (given is not None or taken) and proposer is not judge:
            warn(f"the sampler '{sampler}' makes no use of a prior or a warm start; '{BayesSampler.name}' does")

        columns: dict[str, Any] = {knob.name: None if knob.derived else knob.values for knob in task.space.knobs}
        if layerwise:
            columns |= dict.fromkeys(name for name in BLOCK_KNOBS if name not in columns)
        with logging_to(log_to, out, listener) as listener, _folder(out) as path:
            folder = RunFolder.open(
                path, asked, knobs=columns, make_config=Config, storage=storage, resume=resume, warn=warn
            )
            with folder:
                begun = (first.note,) if first.note and not folder.resumed else ()
                for note in (*folder.notes, *task.notes, *begun):
                    warn(note)
                interrupted, ended = False, ""
                lost: RunnerError | None = None
                listener.waiting("starting workers")
                with contextlib.ExitStack() as stack:
                    try:
                        made = stack.enter_context(
                            make_runner(
                                task,
                                runner,
                                calls,
                                limit_mib=limit_mib,
                                timeout_s=timeout_s,
                                plan=plan,
                                seed=seed,
                                concurrency=concurrency,
                                ray_address=ray_address,
                                estimator=estimator,
                                earlier=folder.trials(),
                                agent=agent,
                            )
                        )
                        folder.record_hosts(made.per_host)
                        search = Search(
                            run_folder=folder,
                            sampler=proposer,
                            runner=made,
                            budget=budget,
                            first=(first.config,),
                            fallback=first.fallback,
                            trial_timeout_s=timeout_s,
                            listener=listener,
                            judge=judge if patience else None,
                            devices=task.devices,
                            predictor=judge,
                            peak_rate=peak_rate(estimator) if estimator is not None else None,
                            watch=watch,
                        )
                        told = {"default": first.config, "kept": out is not None}
                        listener.began(plan_of(task, budget, folder, sampler, made, **told))
                        search.run()
                        ended = search.ended
                        if layerwise:
                            search.refine(refiner(estimator, task.space, headroom, warn))
                        search.confirm()
                    except KeyboardInterrupt:
                        interrupted, ended = True, "interrupted"
                    except RunnerError as error:
                        lost, ended = error, "the machinery that runs trials failed"
                done = folder.trials()
                if (tight := tight_winner(done, headroom)) and not interrupted:
                    warn(tight)
                requested = {"space": space_file, "data": data, "set": override, "fix": fix}
                command = command_of(task, target, limit_mib, seed, made_of=done, given=requested)
                folder.write_best(command, devices=task.device.to_dict())
                result = make_result(
                    done,
                    folder.knobs,
                    folder=path if out is not None else None,
                    ended=ended,
                    interrupted=interrupted,
                    notes=notes,
                    simulated=task.simulated,
                )
                listener.ended(result)
                if lost is not None:
                    kept = out is not None and any(not trial.pending for trial in done)
                    note = f"\nWhat was found before is in '{path}'; resuming goes on from there." if kept else ""
                    raise RunnerError(f"{lost}{note}") from lost
                if result.best is None and not heard:
                    warnings.warn(f"result.best is None: {result.why}", RuntimeWarning, stacklevel=2)
                return result


@contextlib.contextmanager
def _folder(out: str | Path | None) -> Iterator[Path]:
    if out is not None:
        yield Path(out)
        return
    with Scratch("run") as path:
        yield path
