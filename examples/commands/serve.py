"""A language model behind HTTP, its requests taken together into batches; redline is not mentioned.

python serve.py --port 8000 --max-batch 8 --wait-ms 5 --threads 2
curl -d '{"tokens": [1, 2, 3]}' localhost:8000/generate
"""

import argparse
import json
import queue
import threading
import time
from concurrent.futures import Future
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import torch
from transformers import GPT2Config, GPT2LMHeadModel


class Batcher(threading.Thread):
    """Generates for the requests that wait: as many as a batch may hold, or those that came in time."""

    def __init__(self, model: GPT2LMHeadModel, max_batch: int, wait_s: float, new_tokens: int) -> None:
        super().__init__(daemon=True)
        self.model, self.max_batch, self.wait_s, self.new_tokens = model, max_batch, wait_s, new_tokens
        self.waiting: queue.Queue[tuple[list[int], Future[list[int]]]] = queue.Queue()

    def submit(self, tokens: list[int]) -> "Future[list[int]]":
        answer: Future[list[int]] = Future()
        self.waiting.put((tokens, answer))
        return answer

    def run(self) -> None:
        while True:
            batch = [self.waiting.get()]
            until = time.monotonic() + self.wait_s
            while len(batch) < self.max_batch:
                try:
                    batch.append(self.waiting.get(timeout=max(0.0, until - time.monotonic())))
                except queue.Empty:
                    break
            try:
                found = self.generate([tokens for tokens, _ in batch])
            except Exception as error:  # it belongs to those who asked
                for _, answer in batch:
                    answer.set_exception(error)
            else:
                for (_, answer), tokens in zip(batch, found):
                    answer.set_result(tokens)

    def generate(self, prompts: list[list[int]]) -> list[list[int]]:
        """Returns the continuation of each prompt; shorter ones are padded on the left."""
        length = max(map(len, prompts))
        tokens = torch.tensor([[0] * (length - len(each)) + each for each in prompts])
        mask = torch.tensor([[0] * (length - len(each)) + [1] * len(each) for each in prompts])
        with torch.inference_mode():
            out = self.model.generate(
                tokens, attention_mask=mask, max_new_tokens=self.new_tokens, do_sample=False, pad_token_id=0
            )
        return out[:, length:].tolist()


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    batcher: Batcher

    def do_GET(self) -> None:
        self.answer(200, {"ready": True})

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        try:
            self.answer(200, {"tokens": self.batcher.submit(json.loads(body)["tokens"]).result()})
        except (ValueError, KeyError, IndexError, RuntimeError) as error:
            self.answer(400, {"error": str(error)})

    def answer(self, status: int, document: dict[str, object]) -> None:
        body = json.dumps(document).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


class Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--max-batch", type=int, default=8, help="requests of a batch")
    parser.add_argument(
        "--wait-ms", type=float, default=5.0, help="how long the first request of a batch waits for more"
    )
    parser.add_argument("--threads", type=int, default=2, help="of the model")
    parser.add_argument("--new-tokens", type=int, default=4, help="of an answer")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=1024, n_positions=64, n_embd=256, n_layer=4, n_head=4, bos_token_id=None, eos_token_id=None
    )
    model = GPT2LMHeadModel(config).eval()
    Handler.batcher = Batcher(model, options.max_batch, options.wait_ms / 1e3, options.new_tokens)
    Handler.batcher.start()
    Handler.batcher.submit([1, 2, 3]).result()
    Server(("127.0.0.1", options.port), Handler).serve_forever()


if __name__ == "__main__":
    main()
