"""Launchers that are known, one a file; each is imported when it is asked for, by `registry.find_launcher`."""

LAUNCHERS = {
    "trainer": "trainer",
    "accelerate": "accelerate",
    "deepspeed": "deepspeed",
    "lightning": "lightning",
    "llamafactory": "llamafactory",
    "axolotl": "axolotl",
    "litgpt": "litgpt",
    "torchtitan": "torchtitan",
    "megatron": "megatron",
    "megatron-bridge": "bridge",
    "nemo": "nemo",
}
"""What `--launcher` takes, to the file."""
