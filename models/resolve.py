"""Resolves a model specification to a workload."""

import json
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from difflib import get_close_matches
from importlib.metadata import version
from inspect import signature
from pathlib import Path
from typing import Any, TypedDict

from ..base._transformers import listed_names
from ..base.errors import WorkloadError, meant, nearest, unknown
from ..base.reading import absolute
from .architecture import Architecture, one_line, refused
from .presets import PRESETS, ServerModel
from .workload import FileSource, Workload, default_name, nearest_file

_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
_FILE = re.compile(r"(?P<path>.+\.py)(?::(?P<name>.*))?", re.DOTALL)
_ABOUT_FILES = frozenset({"auto_map", "transformers_version", "quantization_config", "torch_dtype", "model_type"})
"""Fields of a config.json that are about its folder, or that no class declares."""
_NAMED = re.compile(r"(?P<path>.+):(?P<name>\w*)", re.DOTALL)
CONNECT_SECONDS = 3  # without a network, a name is refused soon


class _Given(TypedDict):
    """Overrides of a model's sizes; None for none."""

    seq_len: int | None
    global_batch: int | None


def workload(
    spec: str | Path | Workload | ServerModel,
    *,
    seq_len: int | None = None,
    global_batch: int | None = None,
    lora: str | None = None,
) -> Workload:
    """Returns the workload of a preset's name, a Hugging Face folder or `config.json`, a hub id, or `file.py:name`.

    Weights are never read; only a hub id that is not in the local cache needs a network. A preset has precedence over
    a file or folder of the same name; write that as a path (`./gpt2`).

    Args:
        spec: the specification; a Workload is checked and, if requested, gets another global batch. A ServerModel is
            resolved without looking at files of that name.
        seq_len: tokens of a sample; None for the model's default.
        global_batch: samples of one optimizer step; None for the default.
        lora: train only adapters, such as `r=16` or `r=16,alpha=32,target=q_proj+v_proj`.

    Raises:
        WorkloadError: there is nothing of that name (the message names the nearest), or it cannot be converted to a
            workload.
    """
    if lora is not None:
        from .lora import Lora, with_lora

        whole = workload(spec, seq_len=seq_len, global_batch=global_batch)
        return with_lora(whole, Lora.parse(lora))
    if isinstance(spec, Workload):
        return _own(spec, seq_len, global_batch)
    given: _Given = {"seq_len": seq_len, "global_batch": global_batch}
    if isinstance(spec, ServerModel):
        return _of_a_server(spec, given)
    text = str(spec)
    file = _FILE.fullmatch(text)
    if file:
        path = Path(file["path"]).expanduser()
        loaded = FileSource.read(path, file["name"] or "").load()
        name = file["name"] if loaded.name == default_name(loaded.model) else loaded.name
        loaded = replace(loaded, name=name, spec=f"{absolute(path)}:{file['name']}")
        return _own(loaded, seq_len, global_batch)
    if text in PRESETS:
        return _preset(text, given)
    config = _file_of(text)
    if config is not None:
        place = absolute(Path(text).expanduser())
        return _of_contents(_content(config), str(config), given, name=_file_name(config), spec=place)
    name = text.rpartition("/")[2]
    return _of_contents(_hub_content(text), f"the hub's model '{text}'", given, name=name, spec=text)


def check_name(text: str) -> None:
    """Refuses a model that does not exist, or whose type or class transformers does not list, without importing it.

    Raises:
        WorkloadError: there is nothing of that name, or its configuration cannot be used.
    """
    if text not in PRESETS and (file := _file_of(text)) is not None:
        _refuse_unlisted(_content(file), str(file))


def _file_of(text: str) -> Path | None:
    """The `config.json` that a specification names, which is no preset; None for a hub id.

    Raises:
        WorkloadError: there is nothing of that name.
    """
    path = Path(text).expanduser()
    if text and os.path.exists(path):  # false, not an error, for an invalid path
        file = path / "config.json" if path.is_dir() else path
        if not file.is_file():
            raise WorkloadError(f"{text} contains no config.json, as a Hugging Face model's folder does")
        return file
    if named := _NAMED.fullmatch(text):
        raise _no_python_file(named["path"])
    if text.endswith((".json", ".yaml", ".yml")) or text.startswith(("/", "./", "../", "~")) or text.count("/") > 1:
        raise WorkloadError(
            f"there is no file or folder {text}; give a folder or config.json, or a name that `redline models` lists"
        )
    if _HUB_ID.fullmatch(text):
        return None
    # A family's name refers to models of full size.
    full = [name for name in PRESETS if len(text) > 2 and name.startswith(text.lower()) and not name.endswith("-tiny")]
    near = (full + [name for name in get_close_matches(text.lower(), PRESETS, n=3, cutoff=0.5) if name not in full])[:3]
    hint = f"; did you mean {' or '.join(map(repr, near))}?" if near else "."
    raise WorkloadError(
        f"unknown model '{text}'{hint} `redline models` lists the names. A folder or config.json, a hub id (owner/name) or "
        "FILE.py:NAME works too."
    )


def configuration_file(path: Path) -> Path | None:
    """The `config.json` of a folder, or a JSON file; None if there is none."""
    file = path / "config.json" if os.path.isdir(path) else path
    return file if file.suffix == ".json" and os.path.isfile(file) else None


def _file_name(file: Path) -> str:
    """Name of the model of a configuration file."""
    resolved = file.resolve()
    return resolved.parent.name if resolved.name == "config.json" else resolved.stem


def located(spec: str, replacement: str | None, where: str) -> str:
    """Returns the FILE:NAME of a workload, or another specification unchanged.

    Args:
        spec: the specification that a run or a best.yaml contains.
        replacement: FILE:NAME in its place; None for none.
        where: the run or the file, for errors.

    Raises:
        WorkloadError: it is not a workload in a file, or its file does not exist.
    """
    file = _FILE.fullmatch(spec)
    if replacement is not None:
        if file is None:
            raise WorkloadError(
                f"'{where}' is of the model {spec}, which --workload does not replace; leave one of them out"
            )
        return replacement
    if file is not None and not Path(file["path"]).expanduser().is_file():
        raise WorkloadError(f"'{where}' names its own workload, {spec}; if it has moved, add --workload FILE:NAME")
    return spec


def _no_python_file(text: str) -> WorkloadError:
    """Error of a FILE:NAME whose FILE does not end in `.py`."""
    path = Path(text).expanduser()
    if path.is_file():
        rest = "; save the notebook's code as one" if path.suffix == ".ipynb" else ""
        return WorkloadError(f"{text} is not a Python file: FILE:NAME needs one whose name ends in .py{rest}")
    return WorkloadError(f"there is no file {text}: FILE:NAME needs a Python file and a name in it{nearest_file(path)}")


def _own(workload: Workload, seq_len: int | None, global_batch: int | None) -> Workload:
    if seq_len is not None and seq_len != workload.seq_len:
        raise WorkloadError(
            f"seq_len is part of the workload '{workload.name}': set it in its code, instead of requesting {seq_len!r} here"
        )
    if global_batch is not None:
        workload = replace(workload, global_batch=global_batch)
    check_workload(workload)
    return workload


def _preset(name: str, given: _Given) -> Workload:
    from .huggingface import hugging_face_workload, refuse_length

    preset = PRESETS[name]
    given["global_batch"] = given["global_batch"] if given["global_batch"] is not None else preset.global_batch
    if preset.model_type == "wide_resnet":
        from .wide_resnet import wide_resnet

        refuse_length(name, given["seq_len"])
        return wide_resnet(preset.arguments, name=name, spec=name, global_batch=given["global_batch"])
    architecture = Architecture(model_type=preset.model_type, arguments=dict(preset.arguments), task=preset.task)
    given["seq_len"] = given["seq_len"] if given["seq_len"] is not None else preset.seq_len
    return hugging_face_workload(architecture, name=name, spec=name, **given)


def _content(file: Path) -> Any:
    """Contents of a JSON file.

    Raises:
        WorkloadError: it cannot be read.
    """
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise WorkloadError(f"cannot read {file}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise WorkloadError(f"{file} is not a configuration: it is not UTF-8 text") from None
    except json.JSONDecodeError as error:
        raise WorkloadError(f"{file}:{error.lineno}:{error.colno} is not valid JSON: {error.msg}") from None


def _of_a_server(model: ServerModel, given: _Given) -> Workload:
    if model.is_preset:
        return _preset(model.name, given)
    if model.contents is None:
        found = ServerModel.of(_hub_content(model.name))
        where, name, spec = f"the hub's model '{model.name}'", model.name.rpartition("/")[2], model.name
        return _of_contents(found.contents, where, given, name=name, spec=spec)
    spec = str(model.kept) if model.kept is not None else model.name
    return _of_contents(model.contents, "model", given, name=model.name, spec=spec)


def _of_contents(content: Any, where: str, given: _Given, *, name: str, spec: str) -> Workload:
    """Returns the workload of a config.json's contents.

    Args:
        where: location, for errors.

    Raises:
        WorkloadError: it is not the configuration of a model in transformers.
    """
    from ..base._transformers import quiet, refusals
    from .architecture import from_configuration
    from .huggingface import hugging_face_workload

    model_type = content.get("model_type") if isinstance(content, Mapping) else None
    if not isinstance(model_type, str):
        raise WorkloadError(f"{where} is not a Hugging Face model's configuration: it has no model_type")
    _refuse_unlisted(content, where)
    with quiet() as transformers:
        if model_type not in transformers.CONFIG_MAPPING:
            raise _unknown_type(model_type, where, transformers.CONFIG_MAPPING)
        configuration_class = transformers.CONFIG_MAPPING[model_type]
        try:
            configuration = configuration_class.from_dict(dict(content))
            unread = _unread(content, configuration_class, where)
        except refusals() as error:
            raise WorkloadError(f"{where} is not a valid {model_type} configuration: {one_line(error)}") from error
    _check_heads(configuration, where)
    return hugging_face_workload(from_configuration(configuration, where), name=name, spec=spec, unread=unread, **given)


def _unread(content: Mapping[str, Any], configuration_class: Any, where: str) -> tuple[str, ...]:
    """Returns the fields that the class does not have and that change nothing else in it. transformers keeps them, and the
    class's default in place of the field that was meant.

    Raises:
        WorkloadError: one of them has almost the name of an absent field.
    """
    aliases = configuration_class.attribute_map
    # Not `fields()`: configurations are data classes only since transformers 5.5.
    parameters = {name for part in configuration_class.__mro__ for name in signature(part.__init__).parameters}
    known = parameters | aliases.keys() | set(aliases.values()) | _ABOUT_FILES
    public = {name for name in known | content.keys() if not name.startswith("_")}
    absent = public - content.keys()
    unknown = sorted(name for name in public - known if not hasattr(configuration_class, name))  # it may be a property
    whole = configuration_class.from_dict(dict(content)).to_dict() if unknown else {}
    unread = []
    for name in unknown:
        without = configuration_class.from_dict({key: value for key, value in content.items() if key != name}).to_dict()
        # A class may set a field itself, or make others from it.
        if without != {key: value for key, value in whole.items() if key != name}:
            continue
        if (near := meant(name, absent)) is not None:
            raise WorkloadError(
                f"{where}: '{name}' is not a field of a {configuration_class.model_type}; did you mean '{near}'?"
            )
        unread.append(name)
    for part, part_class in configuration_class.sub_configs.items():
        if isinstance(inner := content.get(part), Mapping) and hasattr(part_class, "attribute_map"):  # not AutoConfig
            unread += [f"{part}.{name}" for name in _unread(inner, part_class, f"{where}: {part}")]
    return tuple(unread)


def _check_heads(configuration: Any, where: str) -> None:
    """Raises WorkloadError if the heads of keys and values do not divide those of queries."""
    for part in (configuration, *(getattr(configuration, name, None) for name in configuration.sub_configs)):
        # Not `getattr`, which classes with other numbers in each layer refuse.
        fields = {} if part is None else vars(part)
        heads, shared = fields.get("num_attention_heads"), fields.get("num_key_value_heads")
        if isinstance(heads, int) and isinstance(shared, int) and shared > 0 and heads % shared:
            raise WorkloadError(
                f"{where}: num_key_value_heads must divide num_attention_heads ({heads}), but got {shared}"
            )


def _hub_content(text: str) -> Any:
    """Contents of a hub model's config.json. The hub's client requests only that file: transformers' own loader would
    mistake a local folder of that name for the model.

    Raises:
        WorkloadError: it is not in the local cache, and the hub does not provide it.
    """
    from huggingface_hub import hf_hub_download

    from ..base._transformers import refusals

    try:
        file = hf_hub_download(text, "config.json", local_files_only=True)
    except (OSError, ValueError):
        _reach_hub(text)
        try:
            file = hf_hub_download(text, "config.json")
        except refusals(OSError) as error:
            raise WorkloadError(f"the hub's model '{text}' cannot be used: {one_line(error)}") from error
    return _content(Path(file))


def _reach_hub(text: str) -> None:
    """Fails at once without a network: the hub's own client would try for half a minute."""
    import socket
    from urllib.parse import urlsplit
    from urllib.request import getproxies

    from huggingface_hub import constants

    without = f"'{text}' is not a preset, a file or folder here, or in the local Hugging Face cache, and "
    instead = "give a folder or config.json of the model instead"
    if constants.HF_HUB_OFFLINE:
        raise WorkloadError(f"{without}HF_HUB_OFFLINE forbids asking the hub; {instead}")
    where = urlsplit(constants.ENDPOINT)
    if where.scheme in getproxies():
        return
    port = where.port or (443 if where.scheme == "https" else 80)
    try:
        socket.create_connection((where.hostname or "", port), timeout=CONNECT_SECONDS).close()
    except OSError as error:
        reason = error.strerror or str(error)
        raise WorkloadError(f"{without}{where.hostname} cannot be reached ({reason}); {instead}") from None


def check_workload(workload: Workload) -> None:
    """Builds the model without weights, makes a small batch twice and traces a step as far as possible.

    Raises:
        WorkloadError: the batch is not made of tensors of its size, is not the same for the same seed, or the model or
            the loss is invalid.
    """
    if workload.identity is not None:  # made here
        return
    import torch

    from .batches import entries, make_batch
    from .flops import flops_of
    from .skeleton import skeleton
    from .workload import user_code_errors

    skeleton(workload)
    with user_code_errors(f"{workload.name}: batch(2, 0)"):
        first, second = (entries(make_batch(workload, 2, 0)) for _ in range(2))
    for key in {**first, **second}:
        value, other = first.get(key), second.get(key)
        if (
            value is None
            or other is None
            or value.shape != other.shape
            or not torch.equal(value.nan_to_num(), other.nan_to_num())
        ):
            raise WorkloadError(
                f"{workload.name}: batch(2, 0) differs from one call to the next in entry {key!r}; losses of "
                "configurations are compared, so draw from a generator that is seeded by the second argument"
            )
    flops_of(workload)  # checks the loss on the way


def _unknown_type(model_type: str, where: str, known: Iterable[str]) -> WorkloadError:
    """Error for a type that transformers does not have."""
    hint = unknown("model type", model_type, known).partition(" Known:")[0]
    return WorkloadError(
        f"{where}: {hint} in transformers {version('transformers')}; code that comes with a model is not run: describe the "
        "model by a redline.Workload of your own (FILE.py:NAME)"
    )


def _refuse_unlisted(content: Any, where: str) -> None:
    """Refuses a config.json whose type or class transformers does not list, before it is imported, which takes seconds.

    Raises:
        WorkloadError: transformers does not list it.
    """
    model_type = content.get("model_type") if isinstance(content, Mapping) else None
    if not isinstance(model_type, str):
        return
    names = listed_names()
    if model_type not in names:
        raise _unknown_type(model_type, where, filter(str.islower, names))
    classes = content.get("architectures")
    if isinstance(classes, list) and classes and classes[0] not in names:
        why = f"transformers does not list a class of this name{nearest(classes[0], names)}"
        raise refused(str(classes[0]), where, why)
