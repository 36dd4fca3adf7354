"""Plans of Galvatron's published searches beside redline's, both predicted by the estimate: `python bench/layerwise.py`.

Galvatron (Miao et al., arXiv:2211.13878) stores the plan of a search as `galvatron_config_*.json`. `PUBLISHED` has those for
Llama and GPT on one node of 8 GPUs that its repositories contain, in their own terms; equal neighbours are written as
`value*count`. Each is translated to redline's knobs and predicted. Then redline plans the same training (model, sequences,
global batch, devices, memory), without what Galvatron does not vary: compiled blocks, offloading, shared sequences.

The devices are not in the files: 24 GB are taken for RTX 4090 and the others for A100 with NVLink. `--hardware` and
`--memory-gib` predict all plans on another device.
"""

import argparse
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from redline.estimator import Shape
from redline.estimator.document import estimate_document
from redline.estimator.request import EstimateRequest, estimate_request
from redline.knobs.layers import BlockStrategy, text_of

LLAMA_7B = Shape(
    name="llama-7b", layers=32, hidden=4096, heads=32, intermediate=11008, vocabulary=32000
)  # fmt: skip
GPT_2_7B = Shape(
    name="gpt-2.7b", layers=32, hidden=2560, heads=32, vocabulary=50257, positions=2048, gated=False, biases=True
)
FIXED = {"precision": "bf16", "fusion": False, "sp": 1, "cp": 1}
"""Knobs that Galvatron does not vary."""


@dataclass(frozen=True, kw_only=True)
class Published:
    """A plan of Galvatron's."""

    model: Shape
    memory_gib: float
    """Memory of a device that the search was given."""
    plan: Mapping[str, Any]
    """Contents of the file."""
    source: str
    """Repository on GitHub, commit and file."""
    devices: int = 8
    seq_len: int = 2048

    @property
    def hardware(self) -> str:
        """Device of that memory."""
        return "rtx4090" if self.memory_gib <= 24 else "a100-40gb"

    def config(self) -> dict[str, Any]:
        """The plan as redline's knobs.

        The vocabulary is cut over `vtp` ranks and the blocks over at most as many, so `tp` is the largest of these. `chunks`
        micro-batches of a replica of Galvatron's data parallelism are one of `tp * chunks` samples here. A stage of ZeRO only
        has a meaning with replicas.
        """
        plan, blocks = self.plan, self.model.layers
        tps, shards, again = (_values(plan[name], blocks) for name in ("tp_sizes_enc", "dp_types_enc", "checkpoint"))
        tp, pp = max(*tps, plan["vtp"]), plan["pp_deg"]
        dp = self.devices // (tp * pp)
        usual = {"ddp": 0, "zero2": 2, "zero3": 3}[plan["default_dp_type"]]
        stages = [
            (3 if sharded else usual) if self.devices > pp * degree else 0 for sharded, degree in zip(shards, tps)
        ]
        zero = (3 if plan["embed_sdp"] else usual) if dp > 1 else 0
        layers = [BlockStrategy(*each) for each in zip(tps, [1] * blocks, stages, map(bool, again), strict=True)]
        found = {
            "tp": tp,
            "pp": pp,
            "micro_batch": plan["global_bsz"] // (dp * plan["chunks"]),
            "strategy": text_of(layers, tp=tp, zero=zero),
            **FIXED,
        }
        return {**found, **({"zero": zero} if dp > 1 else {}), **({"pipeline_schedule": "1f1b"} if pp > 1 else {})}

    def request(self, hardware: str | None = None, memory_gib: float | None = None) -> EstimateRequest:
        """The training of the plan on some device."""
        return estimate_request(
            self.model,
            hardware or self.hardware,
            memory_limit_mib=(memory_gib or self.memory_gib) * 1024,
            devices=self.devices,
            seq_len=self.seq_len,
            global_batch=self.plan["global_bsz"],
            fix=FIXED,
        )


def _values(text: str, blocks: int) -> list[int]:
    """The value of each block: `1*26 0*6`."""
    out: list[int] = []
    for each in text.split():
        value, _, count = each.partition("*")
        out += [int(value)] * int(count)
    if len(out) != blocks:
        raise ValueError(f"'{text}' has {len(out)} values for {blocks} blocks")
    return out


def _plan(
    pp: int, tp: str, sharded: str, checkpoint: str, batch: int, chunks: int, vtp: int = 1, embedding: int = 0
) -> Any:
    """Contents of a file; all have 1F1B, default to ZeRO 2, and cut the stages evenly."""
    return {
        "pp_deg": pp, "tp_sizes_enc": tp, "dp_types_enc": sharded, "checkpoint": checkpoint, "global_bsz": batch,
        "chunks": chunks, "default_dp_type": "zero2", "vtp": vtp, "embed_sdp": embedding,
    }  # fmt: skip


_LLAMA = "galvatron/models/llama_hf/configs/galvatron_config"
PUBLISHED = (
    Published(
        model=LLAMA_7B,
        memory_gib=24,
        plan=_plan(2, "4*32", "0*32", "1*32", 16, 2),
        source=f"Time-has-wings/Hetu-Galvatron 098c220b {_LLAMA}_llama-7b_1nodes_8gpus_per_node_24GB_bf16_[tpconsec_off].json",
    ),
    Published(
        model=LLAMA_7B,
        memory_gib=26,
        plan=_plan(2, "4*32", "0*32", "1*3 0*29", 64, 64, vtp=4),
        source="Fizzmy/Hetu-Galvatron 73cad63a galvatron_gui/data/search_logs/results/"
        "galvatron_config_llama-7b_1nodes_8gpus_per_node_26GB_bf16_bsz64_[tpconsec_off].json",
    ),
    Published(
        model=LLAMA_7B,
        memory_gib=36,
        plan=_plan(1, "1*32", "1*26 0*3 1*3", "1*29 0*3", 64, 8),
        source=f"AFDWang/Hetu-Galvatron bd3ab5ff {_LLAMA}_hidden4096_head32_1nodes_8gpus_per_node_36GB_bf16_[tpconsec_off].json",
    ),
    Published(
        model=LLAMA_7B,
        memory_gib=36,
        plan=_plan(1, "2*32", "1*29 0*3", "1*6 0*26", 16, 1, vtp=4, embedding=1),
        source=f"Time-has-wings/Hetu-Galvatron 06432ceb {_LLAMA}_llama-7b_1nodes_8gpus_per_node_36GB_bf16_[tpconsec_off].json",
    ),
    Published(
        model=LLAMA_7B,
        memory_gib=36,
        # Its vocabulary is shared along the sequence by 2 ranks, each of which has all weights.
        plan=_plan(1, "1*32", "1*32", "1*20 0*12", 16, 1, embedding=1),
        source="Time-has-wings/Hetu-Galvatron 0bf50ceb galvatron/models/gpt/configs/"
        "galvatron_config_llama2-7b_1nodes_8gpus_per_node_36GB_bf16.json",
    ),
    Published(
        model=GPT_2_7B,
        memory_gib=40,
        plan=_plan(2, "2*9 1*7 2*10 1*6", "1*32", "0*32", 64, 4, embedding=1),
        source="AFDWang/Hetu-Galvatron 27d4256b galvatron/models/gpt_hf/configs/"
        "galvatron_config_gpt-2.7b_1nodes_8gpus_per_node_40GB_bf16_example.json",
    ),
)


def compared(published: Published, hardware: str | None = None, memory_gib: float | None = None) -> dict[str, Any]:
    """Predictions of a published plan and of redline's plan for the same training."""
    request = published.request(hardware, memory_gib)
    config = published.config()
    published_estimate = request.estimator(config)
    start = time.perf_counter()
    found = estimate_document(request, top=1, layerwise=True)
    seconds = time.perf_counter() - start
    best: Any = found.layerwise or found.ranked[0].estimate
    knobs = found.layerwise.config if found.layerwise else found.ranked[0].config
    return {
        "model": published.model.name,
        "device": request.hardware.name,
        "memory_gib": memory_gib or published.memory_gib,
        "batch": published.plan["global_bsz"],
        "theirs": _words(config),
        "theirs_tokens_per_s": published_estimate.throughput,
        "theirs_gib": published_estimate.peak_memory_mib / 1024,
        "theirs_fits": published_estimate.fits,
        "ours": _words(knobs),
        "ours_tokens_per_s": best.throughput,
        "ours_gib": best.peak_memory_mib / 1024,
        "ratio": best.throughput / published_estimate.throughput,
        "seconds": seconds,
    }


def _words(config: Mapping[str, Any]) -> str:
    """The knobs of a plan that differ from plain data parallelism."""
    shown = {name: config.get(name, 1) for name in ("tp", "pp", "micro_batch", "virtual_stages")}
    words = [f"{name}={value}" for name, value in shown.items() if value != 1]
    words += [f"zero={config['zero']}"] if config.get("zero") else []
    if config.get("checkpoint_ratio"):
        words.append(f"checkpoint_ratio={config['checkpoint_ratio']:g}")
    if config.get("sequence_parallel"):
        words.append("sequence_parallel")
    if config.get("pipeline_schedule", "1f1b") != "1f1b":
        words.append(str(config["pipeline_schedule"]))
    if "strategy" in config:
        words.append(f'"{config["strategy"]}"')
    return " ".join(words)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hardware", help="a device for all plans")
    parser.add_argument("--memory-gib", type=float, help="memory of a device for all plans")
    options = parser.parse_args()
    print(
        "| model | device, GiB | batch | Galvatron's plan | tokens/s, GiB | redline's plan | tokens/s, GiB | ratio | time |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    worst = float("inf")
    for each in PUBLISHED:
        row = compared(each, options.hardware, options.memory_gib)
        fits = "" if row["theirs_fits"] else ", does not fit"
        print(
            f"| {row['model']} | {row['device']}, {row['memory_gib']:g} | {row['batch']} | `{row['theirs']}` "
            f"| {row['theirs_tokens_per_s']:,.0f}, {row['theirs_gib']:.1f}{fits} | `{row['ours']}` "
            f"| {row['ours_tokens_per_s']:,.0f}, {row['ours_gib']:.1f} | {row['ratio']:.2f} | {row['seconds']:.1f} s |"
        )
        worst = min(worst, row["ratio"])
    raise SystemExit(0 if worst >= 1 else f"a published plan is predicted faster: {worst:.3f} of its throughput")


if __name__ == "__main__":
    main()
