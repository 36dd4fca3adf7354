"""Checks of correct results on the device."""

import importlib.metadata
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numerics_table as numerics
import torch
import transformers
from redline.base.device import detect
from redline.base.host_memory import MIB, shared_memory
from redline.models.resolve import workload as preset
from redline.runners.trial.numerics_check import comparisons, numerics_mismatch, together
from redline.schedule import build, create_schedule
from redline.schedule.parallel.ring import AttentionOptions, Queries, block_attention, block_gradients
from redline.schedule.parallel.sharding import is_dtensor
from redline.training import Training
from redline.training.probe import first_step, take
from torch.nn import functional

from . import Row, Setting, Skipped

FAMILIES = ("gpt2", "bert", "t5", "llama", "mixtral")
KNOBS = {
    "grad_accum": {"grad_accum": 4},
    "checkpoint_ratio": {"checkpoint_ratio": 0.5},
    "tf32": {"precision": "tf32"},
    "bf16": {"precision": "bf16"},
    "bf16_pure": {"precision": "bf16_pure"},
    "fp16": {"precision": "fp16"},
    "fp8": {"precision": "fp8"},
    "eager": {"attention": "eager"},
    "fusion": {"fusion": True},
    "kernels": {"kernels": True},
    "plain optimizer": {"fused_optimizer": False},
    "offload": {"offload": "optimizer"},
}
"""Every knob of a single device, one at a time."""


def versions(setting: Setting) -> Iterator[Row]:
    """Versions, and the memory according to NVML and CUDA."""
    names = ("triton", "liger-kernel", "torchao", "flash-attn", "nvidia-ml-py")
    found = {each: importlib.metadata.version(each) for each in names if _installed(each)}
    yield {
        "what": "versions",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        **found,
    }
    device = detect()
    yield {"what": "detected", "holds": device.type == setting.device, **device.to_dict()}
    shared = shared_memory()
    yield {"what": "/dev/shm", "total_mib": None if shared is None else shared[1] / MIB}
    if not setting.cuda:
        return
    free, total = torch.cuda.mem_get_info()
    yield {
        "what": "mem_get_info against NVML",
        "total_mib": total / MIB,
        "free_mib": free / MIB,
        "nvml_mib": device.memory_mib,
        "holds": abs(total / MIB - device.memory_mib) <= 0.02 * device.memory_mib,
    }
    yield {
        "what": "CUDA",
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
        "nccl": ".".join(map(str, torch.cuda.nccl.version())),
        "architectures": " ".join(torch.cuda.get_arch_list()),
    }


def _installed(name: str) -> bool:
    try:
        importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def tests(setting: Setting) -> Iterator[Row]:
    """The tests that need a GPU; on a CPU they are only collected."""
    if not _installed("pytest"):
        raise Skipped("pytest is not installed")
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "-q", "-p", "no:cacheprovider"]
    done = subprocess.run(
        command if setting.cuda else [*command, "--collect-only"],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=False,
    )
    print(done.stdout, done.stderr, sep="\n")
    yield {"what": "pytest -m gpu", "ended": done.stdout.strip().splitlines()[-1], "holds": done.returncode == 0}


def attention(setting: Setting) -> Iterator[Row]:
    """Block attention as used by a ring: two blocks of keys combined, and gradients by slices of the queries."""
    length = 64 if setting.tiny else 2048
    for dtype, most in ((torch.bfloat16, 0.02), (torch.float16, 0.005), (torch.float32, 1e-5)):
        for heads, kept in ((8, 8), (8, 2)):
            torch.manual_seed(0)
            query, key, value, grad = (
                torch.randn(2, count, length, 64, device=setting.device, dtype=dtype)
                for count in (heads, kept, kept, heads)
            )
            found = _by_blocks(query, key, value, grad)
            expected = _exactly(query, key, value, grad)
            off = [float((a.double() - b).norm() / b.norm()) for a, b in zip(found, expected, strict=True)]
            yield {
                "what": f"{str(dtype).removeprefix('torch.')}, {heads} heads, {kept} of keys",
                **dict(zip(("output", "dq", "dk", "dv"), off, strict=True)),
                "allowed": most,
                "holds": max(off) <= most,
            }


def _by_blocks(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, grad: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    how, half = AttentionOptions(scale=query.shape[-1] ** -0.5), query.shape[2] // 2
    blocks = list(zip(key.split(half, 2), value.split(half, 2), strict=True))
    parts = [block_attention(query, k.contiguous(), v.contiguous(), how) for k, v in blocks]
    log_sum = torch.logaddexp(parts[0][1], parts[1][1])
    output = sum(each.float() * (own - log_sum).exp().unsqueeze(-1) for each, own in parts).to(query.dtype)
    of_queries = torch.zeros_like(query, dtype=torch.float32)
    of_keys, of_values = torch.zeros_like(key, dtype=torch.float32), torch.zeros_like(value, dtype=torch.float32)
    for number, (k, v) in enumerate(blocks):
        at = slice(number * half, (number + 1) * half)
        for rows in (slice(0, half), slice(half, None)):
            queries = Queries(*(each[:, :, rows] for each in (query, grad, output, log_sum)))
            one, two, three = block_gradients(queries, k.contiguous(), v.contiguous(), how)
            of_queries[:, :, rows] += one
            of_keys[:, :, at] += two
            of_values[:, :, at] += three
    return output, of_queries, of_keys, of_values


def _exactly(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, grad: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    q, k, v = (each.double().requires_grad_() for each in (query, key, value))
    output = functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)
    output.backward(grad.double())
    return output.detach(), q.grad, k.grad, v.grad


def weights(setting: Setting) -> Iterator[Row]:
    """The weights of a model on the meta device are equal bit for bit for another schedule: in bf16, with modules replaced."""
    device = torch.device(setting.device)
    for family in FAMILIES:
        states = []
        for changed in (False, True):
            with torch.device("meta"):
                sch = create_schedule(numerics.tiny(family).build_model({}))
            if changed:
                sch.cast(torch.bfloat16)
                sch.replace_all(torch.nn.Embedding, lambda old: torch.nn.Embedding(*old.weight.shape))
            states.append(build(sch, device=device, seed=3)[0].state_dict())
        expected, found = states
        other = [name for name, each in found.items() if not torch.equal(each, expected[name].to(each.dtype))]
        yield {
            "what": family,
            "tensors": len(found),
            "differ": len(other),
            "first": next(iter(other), None),
            "holds": not other and len(found) == len(expected),
        }


def probe(setting: Setting) -> Iterator[Row]:
    """The share of its tolerance that the probe of each knob uses, against the default configuration."""
    for model in ("gpt2-tiny", "llama-tiny", "bert-tiny"):
        workload = preset(model, global_batch=8, seq_len=16 if setting.tiny else 64)
        expected = _probed(workload, {}, setting)
        for name, knobs in KNOBS.items():
            if setting.tiny and (model != "gpt2-tiny" or name not in ("bf16", "checkpoint_ratio", "offload")):
                continue
            if name in ("tf32", "fp16") and not setting.cuda:
                continue
            if (model, name) == ("gpt2-tiny", "fp8"):  # its products are no nn.Linear
                continue
            if name == "fusion" and shutil.which(os.environ.get("CC", "gcc")) is None:
                continue
            try:
                reference, found = expected[0], _probed(workload, knobs, setting)
            except Exception as error:  # a knob that this machine does not support does not affect the others
                yield {"what": f"{model}, {name}", "error": f"{type(error).__name__}: {error}"[:200], "holds": False}
                continue
            shares = [each.share for one in comparisons(found[0], expected[0]) for each in one.departures]
            wrong = numerics_mismatch(found[0], reference, loss=found[1], last_loss=found[1])
            yield {"what": f"{model}, {name}", "share": max(shares), "wrong": wrong or None, "holds": not wrong}


def _probed(workload, knobs, setting):
    config = {"micro_batch": 8 // knobs.get("grad_accum", 1), **knobs}
    training = Training(workload, config, torch.device(setting.device))
    part = take(training)
    loss, seen = first_step(training)
    return together([part], [seen]), float(loss)


def fsdp(setting: Setting) -> Iterator[Row]:
    """`fully_shard` on a mesh of one rank gives the results of the plain model."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    if setting.cuda:
        torch.cuda.set_device(0)
    backend = "nccl" if setting.cuda else "gloo"
    dist.init_process_group(backend, init_method=f"file://{setting.folder}/fsdp.store", rank=0, world_size=1)
    try:
        mesh = init_device_mesh(setting.device, (1,), mesh_dim_names=("dp",))
        for zero in (2, 3):
            results = []
            for cut in (False, True):
                workload = numerics.tiny("llama")
                with torch.device("meta"):
                    model = workload.build_model({"attention": "eager"})
                sch = create_schedule(model, mesh)
                if cut:
                    sch.shard_data(zero)
                model, optimizer = build(sch, optimizer=numerics.adamw, device=setting.device)
                assert cut == all(map(is_dtensor, model.parameters()))
                batch = {name: each.to(setting.device) for name, each in workload.batch(8, 0).items()}

                def passes(model=model, batch=batch):
                    loss = model(**batch).loss
                    loss.backward()
                    return loss.detach()

                def update(optimizer=optimizer):
                    optimizer.step()
                    optimizer.zero_grad()

                results.append(numerics.trained(model, passes, update))
            allowed = numerics.reference(workload).allowed
            found = numerics.compare(*results, allowed, workload.global_batch * workload.seq_len)
            by = {kind: found.largest_of(kind).share for kind in ("gradients", "weights")}
            yield {"what": f"zero {zero}", **by, "wrong": found.wrong and found.wrong.description, "holds": found.holds}
    finally:
        dist.destroy_process_group()


def sdpa(setting: Setting) -> Iterator[Row]:
    """The kernel that computes `scaled_dot_product_attention` in each format."""
    from torch.profiler import ProfilerActivity, profile

    length = 64 if setting.tiny else 2048
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if setting.cuda else [])]
    mask = torch.ones(length, length, dtype=torch.bool, device=setting.device).tril()
    for dtype in (torch.float32, torch.bfloat16):
        query, key = (torch.randn(1, heads, length, 64, device=setting.device, dtype=dtype) for heads in (8, 2))
        for what, given in (("causal", {"is_causal": True}), ("mask", {"attn_mask": mask})):
            functional.scaled_dot_product_attention(query, key, key, enable_gqa=True, **given)
            with profile(activities=activities) as seen:
                functional.scaled_dot_product_attention(query, key, key, enable_gqa=True, **given)
                if setting.cuda:
                    torch.cuda.synchronize()
            names = [each.key for each in seen.key_averages()]
            kernel = next(
                (each for each in names if each.startswith("aten::_scaled_dot") or "attention_math" in each), "?"
            )
            yield {"what": f"{str(dtype).removeprefix('torch.')}, {what}, GQA", "kernel": kernel}


def resume(setting: Setting) -> Iterator[Row]:
    """A training that is saved and resumed is equal bit for bit to an uninterrupted one."""
    from dataclasses import replace

    from redline.models.layouts.dcp import dcp_tensors
    from redline.trainer.checkpoint.saver import CheckpointFolder, Saver, latest
    from redline.trainer.checkpoint.state import State
    from redline.trainer.data import FromWorkload
    from redline.trainer.loop import Hyperparameters, Loop, LoopPlan

    if setting.cuda:  # otherwise attention's backward pass sums in any order
        os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
        torch.use_deterministic_algorithms(True, warn_only=True)
    workload = preset("gpt2-tiny", global_batch=8, seq_len=16 if setting.tiny else 64)
    hyper = Hyperparameters(steps=6 if setting.tiny else 20, lr=1e-3, warmup=2)
    workload = workload.with_optimizer(hyper.optimizer)
    folder = CheckpointFolder(setting.folder / "checkpoints")
    shutil.rmtree(folder.path, ignore_errors=True)

    def trained(until: int | None, save: bool, begin: bool) -> Training:
        training = Training(
            workload, {"micro_batch": 8, "precision": "bf16"}, torch.device(setting.device), own_data=False
        )
        checkpoint = latest(folder, None) if begin else None
        if checkpoint is not None:
            State(training).load(dcp_tensors(checkpoint.path))
        if save:
            folder.prepare()
        saver = Saver(folder) if save else None
        step, position = (checkpoint.step, checkpoint.manifest["samples"]) if checkpoint else (0, 0)
        plan = replace(LoopPlan(), save_minutes=0)
        data = FromWorkload(workload, seed=0, num_evaluation=16)
        loop = Loop(training, data, hyper, plan, saver=saver, step=step, position=position, until=until)
        loop.run()
        if saver is not None:
            saver.close()
        return training

    try:
        expected = trained(None, save=False, begin=False).model.state_dict()
        half = trained(hyper.steps // 2, save=True, begin=False)
        del half
        found = trained(None, save=False, begin=True).model.state_dict()
    finally:
        shutil.rmtree(folder.path, ignore_errors=True)
    other = [name for name, each in expected.items() if not torch.equal(each, found[name])]
    yield {"what": f"{hyper.steps} steps in bf16, saved half-way", "differ": len(other), "holds": not other}
