"""The primitives, one file each; importing this package registers them."""

from . import annotate, cast, checkpoint, compile, fuse, hook, replace, replace_all

__all__ = ["annotate", "cast", "checkpoint", "compile", "fuse", "hook", "replace", "replace_all"]
