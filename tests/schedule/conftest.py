"""Tiny models for the schedule's tests."""

import multiprocessing
import multiprocessing.connection
import tempfile
import traceback

import cloudpickle
import pytest
import torch
from torch import nn


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    # Tiny tensors: a pool of threads only gets in the way.
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class MLP(nn.Module):
    def __init__(self, width: int = 8, hidden: int = 16) -> None:
        super().__init__()
        self.fc1 = nn.Linear(width, hidden)
        self.act = nn.ReLU()
        self.fc2 = nn.Linear(hidden, width)

    def forward(self, x):
        return self.fc2(self.act(self.fc1(x)))


def transformer(name: str, device: str = "meta", dropout: float = 0.0, layers: int = 2):
    """A tiny GPT-2, BERT or Llama with a language-model head."""
    from transformers import (
        BertConfig,
        BertForMaskedLM,
        GPT2Config,
        GPT2LMHeadModel,
        LlamaConfig,
        LlamaForCausalLM,
    )

    special = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    if name == "gpt2":
        config = GPT2Config(
            n_layer=layers,
            n_embd=32,
            n_head=4,
            vocab_size=96,
            n_positions=32,
            resid_pdrop=dropout,
            embd_pdrop=dropout,
            attn_pdrop=dropout,
            **special,
        )
        cls = GPT2LMHeadModel
    elif name == "bert":
        config = BertConfig(
            num_hidden_layers=layers,
            hidden_size=32,
            num_attention_heads=4,
            intermediate_size=64,
            vocab_size=96,
            max_position_embeddings=32,
            hidden_dropout_prob=dropout,
            attention_probs_dropout_prob=dropout,
            **special,
        )
        cls = BertForMaskedLM
    else:
        config = LlamaConfig(
            num_hidden_layers=layers,
            hidden_size=32,
            num_attention_heads=4,
            num_key_value_heads=2,
            intermediate_size=64,
            vocab_size=96,
            max_position_embeddings=32,
            attention_dropout=dropout,
            **special,
        )
        cls = LlamaForCausalLM
    with torch.device(device):
        return cls(config)


@pytest.fixture
def mlp():
    torch.manual_seed(0)
    return MLP()


@pytest.fixture
def make_transformer():
    return transformer


@pytest.fixture
def tokens():
    return torch.randint(3, 96, (2, 16), generator=torch.Generator().manual_seed(1))


class Ranks:
    """Processes with one process group over all of them, for many checks in a row.

    `run(function, *args)` calls `function(*args)` on every rank and returns their results in order. Gloo on
    CPUs; NCCL where there is a GPU for every rank.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.workers = []

    def start(self) -> None:
        # Forked, they have torch and transformers imported. CUDA would not survive a fork, but the tests'
        # own process only counts devices.
        gpus = torch.cuda.device_count() >= self.size
        context = multiprocessing.get_context("fork")
        self.folder = tempfile.TemporaryDirectory()
        for rank in range(self.size):
            ours, theirs = context.Pipe()
            args = (rank, self.size, theirs, f"{self.folder.name}/store", gpus)
            process = context.Process(target=_serve, args=args, daemon=True)
            process.start()
            theirs.close()
            self.workers.append((process, ours))

    def run(self, function, *args, timeout=60):
        if not self.workers:
            self.start()
        job = cloudpickle.dumps((function, args))
        for _, pipe in self.workers:
            pipe.send_bytes(job)
        waiting, results = {pipe: rank for rank, (_, pipe) in enumerate(self.workers)}, [None] * self.size
        while waiting:
            ready = multiprocessing.connection.wait(list(waiting), timeout)
            if not ready:
                self.stop()
                raise TimeoutError(f"ranks {sorted(waiting.values())} did not answer within {timeout} s")
            for pipe in ready:
                rank = waiting.pop(pipe)
                done, value = cloudpickle.loads(pipe.recv_bytes())
                if not done:
                    # The others may wait for it in a collective: none of them is of use any more.
                    self.stop()
                    raise AssertionError(f"rank {rank}:\n{value}")
                results[rank] = value
        return results

    def stop(self) -> None:
        for process, pipe in self.workers:
            pipe.close()
            process.kill()
            process.join()
        if self.workers:
            self.folder.cleanup()
        self.workers = []


def _serve(rank, size, pipe, store, gpus):
    import torch.distributed as dist

    torch.set_num_threads(1)
    if gpus:
        torch.cuda.init()
        torch.cuda.set_device(rank)
    store = dist.FileStore(store, size)
    dist.init_process_group("cpu:gloo,cuda:nccl" if gpus else "gloo", store=store, rank=rank, world_size=size)
    while True:
        try:
            job = pipe.recv_bytes()
        except EOFError:
            return
        function, args = cloudpickle.loads(job)
        try:
            answer = (True, function(*args))
        except BaseException:
            answer = (False, traceback.format_exc())
        pipe.send_bytes(cloudpickle.dumps(answer))


def _ranks(size):
    import transformers.models.bert.modeling_bert
    import transformers.models.gpt2.modeling_gpt2
    import transformers.models.llama.modeling_llama  # noqa: F401

    pool = Ranks(size)
    yield pool
    pool.stop()


@pytest.fixture(scope="session")
def two():
    """Two ranks."""
    yield from _ranks(2)


@pytest.fixture(scope="session")
def four():
    """Four ranks."""
    yield from _ranks(4)
