"""Checkpoints of other tools, both ways: transformers, peft, Megatron-LM, torchtitan, and DCP folders."""
