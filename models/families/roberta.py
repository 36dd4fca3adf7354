"""RoBERTa and XLM-RoBERTa: BERT's blocks under other names."""

from .bert import cut
from .standard import StandardSchedule
from .tensor_parallel import Cuts

schedule = StandardSchedule(
    "roberta.encoder.layer.*",
    Cuts(
        block=cut,
        embedding="roberta.embeddings.word_embeddings",
        head="lm_head.decoder",
        norms=("attention.output.LayerNorm", "output.LayerNorm"),
    ),
)
