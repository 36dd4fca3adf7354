"""GPUs are found by CUDA's rules, on a faked NVML: those visible by `CUDA_VISIBLE_DEVICES`, or an error, never the CPU."""

import importlib.util
from dataclasses import dataclass, field
from types import SimpleNamespace

import pynvml
import pytest
import torch
from redline.base import gpus
from redline.base.device import detect, visible_gpus
from redline.base.errors import MissingDependency, UsageError

GIB = 1 << 30
NVML_ERROR_NO_PERMISSION, NVML_ERROR_LIB_RM_VERSION_MISMATCH = 4, 18


@dataclass(eq=False)
class Fake:
    """A GPU or a MIG instance."""

    uuid: str
    model: str = "NVIDIA H100"
    gib: int = 80
    mig: bool = False
    instances: list["Fake"] = field(default_factory=list)
    hidden: bool = False
    parent: "Fake | None" = None


@pytest.fixture
def machine(monkeypatch):
    """Makes NVML return these GPUs, and sets CUDA_VISIBLE_DEVICES; None unsets it."""

    def nvml(name, function):
        monkeypatch.setattr(pynvml, name, function)

    def made(found, setting=None):
        def at(index):
            if found[index].hidden:
                raise pynvml.NVMLError(NVML_ERROR_NO_PERMISSION)
            return found[index]

        def mode(gpu):
            if gpu.mig is None:
                raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
            return int(gpu.mig), 0

        def instance(gpu, index):
            if index >= len(gpu.instances):
                raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)
            return gpu.instances[index]

        def capability(gpu):
            assert gpu.parent is None, "an instance is not asked"
            return 9, 0

        for gpu in found:
            for each in gpu.instances:
                each.parent = gpu
        nvml("nvmlInit", lambda: None)
        nvml("nvmlShutdown", lambda: None)
        nvml("nvmlDeviceGetCount", lambda: len(found))
        nvml("nvmlDeviceGetHandleByIndex", at)
        nvml("nvmlDeviceGetUUID", lambda gpu: gpu.uuid)
        nvml("nvmlDeviceGetName", lambda gpu: gpu.model)
        nvml("nvmlDeviceGetMemoryInfo", lambda gpu: SimpleNamespace(total=gpu.gib * GIB))
        nvml("nvmlDeviceGetCudaComputeCapability", capability)
        nvml("nvmlDeviceGetMigMode", mode)
        nvml("nvmlDeviceGetMaxMigDeviceCount", lambda gpu: 7)
        nvml("nvmlDeviceGetMigDeviceHandleByIndex", instance)
        if setting is None:
            monkeypatch.delenv(gpus.VARIABLE, raising=False)
        else:
            monkeypatch.setenv(gpus.VARIABLE, setting)

    detect.cache_clear()
    yield made
    detect.cache_clear()


def four():
    return [Fake(f"GPU-{each}932f937-d72c", gib=10 * (1 + each)) for each in range(4)]


def divided():
    """A GPU with two MIG instances, one in MIG mode without instances, and one without MIG."""
    parts = [Fake("MIG-aa11", "NVIDIA H100 MIG 1g.10gb", 10), Fake("MIG-aa22", "NVIDIA H100 MIG 2g.20gb", 20)]
    return [Fake("GPU-00", mig=True, instances=parts), Fake("GPU-11", mig=True), Fake("GPU-22", mig=None)]


@pytest.mark.parametrize(
    ("setting", "names", "gib"),
    [
        (None, ["0", "1", "2", "3"], 10),
        ("2", ["2"], 30),
        ("3,1", ["3", "1"], 20),
        ("1, 2", ["1", "2"], 20),
        ("0,1,99", ["0", "1"], 10),
        ("0,-1", ["0"], 10),
        ("0,2,-1,1", ["0", "2"], 10),
        ("2,all", ["2"], 30),
        ("GPU-2932f937", ["GPU-2932f937"], 30),
        ("GPU-2,GPU-1932f937-d72c", ["GPU-2", "GPU-1932f937-d72c"], 20),
        ("GPU-3,GPU-7", ["GPU-3"], 40),
    ],
)
def test_cuda_visible_devices_shows_what_cuda_would_show(machine, setting, names, gib):
    machine(four(), setting)
    assert visible_gpus(4) == names
    device = detect()
    assert (device.type, device.count, device.memory_mib, device.capability) == ("cuda", len(names), gib * 1024, (9, 0))


@pytest.mark.parametrize("setting", ["", " ", "-1", "-1,0", "NoDevFiles"])
def test_gpus_that_are_hidden_on_purpose_leave_the_cpu(machine, setting):
    machine(four(), setting)
    assert detect().type == "cpu"


@pytest.mark.parametrize("setting", ["99", "all", "GPU-", "GPU-7", "0,0", "MIG-aa11", "gpu-2932f937"])
def test_a_setting_that_names_no_gpu_is_an_error_and_not_the_cpu(machine, setting):
    machine(four(), setting)
    with pytest.raises(
        UsageError, match=f"CUDA_VISIBLE_DEVICES={setting} names none of .*0: GPU-0932f937.*set it empty"
    ):
        detect()


@pytest.mark.parametrize(
    ("setting", "names", "gib"),
    [
        (None, ["0"], 10),
        ("0", ["0"], 10),
        ("1,2", ["2"], 80),
        ("2,0", ["2"], 80),
        ("MIG-aa22", ["MIG-aa22"], 20),
        ("MIG-aa22,MIG-aa11", ["MIG-aa22"], 20),
        ("GPU-00", ["GPU-00"], 10),
    ],
)
def test_a_mig_instance_is_shown_with_its_own_memory(machine, setting, names, gib):
    machine(divided(), setting)
    assert visible_gpus(8) == names
    assert (detect().count, detect().memory_mib) == (len(names), gib * 1024)


def test_a_divided_gpu_without_instances_is_an_error(machine):
    machine([Fake("GPU-11", mig=True)])
    with pytest.raises(UsageError, match="MIG mode and have no instance"):
        detect()


@pytest.mark.parametrize(("setting", "names"), [(None, ["0"]), ("0", ["0"]), ("GPU-3", ["GPU-3"])])
def test_a_task_with_one_gpu_counts_from_it(machine, setting, names):
    """Slurm hides the others by a control group. In a Kubernetes container the others do not exist: the first is the only one."""
    found = four()
    for each in found[:3]:
        each.hidden = True
    machine(found, setting)
    assert visible_gpus(1) == names
    assert (detect().count, detect().memory_mib) == (1, 40 * 1024)


@pytest.mark.parametrize("number", [9, 12, 28])
def test_without_a_driver_there_is_the_cpu(machine, monkeypatch, number):
    machine([])
    monkeypatch.setattr(pynvml, "nvmlInit", lambda: (_ for _ in ()).throw(pynvml.NVMLError(number)))
    assert detect().type == "cpu"


def test_a_gpu_without_pynvml_is_an_error(machine, monkeypatch, tmp_path):
    machine(four())
    real = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name == "pynvml" else real(name, *rest)
    )
    monkeypatch.setattr(gpus, "DEVICE_FILE", str(tmp_path / "nvidia0"))
    assert detect().type == "cpu"
    detect.cache_clear()
    (tmp_path / "nvidia0").touch()
    with pytest.raises(MissingDependency, match="pip install nvidia-ml-py"):
        detect()


def test_packages_learn_the_capability_of_a_gpu_without_initialising_cuda(machine, monkeypatch):
    """As torchao does when it is imported."""
    from torch._dynamo.device_interface import CudaInterface

    def fail():
        raise AssertionError("CUDA was initialised")

    machine([Fake("GPU-a"), Fake("GPU-b")])
    monkeypatch.setattr(torch.cuda, "_lazy_init", fail)
    with gpus.gpus_described():
        assert CudaInterface.Worker.get_device_properties().major == 9
        with gpus.gpus_described():  # a model's class, in the host agent
            assert CudaInterface.Worker.get_device_properties().major == 9
        assert CudaInterface.Worker.get_device_properties().major == 9
    with pytest.raises(AssertionError, match="CUDA was initialised"):
        CudaInterface.Worker.get_device_properties()
    machine([])
    with gpus.gpus_described(), pytest.raises(AssertionError, match="CUDA was initialised"):
        CudaInterface.Worker.get_device_properties()
