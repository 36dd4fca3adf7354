"""What several frameworks cannot do in the same way."""

from collections.abc import Sequence

from .setup import Setup, words


def note_attention(setup: Setup, how: str) -> None:
    """States that the implementation of attention is chosen where the model is made."""
    value = setup.knob("attention")
    if value is not None:
        setup.note(f"attention={value} is chosen with the model: {how.format(value=value)}")


def note_partial_checkpointing(setup: Setup, done: str) -> None:
    """States that a share of checkpointed blocks became all of them."""
    ratio = setup.knob("checkpoint_ratio")
    if 0 < ratio < 1:
        setup.note(
            f"checkpoint_ratio={words(ratio)} recomputes a share of the blocks, and {done}: "
            f"less memory and less speed than {setup.found}"
        )


def note_pipeline(setup: Setup) -> None:
    """States that there are no pipeline stages."""
    if setup.order_of_stages() is not None:
        setup.note(
            f"pp={setup.pp} has no counterpart here: this file runs on {setup.processes} instead of "
            f"{setup.devices} devices, each holding {setup.pp} times the layers; torchtitan, megatron and "
            "python have pipelines"
        )


def note_reduction(setup: Setup, instead: str) -> None:
    """States that gradients travel between replicas in another format."""
    if setup.dp > 1:
        setup.note_unless_neutral("reduce_dtype", instead)


def note_order(setup: Setup, known: Sequence[str], done: str) -> None:
    """States that a pipeline's micro-batches have another order than one of those `known` here."""
    kind = setup.order_of_stages()
    if kind not in (None, *known):
        chunks = setup.knob("virtual_stages")
        several = f" with virtual_stages={chunks}" if chunks > 1 else ""
        setup.note(f"pipeline_schedule={kind}{several} has no counterpart here: {done}")


def note_lora(setup: Setup) -> None:
    """States that adapters are the model's own."""
    if setup.lora:
        given = dict(each.split("=", 1) for each in setup.lora.split(","))
        target = given.get("target", "").split("+")
        arguments = [f"r={given['r']}", f"lora_alpha={given.get('alpha', given['r'])}"]
        if target == ["all-linear"]:
            arguments.append("target_modules='all-linear'")
        elif target != [""]:
            arguments.append(f"target_modules={target}")
        if "dropout" in given:
            arguments.append(f"lora_dropout={given['dropout']}")
        setup.note(
            f"lora={setup.lora}: only adapters were trained; give the model theirs by "
            f"peft.get_peft_model(model, peft.LoraConfig({', '.join(arguments)}))"
        )


def note_pure_bf16(setup: Setup) -> None:
    """States that weights in bfloat16 are the model's own."""
    setup.note(
        "precision=bf16_pure keeps the weights in bfloat16 too: load the model with dtype=torch.bfloat16 "
        "(here mixed precision is off)"
    )
