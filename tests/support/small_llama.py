"""A small Llama, given as the config.json of a model that does not exist yet."""

import json

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "num_hidden_layers": 8,
    "hidden_size": 1024,
    "num_attention_heads": 16,
    "intermediate_size": 4096,
    "vocab_size": 32000,
}


def small_llama(folder):
    """Writes the configuration and returns its path."""
    path = folder / "small.json"
    path.write_text(json.dumps(CONFIG))
    return path
