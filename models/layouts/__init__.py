"""Reads and writes checkpoints of other tools: transformers, peft, Megatron-LM, torchtitan, and DCP folders."""
